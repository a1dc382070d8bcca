"""nearfar search"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nearfar.cli.app import app
from nearfar.cli.output import STDOUT, print_json, print_table, say


@app.command(name="search", short_help="Find the images of an index that are most similar to an image.")
def search_index(
    place: Annotated[Path, typer.Argument(metavar="INDEX", help="The folder of an index.")],
    images: Annotated[
        list[Path] | None, typer.Argument(metavar="[IMAGE]...", help="Query images.", show_default=False)
    ] = None,
    ids: Annotated[
        list[int] | None, typer.Option("--id", metavar="ID", help="Search by the id of an item; repeatable.")
    ] = None,
    k: Annotated[int, typer.Option("-k", help="Number of neighbors.")] = 10,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Only items that pass this filter: label=jay, year>=2019, name~garden/*; repeatable.",
        ),
    ] = None,
    expand: Annotated[
        int, typer.Option(metavar="N", help="Search again with the mean of the query and N neighbors.")
    ] = 0,
    rerank: Annotated[
        str | None, typer.Option(help="k_reciprocal: rank items first that would find the query in turn.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="Class of IMAGE, to mark right and wrong results.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with the results.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the results as one image.")] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the results as JSON; - prints it instead of the table.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="MODEL", help="Use this copy of the model of the index.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device for the model: auto, cpu, cuda, cuda:1, …")] = "auto",
) -> None:
    """Find the images of an index that are most similar to an image, or to one of its own items.

    Example: nearfar search my.index query.jpg -k 10 --html found.html
    """
    from nearfar.reports.search_pages import write_results
    from nearfar.search import Index, filters
    from nearfar.training.api import model_folder

    queries: list[Path | int] = [*(images or ()), *(ids or ())]
    if not queries:
        raise ValueError("IMAGE is missing; give an image, or the --id of an item")
    wanted = filters.combine([filters.parse(text) for text in where or ()]) or None
    own = None if model is None else model_folder(model)
    with Index.open(place, read_only=True, device=device, model=own) as opened:
        found = [opened.search(query, k, where=wanted, expand=expand, rerank=rerank, label=label) for query in queries]
    for results in found if json != STDOUT else ():
        if len(found) > 1:
            say(results.name)
        sign = {None: "", True: "✓", False: "✗"}
        rows = [
            (str(place), f"{each.score:.4f}", each.item.label or "", sign[right], each.item.name, str(each.item.id))
            for place, (each, right) in enumerate(zip(results, results.right, strict=True), start=1)
        ]
        print_table(("", "score", "class", "", "name", "id"), rows, right=(0, 1, 5))
    for file in (html, png):
        if file is not None:
            write_results(found, file)
            say(f"wrote {file}")
    if json is not None:
        print_json(json, [results.to_json() for results in found])
