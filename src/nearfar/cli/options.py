"""Arguments and options that several commands have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from nearfar.cli import complete
from nearfar.cli.output import SHOWN

Settings = Annotated[
    list[str] | None,
    Option("--set", metavar="SECTION.KEY=VALUE", help="Change the recipe, as in loss.alpha=32; repeatable."),
]
Roots = Annotated[
    list[str] | None, Option(metavar="ROOT", help="Location of the data (data.root); repeat for several archives.")
]
Device = Annotated[str, Option(help="Device: auto, cpu, cuda, cuda:1, …")]
RecipeDevice = Annotated[str | None, Option(help="Device instead of the recipe's: auto, cpu, cuda, cuda:1, …")]
Cache = Annotated[
    Path | None, Option(metavar="FOLDER", help="Folder of decoded images; default: $NEARFAR_CACHE or ~/.cache/nearfar.")
]
OnError = Annotated[
    str | None,
    Option(help="What to do with files of DATA that cannot be decoded: skip or fail; fail or as in the recipe."),
]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print only the results.")]
Seed = Annotated[int, Option(help="Random seed.")]
Everything = Annotated[bool, Option("--all", help=f"List everything, not just the first {SHOWN}.")]
Json = Annotated[Path | None, Option(metavar="FILE", help="Write all results as JSON; - prints them instead of text.")]

Runs = Annotated[
    list[Path],
    Argument(
        metavar="RUNS…", help="Run folders, folders that hold some, or packed grids.", autocompletion=complete.results
    ),
]
Metric = Annotated[str, Option(help="The metric: recall@1, map@r, nmi, …")]
Anyway = Annotated[bool, Option("--anyway", help="Rank unfair comparisons as well, marked UNFAIR.")]
Format = Annotated[str, Option(help="text, csv, latex or html.")]
ChartFormat = Annotated[str, Option(help="text, csv, latex, html, or svg for a chart.")]
OtherCode = Annotated[
    str | None,
    Option(metavar="REASON", help="Accept runs of different code; the reason is printed with the ranking."),
]
Force = Annotated[bool, Option("--force", help="Replace an existing file that this command did not write.")]
Out = Annotated[Path | None, Option("-o", "--out", metavar="FILE", help="Write to a file.")]

IndexFolder = Annotated[
    Path, Argument(metavar="INDEX", help="The folder of an index.", autocompletion=complete.indexes)
]
Model = Annotated[
    Path,
    Argument(
        metavar="MODEL",
        help="A run folder, one with model.safetensors, or a network with published weights, such as "
        "efficientnet_lite0 or timm:NAME.",
        autocompletion=complete.runs,
    ),
]
Download = Annotated[
    bool, Option("--download", help="Download the weights of a network if they are not on this machine.")
]
NoLabels = Annotated[bool, Option("--no-labels", help="Do not use folders as classes.")]
Engine = Annotated[str, Option(help="local, or ray: workers of a Ray cluster, with files on shared storage.")]
Workers = Annotated[int | None, Option("--jobs", help="Number of Ray workers; default: one per GPU, or per CPU.")]
RayAddress = Annotated[str | None, Option(metavar="ADDRESS", help="Address of a Ray cluster.")]
BatchSize = Annotated[int, Option(help="Number of images per forward pass.")]
Where = Annotated[
    list[str] | None,
    Option(
        metavar="KEY=VALUE", help="Only items that pass this filter: label=jay, year>=2019, name~garden/*; repeatable."
    ),
]


def recipe_overrides(settings: Sequence[str] | None, data: list[str] | None, device: str | None) -> dict[str, Any]:
    """What --set, --data and --device change in a recipe."""
    from nearfar.training.recipe.files import parse_override

    found = dict(map(parse_override, settings or ()))
    if data:
        found["data.root"] = data[0] if len(data) == 1 else data
    if device is not None:
        found["training.device"] = device
    return found
