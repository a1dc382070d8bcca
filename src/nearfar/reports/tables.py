"""Tables of results as HTML pages."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from nearfar.bench.comparison import tables
from nearfar.bench.comparison.tables import UNFAIR, ResultTable, TableColumn
from nearfar.reports import html as pages
from nearfar.utils.validation import one_of

FORMATS = (*tables.WRITERS, "html")


def write(table: ResultTable, format: str = "text") -> str:
    """Write a table in one of the formats.

    Args:
        table: The table.
        format: "text", "csv", "latex", or "html" for a page in a single file.
    """
    return page(table) if one_of("format", format, FORMATS) == "html" else tables.write(table, format)


def page(table: ResultTable) -> str:
    """A table as a page in a single file.

    Args:
        table: The table.
    """
    title = f"{UNFAIR}: {table.title}" if table.unfair else table.title
    return pages.document(title, "", [html(table, headed=False)], style="h3, section p.soft { margin-top: 16px; }")


def html(table: ResultTable, *, headed: bool = True) -> str:
    """A table as a section of a page, with the class "unfair" where it applies.

    Args:
        table: The table.
        headed: Whether the section begins with the title.
    """
    kind = ' class="unfair"' if table.unfair else ""
    mark = f"<strong>{UNFAIR}</strong>: " if table.unfair else ""
    head = [f"<h2>{mark}{escape(table.title)}</h2>"] if headed else []
    lines = [f"<section{kind}>", *head, '<div class="scroll">', "<table>"]
    lines += [f"<thead>{_html_row([column.name for column in table.columns], table.columns, 'th')}</thead>", "<tbody>"]
    lines += [_html_row(row, table.columns, "td") for row in table.formatted()]
    lines += ["</tbody>", "</table>", "</div>"]
    if table.unfair:
        reasons = "".join(f"<li>{escape(reason)}</li>" for reason in table.unfair)
        lines.append(f"<h3>{UNFAIR}</h3><ul>{reasons}</ul>")
    lines += [f'<p class="soft">{escape(note)}</p>' for note in table.notes]
    return "\n".join([*lines, "</section>"])


def _html_row(cells: Sequence[str], columns: Sequence[TableColumn], tag: str) -> str:
    parts = []
    for cell, column in zip(cells, columns, strict=True):
        kind = "" if column.digits is None else ' class="number"'
        parts.append(f"<{tag}{kind}>{escape(cell)}</{tag}>")
    return f"<tr>{''.join(parts)}</tr>"
