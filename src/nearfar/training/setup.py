"""Builds everything a run needs from its recipe: data, split, sampler, loaders, network, losses and optimizer."""

from __future__ import annotations

import hashlib
import inspect
import math
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nearfar import data, networks
from nearfar.data import Dataset, Loader, Split, Store, View, sampling, splits
from nearfar.data.datasets.base import ItemRelations, takes_root
from nearfar.data.datasets.frames import pad_to_squares
from nearfar.data.sampling import Given, Independent, Sampler
from nearfar.distributed import World, shard_classes
from nearfar.losses import Memory, ProxyLoss
from nearfar.losses.base import loss_groups
from nearfar.networks import Embedder, Ensemble
from nearfar.networks import registry as backbones
from nearfar.networks.weights import published, save
from nearfar.supervision import Pairs, Triplets
from nearfar.training.recipe.checks import VERIFICATION
from nearfar.training.recipe.schema import LossSection, OptimizerSection, Recipe, ScheduleSection
from nearfar.training.step import GivenRelations, Learner, StepResult, TrainStep, combine_seeds, prefetch
from nearfar.utils.atomic import whole_file
from nearfar.utils.preprocessing import SMALL, Preprocessing
from nearfar.utils.progress import Watch
from nearfar.utils.system import expanded
from nearfar.utils.tensors import as_device, shapes_only

if TYPE_CHECKING:
    from nearfar.training.checkpoint import State

Model = Embedder | Ensemble
Rows = NDArray[np.int64]
Vectors = NDArray[np.float32]
DIGITS = 16  # of the fingerprint in the name of a file of features


@dataclass(frozen=True, eq=False)
class LossStage:
    """Some epochs that are trained with one loss."""

    losses: nn.ModuleDict  # A loss for each output of the model, by the keys of its `outputs`; their sum is minimized
    first: int  # the first epoch of the stage
    epochs: int  # the number of epochs
    lr_factor: float = 1.0  # factor of the learning rate


