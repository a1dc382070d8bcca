"""nearfar search"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from nearfar.cli.app import app
from nearfar.cli.derive import derived
from nearfar.cli.options import Device, Force, IndexFolder, Json, Where
from nearfar.cli.output import STDOUT, output_file, print_json, print_table, say

if TYPE_CHECKING:
    from nearfar.search.results import Results

SIGNS = {None: "", True: "✓", False: "✗"}
DECISIONS = {True: "match", False: "no match"}


@app.command(name="search", short_help="Find the images of an index that are most similar to an image.")
@derived("nearfar.search.index:Index.search", leave_out=("query",))
def search_index(
    place: IndexFolder,
    images: Annotated[
        list[Path] | None, Argument(metavar="[IMAGE]...", help="Query images.", show_default=False)
    ] = None,
    ids: Annotated[
        list[int] | None, Option("--id", metavar="ID", help="Search by the id of an item; repeatable.")
    ] = None,
    where: Where = None,
    html: Annotated[Path | None, Option(metavar="FILE", help="Write a page with the results.")] = None,
    json: Json = None,
    force: Force = False,
    model: Annotated[Path | None, Option(metavar="MODEL", help="Use this copy of the model of the index.")] = None,
    device: Device = "auto",
    **given: Any,
) -> None:
    """Find the images of an index that are most similar to an image, or to one of its own items.

    Example: nearfar search my.index query.jpg -k 10 --html found.html
    """
    from nearfar.reports.search_pages import results_page
    from nearfar.search import Index, filters
    from nearfar.training.trainer import open_model
    from nearfar.utils.atomic import write_text

    queries: list[Path | int] = [*(images or ()), *(ids or ())]
    if not queries:
        raise ValueError("IMAGE is missing; give an image, or the --id of an item")
    page = output_file(html, "search_results", place, *queries, force=force)
    json = output_file(json, "search", place, *queries, force=force)
    wanted = filters.combine([filters.parse(text) for text in where or ()]) or None
    own = None if model is None else open_model(model)
    with Index.open(place, read_only=True, device=device, model=own) as opened:
        found = [opened.search(query, where=wanted, **given) for query in queries]
    for query, results in zip(queries, found, strict=True) if json != STDOUT else ():
        if len(found) > 1:
            say(results.name)
        if len(results):
            _show(results)
        else:
            none = f"the index has no {'other ' if isinstance(query, int) else ''}items"
            say(f"no item meets --where {' --where '.join(where)}" if where else none)
    if page is not None:
        write_text(page, results_page(found))
        say(f"wrote {page}")
    print_json(json, [results.to_json() for results in found])


def _show(results: Results) -> None:
    """Print the neighbors of a query, and whether they match if the index has a threshold."""
    threshold = results.threshold
    rows = [
        (str(place), f"{each.score:.4f}", *([] if match is None else [DECISIONS[match]]), each.item.label or "",
         SIGNS[right], each.item.name, str(each.item.id))
        for place, (each, right, match) in enumerate(zip(results, results.right, results.matches, strict=True), start=1)
    ]  # fmt: skip
    heads = ("", "score", *([] if threshold is None else ["decision"]), "class", "", "name", "id")
    print_table(heads, rows, right=(0, 1, len(heads) - 1))
    if threshold is not None:
        nearest = "" if results.unknown else results.labels[0] or results.names[0]
        say(f"match: {nearest}" if nearest else "unknown: no item matches")
        say(threshold.describe())
