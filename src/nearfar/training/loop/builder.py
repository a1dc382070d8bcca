"""From a recipe to everything a run needs: data, network, losses, optimiser, schedule."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from nearfar import networks
from nearfar.data import Dataset, Loader, Split, Store, View
from nearfar.data.sampling import registry
from nearfar.data.sampling.base import Sampler
from nearfar.networks import Embedder, Ensemble
from nearfar.networks import registry as backbones
from nearfar.networks.preprocessing import SMALL, Preprocessing
from nearfar.networks.weights import published
from nearfar.training.loop import optimizers, schedules
from nearfar.training.loop.examples import (
    Places,
    Vectors,
    check_measured,
    fingerprint_of,
    labels_of,
    open_data,
    rows_of,
    split_of,
    store_of,
)
from nearfar.training.loop.schedules import Schedule
from nearfar.training.loop.stages import Stage, members_of, stages_of
from nearfar.training.recipe.schema import Data, Recipe
from nearfar.utils.inputs import as_device
from nearfar.utils.progress import Watch

Model = Embedder | Ensemble


@dataclass(frozen=True, eq=False)
class Parts:
    """What a recipe is made of, on the device it trains on.

    Args:
        recipe: What was built.
            dataset, split all there is, and which classes are for what.
        store: Decoded pictures, or vectors [n, d].
        labels: [len(store)]: training classes are 0 … num_classes − 1, all others come after them.
        rows: Places in the store: "train", "validation" (may be empty), and "test" or "query" and "gallery".
        train_labels: [len(rows["train"])], the labels of these rows.
        num_classes: Of training.
        sampler: Positions in rows["train"]; loader.epoch(sampler, epoch, rows=rows["train"]) makes batches.
        loader: Training view; ``eval_loader`` shows the same pictures for evaluation.
        model, losses: On the device. ``losses`` holds those of all stages, once each; two of them may share class
            vectors (tensors of its state dict may be one and the same memory).
        stages: In order; ``stage_at(epoch)`` finds one.
        preprocessing: What evaluation does to pictures; None for vectors.
        fingerprint: Of pictures, labels and split.
        epochs, steps: How many there are; the last epoch may end early when iterations are counted.
    """

    recipe: Recipe
    dataset: Dataset
    split: Split
    store: Store | Vectors
    labels: Places
    rows: Mapping[str, Places]
    train_labels: Places
    num_classes: int
    sampler: Sampler
    loader: Loader
    eval_loader: Loader
    model: Model
    losses: nn.ModuleList
    stages: tuple[Stage, ...]
    preprocessing: Preprocessing | None
    fingerprint: str
    device: torch.device
    epochs: int
    steps: int

    @property
    def steps_per_epoch(self) -> int:
        """Updates in a whole epoch."""
        return len(self.sampler)

    def stage_at(self, epoch: int) -> Stage:
        """The stage that an epoch belongs to."""
        return [stage for stage in self.stages if stage.first <= epoch][-1]

    def optimizer(self) -> torch.optim.Optimizer:
        """A new optimiser; make it while the backbone is awake."""
        return optimizers.create(self.recipe.optimizer, self.model, self.losses, self.device)

    def schedule(self, optimizer: torch.optim.Optimizer) -> Schedule:
        """A new schedule of an optimiser that was just made."""
        return schedules.create(self.recipe.schedule, optimizer, steps_per_epoch=self.steps_per_epoch, steps=self.steps)


def build(
    recipe: Recipe,
    *,
    rank: int = 0,
    ranks: int = 1,
    cache: str | Path | None = None,
    watch: Watch | None = None,
) -> Parts:
    """Open the data, prepare its pictures, and make network, losses and the rest.

    Every rank makes the same parameters: random numbers start at ``training.seed``.

    Args:
        rank, ranks: Which share of each batch the sampler draws, and of how many.
        cache: Where decoded pictures are kept.
        watch: Told when decoding begins.
    """
    device = device_of(recipe.training.device, rank)
    dataset = open_data(recipe)
    split = split_of(recipe, dataset)
    _find_weights(recipe)
    store = store_of(recipe, dataset, cache, watch)
    rows = rows_of(split, store)
    labels, num_classes = labels_of(dataset, store, rows)
    check_measured(recipe, dataset, rows, labels)
    if recipe.schedule.name == "plateau" and not len(rows["validation"]):
        raise ValueError(
            "schedule.name is 'plateau', which watches the validation classes, and there are none; "
            "split.name = 'fixed_validation' takes some of the training classes"
        )
    train_labels = labels[rows["train"]]
    sampler = _sampler(recipe, train_labels, rank, ranks)
    torch.manual_seed(recipe.training.seed)
    model = network_of(recipe, store)
    _check_input(recipe, dataset, model)
    steps = recipe.training.iterations or (recipe.training.epochs or 0) * len(sampler)
    epochs = math.ceil(steps / len(sampler))
    losses, stages = stages_of(recipe, model, num_classes, epochs)
    _check_warmup(recipe, model, stages, epochs, steps)
    layout = {"memory_format": torch.channels_last} if recipe.training.channels_last and not dataset.is_vectors else {}
    model.to(device, **layout)  # type: ignore[call-overload]
    losses.to(device)
    loader, eval_loader = _loaders(recipe, store, labels, model, device)
    return Parts(
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
        preprocessing=_preprocessing(eval_loader, recipe.data),
        fingerprint=fingerprint_of(dataset.source.fingerprint(), rows, labels),
        device=device,
        epochs=epochs,
        steps=steps,
    )


def device_of(name: str, rank: int = 0) -> torch.device:
    """ "auto" is the GPU of this rank where there is one, else the CPU.

    >>> device_of("cpu")
    device(type='cpu')
    """
    return as_device("training.device", name, local=int(os.environ.get("LOCAL_RANK", rank)))


def network_of(recipe: Recipe, store: Store | Vectors) -> Model:
    """The network of a recipe; sizes that only the data knows are read off it."""
    section = recipe.network
    settings = dict(section.settings)
    if ":" not in section.name:
        allowed = backbones.defaults(section.name)
        if "in_dim" in allowed and isinstance(store, Store):
            raise ValueError(_other_input(recipe, "vectors", "pictures"))
        settings |= {
            key: value for key, value in _read_off(recipe, store).items() if key in allowed and key not in settings
        }
    members = [
        networks.create(
            section.name,
            dim=section.dim,
            pooling=section.pooling,
            normalize=section.normalize,
            head=section.head,
            levels=section.levels,
            pretrained=section.pretrained,
            freeze_batchnorm=section.freeze_batchnorm,
            **settings,
        )
        for _ in range(section.members)
    ]
    return members[0] if len(members) == 1 else Ensemble(members, normalize=section.normalize)


def _read_off(recipe: Recipe, store: Store | Vectors) -> dict[str, Any]:
    if not isinstance(store, Store):
        return {"in_dim": int(store.shape[1])}
    sides = np.unique(store.sizes)
    size = recipe.augmentation.size or (int(sides[0]) if len(sides) == 1 else None)
    return {"channels": store.channels, **({} if size is None else {"size": size})}


def _find_weights(recipe: Recipe) -> None:
    """Published weights are looked for, or downloaded, before pictures are decoded, which may take long."""
    name = recipe.network.name
    if recipe.network.pretrained is True and ":" not in name and published.locate(published.get(name)) is None:
        published.fetch(published.get(name))


def _sampler(recipe: Recipe, labels: Places, rank: int, ranks: int) -> Sampler:
    section = recipe.sampler
    keys = ("classes", "per_class", "batch_size", "candidates", "steps")
    settings = {key: getattr(section, key) for key in keys if getattr(section, key) is not None}
    if section.name == "groups" and section.batch_size is not None:
        most = settings.pop("batch_size")
        settings["classes"] = registry.fitting_classes(labels, most, settings["per_class"], ranks)
    try:
        return registry.create(section.name, labels, **settings, seed=recipe.training.seed, rank=rank, ranks=ranks)
    except ValueError as error:
        classes = len(np.unique(labels))
        few = (section.classes or 0) > classes
        hint = f"; the split leaves {classes} classes for training, so sampler.classes can be {classes} at most"
        raise ValueError(f"sampler: {error}{hint if few else ''}") from None


def _check_input(recipe: Recipe, dataset: Dataset, model: Model) -> None:
    if (model.normalization is None) != dataset.is_vectors:
        words = ("pictures", "vectors") if dataset.is_vectors else ("vectors", "pictures")
        raise ValueError(_other_input(recipe, *words))
    effects = recipe.augmentation.effects
    if dataset.is_vectors and effects:
        key = next(iter(effects))
        raise ValueError(f"augmentation.{key} is {effects[key]}; it is for pictures, and {dataset.name} holds vectors")


def _check_warmup(recipe: Recipe, model: Model, stages: tuple[Stage, ...], epochs: int, steps: int) -> None:
    """Refuse a warm-up in which nothing learns, or after which nothing is left."""
    asleep, rising = recipe.training.warmup_epochs, recipe.schedule.warmup
    if asleep >= epochs:
        raise ValueError(
            f"training.warmup_epochs is {asleep}; the training has {epochs} epochs, and the backbone would never learn"
        )
    if rising > steps:
        raise ValueError(
            f"schedule.warmup is {rising}; the training has {steps} steps, and would never come to its learning rate"
        )
    awake = any(not name.startswith("backbone.") for one in members_of(model) for name, _ in one.named_parameters())
    dull = [stage for stage in stages if stage.first < asleep and not list(stage.losses.parameters())]
    if dull and not awake:
        raise ValueError(
            f"training.warmup_epochs is {asleep}, in which head and loss learn alone; the network has no head, and the "
            "loss nothing to learn"
        )


def _other_input(recipe: Recipe, reads: str, holds: str) -> str:
    return f"network.name is {recipe.network.name!r}, which reads {reads}; {recipe.data.name} holds {holds}"


def _loaders(
    recipe: Recipe, store: Store | Vectors, labels: Places, model: Model, device: torch.device
) -> tuple[Loader, Loader]:
    settings: dict[str, Any] = {"device": device, "mode": recipe.data.mode, "seed": recipe.training.seed}
    if not isinstance(store, Store):
        loader = Loader(store, labels, **settings)
        return loader, loader
    section, evaluation = recipe.augmentation, recipe.evaluation
    size = section.size or model.input_size
    if size is None:
        raise ValueError(f"augmentation.size is missing; {recipe.network.name} does not say what it reads")
    training = View(
        size=size,
        crop=section.crop,
        resize=_resize(section.resize, size),
        aspect=section.aspect,
        scale=section.scale,
        ratio=section.ratio,
        flip=section.flip,
        **section.effects,
    )
    size = evaluation.size or size
    resize = _resize(evaluation.resize, size)
    shown = View(size=size, crop=evaluation.crop, resize=resize, aspect=section.aspect, flip=False)
    loader = Loader(store, labels, view=training, normalization=model.normalization, **settings)
    return loader, loader.viewed(shown)


def _resize(wanted: int | str | None, size: int) -> int | None:
    if wanted == "auto":
        return size if size < SMALL else round(size * 8 / 7)
    return None if wanted is None else int(wanted)


def _preprocessing(loader: Loader, section: Data) -> Preprocessing | None:
    """What becomes of pictures in evaluation, from their files on."""
    view, normalization, store = loader.view, loader.normalization, loader.store
    if view is None or normalization is None or not isinstance(store, Store):
        return None
    normalization = replace(normalization, grey=store.channels < normalization.channels)
    size = view.window[0]
    if view.crop == "none":
        return Preprocessing(size=size, resize=size, aspect="squash", crop="none", normalization=normalization)
    # Pictures that stay as they are were shrunk when they were decoded, or squashed.
    aspect = "squash" if section.aspect == "squash" else view.aspect if view.resize else "shrink"
    resize = view.resize or max(section.side, size)
    return Preprocessing(size=size, resize=resize, aspect=aspect, normalization=normalization)