@dataclass(frozen=True, eq=False)
class Setup:
    """Everything that is built from a recipe, on the device it trains on."""

    recipe: Recipe
    dataset: Dataset  # the dataset, with all of its parts
    split: Split  # which rows of the dataset are for training, validation and test
    store: Store | Vectors  # decoded images, or vectors [n, d]
    labels: Rows  # [len(store)]; training classes are 0 … num_classes − 1, all others come after them
    # Rows of the store: "train", "validation" (may be empty), and "test" or "query" and "gallery".
    rows: Mapping[str, Rows]
    train_labels: Rows  # [len(rows["train"])], the labels of these rows
    num_classes: int  # the number of training classes
    sampler: Sampler  # draws positions in rows["train"]; loader.epoch(sampler, epoch, rows=rows["train"]) makes batches
    loader: Loader  # loads batches for training
    eval_loader: Loader  # loads images for evaluation
    model: Model  # the network, on the device
    losses: nn.ModuleList  # the losses of all stages, once each; two of them may share class vectors
    stages: tuple[LossStage, ...]  # in order; stage_at(epoch) finds one
    preprocessing: Preprocessing | None  # how images are prepared for evaluation; None for vectors
    fingerprint: str  # digest of images, labels and split
    device: torch.device  # where to train
    epochs: int  # number of epochs; the last one may end early if iterations are counted
    steps: int  # number of steps in total
    # Given pairs or triplets for training, as positions in rows["train"]; None if there are classes.
    relations: ItemRelations | None = None
    world: World = field(default_factory=World)  # the processes that train together

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the network and of all losses."""
        return create_optimizer(self.recipe.optimizer, self.model, self.losses, self.device)

    @cached_property
    def memories(self) -> dict[str, Memory]:
        """The cross-batch memory of each output; empty if the recipe has none."""
        size = self.recipe.training.memory
        dims = self.model.outputs if size else {}
        return {key: Memory(size, dim=dim, device=self.device) for key, dim in dims.items()}

    @cached_property
    def _embed_functions(self) -> list[Callable[[Tensor], dict[str, Tensor]]]:
        """The forward methods of the networks, compiled or replayed as CUDA graphs where the recipe allows it."""
        training, networks = self.recipe.training, self.model.members
        if training.compile:
            return [torch.compile(network.levels_forward) for network in networks]
        if self.device.type == "cuda" and training.graphs and training.chunk is None and not self.recipe.network.freeze:
            from nearfar.training.cuda_graphs import GraphedEmbedder

            return [GraphedEmbedder(network) for network in networks]
        return [network.levels_forward for network in networks]

    def train_step(self, stage: LossStage) -> TrainStep:
        """Create the step that trains the networks with the losses of a stage."""
        training, learners = self.recipe.training, []
        for number, network in enumerate(self.model.members):
            losses = {level: stage.losses[self.model.output_key(number, level)] for level in network.levels}
            learners.append(Learner(network, losses, embed=self._embed_functions[number]))
        return TrainStep(
            learners,
            self.optimizer,
            world=self.world,
            skip=training.on_nonfinite == "skip",
            independent=self.recipe.network.independent,
            **training.model_dump(include={"precision", "channels_last", "clip", "chunk"}),
        )

    def train_epoch(self, state: State, step: TrainStep) -> Generator[tuple[StepResult, int], None, None]:
        """Train from where the state is to the end of its epoch; yield the result of each step and its images."""
        training = self.recipe.training
        self.model.train()
        if state.epoch < training.warmup_epochs or self.recipe.network.freeze:
            self.model.freeze_backbone()
        else:
            self.model.unfreeze_backbone()
        share = {"rank": self.world.rank, "ranks": self.world.ranks}
        batches = self.loader.epoch(self.sampler, state.epoch, rows=self.rows["train"], start=state.step, **share)
        if self.device.type == "cuda":
            batches = prefetch(batches, self.device)
        with closing(batches):
            for batch in batches:
                if self.memories and state.iteration >= training.memory_warmup:
                    self.remember(step)
                seed, given = combine_seeds(training.seed, state.iteration), self.given(state.epoch, state.step)
                result = step(batch, seed=seed, given=given)
                state.step, state.iteration = state.step + 1, state.iteration + 1
                self.set_learning_rates(state)
                yield result, len(batch)

    def remember(self, step: TrainStep) -> None:
        """Let a step compare with the memories."""
        for number, learner in enumerate(step.learners):
            learner.memories = {level: self.memories[self.model.output_key(number, level)] for level in learner.losses}

    def set_learning_rates(self, state: State) -> None:
        """Set the learning rates to their initial values times warm-up × schedule × stage."""
        schedule = schedule_factor(self.recipe.schedule, state, self.steps_per_epoch, self.steps)
        factor = schedule * self.stage_at(state.epoch).lr_factor
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor

    def learning_rates(self) -> dict[str, float]:
        """Return the current learning rates by the names of the parameter groups."""
        groups = enumerate(self.optimizer.param_groups)
        return {group.get("name", str(number)): float(group["lr"]) for number, group in groups}

    @property
    def measured(self) -> list[str]:
        """The parts that are measured at the end of the training."""
        evaluation = self.recipe.evaluation
        tests = evaluation.test and bool(self.rows.keys() - {"train", "validation"})
        return ["validation", *(["test"] if tests else ()), *(["train"] if evaluation.train_recall else ())]

    @property
    def steps_per_epoch(self) -> int:
        """Updates in a whole epoch."""
        return len(self.sampler)

    def stage_at(self, epoch: int) -> LossStage:
        """Return the stage that an epoch belongs to."""
        return [stage for stage in self.stages if stage.first <= epoch][-1]

    def dataset_rows(self, rows: Rows) -> Rows:
        """Convert rows of the store to rows of the dataset; files that cannot be decoded are not in the store."""
        return self.store.rows[rows] if isinstance(self.store, Store) else rows

    def given(self, epoch: int, step: int) -> GivenRelations | None:
        """Return the given pairs or triplets of a batch; None if the labels of the batch are its supervision."""
        if self.relations is None:
            return None
        assert isinstance(self.sampler, Given)
        drawn = self.relations.take(self.sampler.drawn(epoch, step))
        _, first, places = np.unique(drawn.rows.T, return_index=True, return_inverse=True)
        left, right, *negative = torch.from_numpy(places.reshape(drawn.width, -1))
        if negative:
            return GivenRelations(torch.from_numpy(first), Triplets(left, right, negative[0]))
        graded = any(getattr(module, "needs_grades", False) for module in self.losses.modules())
        same, grades = torch.from_numpy(drawn.same), torch.from_numpy(drawn.scores) if graded else None
        return GivenRelations(torch.from_numpy(first), Pairs(left, right, same, grades=grades))

    def batch_contents(self, iteration: int) -> dict[str, Any]:
        """Describe this process's share of a batch: the rows of the dataset, and the names of their images."""
        epoch, step = divmod(iteration, self.steps_per_epoch)
        share = self.sampler.share(self.sampler.batch(epoch, step), self.world.rank, self.world.ranks)
        indices = self.dataset_rows(self.rows["train"][share]).tolist()
        names = [self.dataset.source.name(index) for index in indices]
        return {"iteration": iteration, "epoch": epoch, "step": step, "indices": indices, "names": names}

    def groups(self, rows: Rows) -> Rows | None:
        """Return the numbers of the groups of rows of the store; None if the recipe has no groups."""
        column = self.recipe.evaluation.groups
        return None if column is None else group_numbers(self.dataset, column)[self.dataset_rows(rows)]


