"""Tables of results as text, CSV and LaTeX; ``nearfar.reports.pages`` adds HTML.

Unfair comparisons are marked in each format.
"""

from __future__ import annotations

import csv as comma_separated
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nearfar.bench.comparison.significance import ALPHA, POWER
from nearfar.utils import formatting
from nearfar.utils.formatting import MISSING

if TYPE_CHECKING:
    from nearfar.bench.comparison.ranking import Ranking
    from nearfar.bench.comparison.tournament import Tournament

UNFAIR = "UNFAIR"
NOT_RANKED = "not ranked: the comparison is unfair"
GREEK = {"α": r"\alpha", "β": r"\beta", "γ": r"\gamma", "ε": r"\epsilon", "λ": r"\lambda", "σ": r"\sigma", "τ": r"\tau"}

Value = str | int | float | tuple[Any, ...] | None  # a tuple needs a column that shows it


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    name: str  # its heading
    digits: int | None = None  # digits after the decimal point of numbers; None for text
    percent: bool = False  # whether values are shares of 1, which are written in percent
    show: Callable[[Any], str] | None = None  # writes a value instead of the digits
    missing: str = MISSING  # stands where there is no value
    long: bool = False  # whether a page may break its texts into lines

    def text(self, value: Value) -> str:
        """A value as it is read."""
        value = self.number(value)
        if value is None:
            return self.missing
        if self.show is not None:
            return self.show(value)
        if isinstance(value, (str, tuple)) or self.digits is None:
            return str(value)
        least = 10.0**-self.digits
        if self.name == "p" and value < least:  # a p-value is never 0
            return f"< {least:.{self.digits}f}"
        return f"{value:.{self.digits}f}"

    def number(self, value: Value) -> Value:
        """A value in the unit of the column; None instead of NaN."""
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return None
        return 100 * value if self.percent else value


@dataclass(frozen=True)
class Table:
    """A table of results with its notes.

    >>> columns = (Column("loss"), Column("recall@1", 1))
    >>> print(text(Table("Recall", columns, [["raw", 66.85], ["nra", None]])))
    Recall
    loss  recall@1
    --------------
    raw       66.8
    nra          –
    """

    title: str
    columns: Sequence[Column]  # columns of text or numbers
    rows: Sequence[Sequence[Value]]  # a value for each column; None or NaN where there is none
    notes: Sequence[str] = ()  # lines below the table
    unfair: Sequence[str] = ()  # why its rows cannot be compared; marked in every format
    other_code: str = ""  # why they are compared in spite of different code; the notes have it as well
    kinds: Sequence[str] = ()  # a class of each row on a page: "base", "best" or ""
    sorted_by: int | None = None  # the column by which the rows are sorted, largest first; None for another order

    def texts(self) -> list[list[str]]:
        """The cells as text."""
        return [[column.text(value) for column, value in zip(self.columns, row, strict=True)] for row in self.rows]


def filled(columns: Mapping[Column, Sequence[Value]]) -> tuple[list[Column], list[list[Value]]]:
    """Return the columns that have any value, and their rows."""
    kept = {column: values for column, values in columns.items() if any(value is not None for value in values)}
    return list(kept), [list(row) for row in zip(*kept.values(), strict=True)]


def of_ranking(ranking: Ranking) -> Table:
    """The table of a ranking, in percent. Columns without any content are left out."""
    rows = ranking.rows
    places = [row.runs[0].place for row in rows]
    is_repeated = any(len(row.runs) > 1 for row in rows)
    columns: dict[Column, list[Value]] = {
        Column("rank", 0): [row.rank for row in rows],
        Column("loss"): [row.loss for row in rows],
        **{
            Column(name, 0 if name == "dim" else None): [place[name] for place in places]
            for name in places[0]
            if len({place[name] for place in places}) > 1
        },
        Column(ranking.metric, 2, percent=True): [row.score for row in rows],
        Column("std", 2, percent=True): [row.std for row in rows],
        Column("runs", 0): [len(row.runs) if is_repeated else None for row in rows],
        Column("low", 2, percent=True): [row.low for row in rows],
        Column("high", 2, percent=True): [row.high for row in rows],
        Column("group"): [row.group or None for row in rows],
        Column("p", 4): [row.p for row in rows],
        Column("seconds", 1): [row.seconds for row in rows],
        Column("MiB", 0): [row.memory for row in rows],
    }
    notes = [*([] if ranking.ranked else [NOT_RANKED]), *statistics_notes(ranking), *ranking.verdict.notes]
    title = f"{ranking.metric} of the {ranking.part} classes, in percent"
    return Table(title, *filled(columns), notes, ranking.verdict.reasons, ranking.verdict.other_code)


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


