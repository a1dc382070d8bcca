"""The command ``nearfar weights``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from nearfar.cli.app import group
from nearfar.cli.output import print_table, say
from nearfar.utils.progress import bars

weights = group("weights", "List, import or locate published weights.", example="list")


@weights.command(name="list", short_help="List the networks with published weights.")
def list_weights() -> None:
    """List the networks with published weights, and which of these are on this machine.

    Example: nearfar weights list
    """
    from nearfar.networks.weights import published

    rows = []
    for each in published.KNOWN:
        place = published.locate(each)
        source = each.url or each.install_command
        rows.append((each.name, each.file, f"no: {source}" if place is None else f"{place.kind}: {place.file}"))
    print_table(("network", "file", "on this machine"), rows)
    say(f"Cache: {published.folder()}")


@weights.command(name="import", short_help="Copy a weights file into the cache.")
def import_weights(
    file: Annotated[Path, Argument(metavar="FILE", help="A PyTorch checkpoint or a .safetensors file.")],
    name: Annotated[
        str | None, Option(metavar="NETWORK", help="The network; default: recognized by the keys of the file.")
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


@weights.command(name="path", short_help="Print the path of the weights of a network.")
def weights_path(
    name: Annotated[str, Argument(metavar="NETWORK", help="A network of: nearfar weights list")],
    download: Annotated[
        bool, Option("--download", help="Download the weights if they are not on this machine.")
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
        how = f"nearfar weights path {name} --download" if each.url else each.install_command
        raise FileNotFoundError(f"the weights of {name} ({each.file}) are not on this machine; run: {how}")
    print(place.file)