def build(
    recipe: Recipe,
    *,
    world: World | None = None,
    cache: str | Path | None = None,
    watch: Watch = lambda work: None,
    opened: Setup | None = None,
) -> Setup:
    """Open the data, decode its images, and create network, losses, sampler and loaders.

    All ranks create the same parameters: the random generator is seeded with ``training.seed``. The data of a setup
    that was built before need not be opened again.
    """
    world = world or World()
    device = as_device("training.device", recipe.training.device, local=int(os.environ.get("LOCAL_RANK", world.rank)))
    dataset = open_dataset(recipe) if opened is None else opened.dataset
    split = create_split(recipe, dataset)
    name = recipe.network.name
    if recipe.network.pretrained is True and ":" not in name and published.locate(published.get(name)) is None:
        published.fetch(published.get(name))  # before images are decoded, which may take long
    store = open_store(dataset, cache, watch, **recipe.data.decoding) if opened is None else opened.store
    rows = split_rows(split, store)
    items = store.rows if isinstance(store, Store) else np.arange(len(store))  # rows of the dataset
    labels, num_classes = number_classes(dataset, items, rows)
    _check_parts(recipe, dataset, items, rows, labels)
    if recipe.schedule.name == "plateau" and not len(rows["validation"]):
        raise ValueError(
            "schedule.name is 'plateau', which needs validation classes, and there are none; "
            "split.name = 'fixed_validation' takes some of the training classes"
        )
    train_labels = labels[rows["train"]]
    relations = _train_relations(recipe, dataset, items, rows)
    sampler = _create_sampler(recipe, train_labels, world.ranks, relations)
    torch.manual_seed(recipe.training.seed)
    model = create_network(recipe, store)
    _check_input(recipe, dataset, model)
    steps = recipe.training.iterations or (recipe.training.epochs or 0) * len(sampler)
    epochs = math.ceil(steps / len(sampler))
    losses, stages = create_losses(recipe, model, num_classes, epochs, world)
    for loss in (loss for modules in losses for loss in modules.values()) if relations is not None else ():  # type: ignore[operator]
        if loss.needs_labels is not None:
            raise ValueError(
                f"loss.name is {loss.key!r}, which {loss.needs_labels}; {dataset.name} gives pairs or triplets"
            )
    _check_warmup(recipe, model, stages, epochs, steps)
    layout = {"memory_format": torch.channels_last} if recipe.training.channels_last and not dataset.is_vectors else {}
    model.to(device, **layout)  # type: ignore[call-overload]
    losses.to(device)
    loader, eval_loader, preprocessing = _create_loaders(recipe, store, labels, model, device)
    return Setup(
        recipe=recipe,
        dataset=dataset,
        split=split,
        store=store,
        labels=labels,
        rows=rows,
        train_labels=train_labels,
        num_classes=num_classes,
        sampler=sampler,
        loader=loader,
        eval_loader=eval_loader,
        model=model,
        losses=losses,
        stages=stages,
        preprocessing=preprocessing,
        fingerprint=data_fingerprint(dataset.source.fingerprint(), rows, labels, dataset.relations),
        device=device,
        epochs=epochs,
        steps=steps,
        relations=relations,
        world=world,
    )


