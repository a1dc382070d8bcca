"""Own runs compared with numbers printed in the papers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from copy import copy

from nearfar.bench import papers
from nearfar.bench.comparison.ranking import by_label
from nearfar.bench.comparison.tables import Column, Table, Value
from nearfar.training.run.reader import Run


def beside(runs: Iterable[Run], *, metric: str = "recall@1") -> Table:
    """Each loss with the numbers that papers print for it on the same dataset, in percent.

    Numbers for the same size of the embedding are preferred. The difference is ours minus theirs. A number for another
    network or protocol says little about ours; the columns show which it is.
    """
    rows: list[Sequence[Value]] = []
    without = []
    for name, group in by_label(runs).items():
        ours = 100 * statistics.fmean(run.score(metric) for run in group)
        plain = without_labels(group[0])
        start: list[Value] = [name, plain.data, plain.network, plain.dim, ours]
        figures = [] if plain.is_baseline else nearest(group[0], metric)
        if not figures:
            without.append(name)
            rows.append([*start, *(None for _ in range(6))])
        for figure in figures:
            theirs: list[Value] = [figure.reference, figure.row.network, figure.row.dim, figure.table.protocol]
            rows.append([*start, *theirs, figure.value, ours - figure.value])
    columns = [Column(name) for name in ("loss", "data", "network")]
    columns += [Column("dim", 0), Column("ours", 2), Column("printed in"), Column("network there")]
    columns += [Column("dim there", 0), Column("protocol there")]
    columns += [Column("theirs", 2), Column("difference", 2)]
    notes = [f"no paper prints {metric} of {', '.join(without)} on this dataset"] if without else []
    return Table(f"{metric} of the test classes and the papers, in percent", columns, rows, notes)


def without_labels(run: Run) -> Run:
    """A run under the names of its recipe: papers do not use the labels of a grid."""
    plain = copy(run)
    plain.labels = {}
    return plain


def nearest(run: Run, metric: str = "recall@1") -> list[papers.Figure]:
    """The printed numbers that are closest to a run.

    They have its loss and dataset, and its size of the embedding if any paper has it. Numbers for the run's network
    come first. Cited numbers and variants of a loss are left out.
    """
    plain = without_labels(run)
    figures = [
        figure
        for figure in papers.figures(loss={run.loss, plain.loss}, data=plain.data, metric=metric)
        if figure.table.kind == "results"
    ]
    same = [figure for figure in figures if figure.row.dim == plain.dim]
    seen: dict[tuple[object, ...], papers.Figure] = {}
    for figure in same or figures:  # the thesis prints some of its figures twice
        row = figure.row
        about = figure.table.document, row.name, row.network, row.dim, figure.table.protocol, figure.value
        seen.setdefault(about, figure)
    return sorted(seen.values(), key=lambda figure: figure.row.network != plain.network)


def catalog() -> Table:
    """A table of all printed tables."""
    rows: list[Sequence[Value]] = [
        [key if at == 0 else "", table.id, table.title, len(table.rows)]
        for key in papers.KEYS
        for at, table in enumerate(papers.tables(key))
    ]
    columns = [Column("document"), Column("table"), Column("title"), Column("rows", 0)]
    return Table("Tables of the papers", columns, rows)


def printed(number: str) -> Table:
    """A printed table."""
    key, _, name = number.partition(":")
    table = papers.table(key, name)
    rows: list[Sequence[Value]] = []
    for row in table.rows:
        cells = [str(cell) if isinstance(cell, bool) else cell for cell in row.cells.values()]
        rows.append([f"{row.name} {row.reference}".strip(), *cells])
    return Table(
        f"{key}, Table {table.id}: {table.title}",
        [Column("row"), *(Column(column) for column in table.columns)],
        rows,
        table.notes,
    )
