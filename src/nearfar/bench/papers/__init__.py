"""The numbers that the five documents print, table by table.

A file for each document; recalls and NMI are in percent, as printed. A cell is missing (None) where the document
prints nothing, or something that cannot be: the notes of a table say so.

>>> table("thesis", "7c").value("ProxyAnchor", "recall@1")
68.11
>>> [figure.value for figure in figures(loss="nra", data="cub", dim=512, metric="recall@1")]
[64.3, 64.3]
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from nearfar.utils.validation import nearest

KEYS = ("thesis", "nra", "unified_view", "ranked_list", "group")
MISSING = "-"

Cell = float | str | bool | None


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Args:
        name: As printed, without the reference behind it.
        reference: Such as "[24]"; empty for what the document measured itself.
        own: Whether the document measured it itself.
        losses: What it is called here: labels of losses, none where we do not have it.
        network: Which backbone, None where that is not printed.
        dim: Size of the embedding, None where that is not printed.
        cells: By column.
    """

    name: str
    reference: str
    own: bool
    losses: tuple[str, ...]
    network: str | None
    dim: int | None
    cells: dict[str, Cell]


@dataclass(frozen=True)
class Table:
    """A table of a document, or the part of it that is about one data set and size.

    Args:
        document: Key of the document.
        id: Its number, with the part: "7c", "I-cub-512".
        title: What is in it.
        kind: "results"; "variants" of one loss; "settings"; "tournament".
        data: Which data set, None where there is none.
        protocol: "standard", "fixed_validation" or "k_fold".
        columns: Their names; recall@k, nmi and std are in percent.
        rows: In order.
        notes: What to know about single cells.
    """

    document: str
    id: str
    title: str
    kind: str
    data: str | None
    protocol: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    def value(self, row: str, column: str) -> Cell:
        """A cell, by the printed name of its row."""
        for one in self.rows:
            if one.name == row:
                if column not in one.cells:
                    raise KeyError(f"{column!r}; the columns are {', '.join(one.cells)}")
                return one.cells[column]
        names = [one.name for one in self.rows]
        raise KeyError(f"{row!r}{nearest(row, names)}; the rows are {', '.join(names)}")


@dataclass(frozen=True)
class Document:
    """A document and its tables."""

    key: str
    title: str
    authors: str
    year: int | None
    tables: tuple[Table, ...]


@dataclass(frozen=True)
class Figure:
    """One number, and where it stands."""

    document: str
    table: str
    row: Row
    metric: str
    value: float
    data: str
    protocol: str
    kind: str

    @property
    def reference(self) -> str:
        """Where to look it up: "thesis, Table 7c, row ProxyAnchor"."""
        return f"{self.document}, Table {self.table}, row {self.row.name}"


def documents() -> list[Document]:
    """All documents."""
    return [document(key) for key in KEYS]


@cache
def document(key: str) -> Document:
    """A document: "thesis", "nra", "unified_view", "ranked_list" or "group"."""
    if key not in KEYS:
        raise ValueError(f"document is {key!r}{nearest(key, KEYS)}; allowed are {', '.join(KEYS)}")
    content = tomllib.loads(files(__name__).joinpath(f"{key}.toml").read_text(encoding="utf-8"))
    tables = tuple(_table(key, one, content["losses"]) for one in content["tables"])
    return Document(key, content["title"], content["authors"], content.get("year"), tables)


def table(key: str, number: str) -> Table:
    """A table of a document by its number."""
    found = document(key).tables
    for one in found:
        if one.id == number:
            return one
    raise ValueError(f"{key} has no table {number!r}; it has {', '.join(one.id for one in found)}")


def figures(
    *,
    loss: str | Iterable[str] | None = None,
    data: str | None = None,
    network: str | None = None,
    dim: int | None = None,
    metric: str | None = None,
    own: bool = True,
) -> list[Figure]:
    """Printed numbers of results.

    Args:
        loss: A label of a loss, or several: a row is taken that is any of them.
        data: Data set.
        network: Backbone.
        dim: Size of the embedding.
        metric: Column.
        own: Only what the document measured itself; False: also what it cites.
    """
    wanted = None if loss is None else {loss} if isinstance(loss, str) else set(loss)
    found = []
    for one in documents():
        for each in one.tables:
            if each.kind not in ("results", "variants") or each.data is None or data not in (None, each.data):
                continue
            for row in each.rows:
                if wanted is not None and not wanted.intersection(row.losses):
                    continue
                if network not in (None, row.network) or dim not in (None, row.dim) or (own and not row.own):
                    continue
                found += [
                    Figure(one.key, each.id, row, column, value, each.data, each.protocol, each.kind)
                    for column, value in row.cells.items()
                    if metric in (None, column) and isinstance(value, float)
                ]
    return found


def scores(key: str, numbers: Iterable[str], metric: str = "recall@1") -> dict[str, dict[str, float]]:
    """Tables as a tournament takes them: {table: {row: value}}.

    >>> from nearfar.bench.comparison.tournament import tournament
    >>> [row.loss for row in tournament(scores("thesis", ["6a", "6b", "6c", "6d"]))[:3]]
    ['ProxyAnchor', 'MultiSimilarity', 'SoftTriple']
    """
    found = {}
    for number in numbers:
        values = {row.name: row.cells[metric] for row in table(key, number).rows}
        found[number] = {name: value for name, value in values.items() if isinstance(value, float)}
    return found


def _table(key: str, content: Mapping[str, Any], losses: Mapping[str, Any]) -> Table:
    columns = [name for name in content["columns"] if name not in ("network", "dim")]
    rows = []
    for name, *values in content["rows"]:
        match = re.fullmatch(r"(.*?)((?: ?\[\d+\],?)*)", name)
        assert match is not None
        base, reference = match[1].strip(), match[2].strip()
        cells = dict(zip(content["columns"], values, strict=True))
        given = {**content, **content.get("of", {}).get(base, {}), **cells}
        labels = given.get("loss", losses.get(base, ()))
        own = base in content["own"] if "own" in content else not reference
        rows.append(
            Row(
                name=base,
                reference=reference,
                own=own,
                losses=(labels,) if isinstance(labels, str) else tuple(labels),
                network=given.get("network"),
                dim=given.get("dim"),
                cells={column: _cell(cells[column]) for column in columns},
            )
        )
    return Table(
        document=key,
        id=content["id"],
        title=content["title"],
        kind=content.get("kind", "results"),
        data=content.get("data"),
        protocol=content.get("protocol", "standard"),
        columns=tuple(columns),
        rows=tuple(rows),
        notes=tuple(content.get("notes", ())),
    )


def _cell(value: Any) -> Cell:
    if value == MISSING:
        return None
    if isinstance(value, (bool, str)):
        return value
    return float(value)