# --- data ----------------------------------------------------------------------------------------------------------


def open_dataset(recipe: Recipe) -> Dataset:
    """Open the dataset of a recipe."""
    section = recipe.data
    if section.root is None and takes_root(section.name):
        raise ValueError(
            f"data.root is missing; {section.name} needs the folder or file of the dataset: --data ROOT, or root "
            "in [data]"
        )
    places = [section.root] if isinstance(section.root, str) else section.root
    roots = [str(expanded(place)) for place in places or ()]
    root = roots[0] if len(roots) == 1 else roots or None
    dataset = data.open(section.name, root, **section.settings)
    return pad_to_squares(dataset) if section.pad else dataset


def create_split(recipe: Recipe, dataset: Dataset) -> Split:
    """Split a dataset into training, validation and test classes."""
    rule = recipe.split
    if rule.name == "standard":
        return splits.standard(dataset)
    if rule.name == "closed_set":
        return splits.closed_set(dataset)
    if rule.name == "train_only":
        return splits.train_only(dataset)
    if rule.name == "everything":
        return splits.everything(dataset)
    if rule.name == "fixed_validation":
        return splits.fixed_validation(dataset, share=rule.share, seed=rule.seed)
    return splits.k_fold(dataset, rule.folds, seed=rule.seed)[rule.fold]


def open_store(
    dataset: Dataset, cache: str | Path | None = None, watch: Watch = lambda work: None, **settings: Any
) -> Store | Vectors:
    """Return the decoded images of a dataset, from the cache if they are there; or its vectors."""
    if dataset.is_vectors:
        array: Vectors = dataset.source.array  # type: ignore[attr-defined]
        return array
    from nearfar.data.store.prepare import prepare

    return prepare(dataset, cache=cache, progress=watch("decoding"), **settings)


def split_rows(split: Split, store: Store | Vectors) -> dict[str, Rows]:
    """Return the rows of the store that belong to each part of a split."""
    parts = {"train": split.train, "validation": split.validation, **split.test}
    rows = {name: store.places(part) if isinstance(store, Store) else part for name, part in parts.items()}
    for name, part in rows.items():
        if not len(part) and len(parts[name]):
            raise ValueError(f"none of the {len(parts[name])} files of the part {name} could be decoded")
    return rows


def number_classes(dataset: Dataset, items: Rows, rows: Mapping[str, Rows]) -> tuple[Rows, int]:
    """Number the classes, training classes first."""
    given = dataset.labels[items]
    trained = np.unique(given[rows["train"]])
    order = np.concatenate([trained, np.setdiff1d(np.arange(dataset.num_classes), trained)])
    number = np.empty(dataset.num_classes, dtype=np.int64)
    number[order] = np.arange(dataset.num_classes)
    return number[given], len(trained)


def data_fingerprint(
    source: str, rows: Mapping[str, Rows], labels: Rows, relations: ItemRelations | None = None
) -> str:
    """Return a digest of the source's own fingerprint, the labels, the split and the given relations."""
    digest = hashlib.sha256(source.encode())
    digest.update(labels.astype("<i8").tobytes())
    for name, part in sorted(rows.items()):
        digest.update(f"{name} {len(part)} ".encode() + part.astype("<i8").tobytes())
    if relations is not None:
        digest.update(relations.rows.astype("<i8").tobytes() + relations.scores.astype("<f8").tobytes())
        digest.update(np.packbits(relations.same).tobytes() + " ".join(relations.parts).encode())
    return digest.hexdigest()


def group_numbers(dataset: Dataset, column: str) -> Rows:
    """Return the number of the group of each row of a dataset."""
    if column not in dataset.columns:
        has = ", ".join(dataset.columns) or "none"
        raise ValueError(f"evaluation.groups is {column!r}; {dataset.name} has the columns {has}")
    return np.unique(dataset.columns[column], return_inverse=True)[1].astype(np.int64)


