"""Tables of results as HTML pages."""

from __future__ import annotations

from nearfar.bench.comparison import tables
from nearfar.bench.comparison.tables import UNFAIR, ResultTable
from nearfar.reports.pages import render
from nearfar.utils.validation import one_of

FORMATS = (*tables.WRITERS, "html")


def write(table: ResultTable, format: str = "text") -> str:
    """Write a table in one of the formats."""
    return page(table) if one_of("format", format, FORMATS) == "html" else tables.write(table, format)


def page(table: ResultTable) -> str:
    """A table as a page in a single file."""
    title = f"{UNFAIR}: {table.title}" if table.unfair else table.title
    return render("table.html", title, table=table, rows=table.formatted())
