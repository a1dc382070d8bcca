"""Tables of results as text, CSV and LaTeX. Unfair comparisons are marked in each format.

``nearfar.reports.table_page`` adds HTML.
"""

from __future__ import annotations

import csv as comma_separated
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nearfar.bench.comparison.significance import ALPHA, POWER
from nearfar.utils import formatting
from nearfar.utils.validation import one_of

if TYPE_CHECKING:
    from nearfar.bench.comparison.ranking import Ranking
    from nearfar.bench.comparison.tournament import Tournament

UNFAIR = "UNFAIR"
NOT_RANKED = "not ranked: the comparison is unfair"
MISSING = "–"
GREEK = {"α": r"\alpha", "β": r"\beta", "γ": r"\gamma", "ε": r"\epsilon", "λ": r"\lambda", "σ": r"\sigma", "τ": r"\tau"}

CellValue = str | int | float | None


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    name: str  # its heading
    digits: int | None = None  # digits after the decimal point of numbers; None for text


@dataclass(frozen=True)
class ResultTable:
    """A table of results with its notes.

    >>> columns = (Column("loss"), Column("recall@1", 1))
    >>> print(text(ResultTable("Recall", columns, [["raw", 66.85], ["nra", None]])))
    Recall
    loss  recall@1
    --------------
    raw       66.8
    nra          –
    """

    title: str
    columns: Sequence[Column]  # columns of text or numbers
    rows: Sequence[Sequence[CellValue]]  # A value for each column; None or NaN where there is none
    notes: Sequence[str] = ()  # lines below the table
    unfair: Sequence[str] = ()  # why its rows cannot be compared; marked in every format
    other_code: str = ""  # why they are compared in spite of different code; the notes have it as well

    def formatted(self) -> list[list[str]]:
        """The cells as text."""
        return [
            [_formatted(value, column) for value, column in zip(row, self.columns, strict=True)] for row in self.rows
        ]


def of_ranking(ranking: Ranking) -> ResultTable:
    """The table of a ranking, in percent. Columns without any content are left out."""
    rows = ranking.rows
    columns = [*([Column("rank", 0)] if ranking.groups is not None else []), Column("loss")]
    places = [row.runs[0].place for row in rows]
    for name in places[0]:
        if len({place[name] for place in places}) > 1:
            columns.append(Column(name, 0 if name == "dim" else None))
    columns.append(Column(ranking.metric, 2))
    if any(len(row.runs) > 1 for row in rows):
        columns += [Column("std", 2), Column("runs", 0)]
    if ranking.classes is not None:
        columns += [Column("low", 2), Column("high", 2)]
    if ranking.groups is not None:
        columns += [Column("group"), Column("p", 4)]
    columns += [Column("seconds", 1), Column("MiB", 0)]
    lines: list[Sequence[CellValue]] = []
    for row in rows:
        values = {
            "rank": row.rank,
            "loss": row.loss,
            **row.runs[0].place,
            ranking.metric: _percent(row.score),
            "std": _percent(row.std),
            "low": _percent(row.low),
            "high": _percent(row.high),
            "group": row.group or None,
            "p": row.p,
            "runs": len(row.runs),
            "seconds": row.seconds,
            "MiB": row.memory,
        }
        lines.append([values[column.name] for column in columns])
    notes = [*([] if ranking.ranked else [NOT_RANKED]), *statistics_notes(ranking), *ranking.verdict.notes]
    title = f"{ranking.metric} of the {ranking.part} classes, in percent"
    return ResultTable(title, columns, lines, notes, ranking.verdict.reasons, ranking.verdict.other_code)


def statistics_notes(ranking: Ranking, name: str = "low and high") -> list[str]:
    """Sentences on the intervals, ranks and p-values of a ranking."""
    groups, notes = ranking.groups, []
    if ranking.classes is None:
        notes += [f"no intervals: {ranking.no_intervals}"] if ranking.no_intervals else []
    elif ranking.seeds > 1:
        notes.append(f"{name}: 95 % interval over {ranking.classes} classes and {ranking.seeds} seeds")
        if any(len(row.runs) == 1 for row in ranking.rows):
            notes.append("the interval of a row with one run is over classes only")
    else:
        notes.append(f"{name}: 95 % interval over {ranking.classes} classes ONLY; other seeds may differ by more")
    if groups is not None:
        pairs = formatting.plural(len(groups.differences), "pair")
        notes += [
            "rank: 1 + the number of losses that are significantly better; losses that share a letter of their group "
            "cannot be told apart",
            f"p: against the first loss, over classes and seeds, corrected for {pairs} (Holm)",
            f"smallest detectable difference: {100 * groups.detectable:.1f} points (median over pairs; a true "
            f"difference of this size is found with a chance of {100 * POWER:.0f} %)",
        ]
    elif ranking.no_groups and ranking.no_groups != ranking.no_intervals:
        notes.append(f"no ranks and no p: {ranking.no_groups}; rows are in the order of their scores")
    if ranking.agreement is not None:
        order = f"validation {ranking.agreement_metric} and test {ranking.metric} on the order of losses"
        notes.append(f"agreement of {order}: τ = {ranking.agreement:.2f} (Kendall)")
    return notes


