"""One kind of table, written as text, CSV, LaTeX or HTML. What is unfair says so in each of them."""

from __future__ import annotations

import csv as comma_separated
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

from nearfar.reports import html as pages
from nearfar.utils.validation import one_of

UNFAIR = "UNFAIR"
GREEK = {"α": r"\alpha", "β": r"\beta", "γ": r"\gamma", "ε": r"\epsilon", "λ": r"\lambda", "σ": r"\sigma", "τ": r"\tau"}
NOTHING = "–"

Cell = str | int | float | None


@dataclass(frozen=True)
class Column:
    """A column.

    Args:
        name: What stands above it.
        digits: None: text. Otherwise numbers with so many digits after the point.
    """

    name: str
    digits: int | None = None


@dataclass(frozen=True)
class Table:
    """A table and what there is to say about it.

    Args:
        title: What stands above it.
        columns: Of text or numbers.
        rows: A cell for each column; None (and NaN) where there is nothing.
        notes: Lines below it.
        unfair: The reasons why its rows cannot be compared; marked in every format.

    >>> print(text(Table("Recall", (Column("loss"), Column("recall@1", 1)), [["raw", 66.85], ["nra", None]])))
    Recall
    loss  recall@1
    --------------
    raw       66.8
    nra          –
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    unfair: Sequence[str] = field(default=())

    def shown(self) -> list[list[str]]:
        """The cells as they are read."""
        return [[_shown(cell, column) for cell, column in zip(row, self.columns, strict=True)] for row in self.rows]


def write(table: Table, format: str = "text") -> str:
    """A table in one of the formats.

    Args:
        table: What to write.
        format: "text", "csv", "latex" or "html", a page that is complete in itself.
    """
    return WRITERS[one_of("format", format, FORMATS)](table)


def text(table: Table) -> str:
    """Columns of equal width, for a terminal."""
    cells = table.shown()
    names = [column.name for column in table.columns]
    widths = [max(len(row[at]) for row in [names, *cells]) for at in range(len(names))]

    def line(words: Sequence[str]) -> str:
        padded = [
            word.ljust(width) if column.digits is None else word.rjust(width)
            for word, width, column in zip(words, widths, table.columns, strict=True)
        ]
        return "  ".join(padded).rstrip()

    lines = [f"{UNFAIR}: {table.title}" if table.unfair else table.title, line(names)]
    lines += ["-" * (sum(widths) + 2 * len(widths) - 2), *map(line, cells)]
    lines += [f"{UNFAIR}: {reason}" for reason in table.unfair]
    lines += [f"note: {note}" for note in table.notes]
    return "\n".join(lines)


def csv(table: Table) -> str:
    """Numbers as they are, not rounded; a column "verdict" says UNFAIR in each row where it applies."""
    file = io.StringIO()
    writer = comma_separated.writer(file, lineterminator="\n")
    marked = ["verdict"] if table.unfair else []
    writer.writerow([*marked, *(column.name for column in table.columns)])
    for row in table.rows:
        writer.writerow([*(UNFAIR for _ in marked), *("" if _is_nothing(cell) else cell for cell in row)])
    return file.getvalue().rstrip("\n")


def latex(table: Table) -> str:
    """A tabular with rules of booktabs in a table with a caption."""
    caption = _tex(table.title)
    lines = [f"% {UNFAIR}: {' '.join(reason.split())}" for reason in table.unfair]
    if table.unfair:
        caption = rf"\textbf{{{UNFAIR}}}: {caption}. {_tex('; '.join(table.unfair))}"
    align = "".join("l" if column.digits is None else "r" for column in table.columns)
    lines += [r"\begin{table}", r"\centering", rf"\caption{{{caption}}}", rf"\begin{{tabular}}{{{align}}}", r"\toprule"]
    lines += [" & ".join(_tex(column.name) for column in table.columns) + r" \\", r"\midrule"]
    lines += [" & ".join(_tex(cell) for cell in row) + r" \\" for row in table.shown()]
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\par\footnotesize {_tex(note)}" for note in table.notes]
    return "\n".join([*lines, r"\end{table}"])


def html(table: Table, *, headed: bool = True) -> str:
    """A piece of a page, with the class "unfair" where it applies; cells are text and never markup."""
    kind = ' class="unfair"' if table.unfair else ""
    mark = f"<strong>{UNFAIR}</strong>: " if table.unfair else ""
    head = [f"<h2>{mark}{escape(table.title)}</h2>"] if headed else []
    lines = [f"<section{kind}>", *head, '<div class="scroll">', "<table>"]
    lines += [f"<thead>{_html_row([column.name for column in table.columns], table.columns, 'th')}</thead>", "<tbody>"]
    lines += [_html_row(row, table.columns, "td") for row in table.shown()]
    lines += ["</tbody>", "</table>", "</div>"]
    if table.unfair:
        reasons = "".join(f"<li>{escape(reason)}</li>" for reason in table.unfair)
        lines.append(f"<h3>{UNFAIR}</h3><ul>{reasons}</ul>")
    lines += [f'<p class="soft">{escape(note)}</p>' for note in table.notes]
    return "\n".join([*lines, "</section>"])


def page(table: Table) -> str:
    """The same as a page that needs nothing else."""
    title = f"{UNFAIR}: {table.title}" if table.unfair else table.title
    return pages.document(title, "", [html(table, headed=False)], style="h3, section p.soft { margin-top: 16px; }")


WRITERS: dict[str, Callable[[Table], str]] = {"text": text, "csv": csv, "latex": latex, "html": page}
FORMATS = tuple(WRITERS)


def _html_row(cells: Sequence[str], columns: Sequence[Column], tag: str) -> str:
    parts = []
    for cell, column in zip(cells, columns, strict=True):
        kind = "" if column.digits is None else ' class="number"'
        parts.append(f"<{tag}{kind}>{escape(cell)}</{tag}>")
    return f"<tr>{''.join(parts)}</tr>"


def _shown(cell: Cell, column: Column) -> str:
    if cell is None or isinstance(cell, str):
        return cell if cell is not None else NOTHING
    if _is_nothing(cell):
        return NOTHING
    return str(cell) if column.digits is None else f"{cell:.{column.digits}f}"


def _is_nothing(cell: Cell) -> bool:
    return cell is None or (isinstance(cell, float) and math.isnan(cell))


def _tex(words: str) -> str:
    """Text in which nothing means anything to TeX.

    >>> _tex("recall@1 of raw_loss, 50 %")
    'recall@1 of raw\\\\_loss, 50 \\\\%'
    """
    special = {char: f"\\{char}" for char in "&%$#_{}"}
    special |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
    special |= {letter: f"${name}$" for letter, name in GREEK.items()}
    special |= {"–": "--", "×": r"$\times$", "−": "$-$", "<": r"\textless{}", ">": r"\textgreater{}"}
    return "".join(special.get(char, char) for char in words)
