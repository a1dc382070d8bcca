"""The command ``nearfar weights``."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from nearfar.cli.app import group
from nearfar.cli.output import print_table, say

weights = group("weights", "List or locate published weights.", example="list")


@weights.command(name="list", short_help="List the networks with published weights.")
def list_weights() -> None:
    """List the networks with published weights, and which of these are on this machine.

    Example: nearfar weights list
    """
    from nearfar.networks.weights import published

    rows = []
    for each in published.KNOWN:
        file = published.locate(each)
        rows.append((each.name, each.file, f"no: {each.url or each.install_command}" if file is None else str(file)))
    print_table(("network", "file", "on this machine"), rows)
    say(f"Cache: {published.folder()}")


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
    file = published.fetch(each) if download else published.locate(each)
    if file is None:
        how = f"nearfar weights path {name} --download" if each.url else each.install_command
        raise FileNotFoundError(f"the weights of {name} ({each.file}) are not on this machine; run: {how}")
    print(file)
