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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from nearfar.utils.validation import nearest

KEYS = ("thesis", "nra", "unified_view", "ranked_list", "group")
MISSING = "-"

Value = float | str | bool | None


@dataclass(frozen=True)
class PaperRow:
    """A row of a published table.

    Args:
        name: Name as printed, without its reference.
        reference: Reference such as "[24]"; empty for results of the paper itself.
        own: Whether the paper measured it itself.
        losses: Labels of the corresponding losses of this library; empty if there is none.
        network: Backbone; None if it is not printed.
        dim: Dimension of the embedding; None if it is not printed.
        cells: Values by column.
    """

    name: str
    reference: str
    own: bool
    losses: tuple[str, ...]
    network: str | None
    dim: int | None
    cells: dict[str, Value]


@dataclass(frozen=True)
class PaperTable:
    """A published table, or the part of it about one dataset and dimension.

    Args:
        document: Key of the paper.
        id: Number of the table and its part, such as "7c" or "I-cub-512".
        title: Title of the table.
        kind: "results", "variants" (of one loss), "settings" or "tournament".
        data: Dataset; None if there is none.
        protocol: "standard", "fixed_validation" or "k_fold".
        columns: Names of the columns; recall@k, nmi and std are in percent.
        rows: Rows in order.
        notes: Remarks on single values.
    """

    document: str
    id: str
    title: str
    kind: str
    data: str | None
    protocol: str
    columns: tuple[str, ...]
    rows: tuple[PaperRow, ...]
    notes: tuple[str, ...]

    def value(self, row: str, column: str) -> Value:
        """Return a value of the table.

        Args:
            row: Printed name of the row.
            column: Name of the column.

        Raises:
            KeyError: If there is no such row or column.
        """
        for one in self.rows:
            if one.name == row:
                if column not in one.cells:
                    raise KeyError(f"{column!r}; the columns are {', '.join(one.cells)}")
                return one.cells[column]
        names = [one.name for one in self.rows]
        raise KeyError(f"{row!r}{nearest(row, names)}; the rows are {', '.join(names)}")


@dataclass(frozen=True)
class Document:
    """A paper and its tables.

    Args:
        key: Key of the paper.
        title: Title.
        authors: Authors.
        year: Year of publication; None if unknown.
        tables: Its tables.
    """

    key: str
    title: str
    authors: str
    year: int | None
    tables: tuple[PaperTable, ...]


@dataclass(frozen=True)
class Figure:
    """One published number and its source.

    Args:
        document: Key of the paper.
        table: Number of the table.
        row: Row of the table.
        metric: Name of the column.
        value: The number, in percent.
        data: Dataset.
        protocol: Evaluation protocol.
        kind: Kind of the table.
    """

    document: str
    table: str
    row: PaperRow
    metric: str
    value: float
    data: str
    protocol: str
    kind: str

    @property
    def reference(self) -> str:
        """Source of the number, such as "thesis, Table 7c, row ProxyAnchor"."""
        return f"{self.document}, Table {self.table}, row {self.row.name}"


def documents() -> list[Document]:
    """Return all papers."""
    return [document(key) for key in KEYS]


@cache
def document(key: str) -> Document:
    """Return a paper.

    Args:
        key: "thesis", "nra", "unified_view", "ranked_list" or "group".
    """
    if key not in KEYS:
        raise ValueError(f"document is {key!r}{nearest(key, KEYS)}; allowed are {', '.join(KEYS)}")
    content = tomllib.loads(files(__name__).joinpath(f"{key}.toml").read_text(encoding="utf-8"))
    tables = tuple(_table(key, one, content["losses"]) for one in content["tables"])
    return Document(key, content["title"], content["authors"], content.get("year"), tables)


def table(key: str, number: str) -> PaperTable:
    """Return a table of a paper.

    Args:
        key: Key of the paper.
        number: Number of the table, such as "7c".
    """
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
    """Return published numbers that match all conditions.

    Args:
        loss: Label of a loss, or several labels of which a row must have one.
        data: Dataset.
        network: Backbone.
        dim: Dimension of the embedding.
        metric: Name of the column.
        own: Whether to return only what the papers measured themselves, and not what they cite.
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
    """Return tables as input of a tournament: {table: {row: value}}.

    Args:
        key: Key of the paper.
        numbers: Numbers of the tables.
        metric: Name of the column.

    Example:
        >>> from nearfar.bench.comparison.tournament import tournament
        >>> [row.loss for row in tournament(scores("thesis", ["6a", "6b", "6c", "6d"]))[:3]]
        ['ProxyAnchor', 'MultiSimilarity', 'SoftTriple']
    """
    found = {}
    for number in numbers:
        values = {row.name: row.cells[metric] for row in table(key, number).rows}
        found[number] = {name: value for name, value in values.items() if isinstance(value, float)}
    return found


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
        own = base in content["own"] if "own" in content else not reference
        rows.append(
            PaperRow(
                name=base,
                reference=reference,
                own=own,
                losses=(labels,) if isinstance(labels, str) else tuple(labels),
                network=given.get("network"),
                dim=given.get("dim"),
                cells={column: _value(cells[column]) for column in columns},
            )
        )
    return PaperTable(
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


def _value(value: Any) -> Value:
    if value == MISSING:
        return None
    if isinstance(value, (bool, str)):
        return value
    return float(value)
