"""Published results of the five papers, table by table.

Each paper has a TOML file; recall and NMI are in percent, as printed. A value is None where the paper prints nothing,
or an impossible number, which the notes of the table explain.

Example:
    >>> table("thesis", "7c").value("ProxyAnchor", "recall@1")
    68.11
    >>> [figure.value for figure in figures(loss="nra", data="cub", dim=512, metric="recall@1")]
    [64.3, 64.3]
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from nearfar.utils.validation import nearest

KEYS = ("thesis", "nra", "unified_view", "ranked_list", "group")
MISSING = "-"

Value = float | str | bool | None


class PaperRow(NamedTuple):
    """A row of a published table."""

    name: str  # name as printed, without its reference
    reference: str  # reference such as "[24]"; empty for results of the paper itself
    own: bool  # whether the paper measured it itself
    losses: tuple[str, ...]  # labels of the corresponding losses of this library; empty if there is none
    network: str | None  # backbone; None if it is not printed
    dim: int | None  # dimension of the embedding; None if it is not printed
    cells: dict[str, Value]  # values by column


class PaperTable(NamedTuple):
    """A published table, or the part of it about one dataset and dimension."""

    document: str  # key of the paper
    columns: tuple[str, ...]  # names of the columns; recall@k, nmi and std are in percent
    rows: tuple[PaperRow, ...]  # rows in order
    id: str  # number of the table and its part, such as "7c" or "I-cub-512"
    title: str  # title of the table
    kind: str = "results"  # or "variants" (of one loss), "settings" or "tournament"
    data: str | None = None  # dataset; None if there is none
    protocol: str = "standard"  # or "fixed_validation" or "k_fold"
    notes: Sequence[str] = ()  # remarks on single values

    def value(self, row: str, column: str) -> Value:
        """Return a value of the table."""
        rows = {printed.name: printed.cells for printed in reversed(self.rows)}
        if row not in rows:
            names = ", ".join(printed.name for printed in self.rows)
            raise KeyError(f"{row!r}{nearest(row, rows)}; the rows are {names}")
        if column not in rows[row]:
            raise KeyError(f"{column!r}; the columns are {', '.join(rows[row])}")
        return rows[row][column]


class Figure(NamedTuple):
    """One published number."""

    table: PaperTable
    row: PaperRow
    metric: str  # name of the column
    value: float  # in percent

    @property
    def reference(self) -> str:
        """Source of the number, such as "thesis, Table 7c, row ProxyAnchor"."""
        return f"{self.table.document}, Table {self.table.id}, row {self.row.name}"


@cache
def document(key: str) -> dict[str, Any]:
    """Return the content of a paper's file: its title, authors and year, and its tables as they are written there."""
    if key not in KEYS:
        raise ValueError(f"document is {key!r}{nearest(key, KEYS)}; allowed are {', '.join(KEYS)}")
    return tomllib.loads(files(__name__).joinpath(f"{key}.toml").read_text(encoding="utf-8"))


@cache
def tables(key: str | None = None) -> tuple[PaperTable, ...]:
    """Return the tables of a paper, or of all papers."""
    if key is None:
        return tuple(table for paper in KEYS for table in tables(paper))
    content = document(key)
    return tuple(_table(key, table, content["losses"]) for table in content["tables"])


def table(key: str, number: str) -> PaperTable:
    """Return a table of a paper."""
    by_number = {table.id: table for table in tables(key)}
    if number not in by_number:
        raise ValueError(f"{key} has no table {number!r}; it has {', '.join(by_number)}")
    return by_number[number]


def figures(
    *,
    loss: str | Iterable[str] | None = None,
    data: str | None = None,
    network: str | None = None,
    dim: int | None = None,
    metric: str | None = None,
    own: bool = True,
) -> list[Figure]:
    """Return published numbers that match all conditions."""
    wanted = None if loss is None else {loss} if isinstance(loss, str) else set(loss)
    return [
        Figure(table, row, column, value)
        for table in tables()
        if table.kind in ("results", "variants") and table.data is not None and data in (None, table.data)
        for row in table.rows
        if (wanted is None or wanted.intersection(row.losses)) and (row.own or not own)
        if network in (None, row.network) and dim in (None, row.dim)
        for column, value in row.cells.items()
        if metric in (None, column) and isinstance(value, float)
    ]


def scores(key: str, numbers: Iterable[str], metric: str = "recall@1") -> dict[str, dict[str, float]]:
    """Return tables as input of a tournament: {table: {row: value}}."""
    values = {number: {row.name: row.cells[metric] for row in table(key, number).rows} for number in numbers}
    return {
        number: {name: value for name, value in rows.items() if isinstance(value, float)}
        for number, rows in values.items()
    }


def _table(key: str, content: Mapping[str, Any], losses: Mapping[str, Any]) -> PaperTable:
    columns = [name for name in content["columns"] if name not in ("network", "dim")]
    rows = []
    for name, *values in content["rows"]:
        match = re.fullmatch(r"(.*?)((?: ?\[\d+\],?)*)", name)
        assert match is not None
        base, reference = match[1].strip(), match[2].strip()
        cells = dict(zip(content["columns"], values, strict=True))
        given = {**content, **content.get("of", {}).get(base, {}), **cells}
        labels = given.get("loss", losses.get(base, ()))
        rows.append(
            PaperRow(
                name=base,
                reference=reference,
                own=base in content["own"] if "own" in content else not reference,
                losses=(labels,) if isinstance(labels, str) else tuple(labels),
                network=given.get("network"),
                dim=given.get("dim"),
                cells={column: _value(cells[column]) for column in columns},
            )
        )
    about = {name: content[name] for name in ("id", "title", *PaperTable._field_defaults) if name in content}
    return PaperTable(key, tuple(columns), tuple(rows), **about)


def _value(value: Any) -> Value:
    if value == MISSING:
        return None
    return value if isinstance(value, (bool, str)) else float(value)