def _check_parts(recipe: Recipe, dataset: Dataset, items: Rows, rows: Mapping[str, Rows], labels: Rows) -> None:
    """Raise an error for parts that cannot be evaluated, before anything is trained."""
    if dataset.relations is not None:
        return
    measured = {"train": recipe.evaluation.train_recall, "validation": True}
    column = recipe.evaluation.groups
    if column is not None:
        groups = group_numbers(dataset, column)[items]
        kinds = np.unique(labels * (groups.max() + 1) + groups, return_inverse=True)[1]  # of class and group together
    for part, queries in rows.items():
        if part == "gallery" or not len(queries) or not measured.get(part, recipe.evaluation.test):
            continue
        searched = rows["gallery"] if part == "query" else queries
        classes, counts = np.unique(labels[searched], return_counts=True)
        where = f"the {'gallery' if part == 'query' else f'{part} part'} of {dataset.name}"
        if len(classes) < splits.MIN_CLASSES:
            hint = '; split.name = "fixed_validation" takes validation classes from the training classes'
            raise ValueError(
                f"{where} has a single class, so there is nothing to tell apart{hint if part == 'validation' else ''}"
            )
        if not np.isin(labels[queries], classes).any():
            raise ValueError(f"{where} has no class of the queries, so there is nothing to retrieve")
        if part != "query" and counts.max() < 2:
            raise ValueError(f"{where} has a single image of each class, so there is nothing to retrieve")
        if column is not None:
            same_class = np.bincount(labels[searched], minlength=labels.max() + 1)[labels[queries]]
            same_kind = np.bincount(kinds[searched], minlength=kinds.max() + 1)[kinds[queries]]
            if not (same_class > same_kind).any():
                raise ValueError(
                    f"{where} has no image of a query's class in another {column}, so there is nothing to retrieve"
                )


def _train_relations(recipe: Recipe, dataset: Dataset, items: Rows, rows: Mapping[str, Rows]) -> ItemRelations | None:
    """Return the given pairs or triplets for training, after checks of all of them."""
    given, metric = dataset.relations, recipe.selection.metric
    if (given is None) == (recipe.sampler.name == "given"):
        has = "has classes" if given is None else "gives pairs or triplets, which sampler.name = 'given' draws"
        raise ValueError(f"sampler.name is {recipe.sampler.name!r}; {dataset.name} {has}")
    if given is None:
        return None
    settings = {"training.memory": recipe.training.memory, "network.independent": recipe.network.independent}
    settings["selection.blend"] = recipe.selection.blend is True
    for key, value in settings.items():
        if value:
            raise ValueError(f"{key} is {value}; it is for classes, and {dataset.name} gives pairs or triplets")
    if len(rows["validation"]) and metric not in VERIFICATION:
        raise ValueError(
            f"selection.metric is {metric!r}; {dataset.name} gives pairs or triplets, whose metrics are "
            f"{' and '.join(VERIFICATION)}"
        )
    for part in ("validation", "test"):
        own = given.take(given.parts == part)
        if len(rows.get(part, ())) and given.width == 2 and len(np.unique(own.same)) < 2:
            raise ValueError(f"the {part} part of {dataset.name} needs pairs that are the same and others")
    train = given.take(given.parts == "train")
    return train.among(items[rows["train"]])


def _create_sampler(recipe: Recipe, labels: Rows, ranks: int, relations: ItemRelations | None) -> Sampler:
    section, seed = recipe.sampler, recipe.training.seed
    if relations is None and len(np.unique(labels)) < 2:
        aside = recipe.split.name in ("fixed_validation", "k_fold")
        remedy = "; set fewer classes aside for validation" if aside else ""
        raise ValueError(f"the split has one training class, and a loss compares at least two{remedy}")
    settings = section.model_dump(exclude={"name"}, exclude_none=True)
    if relations is not None:
        settings["relations"] = relations.rows
    if section.name == "groups" and section.batch_size is not None:
        most = settings.pop("batch_size")
        settings["classes"] = sampling.fitting_classes(labels, most, settings["per_class"], ranks)
    try:
        if recipe.network.independent:
            sampler: Sampler = Independent(section.name, labels, settings, recipe.network.members, seed=seed)
        else:
            sampler = sampling.create(section.name, labels, **settings, seed=seed)
        sampler.check_ranks(ranks)
        return sampler
    except ValueError as error:
        classes = len(np.unique(labels))
        few = (section.classes or 0) > classes
        hint = f"; the split has {classes} training classes, so sampler.classes can be {classes} at most"
        raise ValueError(f"sampler: {error}{hint if few else ''}") from None