def of_tournament(tournament: Tournament) -> Table:
    """The table of a tournament: its ranks, or the scores in percent if it is not ranked."""
    scores, verdict = tournament.scores, tournament.verdict
    title = f"Tournament over {formatting.plural(len(scores), 'experiment')} by {tournament.metric}"
    rows: list[Sequence[Value]]
    if not tournament.ranked:
        losses = dict.fromkeys(loss for experiment in scores.values() for loss in experiment)
        rows = [[loss, *(experiment.get(loss) for experiment in scores.values())] for loss in losses]
        columns = [Column("loss"), *(Column(name, 2, percent=True) for name in scores)]
        return Table(title, columns, rows, [NOT_RANKED, *verdict.notes], verdict.reasons)
    digits = 0 if tournament.style == "thesis" else 1
    columns = [Column("loss"), Column("total", digits), Column("average", 2), Column("std", 2)]
    wins, notes = tournament.wins, tournament_notes(tournament)
    if wins is not None:
        columns += [Column("beats", 0), Column("loses", 0)]
        notes.append("beats, loses: pairs that differ significantly within an experiment (Holm)")
    else:
        notes.append(f"no p within experiments: {tournament.no_wins}")
    columns += [Column(name, digits) for name in scores]
    ranked = {row.loss for row in tournament.rows}
    between = [pair for pair in wins or () if ranked.issuperset(pair)]
    rows = []
    for row in tournament.rows:
        counts = [] if wins is None else [sum(row.loss == pair[side] for pair in between) for side in (0, 1)]
        rows.append([row.loss, row.total, row.average, row.std, *counts, *row.ranks])
    return Table(title, columns, rows, [*notes, *verdict.notes], verdict.reasons, verdict.other_code)


def tournament_notes(tournament: Tournament) -> list[str]:
    """Sentences on the ranks of a tournament and the test over datasets."""
    notes = []
    if tournament.left_out:
        notes.append(f"only the {len(tournament.rows)} losses take part that all experiments have")
    if tournament.style == "thesis":
        return [*notes, "total: sum of ranks; equal scores share the better rank, as in the thesis; no test"]
    notes.append("average: mean rank over datasets; equal scores share the middle of their ranks")
    if tournament.p is None:
        return [*notes, "no test of the order: it takes at least two datasets, and sizes of one dataset do not count"]
    p = f"p = {tournament.p:.3f}" if tournament.p >= 0.001 else "p < 0.001"
    notes.append(f"Friedman test over {tournament.datasets} datasets: χ² = {tournament.statistic:.2f}, {p}")
    limit = f"critical difference of average ranks (Nemenyi, α = 0.05): {tournament.critical:.2f}"
    return [*notes, limit if tournament.p < ALPHA else f"{limit}; the Friedman test finds no difference at all"]


def text(table: Table) -> str:
    """Columns of equal width, for a terminal."""
    cells = table.texts()
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
    """Comma-separated values, not rounded.

    A column "verdict" has UNFAIR in each row of an unfair table, and the reason where other code was accepted.
    """
    file = io.StringIO()
    writer = comma_separated.writer(file, lineterminator="\n")
    verdict = [UNFAIR] if table.unfair else [f"code waived: {table.other_code}"] if table.other_code else []
    writer.writerow([*("verdict" for _ in verdict), *(column.name for column in table.columns)])
    for row in table.rows:  # None is written as nothing
        writer.writerow([*verdict, *(column.number(value) for column, value in zip(table.columns, row, strict=True))])
    return file.getvalue().rstrip("\n")


def latex(table: Table) -> str:
    """A LaTeX table with a caption and the rules of booktabs."""
    caption = _tex(table.title)
    lines = [f"% {UNFAIR}: {' '.join(reason.split())}" for reason in table.unfair]
    if table.unfair:
        caption = rf"\textbf{{{UNFAIR}}}: {caption}. {_tex('; '.join(table.unfair))}"
    align = "".join("l" if column.digits is None else "r" for column in table.columns)
    lines += [r"\begin{table}", r"\centering", rf"\caption{{{caption}}}", rf"\begin{{tabular}}{{{align}}}", r"\toprule"]
    lines += [" & ".join(_tex(column.name) for column in table.columns) + r" \\", r"\midrule"]
    lines += [" & ".join(_tex(cell) for cell in row) + r" \\" for row in table.texts()]
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\par\footnotesize {_tex(note)}" for note in table.notes]
    return "\n".join([*lines, r"\end{table}"])


WRITERS: dict[str, Callable[[Table], str]] = {"text": text, "csv": csv, "latex": latex}


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
