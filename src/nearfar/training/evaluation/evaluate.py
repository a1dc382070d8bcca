"""Evaluates trained models and files of embeddings, and calibrates the thresholds that are stored beside models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar import __version__, metrics
from nearfar import data as datasets
from nearfar.data import Dataset, Loader, Store, View
from nearfar.distributed import World
from nearfar.metrics import Threshold
from nearfar.metrics.clustering import NORMALIZATIONS
from nearfar.metrics.retrieval import RERANKINGS
from nearfar.networks import ensemble
from nearfar.networks.weights import save
from nearfar.training.evaluation.embeddings import EmbeddingSet, embed, measure_embeddings
from nearfar.training.recipe.files import load as load_recipe
from nearfar.training.recipe.schema import EvaluationSection, Recipe
from nearfar.training.run.folder import RunFolder, finite
from nearfar.training.run.provenance import now, record_look
from nearfar.training.run.reader import Run, read_json
from nearfar.training.setup import (
    Rows,
    Vectors,
    create_split,
    group_numbers,
    open_dataset,
    open_store,
    split_rows,
)
from nearfar.training.trainer import open_model
from nearfar.utils.folders import claim_file
from nearfar.utils.formatting import command
from nearfar.utils.preprocessing import Preprocessing
from nearfar.utils.progress import Watch
from nearfar.utils.system import expanded
from nearfar.utils.tensors import Array, as_device, as_vectors
from nearfar.utils.validation import one_of, whole
from nearfar.utils.vector_files import read, read_details

TEST_PARTS = ("test", "query", "gallery")
LEARNED = "the model was trained on these classes, so the rates look better than they are"
SIDE = 256  # images are decoded at this side before networks that read smaller ones


def evaluate(
    where: str | Path | Sequence[str | Path],
    data: str | None = None,
    *,
    levels: bool = False,
    ks: Sequence[int] | None = None,
    clustering: bool = False,
    intervals: bool = False,
    worst: int = 0,
    groups: str | None = None,
    rerank: str | None = None,
    device: str = "auto",
    download: bool = False,
) -> dict[str, Any]:
    """Measure a trained model on classes it has not seen, as ``nearfar evaluate RUN --json`` does.

    Args:
        where: A run folder, a folder that ``nearfar.networks.weights.save`` wrote, or the name of a network with
            published weights; several of them are an ensemble, whose embeddings are concatenated.
        data: Another dataset than the run's, as NAME or NAME:ROOT, or the new location of the run's own dataset; for a
            network without a run also a folder of class folders.
        levels: Whether to measure each level of the network separately, too.
        ks: The k of recall@k; those of the recipe by default.
        clustering: Whether to add NMI, AMI and F1 of clusters.
        intervals: Whether to add 95 % intervals over classes.
        worst: How many of the queries with the lowest average precision to list.
        groups: A column of the dataset, such as "camera": items of the query's class and group are ignored. That of the
            recipe by default.
        rerank: "k_reciprocal" also measures re-ranked results, under "reranked".
        device: Where to compute: "auto", "cpu", "cuda", …
        download: Allow to download the weights of a network that is given by name.

    Returns:
        All metrics, fit for JSON. Those of the levels, or of the runs of an ensemble, are under "alone", by name.

    Example:
        >>> import tempfile, nearfar as nf
        >>> settings = {
        ...     "data": {"name": "digits", "settings": {"vectors": True}},
        ...     "sampler": {"classes": 5, "per_class": 8, "steps": 2},
        ...     "network": {"name": "linear", "dim": 8},
        ...     "loss": {"name": "contrastive"},
        ...     "optimizer": {"lr": 0.01},
        ...     "training": {"epochs": 1, "device": "cpu"},
        ... }
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     trained = nf.train(settings, f"{folder}/run")
        ...     found = nf.evaluate(trained.folder, device="cpu")
        >>> found["retrieval"]["recall@1"] == trained.metrics["test"]["recall@1"]
        True
    """
    places = Path(where) if isinstance(where, (str, Path)) else [Path(run) for run in where]
    how: dict[str, Any] = {"data": data, "groups": groups, "device": device, "download": download}
    embeddings, alone, section = load_models(places, levels=levels, **how)
    return evaluate_embeddings(
        embeddings,
        alone=alone,
        ks=section.ks if ks is None else ks,
        measure=section.measure,
        clustering=clustering,
        intervals=intervals,
        worst=worst,
        rerank=rerank,
    )


def evaluate_embeddings(
    embeddings: EmbeddingSet,
    *,
    alone: Mapping[str, EmbeddingSet] | None = None,
    ks: Sequence[int] = (1, 2, 4, 8),
    measure: str = "cosine",
    clustering: bool = True,
    normalization: str = "arithmetic",
    intervals: bool = False,
    worst: int = 0,
    rerank: str | None = None,
    seed: int = 0,
    watch: Watch = lambda work: None,
) -> dict[str, Any]:
    """Compute all metrics of embeddings."""
    # Wrong settings raise an error before any long computation.
    whole("worst", worst, low=0)
    whole("seed", seed, low=0, high=2**63 - 1)
    one_of("normalization", normalization, NORMALIZATIONS)
    settings = {"ks": list(ks), "measure": measure, "normalization": normalization, "seed": seed}
    if rerank is not None:
        settings["rerank"] = one_of("rerank", rerank, RERANKINGS)

    def report(tested: EmbeddingSet) -> dict[str, Any]:
        values: dict[str, Any] = {"nearfar": __version__, "settings": settings, "queries": tested.counts()}
        if tested.gallery is not None:
            values["gallery"] = tested.gallery.counts("gallery_labels")
        if tested.relations is not None:
            if intervals or worst or rerank:
                raise ValueError("intervals, worst and rerank are for queries; given pairs and triplets have none")
            return {**values, "verification": finite(measure_embeddings(tested, measure=measure).verification)}
        if clustering and values["queries"]["classes"] == 1:
            raise ValueError(
                "labels have one class, so there is nothing to cluster; leave it out with clustering=False, or "
                "--no-clustering"
            )
        result = measure_embeddings(
            tested, ks=ks, measure=measure, clustering=clustering, normalization=normalization, seed=seed, watch=watch
        )
        values["retrieval"] = result.retrieval
        if rerank is not None:
            again = measure_embeddings(tested, ks=ks, measure=measure, rerank=rerank, watch=watch)
            values["reranked"] = again.retrieval
        if clustering:
            values["clustering"] = result.clustering
        if intervals and values["queries"]["classes"] > 1:
            values["intervals"] = {
                name: {"low": interval.low, "high": interval.high, "classes": interval.classes}
                for name, interval in metrics.class_intervals(result.per_query, tested.labels).items()
            }
        if worst:
            values["worst"] = _worst_queries(result.per_query, tested.labels, worst)
        return values

    result = report(embeddings)
    if alone:
        result["alone"] = {name: report(tested) for name, tested in alone.items()}
    return result


def _worst_queries(per_query: dict[str, Tensor], labels: Array, count: int) -> list[dict[str, Any]]:
    """Return the queries with the lowest average precision, lowest first."""
    precision = per_query["map"].cpu()
    order = precision.nan_to_num(nan=torch.inf).argsort(stable=True)[: int((~precision.isnan()).sum())]
    queries = []
    for row in order[:count].tolist():
        label = labels[row].item() if hasattr(labels[row], "item") else labels[row]
        label = label.decode(errors="replace") if isinstance(label, bytes) else label
        first_match = round(1 / per_query["mrr"][row].item())
        queries.append({"row": row, "label": label, "map": precision[row].item(), "first_match": first_match})
    return queries


# --- what to measure -----------------------------------------------------------------------------------------------


def load_files(
    name: str,
    embeddings: Path,
    labels: Path | None = None,
    *,
    key: str | None = None,
    labels_key: str | None = None,
    groups: str | None = None,
    device: str = "cpu",
) -> EmbeddingSet:
    """Read embeddings and labels from one file or two.

    Embeddings that ``nearfar embed`` wrote without a class are left out.
    """
    place, shared = as_device("device", device), labels is None or labels == embeddings
    vectors = as_vectors(name, read(embeddings, "embeddings", key, shared=shared))
    file = labels or embeddings
    found = read(file, "labels", labels_key, shared=shared)
    kinds = None if groups is None else read(file, "groups", groups)
    # In files of ``nearfar embed``, which contain the names of classes, the label −1 means no class.
    if labels_key is None and "classes" in read_details(file) and len(found) == len(vectors):
        labeled = torch.as_tensor(found) >= 0
        if not labeled.any():
            raise ValueError(f"{file} has no class for any of its {len(vectors):,} embeddings")
        if not labeled.all():
            kept = labeled.numpy()
            return EmbeddingSet(
                vectors[labeled].to(place),
                found[kept],
                unlabeled=int((~labeled).sum()),
                groups=None if kinds is None else kinds[kept],
            )
    return EmbeddingSet(vectors.to(place), found, groups=kinds)


def load_models(
    where: Path | Sequence[Path],
    *,
    levels: bool = False,
    data: str | None = None,
    groups: str | None = None,
    device: str = "cpu",
    download: bool = False,
    on_error: str | None = None,
    world: World | None = None,
    watch: Watch = lambda work: None,
) -> tuple[EmbeddingSet, Mapping[str, EmbeddingSet], EvaluationSection]:
    """Return the embeddings of a model, or of several together, those of levels or models alone, and the settings."""
    runs = [where] if isinstance(where, Path) else [*where]
    names = ", ".join(map(str, runs))
    if levels and len(runs) > 1:
        raise ValueError(f"levels are those of one run; where has {len(runs)}")
    if not isinstance(where, Path) and len(runs) < 2:
        raise ValueError(f"runs are {names or 'missing'}; an ensemble needs two at least")
    if len({run.resolve() for run in runs}) < len(runs):
        raise ValueError(f"runs are {names}; each may be in an ensemble only once")
    for run in runs:
        check_trained(run)
    sources = {run: read_json(RunFolder(run).manifest).get("data", {}).get("source") for run in runs}
    for run in runs[1:] if data is None else ():
        if sources[run] != sources[runs[0]]:
            raise ValueError(
                f"{run} and {runs[0]} are runs of different data; an ensemble needs one dataset, and data names one "
                "to test all of them on"
            )
    place, dims = as_device("device", device), level_dims(runs[0]) if levels else {}
    models = {
        str(run): model_embeddings(
            run, data=data, groups=groups, device=place, download=download, on_error=on_error, world=world, watch=watch
        ).to(place)
        for run in runs
    }
    name, _, root = (data or "").partition(":")
    for folder in map(RunFolder, runs if world is None or world.is_main else ()):
        # Evaluations on the test classes of a run are counted, and those on other datasets are not.
        if folder.recipe.is_file() and (data is None or _is_own(load_recipe(folder.folder), name, root)):
            record_look(folder, "evaluate")
    recipe = load_recipe(runs[0]) if RunFolder(runs[0]).recipe.is_file() else None
    section = EvaluationSection() if recipe is None else recipe.evaluation
    if len(runs) == 1:
        embeddings = models[str(runs[0])]
        return embeddings, embeddings.split(dims) if levels else {}, section
    normalize = recipe is None or recipe.network.concatenation != "raw"
    return concatenate(models, normalize=normalize), models, section


def concatenate(models: Mapping[str, EmbeddingSet], *, normalize: bool = True) -> EmbeddingSet:
    """Concatenate the embeddings of several models."""
    (first, start), *others = models.items()
    for name, other in others:
        same = (start.gallery is None) == (other.gallery is None) and all(
            torch.equal(torch.as_tensor(one), torch.as_tensor(two))
            for one, two in ((start.rows, other.rows), (start.labels, other.labels))
        )
        if not same:
            raise ValueError(f"{name} and {first} are not tested on the same images; an ensemble needs one split")
    columns = [model.embeddings.to(start.embeddings.device) for model in models.values()]
    galleries = {name: model.gallery for name, model in models.items() if model.gallery is not None}
    return replace(
        start,
        embeddings=ensemble.concatenate(columns, normalize=normalize),
        gallery=concatenate(galleries, normalize=normalize) if galleries else None,
    )


def level_dims(where: str | Path) -> dict[str, int]:
    """Return the dimensions of each level of a trained network, in the order of its embedding.

    The levels of an ensemble's members are named "0_high", "1_high" and so on.
    """
    dims = open_model(where).outputs
    if len(dims) == 1:
        raise ValueError(
            f"the network in {where} has one level, {next(iter(dims))}; levels are measured separately if "
            'network.levels has several, such as ["low", "mid", "high"]'
        )
    return dims


def model_embeddings(
    where: str | Path,
    *,
    data: str | None = None,
    groups: str | None = None,
    part: str = "test",
    device: str | torch.device = "cpu",
    download: bool = False,
    on_error: str | None = None,
    cache: str | Path | None = None,
    world: World | None = None,
    watch: Watch = lambda work: None,
) -> EmbeddingSet:
    """Return the embeddings that a model is tested on, or those of its validation or training classes."""
    one_of("part", part, ("test", "validation", "train"))
    where, run = Path(where), RunFolder(where)
    recipe = load_recipe(run.folder) if run.recipe.is_file() else None
    name, _, root = (data or "").partition(":")
    own = recipe is not None and (name not in datasets.names() or _is_own(recipe, name, root))
    column = recipe.evaluation.groups if groups is None and recipe is not None and own else groups
    if part == "test" and recipe is not None and data is None and run.embeddings.is_file():
        stored = EmbeddingSet.load(run.embeddings)
        return stored if groups is None else stored.grouped(group_numbers(open_dataset(recipe), groups))
    model = open_model(where, download=download).to(device)
    preprocessing = save.preprocessing_of(model)
    if recipe is not None and own:
        moved = {"data.root": (root or None) if name in datasets.names() else data, "data.on_error": on_error}
        moved = {key: value for key, value in moved.items() if value is not None}
        recipe = load_recipe(run.folder, overrides=moved) if moved else recipe
        dataset, store, rows = _open_own(recipe, run, data, part, cache, watch)
    else:
        if recipe is None and data is not None and data not in datasets.names() and Path(data).exists():
            data, name = f"folder:{data}", "folder"
        if data is None or name not in datasets.names():
            problem = "data is missing" if data is None else f"data is {data!r}"
            raise ValueError(
                f"{problem}; a network without a run has no dataset of its own: a folder of class folders, NAME or "
                f"NAME:ROOT is needed, with a name of {', '.join(datasets.names())}"
            )
        on_error = on_error or ("fail" if recipe is None else recipe.data.on_error)
        dataset, store, rows = _open_other(data, run, part, cache, watch, preprocessing, on_error)
    if (preprocessing is None) != dataset.is_vectors:
        reads, holds = ("vectors", "images") if preprocessing is None else ("images", "vectors")
        raise ValueError(f"the network in {where} reads {reads}; {dataset.name} holds {holds}")
    view, normalization, crops = None, None, 1 if recipe is None else recipe.evaluation.crops
    if preprocessing is not None:
        normalization = preprocessing.normalization
        view = View(
            size=preprocessing.size,
            crop="random" if crops > 1 else preprocessing.crop,
            resize=preprocessing.resize,
            aspect=preprocessing.aspect,
            flip=crops > 1,
        )
    numbers = store.rows if isinstance(store, Store) else np.arange(len(store))
    loader = Loader(store, dataset.labels[numbers], view=view, normalization=normalization, device=device)
    parts = {}
    for name, places in rows.items():
        if not len(places):
            raise ValueError(f"the part {name} of {dataset.name} has no images")
        embedded = embed(model, loader, places, crops=crops, world=world, progress=watch("embedding"))
        labels = torch.as_tensor(embedded.labels).cpu()
        parts[name] = replace(embedded, labels=labels, rows=torch.from_numpy(numbers[places].copy()))
    tested = replace(parts["query"], gallery=parts["gallery"]) if "query" in parts else parts[part]
    if dataset.relations is not None:
        tested = replace(tested, relations=dataset.relations.among(tested.rows.numpy()))
    return tested if column is None else tested.grouped(group_numbers(dataset, column))


def check_trained(where: Path) -> None:
    """Raise an error for what is neither a run, a saved network nor the name of a network."""
    if not RunFolder(where).recipe.is_file() and not (where / save.NAME).is_file() and not save.is_network(where):
        if not where.exists():
            raise FileNotFoundError(
                f"{where} does not exist; a run folder, one with model.safetensors, or a network is needed"
            )
        raise ValueError(
            f"{where} is neither a run nor a saved network: a folder with recipe.toml or model.safetensors is needed"
        )


def _open_own(
    recipe: Recipe, run: RunFolder, data: str | None, part: str, cache: str | Path | None, watch: Watch
) -> tuple[Dataset, Store | Vectors, dict[str, Rows]]:
    """Open the dataset of a run; return it, its images, and the rows of its test parts or of another part."""
    dataset = open_dataset(recipe)
    store = open_store(dataset, cache, watch, **recipe.data.decoding)
    wanted = TEST_PARTS if part == "test" else (part,)
    rows = split_rows(create_split(recipe, dataset), store)
    rows = {name: places for name, places in rows.items() if name in wanted and len(places)}
    if not rows:
        reason, remedy = "", "name a dataset to test it on with data, as NAME:ROOT"
        if part == "validation":
            reason = "" if data is None else f", and {data} is the data that it was trained and tested on"
            remedy = (
                'train with split.name = "fixed_validation", or name labeled images of other classes: folder:PHOTOS'
            )
        raise ValueError(f"{run.folder} has no {part} classes: its split is {recipe.split.name!r}{reason}; {remedy}")
    return dataset, store, rows


def _open_other(
    data: str,
    run: RunFolder,
    part: str,
    cache: str | Path | None,
    watch: Watch,
    preprocessing: Preprocessing | None,
    on_error: str,
) -> tuple[Dataset, Store | Vectors, dict[str, Rows]]:
    """Open another dataset; all that is not for the test is its validation part."""
    name, _, root = data.partition(":")
    dataset = datasets.open(name, root or None) if root else datasets.open(name)
    settings: dict[str, Any] = {"on_error": on_error}
    if preprocessing is not None:
        settings |= {"side": max(SIDE, preprocessing.resize), "channels": preprocessing.normalization.channels}
    store: Store | Vectors = np.empty((0, 0), dtype=np.float32)
    if (preprocessing is None) == dataset.is_vectors:  # otherwise an error follows
        store = open_store(dataset, cache, watch, **settings)
    parts = {name: rows for name, rows in dataset.parts.items() if name in TEST_PARTS}
    if part == "validation":
        known = run.fingerprints()
        if known is not None and known[1] == dataset.source.fingerprint():
            raise ValueError(
                f"data is {dataset.name}, which holds the data of {run.folder}; its test classes cannot be used, and "
                "its validation classes are used if no data is named"
            )
        test_rows = np.concatenate([np.empty(0, dtype=np.int64), *parts.values()])
        parts = {part: np.setdiff1d(np.arange(len(dataset)), test_rows)}
    parts = parts or {part: np.arange(len(dataset))}
    places = {name: store.places(rows) if isinstance(store, Store) else rows for name, rows in parts.items()}
    return dataset, store, places


def _is_own(recipe: Recipe, name: str, root: str) -> bool:
    """Whether this is the dataset of the run, whose recipe determines the test classes."""
    if name != recipe.data.name or not root:
        return name == recipe.data.name
    return expanded(str(recipe.data.root)).resolve() == expanded(root).resolve()


# --- decision thresholds ----------------------------------------------------------------------------------------------


def calibrate(
    where: str | Path,
    data: str | None = None,
    *,
    criterion: str | float = "f1",
    unknown: float = 0.05,
    items: int | None = None,
    out: str | Path | None = None,
    device: str = "auto",
    on_error: str | None = None,
    cache: str | Path | None = None,
    force: bool = False,
    watch: Watch = lambda work: None,
) -> Threshold:
    """Choose the similarities from which on images match, and write them to threshold.json in the folder of a model.

    One is for two images, and one for searches among any number of images. The classes are the validation classes of a
    run. Without any, they are its training classes, which the model knows: the rates look better than they are then,
    and ``about`` and ``describe`` say so.

    Args:
        where: A run folder, the folder of a saved network, or the name of a network.
        data: Another dataset than the validation classes of the run: "NAME" or "NAME:ROOT", such as folder:photos. The
            model was neither trained nor tested on its classes; its test part is left out.
        criterion: For two images: "f1", "accuracy", or the highest false accept rate, such as 0.001.
        unknown: For searches: the share of images of no class of the index that may match.
        items: Number of images of the index to print the rates for; by default as many as the classes have. An index
            uses its own number.
        out: The JSON file to write instead. The name of a network needs it, since there is no folder.
        device: Where to compute: "auto", "cpu", "cuda", …
        on_error: "skip" leaves out files that cannot be decoded, "fail" raises an error; as in the recipe by default.
        cache: Folder of decoded images; by default $NEARFAR_CACHE or ~/.cache/nearfar.
        force: Replace a file that is no threshold.
        watch: Called when work begins; returns a progress callback.

    Returns:
        The threshold of two images, and that of searches as its ``search``. Its ``about`` names the model and the
        data, with the facts of the run's manifest.
    """
    run = RunFolder(where)
    check_trained(run.folder)
    if out is None and save.is_network(where):
        raise ValueError(
            f"out is missing; {where} is the name of a network, which has no folder for its threshold: "
            f"{calibrate_command(where)}"
        )
    file = claim_file(run.threshold if out is None else out, "threshold", force=force)
    place = as_device("device", device)
    is_run = run.recipe.is_file()
    manifest = read_json(run.manifest) if is_run else {}
    part, name = "validation", data or "validation classes"
    if is_run and data is None and not manifest["data"]["rows"].get(part):
        part, name = "train", "training classes"
    tested = model_embeddings(where, data=data, part=part, device=place, on_error=on_error, cache=cache, watch=watch)
    measure = load_recipe(run.folder).evaluation.measure if is_run else "cosine"
    threshold = metrics.calibrate(
        tested.embeddings, tested.labels, criterion=criterion, measure=measure, progress=watch("comparing pairs")
    )
    search = metrics.calibrate_search(
        tested.embeddings, tested.labels, items=items, unknown=unknown, measure=measure, progress=watch("searching")
    )
    name, _, root = name.partition(":")
    about: dict[str, Any] = {
        # Without the path of a folder, since servers publish it.
        "data": f"{name}:{Path(root).name}" if root else Path(name).name,
        **tested.counts(),
        "model": save.fingerprint(open_model(where)),
        "date": now(),
        "nearfar": __version__,
    }
    kept = read_json(run.metrics).get("blend", {}).get("share") if run.metrics.is_file() else None
    if part == "train" and kept != 0.0:  # a run that kept nothing of its training has learned no class
        about["note"] = LEARNED
    if is_run:
        about["run"] = {"name": run.folder.absolute().name} | {
            key: manifest.get(key) for key in ("began", "seed", "selection", "commit")
        }
        about["run"]["data"] = {key: manifest["data"][key] for key in ("name", "fingerprint", "source")}
    threshold = replace(threshold, search=replace(search, about=about), about=about)
    threshold.save(file, force=force)
    return threshold


def calibrate_command(where: str | Path) -> str:
    """Return the command that calibrates a model: it needs data without validation classes, a file without a folder."""
    words = [] if "validation" in Run(where).metrics else ["--data", "folder:PHOTOS"]
    return command("calibrate", where, *words, *(["--out", "threshold.json"] if save.is_network(where) else []))


def load_threshold(where: str | Path, file: str | Path | None = None) -> Threshold | None:
    """Return the threshold of a model; None if it was not calibrated.

    Args:
        where: A run folder, a folder with a saved network, or the name of a network.
        file: The file that ``calibrate`` wrote with ``out``; None: threshold.json in the folder.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, or the model has changed since it was calibrated.
    """
    if file is None:
        file = RunFolder(where).threshold
        if not file.is_file():
            return None
    elif not Path(file).is_file():
        raise FileNotFoundError(f"{file} does not exist; needed is a threshold written by nearfar calibrate --out")
    threshold = Threshold.load(file)
    if threshold.about.get("model") != save.fingerprint(open_model(where)):
        raise ValueError(f"{file} is of another model than {where} holds now; run: {calibrate_command(where)}")
    return threshold