def _create_loaders(
    recipe: Recipe, store: Store | Vectors, labels: Rows, model: Model, device: torch.device
) -> tuple[Loader, Loader, Preprocessing | None]:
    """Create the loaders for training and evaluation, and describe what the latter does, starting from files."""
    data, section, evaluation = recipe.data, recipe.augmentation, recipe.evaluation
    settings: dict[str, Any] = {"device": device, "mode": data.mode, "seed": recipe.training.seed}
    if not isinstance(store, Store):
        loader = Loader(store, labels, **settings)
        return loader, loader, None
    size = section.size or model.input_size
    if size is None:
        raise ValueError(f"augmentation.size is missing; {recipe.network.name} has no input size of its own")

    def resized(given: int | str | None, size: int) -> int | None:
        automatic = size if size < SMALL else round(size * 8 / 7)
        return automatic if given == "auto" else None if given is None else int(given)

    effects = section.model_dump(exclude={"size", "resize"})
    view = View(size=size, resize=resized(section.resize, size), **effects)
    loader = Loader(store, labels, view=view, normalization=model.normalization, **settings)
    size = evaluation.size or size
    resize, several = resized(evaluation.resize, size), evaluation.crops > 1
    crop = "random" if several else evaluation.crop
    evaluated = View(size=size, crop=crop, resize=resize, aspect=section.aspect, flip=several)
    assert model.normalization is not None
    # Images that are not resized here were shrunk or squashed when they were decoded.
    aspect = "squash" if data.aspect == "squash" or crop == "none" else section.aspect if resize else "shrink"
    preprocessing = Preprocessing(
        size=size,
        resize=size if crop == "none" else resize or max(data.side, size),
        aspect=aspect,
        crop="none" if crop == "none" else "center",
        pad=data.pad,
        normalization=replace(model.normalization, grey=store.channels < model.normalization.channels),
    )
    return loader, loader.viewed(evaluated), preprocessing


# --- network and losses --------------------------------------------------------------------------------------------


def create_network(recipe: Recipe, store: Store | Vectors) -> Model:
    """Create the network of a recipe; input sizes that the recipe leaves open are taken from the data."""
    section = recipe.network
    settings = dict(section.settings)
    if ":" not in section.name:
        allowed = backbones.defaults(section.name)
        sizes: dict[str, Any] = {}
        if not isinstance(store, Store):
            sizes["in_dim"] = int(store.shape[1])
        elif "in_dim" in allowed:
            raise ValueError(_wrong_input(recipe, "vectors", "images"))
        else:
            sides = np.unique(store.sizes)
            size = recipe.augmentation.size or (int(sides[0]) if len(sides) == 1 else None)
            sizes |= {"channels": store.channels, **({} if size is None else {"size": size})}
        settings = {key: value for key, value in sizes.items() if key in allowed} | settings
    keys = {"dim", "pooling", "normalize", "head", "levels", "pretrained", "freeze_batchnorm"}
    settings |= section.model_dump(include=keys)
    saved = _saved_model(section.pretrained)
    if saved is not None:
        settings["pretrained"] = False
    members = [networks.create(section.name, **settings) for _ in range(section.members)]
    model = members[0] if len(members) == 1 else Ensemble(members, normalize=section.concatenation == "normalized")
    if saved is not None:
        start = save.load(saved)
        if save.describe(start) != save.describe(model):
            raise ValueError(f"network.pretrained is {str(saved)!r}, which holds another network than {section.name!r}")
        model.load_state_dict(start.state_dict())
    return model


def untrained(setup: Setup) -> Setup:
    """Replace the network by the pooled features of its pretrained backbone; other networks are untrained as built."""
    section = setup.recipe.network
    if not section.freeze and (section.pretrained is False or _saved_model(section.pretrained) is not None):
        return setup
    backbone = setup.model.members[0].backbone
    model = Embedder(backbone, dim=None, pooling=section.pooling, normalize=section.normalize).to(setup.device)
    return replace(setup, model=model)


