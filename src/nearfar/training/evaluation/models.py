"""Embeddings of trained models: those a run left behind, or new ones; whole, by level, or of several models as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from nearfar import data as datasets
from nearfar.data import Dataset, Loader, Store, View
from nearfar.networks.ensemble import concatenate
from nearfar.networks.preprocessing import Preprocessing
from nearfar.networks.weights import save
from nearfar.training.api import open_model, read_model
from nearfar.training.evaluation import measure
from nearfar.training.loop.examples import Places, Vectors, open_data, rows_of, split_of, store_of
from nearfar.training.loop.stages import dims_of
from nearfar.training.recipe.files import load
from nearfar.training.recipe.schema import Recipe
from nearfar.training.run.folder import RunFolder
from nearfar.training.run.reader import Embeddings, read_embeddings, read_json
from nearfar.utils.paths import expanded
from nearfar.utils.progress import Watch

SIDE = 256  # what pictures are shrunk to before networks that read less


class Sides(NamedTuple):
    """Embeddings to ask with, and to look in where that is something else."""

    queries: Embeddings
    gallery: Embeddings | None
    recipe: Recipe | None


def is_trained(where: Path) -> bool:
    """Whether a folder holds a run or a saved network."""
    return RunFolder(where).recipe.is_file() or (where / save.NAME).is_file()


def embeddings_of(
    where: str | Path,
    *,
    data: str | None = None,
    device: str | torch.device = "cpu",
    cache: str | Path | None = None,
    watch: Watch = lambda work: None,
) -> Sides:
    """Embeddings of what a model is tested on.

    Args:
        where: A run folder, or a folder that ``nearfar.networks.weights.save`` wrote.
        data: None: the test classes of the run, as its end embedded them. A place: the run's data set lies there
            now. "NAME" or "NAME:PLACE": another data set, such as cars196 or folder:photos; its own test part
            where it has one, and otherwise all of it. What is the run's own after all is split as the run did.
        device: Where to embed.
        cache: Where decoded pictures are kept.
        watch: Told what work begins.
    """
    where = Path(where)
    run = RunFolder(where)
    recipe = load(run.folder) if run.recipe.is_file() else None
    if recipe is not None and data is None:
        queries, gallery = read_embeddings(run.embeddings)
        if queries is not None:
            return Sides(queries, gallery, recipe)
    model, preprocessing = read_model(where, lambda folder: (save.load(folder), save.load_preprocessing(folder)))
    model = model.to(device)
    dataset, store, rows = _data(recipe, run, data, cache, watch, preprocessing)
    if (preprocessing is None) != dataset.is_vectors:
        reads, holds = ("vectors", "pictures") if preprocessing is None else ("pictures", "vectors")
        raise ValueError(f"the network in {where} reads {reads}; {dataset.name} holds {holds}")
    view, normalization = None, None
    if preprocessing is not None:
        normalization = preprocessing.normalization
        view = View(
            size=preprocessing.size,
            crop=preprocessing.crop,
            resize=preprocessing.resize,
            aspect=preprocessing.aspect,
            flip=False,
        )
    kept = store.rows if isinstance(store, Store) else np.arange(len(store))
    loader = Loader(store, dataset.labels[kept], view=view, normalization=normalization, device=device)
    found = {}
    for part, places in rows.items():
        if not len(places):
            raise ValueError(f"the part {part} of {dataset.name} has no pictures")
        one = measure.embed(model, loader, places, progress=watch("embedding"))
        indices = torch.from_numpy(kept[one.rows].copy())
        found[part] = Embeddings(one.points, one.labels.cpu(), indices)
    if "query" in found:
        return Sides(found["query"], found["gallery"], recipe)
    return Sides(found["test"], None, recipe)


def levels_of(where: str | Path) -> dict[str, int]:
    """The dimensions of each level of a trained network, in the order in which its embedding has them.

    Those of an ensemble's members are named "0_high", "1_high" and so on. A network with one level alone is refused.
    """
    dims = dims_of(open_model(where))
    if len(dims) == 1:
        raise ValueError(
            f"the network in {where} has one level, {next(iter(dims))}; levels are told apart where network.levels "
            'has several, such as ["low", "mid", "high"]'
        )
    return dims


def by_level(whole: Sides, dims: Mapping[str, int]) -> dict[str, Sides]:
    """The embeddings of each level: columns of those of the whole network, which has them side by side.

    Args:
        whole: Embeddings of all levels.
        dims: See :func:`levels_of`.

    Where levels had length 1 they now have one length, if a smaller one: ranks and clusters are the same.

    >>> one = Embeddings(torch.eye(3), torch.arange(3), torch.arange(3))
    >>> by_level(Sides(one, None, None), {"low": 1, "high": 2})["high"].queries.points
    tensor([[0., 0.],
            [1., 0.],
            [0., 1.]])
    """

    def cut(one: Embeddings) -> list[Embeddings]:
        return [replace(one, points=part) for part in torch.split(one.points, list(dims.values()), dim=1)]

    galleries = [None] * len(dims) if whole.gallery is None else cut(whole.gallery)
    return {
        level: Sides(queries, gallery, whole.recipe)
        for level, queries, gallery in zip(dims, cut(whole.queries), galleries, strict=True)
    }


def check_ensemble(runs: Sequence[Path]) -> None:
    """Refuse what makes no ensemble: fewer than two models, or one of them twice."""
    if len(runs) < 2:
        raise ValueError(f"runs are {', '.join(map(str, runs)) or 'missing'}; an ensemble needs two at least")
    if len({run.resolve() for run in runs}) < len(runs):
        raise ValueError(f"runs are {', '.join(map(str, runs))}; each may be in an ensemble only once")


def check_same_data(runs: Sequence[Path]) -> None:
    """Refuse runs of different data, by the fingerprints in their manifests."""
    first, *others = [(run, read_json(RunFolder(run).manifest).get("data", {}).get("source")) for run in runs]
    for run, source in others:
        if source != first[1]:
            raise ValueError(
                f"{run} and {first[0]} are runs of different data; an ensemble needs one data set, and data says where "
                "all can be tested anew"
            )


def joined(each: Mapping[str, Sides]) -> Sides:
    """The embeddings of several models as one: with length 1 each, so that all count the same, then as in an ensemble.

    Args:
        each: Embeddings of the same pictures, by the names of the models.
    """
    (first, one), *others = each.items()
    for name, other in others:
        if not (_same(one.queries, other.queries) and _same(one.gallery, other.gallery)):
            raise ValueError(f"{name} and {first} are not tested on the same pictures; an ensemble needs one split")
    galleries = [sides.gallery for sides in each.values() if sides.gallery is not None]
    queries = _joined([sides.queries for sides in each.values()])
    return Sides(queries, _joined(galleries) if galleries else None, one.recipe)


def _joined(parts: Sequence[Embeddings]) -> Embeddings:
    device = parts[0].points.device  # some may have been in files, others just made
    return replace(parts[0], points=concatenate([F.normalize(part.points.to(device), dim=1) for part in parts]))


def _same(one: Embeddings | None, other: Embeddings | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one.rows, other.rows) and torch.equal(one.labels, other.labels)


def _data(
    recipe: Recipe | None,
    run: RunFolder,
    data: str | None,
    cache: str | Path | None,
    watch: Watch,
    preprocessing: Preprocessing | None,
) -> tuple[Dataset, Store | Vectors, dict[str, Places]]:
    """The data set, its pictures, and the places of those that are tested."""
    name, _, root = (data or "").partition(":")
    if recipe is not None and data is not None and _is_own(recipe, name, root):
        data = root or None
    elif name in datasets.names():
        dataset = datasets.open(name, root or None) if root else datasets.open(name)
        on_error = "fail" if recipe is None else recipe.data.on_error
        store = _store(dataset, cache, watch, preprocessing, on_error)
        asked = {part: rows for part, rows in dataset.parts.items() if part in ("test", "query", "gallery")}
        asked = asked or {"test": np.arange(len(dataset))}
        return (
            dataset,
            store,
            {part: store.places(rows) if isinstance(store, Store) else rows for part, rows in asked.items()},
        )
    if recipe is None:
        given = "data is missing" if data is None else f"data is {data!r}"
        raise ValueError(
            f"{given}; a network without a run does not say what to test it on: NAME or NAME:PLACE is needed, "
            f"with a name of {', '.join(datasets.names())}"
        )
    if data is not None:
        recipe = load(run.folder, overrides={"data.root": data})
    dataset = open_data(recipe)
    store = store_of(recipe, dataset, cache, watch)
    rows = rows_of(split_of(recipe, dataset), store)
    return dataset, store, {part: places for part, places in rows.items() if part not in ("train", "validation")}


def _is_own(recipe: Recipe, name: str, root: str) -> bool:
    """Whether this is the data set of the run, which knows which of its classes are for the test."""
    if name != recipe.data.name or not root:
        return name == recipe.data.name
    return expanded(str(recipe.data.root)).resolve() == expanded(root).resolve()


def _store(
    dataset: Dataset, cache: str | Path | None, watch: Watch, preprocessing: Preprocessing | None, on_error: str
) -> Store | Vectors:
    if dataset.is_vectors or preprocessing is None:
        array: Vectors = getattr(dataset.source, "array", np.empty((0, 0), dtype=np.float32))
        return array
    from nearfar.data.store.prepare import prepare

    return prepare(
        dataset,
        cache=cache,
        side=max(SIDE, preprocessing.resize),
        channels=preprocessing.normalization.channels,
        on_error=on_error,
        progress=watch("decoding"),
    )
