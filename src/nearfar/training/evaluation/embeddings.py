"""Sets of embeddings: computed by a model, measured, and stored in a run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nearfar import metrics
from nearfar.data.datasets.base import ItemRelations
from nearfar.data.loader import Loader
from nearfar.data.sampling import Independent, hard_items
from nearfar.distributed import World
from nearfar.losses import HierarchicalTriplet
from nearfar.networks.embedder import cpu_batch
from nearfar.supervision import Pairs
from nearfar.training.run.folder import RunFolder, finite
from nearfar.training.setup import Rows, Setup
from nearfar.training.step import autocast, no_cudnn_autotune
from nearfar.utils.atomic import read_tensors, write_tensors
from nearfar.utils.progress import Progress, Watch
from nearfar.utils.tensors import Array, as_labels

TRIED = 8  # rows that are embedded on a CPU before the first step
PerQuery = dict[str, Tensor]  # metrics of each query [n], by name


@dataclass(frozen=True, eq=False)
class EmbeddingSet:
    """Embeddings with their labels, and the gallery they are searched in."""

    embeddings: Tensor  # [n, d]
    labels: Array  # [n]: class numbers, or text as a NumPy array
    # [n], the rows of the dataset; 0 … n − 1 by default.
    rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    gallery: EmbeddingSet | None = None  # what the embeddings are searched in; None: each other
    unlabeled: int = 0  # the number of embeddings that were left out because they have no label
    # [n], such as the camera of each image: items of the query's class and group are ignored. None: none are.
    groups: Array | None = None
    # Given pairs or triplets of the embeddings, by position, which are verified in place of retrieval.
    relations: ItemRelations | None = None

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.embeddings):
            object.__setattr__(self, "rows", torch.arange(len(self.embeddings)))

    def __len__(self) -> int:
        return len(self.embeddings)

    def to(self, device: str | torch.device) -> EmbeddingSet:
        """Move the embeddings, including those of the gallery, to a device."""
        gallery = None if self.gallery is None else self.gallery.to(device)
        return replace(self, embeddings=self.embeddings.to(device), gallery=gallery)

    def is_finite(self) -> bool:
        """Whether all embeddings, including those of the gallery, are free of NaN and infinity."""
        own = bool(self.embeddings.isfinite().all())
        return own and (self.gallery is None or self.gallery.is_finite())

    def counts(self, labels_name: str = "labels") -> dict[str, int]:
        """Count vectors, dimensions and classes."""
        count, dimensions = self.embeddings.shape
        classes = len(torch.unique(as_labels(labels_name, self.labels, count)))
        found = {"vectors": count, "dimensions": dimensions, "classes": classes}
        return {**found, "without_class": self.unlabeled} if self.unlabeled else found

    def split(self, dims: Mapping[str, int]) -> dict[str, EmbeddingSet]:
        """Split the columns into sets of the given dimensions, such as the levels of a network."""
        columns = torch.split(self.embeddings, list(dims.values()), dim=1)
        galleries = {} if self.gallery is None else self.gallery.split(dims)
        return {
            name: replace(self, embeddings=part, gallery=galleries.get(name))
            for name, part in zip(dims, columns, strict=True)
        }

    def grouped(self, groups: NDArray[np.int64]) -> EmbeddingSet:
        """Return the same embeddings, including those of the gallery, with groups."""
        gallery = None if self.gallery is None else self.gallery.grouped(groups)
        return replace(self, groups=torch.from_numpy(groups[self.rows.numpy()]), gallery=gallery)

    def save(self, file: Path) -> None:
        """Write "embeddings", "labels", "rows" and "groups" to a file; those of a gallery with "gallery_" before."""
        tensors = {}
        for prefix, part in (("", self), ("gallery_", self.gallery)):
            if part is not None:
                tensors[f"{prefix}embeddings"] = part.embeddings.cpu().contiguous()
                tensors[f"{prefix}labels"] = torch.as_tensor(part.labels).clone()
                tensors[f"{prefix}rows"] = part.rows
                if part.groups is not None:
                    tensors[f"{prefix}groups"] = torch.as_tensor(part.groups).clone()
        if self.relations is not None:
            given = self.relations
            tensors |= {"relations": torch.from_numpy(given.rows), "scores": torch.from_numpy(given.scores)}
            tensors |= {"same": torch.from_numpy(given.same)}
            tensors |= {} if given.folds is None else {"folds": torch.from_numpy(given.folds)}
        write_tensors(file, tensors)

    @classmethod
    def load(cls, file: Path) -> EmbeddingSet:
        """Read a file of a run folder."""
        tensors, _ = read_tensors(file)

        def part(prefix: str, gallery: EmbeddingSet | None) -> EmbeddingSet:
            names = [f"{prefix}{name}" for name in ("embeddings", "labels", "rows")]
            missing = [name for name in names if name not in tensors]
            if missing:
                raise ValueError(f"{file} has no {' and no '.join(missing)}")
            embeddings, labels, rows = (tensors[name] for name in names)
            return cls(embeddings.float(), labels, rows, gallery, groups=tensors.get(f"{prefix}groups"))

        if "relations" in tensors:
            rows, scores, same = (tensors[name].numpy() for name in ("relations", "scores", "same"))
            folds = tensors["folds"].numpy() if "folds" in tensors else None
            given = ItemRelations(rows, scores, same, np.full(len(rows), "test"), folds)
            return replace(part("", None), relations=given)
        return part("", part("gallery_", None) if "gallery_embeddings" in tensors else None)


@dataclass(frozen=True)
class Measurement:
    """The metrics of an embedding set."""

    retrieval: dict[str, Any]  # metrics of retrieval, by name
    clustering: dict[str, Any]  # metrics of k-means clusters, by name; empty if not measured
    per_query: PerQuery  # the retrieval metrics of each query
    # Metrics of given pairs or triplets, by name, in place of all others.
    verification: dict[str, Any] = field(default_factory=dict)


def measure_embeddings(
    found: EmbeddingSet,
    *,
    ks: Sequence[int] = (1, 2, 4, 8),
    measure: str = "cosine",
    clustering: bool = False,
    normalization: str = "arithmetic",
    seed: int = 0,
    rerank: str | None = None,
    watch: Watch = lambda work: None,
) -> Measurement:
    """Measure how well embeddings retrieve their classes, and how well they cluster."""
    if found.relations is not None:
        return Measurement({}, {}, {}, verify(found.embeddings, found.relations, measure=measure))
    gallery = found.gallery
    values = metrics.retrieval(
        found.embeddings,
        found.labels,
        None if gallery is None else gallery.embeddings,
        None if gallery is None else gallery.labels,
        ks=ks,
        measure=measure,
        groups=found.groups,
        gallery_groups=None if gallery is None else gallery.groups,
        rerank=rerank,
        per_query=True,
        progress=watch("ranking" if rerank is None else "re-ranking"),
    )
    per_query: PerQuery = values.pop("per_query")
    clusters: dict[str, Any] = {}
    if clustering:
        clusters = metrics.clustering(
            found.embeddings,
            found.labels,
            seed=seed,
            normalize=measure == "cosine",
            normalization=normalization,
            progress=watch("clustering"),
        )
    return Measurement(values, clusters, per_query)


def verify(embeddings: Tensor, relations: ItemRelations, *, measure: str = "cosine") -> dict[str, Any]:
    """Measure how well embeddings tell given pairs apart, or order given triplets."""
    first, second = relations.rows[:, 0], relations.rows[:, 1]
    left = np.tile(first, relations.width - 1)
    right = np.concatenate([second, *relations.rows[:, 2:].T])
    same, folds = relations.same, relations.folds
    if relations.width == 3:
        same = np.repeat([True, False], len(relations))
    pairs = Pairs(left, right, same)
    found: dict[str, Any] = metrics.verification(embeddings, pairs, folds=folds, measure=measure)
    points = embeddings.double().cpu()
    points = torch.nn.functional.normalize(points, dim=1) if measure == "cosine" else points
    nearness = -(points[left] - points[right]).norm(dim=1).numpy()
    if relations.width == 3:
        found["triplet_accuracy"] = float((nearness[: len(first)] > nearness[len(first) :]).mean())
    elif len(np.unique(relations.scores)) > 2:
        from scipy.stats import spearmanr

        found["spearman"] = float(spearmanr(nearness, relations.scores).statistic)
    return found


@torch.no_grad()
def embed(
    model: nn.Module,
    loader: Loader,
    rows: Rows,
    *,
    batch_size: int = 256,
    precision: str = "float32",
    channels_last: bool = True,
    crops: int = 1,
    world: World | None = None,
    progress: Progress | None = None,
) -> EmbeddingSet:
    """Compute the embeddings of rows of a store, in their order, in evaluation mode."""
    if not len(rows):
        raise ValueError("rows is empty; there is nothing to embed")
    world = world or World()
    if loader.view is not None and loader.device.type == "cpu":
        batch_size = min(batch_size, cpu_batch(*loader.view.window))
    # Processes share whole batches: the arithmetic of a network may depend on the size of a batch.
    batches = -(-len(rows) // batch_size)
    bounds = [-(-batches * rank // world.ranks) for rank in range(world.ranks + 1)]
    steps = range(bounds[world.rank], bounds[world.rank + 1])  # the batches of this process, which may be none
    count = len(rows[steps.start * batch_size : steps.stop * batch_size])
    points, failure, done = torch.empty(0), None, 0
    was = model.training
    model.eval()
    try:
        with no_cudnn_autotune():
            for draw in range(crops):
                embedded = []
                for batch in loader.all(rows, batch_size=batch_size, draw=draw, steps=steps):
                    images, missing = batch.images, min(batch_size, len(rows)) - len(batch.images)
                    if images.is_cuda and missing:  # the first batch of a new shape takes seconds
                        images = torch.cat([images, images.new_zeros(missing, *images.shape[1:])])
                    if channels_last and images.ndim == 4:
                        images = images.contiguous(memory_format=torch.channels_last)
                    with autocast(images.device, precision):
                        embedded.append(model(images)[: len(batch)].float())
                    done += len(batch)
                    if progress is not None:
                        progress(done, crops * count)
                if embedded:
                    points = torch.cat(embedded) if draw == 0 else points + torch.cat(embedded)
            points = points / crops
    except BaseException as error:
        failure = error
    finally:
        model.train(was)
    if world.any(failure is not None):  # all processes leave together
        raise failure or RuntimeError("computing embeddings failed in another process")
    if world.ranks > 1:
        dim = world.share(points.shape[-1])
        counts = [stop - start for start, stop in pairwise(min(bound * batch_size, len(rows)) for bound in bounds)]
        points = world.join(points if len(steps) else torch.empty(0, dim, device=loader.device), counts)
    labels = torch.from_numpy(loader.labels[rows]).to(loader.device)
    return EmbeddingSet(points, labels, torch.from_numpy(np.array(rows)))


def class_means(found: EmbeddingSet, class_labels: NDArray[Any]) -> NDArray[np.float32]:
    """Return the mean embedding of each class, [classes, d]."""
    labels = torch.as_tensor(found.labels)
    order = torch.from_numpy(np.asarray(class_labels, dtype=np.int64)).to(labels.device)
    codes = torch.searchsorted(order, labels)
    sums = torch.zeros(len(order), found.embeddings.shape[1], dtype=torch.float64, device=found.embeddings.device)
    sums.index_add_(0, codes, found.embeddings.double())
    counts = torch.bincount(codes, minlength=len(order)).clamp(min=1).unsqueeze(1)
    means: NDArray[np.float32] = (sums / counts).float().cpu().numpy()
    return means


def due_parts(setup: Setup, epoch: int, *, last: bool) -> list[str]:
    """Return the parts that are measured after an epoch.

    The test classes are measured after the last epoch if no validation classes select another one, and during
    training only where the recipe asks for it (``evaluation.test_every``).
    """
    section, validates = setup.recipe.evaluation, bool(len(setup.rows["validation"]))
    regular = last or (section.every > 0 and epoch % section.every == 0)
    chooses = validates or setup.recipe.selection.blend is not False  # what the network becomes, after the last epoch
    look = (last and not chooses) or (section.test_every > 0 and epoch % section.test_every == 0)
    due = {"validation": regular and validates, "test": look, "train": regular}
    return [part for part in setup.measured if due[part]]


def embed_parts(setup: Setup, names: Sequence[str] | None = None) -> dict[str, EmbeddingSet]:
    """Compute the embeddings of parts: "train", "validation", and "test", which may be queries with a gallery."""
    parts = {}
    for name in setup.measured if names is None else names:
        has_gallery = name == "test" and "query" in setup.rows
        rows = setup.rows["query" if has_gallery else name]
        if len(rows):
            queries = _embed_rows(setup, rows)
            gallery = _embed_rows(setup, setup.rows["gallery"]) if has_gallery else None
            parts[name] = replace(queries, gallery=gallery)
    return parts


def _embed_rows(setup: Setup, rows: Rows) -> EmbeddingSet:
    training, evaluation = setup.recipe.training, setup.recipe.evaluation
    embedded = embed(
        setup.model,
        setup.eval_loader,
        rows,
        batch_size=evaluation.batch_size,
        precision=training.precision,
        channels_last=training.channels_last,
        crops=evaluation.crops,
        world=setup.world,
    )
    groups, given = setup.groups(rows), setup.dataset.relations
    return replace(
        embedded,
        rows=torch.from_numpy(np.array(setup.dataset_rows(rows))),
        groups=None if groups is None else torch.from_numpy(groups),
        relations=None if given is None else given.among(setup.dataset_rows(rows)),
    )


def measure_parts(setup: Setup, parts: Mapping[str, EmbeddingSet]) -> tuple[dict[str, Any], PerQuery | None]:
    """Measure parts with the metrics of the recipe."""
    section, values, per_query = setup.recipe.evaluation, {}, None
    for name, embedded in parts.items():
        result = measure_embeddings(embedded, ks=section.ks, measure=section.measure, clustering=section.clustering)
        values[name] = finite({**result.retrieval, **result.clustering, **result.verification})
        if name == "test" and not result.verification:
            per_query = result.per_query
    return values, per_query


def update_learned(setup: Setup) -> None:
    """Give the sampler and the losses what they learn from embeddings of the training set, if anything."""
    sampler: Any = setup.sampler
    trees = {
        key: loss
        for losses in setup.losses
        for key, loss in losses.items()  # type: ignore[operator]
        if isinstance(loss, HierarchicalTriplet) and loss.num_classes is not None
    }
    if not (sampler.learns or trees):
        return
    embedded = embed_parts(setup, ["train"])["train"]
    single: Any = sampler.samplers[0] if isinstance(sampler, Independent) else sampler
    if sampler.learns == "classes":
        sampler.update(class_means(embedded, single.class_labels))
    elif sampler.learns == "items":
        sampler.update(hard_items(embedded.embeddings, single.labels, single.neighbors))
    outputs = embedded.split(setup.model.outputs) if trees else {}
    for key, loss in trees.items():
        loss.update(outputs[key].embeddings, torch.as_tensor(embedded.labels))


def try_out(setup: Setup) -> None:
    """Embed a few rows as evaluations do: a network that cannot be evaluated must fail before it is trained."""
    count = setup.recipe.evaluation.batch_size if setup.device.type == "cuda" else TRIED
    _embed_rows(replace(setup, world=World()), setup.rows["train"][:count])


def query_metrics(
    setup: Setup, parts: Mapping[str, EmbeddingSet], per_query: PerQuery | None = None
) -> dict[str, Tensor]:
    """Return rows, labels and metrics of each query of the test that has a match; nothing for given pairs."""
    if "test" not in setup.measured or parts["test"].relations is not None:
        return {}
    tested = _with_dataset_labels(setup, parts["test"])
    if per_query is None:
        per_query = measure_embeddings(parts["test"], ks=(1,), measure=setup.recipe.evaluation.measure).per_query
    metrics = {name: value.cpu() for name, value in per_query.items()}
    answered = ~metrics["mrr"].isnan()
    return {
        "rows": tested.rows[answered],
        "labels": torch.as_tensor(tested.labels)[answered],
        "recall@1": metrics["precision@1"][answered].to(torch.uint8),  # equal to it, and measured for any ks
        "map@r": metrics["map@r"][answered].float(),
    }


def write_embeddings(setup: Setup, run: RunFolder, parts: Mapping[str, EmbeddingSet]) -> None:
    """Write the embeddings of the test to a run folder."""
    if "test" in setup.measured:
        _with_dataset_labels(setup, parts["test"]).save(run.embeddings)


def _with_dataset_labels(setup: Setup, embedded: EmbeddingSet) -> EmbeddingSet:
    """Replace the labels of the training, where trained classes come first, by those of the dataset."""
    labels = torch.from_numpy(setup.dataset.labels[embedded.rows.numpy()].copy())
    gallery = None if embedded.gallery is None else _with_dataset_labels(setup, embedded.gallery)
    return replace(embedded, labels=labels, gallery=gallery)