def _saved_model(pretrained: bool | str) -> Path | None:
    """Return the weights file of a model that nearfar saved, which has a description next to it."""
    if isinstance(pretrained, bool):
        return None
    file = expanded(pretrained)
    return file if file.with_suffix(".json").is_file() else None


def create_losses(
    recipe: Recipe, model: Model, num_classes: int, epochs: int, world: World
) -> tuple[nn.ModuleList, tuple[LossStage, ...]]:
    """Create the losses of a recipe, and the stages that use them.

    Stages with the same loss section share one loss. Stages with different losses share class vectors of the same
    shape: Group Loss starts from the classifier that softmax trained.
    """
    created: list[tuple[LossSection, nn.ModuleDict]] = []
    stages: list[LossStage] = []
    first = 0
    for number in range(len(recipe.stages) or 1):
        section = recipe.loss_of(number)
        used = next((modules for known, modules in created if known == section), None)
        if used is None:
            used = nn.ModuleDict()
            for key, dim in model.outputs.items():
                with shapes_only() if recipe.training.shard_classes else nullcontext():
                    used[key] = loss = section.create(num_classes=num_classes, dim=dim)
                if recipe.training.shard_classes and isinstance(loss, ProxyLoss):
                    shard_classes(loss, world=world)
            for key, later in used.items() if created else ():
                before = created[-1][1][key]
                shared = isinstance(before, ProxyLoss) and isinstance(later, ProxyLoss)
                if shared and before.proxies.shape == later.proxies.shape:
                    later.proxies = before.proxies
            created.append((section, used))
        stage = recipe.stages[number] if recipe.stages else None
        length = epochs - first if stage is None or stage.epochs is None else stage.epochs
        stages.append(LossStage(used, first, length, 1.0 if stage is None else stage.lr_factor))
        first += length
    return nn.ModuleList([modules for _, modules in created]), tuple(stages)


def _check_input(recipe: Recipe, dataset: Dataset, model: Model) -> None:
    if (model.normalization is None) != dataset.is_vectors:
        words = ("images", "vectors") if dataset.is_vectors else ("vectors", "images")
        raise ValueError(_wrong_input(recipe, *words))
    effects = recipe.augmentation.effects
    if dataset.is_vectors and effects:
        key = next(iter(effects))
        raise ValueError(f"augmentation.{key} is {effects[key]}; it is for images, and {dataset.name} holds vectors")


def _wrong_input(recipe: Recipe, reads: str, holds: str) -> str:
    return f"network.name is {recipe.network.name!r}, which reads {reads}; {recipe.data.name} holds {holds}"


def _check_warmup(recipe: Recipe, model: Model, stages: tuple[LossStage, ...], epochs: int, steps: int) -> None:
    """Raise an error for a warm-up that never ends, or in which nothing is trained."""
    frozen, rising = recipe.training.warmup_epochs, recipe.schedule.warmup
    if frozen >= epochs:
        raise ValueError(
            f"training.warmup_epochs is {frozen}; the training has {epochs} epochs, so the backbone would never be "
            "trained"
        )
    if rising > steps:
        raise ValueError(
            f"schedule.warmup is {rising}; the training has {steps} steps, so it would never reach its learning rate"
        )
    has_head = any(
        not name.startswith("backbone.") for member in model.members for name, _ in member.named_parameters()
    )
    idle = [stage for stage in stages if stage.first < frozen and not list(stage.losses.parameters())]
    if idle and not has_head:
        raise ValueError(
            f"training.warmup_epochs is {frozen}, in which only head and loss are trained; the network has no head, "
            "and the loss has no parameters"
        )


# --- optimizer -------------------------------------------------------------------------------------------------------


