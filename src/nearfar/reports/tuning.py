"""A study on a page: how it went, what each setting does, and all trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from nearfar.bench.tuning.space import Choices, Parameter, Space
from nearfar.reports import shell
from nearfar.reports.charts import Line, line_chart

if TYPE_CHECKING:
    from nearfar.bench.tuning.results import Results, Trial

MOST_TICKS = 9  # names of choices on an axis
SAMPLERS = {
    "tpe": "tree-structured Parzen estimator",
    "random": "random search",
    "grid": "grid",
    "in_turn": "one setting after the other",
}


def html(found: Results, space: Space, *, title: str, sampler: str) -> str:
    """The page.

    Args:
        found: The trials.
        space: What was searched.
        sampler: How.
    """
    scored = [trial for trial in found.trials if trial.value is not None]
    percent = all(0.0 <= (trial.value or 0.0) <= 1.0 for trial in scored)
    lead = f"{SAMPLERS[sampler]} over {', '.join(one.key for one in space)}"
    sections = [
        _figures(found),
        _edges(found.best, space),
        _history(found, scored, percent),
        _settings(found, scored, space, percent),
        _table(found, space),
    ]
    return shell.document(title, lead, sections)


def _figures(found: Results) -> str:
    best = found.best
    entries = []
    if best is not None:
        entries.append((f"Best {found.metric}", f"{100 * (best.value or 0.0):.1f} %", "of the validation classes"))
        entries.append(("Trial", str(best.number), "best.toml is its recipe"))
    ended = f"{found.count('pruned')} pruned, {found.count('failed')} failed"
    entries.append(("Finished", str(found.count("finished")), ended))
    seconds = sum(trial.seconds or 0.0 for trial in found.trials)
    if seconds:
        entries.append(("Time", duration(seconds), "of finished trials together"))
    return shell.figures(entries)


def _edges(best: Trial | None, space: Space) -> str:
    """A word of caution where the best value is the last one that was allowed."""
    if best is None:
        return ""
    kinds = {one.key: one for one in space}
    found = []
    for key, value in best.values.items():
        one = kinds[key]
        if not isinstance(one, Choices) and value in one.ends():
            found.append(f"{key} = {value:g}")
    if not found:
        return ""
    return (
        f'<p class="note">The best trial is at the edge of what was searched: {escape(", ".join(found))}. '
        "Better values may lie beyond.</p>"
    )


def _history(found: Results, scored: Sequence[Trial], percent: bool) -> str:
    if not scored:
        return ""
    points = [(float(trial.number), trial.value or 0.0) for trial in scored if trial.state == "finished"]
    cut = [(float(trial.number), trial.value or 0.0) for trial in scored if trial.state == "pruned"]
    best, so_far = -math.inf, []
    for place, value in points:
        best = max(best, value)
        so_far.append((place, best))
    if so_far:
        so_far.append((float(max(trial.number for trial in scored)), best))
    lines = [
        Line("best", so_far, color=2),
        Line("finished", points, color=1, dots=True, joined=False),
        Line("pruned", cut, color=10, dots=True, joined=False),
    ]
    chart = line_chart(lines, title="Trials in order", x="trial", y=found.metric, percent=percent)
    courses = [
        Line(
            f"trial {trial.number}",
            _course(trial),
            color=1 if trial is found.best else 10,
            faint=trial is not found.best,
        )
        for trial in sorted(found.trials, key=lambda one: one is found.best)
    ]
    learned = line_chart(
        courses, title="Best value so far by evaluation", x="evaluation", y=found.metric, percent=percent
    )
    told = (
        "Blue: trials that finished. Grey: trials that were given up early, with the best they had reached. The test "
        "classes were not looked at."
    )
    drawn = [("In order", chart), ("As they learned", learned if any(len(line.points) > 1 for line in courses) else "")]
    return shell.section("How the search went", told, shell.charts(drawn))


def _course(trial: Trial) -> list[tuple[float, float]]:
    return [(float(place), value) for place, value in enumerate(trial.reports, start=1)]


def _settings(found: Results, scored: Sequence[Trial], space: Space, percent: bool) -> str:
    drawn = []
    for one in space:
        groups: dict[str, list[tuple[float, float]]] = {"finished": [], "pruned": []}
        for trial in scored:
            if one.key in trial.values:
                groups[trial.state].append((_place(one, trial.values[one.key]), trial.value or 0.0))
        if len({x for points in groups.values() for x, _ in points}) < 2:
            continue
        lines = [
            Line("pruned", sorted(groups["pruned"]), color=10, dots=True, joined=False),
            Line("finished", sorted(groups["finished"]), color=1, dots=True, joined=False),
        ]
        best = found.best
        if best is not None and one.key in best.values:
            mark = [(_place(one, best.values[one.key]), best.value or 0.0)]
            lines.append(Line("the best", mark, color=2, dots=True, joined=False))
        ticks = _ticks(one)
        chart = line_chart(lines, title=one.key, x=one.key, y=found.metric, percent=percent, ticks=ticks)
        drawn.append((one.key, chart))
    if not drawn:
        return ""
    told = (
        "Each point is a trial; the best one is marked. Where several settings change at once, the others scatter it."
    )
    return shell.section("What each setting does", told, shell.charts(drawn))


def _place(one: Parameter, value: Any) -> float:
    """Where a value stands on an axis."""
    if isinstance(one, Choices):
        return float(one.choices.index(value))
    return math.log10(value) if one.log else float(value)


def _ticks(one: Parameter) -> list[tuple[float, str]]:
    if isinstance(one, Choices):
        if len(one.choices) > MOST_TICKS:
            return [(0.0, _short(one.choices[0])), (len(one.choices) - 1.0, _short(one.choices[-1]))]
        return [(float(place), _short(choice)) for place, choice in enumerate(one.choices)]
    if not one.log:
        return []
    low, high = math.log10(one.low), math.log10(one.high)
    powers = [float(power) for power in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)]
    return [(place, f"{10.0**place:g}") for place in powers] or [(low, f"{one.low:g}"), (high, f"{one.high:g}")]


def _short(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 14 else text[:13] + "…"


def _table(found: Results, space: Space) -> str:
    order = {"finished": 0, "pruned": 1, "running": 2, "waiting": 3, "failed": 4}
    trials = sorted(found.trials, key=lambda trial: (order[trial.state], -(trial.value or 0.0), trial.number))
    heads = ["trial", "state", f"validation {found.metric}, %", *(one.key for one in space), "time, s"]
    failed = any(trial.error for trial in trials)
    rows, kinds = [], []
    for trial in trials:
        values = [_value(trial.values.get(one.key)) for one in space]
        row: list[shell.Cell | str] = [
            shell.Cell(str(trial.number), float(trial.number)),
            trial.state,
            shell.number(trial.value, 2, percent=True),
            *values,
            shell.number(trial.seconds),
        ]
        rows.append([*row, shell.Cell(trial.error or "", long=True)] if failed else row)
        kinds.append("best" if trial is found.best else "" if trial.state == "finished" else "base")
    numbers = [2, *(3 + place for place, one in enumerate(space) if not isinstance(one, Choices)), 3 + len(space)]
    content = shell.table(
        [*heads, "why it failed"] if failed else heads, rows, numbers=numbers, kinds=kinds, sorted_by=2
    )
    return shell.section("Trials", "Press a head to sort.", content)


def _value(value: Any) -> shell.Cell:
    if value is None:
        return shell.Cell("as in the recipe", None)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return shell.Cell(f"{value:.4g}", float(value))
    return shell.Cell(str(value))


def duration(seconds: float) -> str:
    """
    >>> duration(3.24), duration(75), duration(7300)
    ('3.2 s', '1:15', '2:01:40')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
