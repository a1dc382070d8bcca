"""The command line: parses, calls, prints.

Bad input ends in one readable line and an exit code other than 0; ``--debug`` shows the traceback.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import nearfar

app = typer.Typer(
    name="nearfar",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit; `arguments` are those of the process unless given."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words  # wherever it stands
    words = [word for word in words if word != "--debug"]
    try:
        code = app(words, prog_name="nearfar", standalone_mode=False)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if debug:
            raise
        # Errors of the parser bring their own exit code and wording.
        words_of = getattr(error, "format_message", None)
        message = words_of() if words_of else str(error) or type(error).__name__
        print(f"nearfar: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 1))
    sys.exit(code if isinstance(code, int) else 0)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Train, compare and serve embedding models: near what is alike, far what is not.

    Example: nearfar demo
    """
    if version:
        print(f"nearfar {nearfar.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(short_help="Learn some digits, look for others.")
def demo(
    losses: Annotated[
        str, typer.Option(help="Keys of losses, separated by commas.")
    ] = "contrastive,triplet,multi_similarity,ranked_list",
    steps: Annotated[int, typer.Option(help="Training steps for each loss.")] = 400,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
) -> None:
    """Learn embeddings of the digits 0 to 4, look for the unseen digits 5 to 9.

    Example: nearfar demo --losses raw,nra --steps 200
    """
    from nearfar import demo as digits

    keys = [key.strip() for key in losses.split(",") if key.strip()]
    digits.show(keys, steps=steps, seed=seed)


@app.command(name="evaluate", short_help="Measure embeddings: retrieval and clustering.")
def evaluate_files(
    embeddings: Annotated[
        Path, typer.Argument(metavar="EMBEDDINGS", help="Vectors: an .npy, .safetensors or .parquet file.")
    ],
    labels: Annotated[
        Path | None, typer.Argument(metavar="[LABELS]", help="Their labels; may be left out if EMBEDDINGS holds both.")
    ] = None,
    gallery: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Vectors to look in instead of EMBEDDINGS.")
    ] = None,
    gallery_labels: Annotated[Path | None, typer.Option(metavar="FILE", help="Labels of the gallery.")] = None,
    ks: Annotated[str, typer.Option(help="The k of recall@k, separated by commas.")] = "1,2,4,8",
    measure: Annotated[str, typer.Option(help="What is near: cosine or euclidean.")] = "cosine",
    clustering: Annotated[
        bool, typer.Option("--clustering/--no-clustering", help="Cluster EMBEDDINGS by k-means: NMI, AMI, F1.")
    ] = True,
    normalization: Annotated[str, typer.Option(help="Of NMI: arithmetic, or geometric as in old papers.")] = (
        "arithmetic"
    ),
    intervals: Annotated[bool, typer.Option("--intervals", help="Add bootstrap intervals of 95 %.")] = False,
    worst: Annotated[int, typer.Option(metavar="N", help="List the N queries that find their class worst.")] = 0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write everything to this file as well.")] = None,
    key: Annotated[str | None, typer.Option(metavar="NAME", help="Tensor or column with the vectors.")] = None,
    labels_key: Annotated[str | None, typer.Option(metavar="NAME", help="Tensor or column with the labels.")] = None,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, …")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of clusters and intervals.")] = 0,
) -> None:
    """Measure how well embeddings find and cluster their classes.

    Example: nearfar evaluate embeddings.npy labels.npy --intervals --json metrics.json
    """
    from nearfar import evaluate as evaluation

    if gallery is None and gallery_labels is not None:
        raise ValueError("--gallery-labels goes with --gallery")
    if json is not None:
        evaluation.check_file(json)
    numbers = _whole_numbers("--ks", ks)
    queries = evaluation.load("embeddings", embeddings, labels, key=key, labels_key=labels_key, device=device)
    asked = None
    if gallery is not None:
        asked = evaluation.load("gallery", gallery, gallery_labels, key=key, labels_key=labels_key, device=device)
    with evaluation.bars() as watch:
        report = evaluation.evaluate(
            queries,
            asked,
            ks=numbers,
            measure=measure,
            clustering=clustering,
            normalization=normalization,
            intervals=intervals,
            worst=worst,
            seed=seed,
            watch=watch,
        )
    evaluation.show(report)
    if json is not None:
        files = {"embeddings": embeddings, "labels": labels, "gallery": gallery, "gallery_labels": gallery_labels}
        given = {name: str(file) for name, file in files.items() if file is not None}
        evaluation.write({"files": given, **report}, json)
        print(f"wrote {json}")


@app.command(name="losses", short_help="List, explain or draw the losses.")
def list_losses(
    keys: Annotated[list[str] | None, typer.Argument(metavar="KEY", help="Losses to explain or draw.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Explain all of them.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw weight against similarity to a .png, .svg or .pdf.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting of the losses to draw.")
    ] = None,
) -> None:
    """List the losses, explain some of them, or draw how they weigh pairs.

    Example: nearfar losses raw --plot raw.svg --set mining=valid_triplet
    """
    if everything and (keys or plot):
        raise ValueError("--all explains every loss; it goes with no KEY and no --plot")
    if settings and not (keys and plot):
        raise ValueError("--set goes with a loss to draw, as in: nearfar losses raw --plot raw.svg --set alpha=4")
    if plot is not None:
        from nearfar import plots

        plots.check_file(plot)
        for key in keys or ():
            plots.check_loss(nearfar.losses.get(key))
        given = dict(_setting(text) for text in settings or ())
        chosen = {key: nearfar.losses.create(key, **given) for key in keys} if keys else plots.classic()
        print(f"wrote {plots.draw_weights(chosen, plot)}")
    elif keys or everything:
        print("\n".join([nearfar.losses.describe(key) for key in keys or nearfar.losses.names()]), end="")
    else:
        _print_losses()


def _whole_numbers(option: str, text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} is {text!r}; needed are whole numbers separated by commas") from None


def _setting(text: str) -> tuple[str, Any]:
    """``alpha=4`` as name and value; what is no Python literal is text."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"--set is {text!r}; needed is NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _print_losses() -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("loss", no_wrap=True)
    table.add_column("what it does")
    table.add_column("source")
    for key in nearfar.losses.names():
        source = nearfar.losses.get(key).source
        table.add_row(Text(key, "bold"), Text(nearfar.losses.summary(key)), Text(source))
    console = Console()
    console.print(table)
    console.print(
        "Formula, settings and reference of one: nearfar losses KEY; of all: nearfar losses --all",
        markup=False,
        highlight=False,
    )