def of_tournament(found: Tournament) -> ResultTable:
    """The table of a tournament: its ranks, or the scores in percent if it is not ranked."""
    scores, verdict = found.scores, found.verdict
    title = f"Tournament over {len(scores)} experiment{'s' if len(scores) > 1 else ''} by {found.metric}"
    rows: list[Sequence[CellValue]]
    if not found.ranked:
        losses = dict.fromkeys(loss for each in scores.values() for loss in each)
        rows = [[loss, *(_percent(each.get(loss)) for each in scores.values())] for loss in losses]
        columns = [Column("loss"), *(Column(name, 2) for name in scores)]
        return ResultTable(title, columns, rows, [NOT_RANKED, *verdict.notes], verdict.reasons)
    digits = 0 if found.style == "thesis" else 1
    columns = [Column("loss"), Column("total", digits), Column("average", 2), Column("std", 2)]
    wins, notes = found.wins, tournament_notes(found)
    if wins is not None:
        columns += [Column("beats", 0), Column("loses", 0)]
        notes.append("beats, loses: pairs that differ significantly within an experiment (Holm)")
    else:
        notes.append(f"no p within experiments: {found.no_wins}")
    columns += [Column(name, digits) for name in scores]
    ranked = {row.loss for row in found.rows}
    between = [pair for pair in wins or () if ranked.issuperset(pair)]
    rows = []
    for row in found.rows:
        counts = [] if wins is None else [sum(row.loss == pair[side] for pair in between) for side in (0, 1)]
        rows.append([row.loss, row.total, row.average, row.std, *counts, *row.ranks])
    return ResultTable(title, columns, rows, [*notes, *verdict.notes], verdict.reasons, verdict.other_code)


def tournament_notes(found: Tournament) -> list[str]:
    """Sentences on the ranks of a tournament and the test over datasets."""
    notes = [note] if (note := left_out_note(found)) else []
    if found.style == "thesis":
        return [*notes, "total: sum of ranks; equal scores share the better rank, as in the thesis; no test"]
    notes.append("average: mean rank over datasets; equal scores share the middle of their ranks")
    if found.p is None:
        return [*notes, "no test of the order: it takes at least two datasets, and sizes of one dataset do not count"]
    shown = f"p = {found.p:.3f}" if found.p >= 0.001 else "p < 0.001"
    notes.append(f"Friedman test over {found.datasets} datasets: χ² = {found.statistic:.2f}, {shown}")
    limit = f"critical difference of average ranks (Nemenyi, α = 0.05): {found.critical:.2f}"
    return [*notes, limit if found.p < ALPHA else f"{limit}; the Friedman test finds no difference at all"]


def left_out_note(found: Tournament) -> str:
    """A sentence on losses that take no part in a tournament; empty if all do."""
    if not found.left_out:
        return ""
    return f"only the {len(found.rows)} losses take part that all experiments have"


def write(table: ResultTable, format: str = "text") -> str:
    """Write a table in one of the formats."""
    return WRITERS[one_of("format", format, tuple(WRITERS))](table)


def text(table: ResultTable) -> str:
    """Columns of equal width, for a terminal."""
    cells = table.formatted()
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


def csv(table: ResultTable) -> str:
    """Comma-separated values, not rounded.

    A column "verdict" has UNFAIR in each row of an unfair table, and the reason where other code was accepted.
    """
    file = io.StringIO()
    writer = comma_separated.writer(file, lineterminator="\n")
    verdict = [UNFAIR] if table.unfair else [f"code waived: {table.other_code}"] if table.other_code else []
    writer.writerow([*("verdict" for _ in verdict), *(column.name for column in table.columns)])
    for row in table.rows:
        writer.writerow([*verdict, *("" if _is_missing(value) else value for value in row)])
    return file.getvalue().rstrip("\n")


def latex(table: ResultTable) -> str:
    """A LaTeX table with a caption and the rules of booktabs."""
    caption = _tex(table.title)
    lines = [f"% {UNFAIR}: {' '.join(reason.split())}" for reason in table.unfair]
    if table.unfair:
        caption = rf"\textbf{{{UNFAIR}}}: {caption}. {_tex('; '.join(table.unfair))}"
    align = "".join("l" if column.digits is None else "r" for column in table.columns)
    lines += [r"\begin{table}", r"\centering", rf"\caption{{{caption}}}", rf"\begin{{tabular}}{{{align}}}", r"\toprule"]
    lines += [" & ".join(_tex(column.name) for column in table.columns) + r" \\", r"\midrule"]
    lines += [" & ".join(_tex(cell) for cell in row) + r" \\" for row in table.formatted()]
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\par\footnotesize {_tex(note)}" for note in table.notes]
    return "\n".join([*lines, r"\end{table}"])


WRITERS: dict[str, Callable[[ResultTable], str]] = {"text": text, "csv": csv, "latex": latex}


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _formatted(value: CellValue, column: Column) -> str:
    if value is None or isinstance(value, str):
        return MISSING if value is None else value
    if _is_missing(value):
        return MISSING
    if column.digits is None:
        return str(value)
    least = 10.0**-column.digits
    if column.name == "p" and value < least:  # a p-value is never 0
        return f"< {least:.{column.digits}f}"
    return f"{value:.{column.digits}f}"


def _is_missing(value: CellValue) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _tex(words: str) -> str:
    """Text in which no character has a meaning for TeX.

    >>> _tex("recall@1 of raw_loss, 50 %")
    'recall@1 of raw\\\\_loss, 50 \\\\%'
    """
    special = {char: f"\\{char}" for char in "&%$#_{}"}
    special |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
    special |= {letter: f"${name}$" for letter, name in GREEK.items()}
    special |= {"–": "--", "×": r"$\times$", "−": "$-$", "<": r"\textless{}", ">": r"\textgreater{}"}
    return "".join(special.get(char, char) for char in words)
