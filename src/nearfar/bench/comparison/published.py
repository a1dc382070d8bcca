"""Our runs beside what the documents print."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from nearfar.bench import papers
from nearfar.bench.comparison.comparison import named
from nearfar.bench.comparison.outcomes import Outcome
from nearfar.bench.comparison.tables import Cell, Column, Table


def beside(outcomes: Iterable[Outcome], *, metric: str = "recall@1") -> Table:
    """Each loss with the figures that documents print for it on the same data set, in percent.

    Of the figures, those of the same size of embedding where there are any; the difference is ours less theirs. A
    figure of another network or protocol says little about ours: the columns show which it is.

    Args:
        outcomes: Finished runs; those that differ in seed or fold alone count by their mean.
        metric: "recall@1", "recall@10", "nmi", …
    """
    rows: list[Sequence[Cell]] = []
    without = []
    for name, runs in named(outcomes).items():
        own = 100 * statistics.fmean(run.score(metric) for run in runs)
        plain = dataclasses.replace(runs[0], labels={})  # documents do not know what a grid calls things
        start: list[Cell] = [name, plain.data, plain.network, plain.dim, own]
        found = [] if plain.is_baseline else nearest(runs[0], metric)
        if not found:
            without.append(name)
            rows.append([*start, *(None for _ in range(6))])
        for figure in found:
            theirs: list[Cell] = [figure.reference, figure.row.network, figure.row.dim, figure.protocol]
            rows.append([*start, *theirs, figure.value, own - figure.value])
    columns = [Column("loss"), Column("data"), Column("network"), Column("dim", 0), Column("ours", 2)]
    columns += [Column("printed in"), Column("network there"), Column("dim there", 0), Column("protocol there")]
    columns += [Column("theirs", 2), Column("difference", 2)]
    notes = [f"no document prints {metric} of {', '.join(without)} on this data"] if without else []
    return Table(f"{metric} of the test classes beside the documents, in percent", columns, rows, notes)


def nearest(outcome: Outcome, metric: str = "recall@1") -> list[papers.Figure]:
    """The printed figures that are closest to a run: its loss and data set, its size of embedding if there are such.

    Figures of the run's network come first. What a document cites is left out, and so are variants of one loss.
    """
    plain = dataclasses.replace(outcome, labels={})
    found = [
        figure
        for figure in papers.figures(loss={outcome.loss, plain.loss}, data=plain.data, metric=metric)
        if figure.kind == "results"
    ]
    same = [figure for figure in found if figure.row.dim == plain.dim]
    seen: dict[tuple[object, ...], papers.Figure] = {}
    for figure in same or found:  # the thesis prints some of its figures twice
        row = figure.row
        seen.setdefault((figure.document, row.name, row.network, row.dim, figure.protocol, figure.value), figure)
    return sorted(seen.values(), key=lambda figure: figure.row.network != plain.network)


def catalogue() -> Table:
    """All tables of the documents."""
    rows: list[Sequence[Cell]] = [
        [one.key if at == 0 else "", each.id, each.title, len(each.rows)]
        for one in papers.documents()
        for at, each in enumerate(one.tables)
    ]
    columns = [Column("document"), Column("table"), Column("title"), Column("rows", 0)]
    return Table("Tables of the documents", columns, rows)


def printed(number: str) -> Table:
    """A table of a document.

    Args:
        number: Such as "thesis:7c"; ``catalogue`` lists all.
    """
    key, _, name = number.partition(":")
    found = papers.table(key, name)
    rows: list[Sequence[Cell]] = []
    for row in found.rows:
        cells = [str(cell) if isinstance(cell, bool) else cell for cell in row.cells.values()]
        rows.append([f"{row.name} {row.reference}".strip(), *cells])
    return Table(
        f"{key}, Table {found.id}: {found.title}",
        [Column("row"), *(Column(column) for column in found.columns)],
        rows,
        found.notes,
    )