def create_optimizer(
    section: OptimizerSection, model: Embedder | Ensemble, losses: nn.Module, device: str | torch.device = "cpu"
) -> torch.optim.Optimizer:
    """Create the optimizer of a recipe.

    Create it while the backbone is not frozen: parameters that are frozen later have no gradient and are not updated.
    Parameters of losses have no weight decay. On a GPU the fused implementation is used where PyTorch has one.
    """
    groups = [*model.param_groups(section.lr, section.head_multiplier, section.weight_decay)]
    groups += loss_groups(losses, section.lr, section.loss_multiplier)
    if not groups:
        raise ValueError("there is nothing to train: neither the network nor the loss has parameters")
    fused: dict[str, Any] = {"fused": True} if torch.device(device).type == "cuda" else {}
    settings = section.model_dump(include={"lr", "weight_decay", *section.keys[section.name]})
    kinds: dict[str, type[torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "radam": torch.optim.RAdam,
    }
    if section.name == "radam":  # has no fused kernel
        fused = {}
    kind = kinds[section.name]
    # Without the wrappers of its methods that import PyTorch's compiler, which takes seconds.
    names = "add_param_group", "load_state_dict", "state_dict", "step", "zero_grad"
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    plain = type(kind.__name__, (kind,), {**methods, "step": torch.no_grad()(methods["step"])})
    optimizer: torch.optim.Optimizer = plain(groups, **settings, **fused)
    for group in optimizer.param_groups:
        group["initial_lr"] = float(group["lr"])
    return optimizer


def schedule_factor(section: ScheduleSection, state: State, steps_per_epoch: int, steps: int) -> float:
    """Return the factor of the initial learning rates after the steps and epochs that are done."""
    rising = (state.iteration + 1) / section.warmup if state.iteration < section.warmup else 1.0
    done = state.epoch if section.per == "epoch" else state.iteration
    if section.name == "step":
        return rising * section.gamma ** (done // (section.step_size or 1))
    if section.name == "multi_step":
        return rising * section.gamma ** sum(done >= milestone for milestone in section.milestones)
    if section.name == "cosine":  # it begins after the warm-up
        over = state.iteration if section.per == "iteration" else state.epoch * steps_per_epoch
        share = min(max(over - section.warmup, 0) / max(steps - section.warmup, 1), 1.0)
        return rising * (section.minimum + (1.0 - section.minimum) * (1.0 + math.cos(math.pi * share)) / 2.0)
    return rising * state.reduced  # 1 except for "plateau"


# --- features of a frozen backbone -----------------------------------------------------------------------------------


def on_features(setup: Setup, watch: Watch = lambda work: None) -> Setup:
    """Freeze the backbone, and let training and evaluation read its features instead of images.

    The features are those of the evaluation's view. They are kept in the folder of the store, by the fingerprint of
    backbone, pooling and preprocessing, so that further trainings on the same images start at once.
    """
    assert isinstance(setup.model, Embedder)
    assert isinstance(setup.store, Store)
    setup.model.freeze_backbone()
    network = Embedder(setup.model.backbone, dim=None, pooling=setup.recipe.network.pooling, normalize=False)
    loader = Loader(
        _features(network, setup, setup.store, watch),
        setup.labels,
        device=setup.device,
        mode=setup.recipe.data.mode,
        seed=setup.recipe.training.seed,
    )
    return replace(setup, loader=loader, eval_loader=loader)


def _features(network: Embedder, setup: Setup, store: Store, watch: Watch) -> Vectors:
    """Return the pooled features [len(store), c], from the folder of the store if they are there."""
    from nearfar.training.evaluation import embeddings

    training = setup.recipe.training
    name = f"features-{save.fingerprint(network, setup.preprocessing)[:DIGITS]}-{training.precision}.npy"
    file = None if store.folder is None else store.folder / name
    if file is not None:
        with suppress(OSError, EOFError, ValueError):
            kept: Vectors = np.load(file, allow_pickle=False)
            if kept.shape == (len(store), network.dim):
                return kept
    features: Vectors = (
        embeddings.embed(
            network,
            setup.eval_loader,
            np.arange(len(store)),
            batch_size=setup.recipe.evaluation.batch_size,
            precision=training.precision,
            channels_last=training.channels_last,
            progress=watch("features"),
        )
        .embeddings.cpu()
        .numpy()
    )
    if file is not None:
        with suppress(OSError), whole_file(file) as draft, open(draft, "wb") as content:
            np.save(content, features)
    return features
