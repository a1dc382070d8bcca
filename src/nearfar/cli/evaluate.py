"""nearfar evaluate"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from nearfar.cli.app import app
from nearfar.cli.options import Device, Download, Force, Json, OnError, Seed
from nearfar.cli.output import STDOUT, bad_files, output_file, print_json, print_table, say, whole_numbers
from nearfar.utils.progress import Watch, bars

NEARNESS = {"cosine": "cosine similarity", "euclidean": "Euclidean distance"}


@app.command(name="evaluate", short_help="Measure embeddings or a run: retrieval and clustering.")
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
    clustering: Annotated[
        bool, Option("--clustering/--no-clustering", help="Cluster EMBEDDINGS by k-means: NMI, AMI, F1.")
    ] = True,
    normalization: Annotated[str, Option(help="Of NMI: arithmetic, or geometric as in old papers.")] = ("arithmetic"),
    intervals: Annotated[bool, Option("--intervals", help="Add intervals of 95 % over classes.")] = False,
    worst: Annotated[int, Option(metavar="N", help="List the N queries that find their class worst.")] = 0,
    groups: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Ignore items of the query's class and group, such as camera: a column of the dataset or of the file.",
        ),
    ] = None,
    rerank: Annotated[
        str | None, Option(help="k_reciprocal: measure re-ranked results as well, as nearfar search finds them.")
    ] = None,
    json: Json = None,
    force: Force = False,
    key: Annotated[str | None, Option(metavar="NAME", help="Tensor or column with the vectors.")] = None,
    labels_key: Annotated[str | None, Option(metavar="NAME", help="Tensor or column with the labels.")] = None,
    on_error: OnError = None,
    device: Device = "cpu",
    seed: Seed = 0,
    download: Download = False,
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
                found = evaluation.load_models(files if ensemble else files[0], levels=levels, **how)
            names = {"runs": [str(run) for run in files]} if ensemble else {"run": str(files[0])}
            given = {**names, **({} if data is None else {"data": data})}
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
            found = evaluation.Loaded(embeddings, {})
            all_files = {"embeddings": files[0], "labels": labels, **beside}
            given = {name: str(file) for name, file in all_files.items() if file is not None}
        if not world.is_main:
            return
        report = evaluation.evaluate_embeddings(
            found.embeddings,
            alone=found.alone,
            ks=found.ks if numbers is None else numbers,
            measure=measure or found.measure,
            clustering=clustering,
            normalization=normalization,
            intervals=intervals,
            worst=worst,
            rerank=rerank,
            seed=seed,
            watch=watch,
        )
    if json != STDOUT:
        _show(report)
    print_json(json, {"files": given, **report})


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
    columns = [*alone.items(), ("together", report)] if alone else [("%", report)]
    _print_metrics([column for name, one in columns for column in _with_reranked(name, one)])
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


def _with_reranked(name: str, report: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """A report, and after it what it says of re-ranked results."""
    if "reranked" not in report:
        return [(name, report)]
    return [(name, report), ("re-ranked", {"queries": report["queries"], "retrieval": report["reranked"]})]


def _print_metrics(reports: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """A line for each metric, and a column for each report: two where it has intervals."""
    _, first_report = reports[0]
    values = {**first_report["retrieval"], **first_report.get("clustering", {})}
    metrics = [name for name in values if name not in ("queries", "queries_without_match", "clusters")]
    first = "metric"
    if len(reports) > 1:
        first, metrics = "metric, %", ["dimensions", *metrics]
    heads = [first, *(head for name, one in reports for head in (name, *["95 % interval"] * ("intervals" in one)))]
    rows = [[metric, *(cell for _, one in reports for cell in _cells(one, metric))] for metric in metrics]
    print_table(heads, rows, right=range(1, len(heads)))


def _cells(report: dict[str, Any], metric: str) -> list[str]:
    if metric == "dimensions":
        cells = [f"{report['queries'][metric]:,}"]
    else:
        value = {**report["retrieval"], **report.get("clustering", {})}.get(metric)
        cells = ["" if value is None else f"{100 * value:.2f}"]
    if "intervals" in report:
        found = report["intervals"].get(metric)
        cells.append("" if found is None else f"{100 * found['low']:.2f} – {100 * found['high']:.2f}")
    return cells
