"""The page of a tuning study: the course of the search, the effect of each setting, and all trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nearfar.bench.comparison.tables import Column, Table
from nearfar.bench.tuning.space import Choices, Parameter, Space
from nearfar.reports.charts import Line, line_chart
from nearfar.reports.pages import render
from nearfar.utils import formatting

if TYPE_CHECKING:
    from nearfar.bench.tuning.results import StudyResults, Trial

MAX_TICKS = 9  # names of choices on an axis
SAMPLERS = {
    "tpe": "tree-structured Parzen estimator",
    "random": "random search",
    "grid": "grid",
    "in_turn": "one setting after another",
}


def html(study: StudyResults) -> str:
    """The page of a study."""
    plan, space = study.plan, study.plan.space
    scored = [trial for trial in study.trials if trial.value is not None]
    percent = all(0.0 <= (trial.value or 0.0) <= 1.0 for trial in scored)
    return render(
        "tuning.html",
        plan.study,
        lead=f"{SAMPLERS[plan.sampler]} over {', '.join(parameter.key for parameter in space)}",
        script=True,
        figures=_figures(study),
        edges=_edges(study.best, space),
        history=_history(study, scored, percent) if scored else [],
        settings=_settings(study, scored, space, percent),
        trials=_table(study, space),
    )


def _figures(study: StudyResults) -> list[tuple[str, str, str]]:
    """The most important numbers: name, value and remark."""
    best = study.best
    entries = []
    if best is not None:
        entries.append((f"Best {study.plan.metric}", formatting.percent(best.value), "on the validation classes"))
        entries.append(("Trial", str(best.number), "its recipe is best.toml"))
    ended = f"{study.count('pruned')} pruned, {study.count('failed')} failed"
    entries.append(("Finished", str(study.count("finished")), ended))
    seconds = sum(trial.seconds or 0.0 for trial in study.trials)
    if seconds:
        entries.append(("Time", formatting.duration(seconds), "of all finished trials"))
    return entries


def _edges(best: Trial | None, space: Space) -> list[str]:
    """Settings of the best trial that lie at the edge of their range."""
    parameters = {parameter.key: parameter for parameter in space}
    edges = []
    for key, value in (best.values if best is not None else {}).items():
        parameter = parameters[key]
        if not isinstance(parameter, Choices) and value in parameter.ends():
            edges.append(f"{key} = {value:g}")
    return edges


def _history(study: StudyResults, scored: Sequence[Trial], percent: bool) -> list[tuple[str, str]]:
    """Charts of the trials in order, and of each trial by evaluation."""
    points = [(float(trial.number), trial.value or 0.0) for trial in scored if trial.state == "finished"]
    pruned = [(float(trial.number), trial.value or 0.0) for trial in scored if trial.state == "pruned"]
    best, so_far = -math.inf, []
    for position, value in points:
        best = max(best, value)
        so_far.append((position, best))
    if so_far:
        so_far.append((float(max(trial.number for trial in scored)), best))
    lines = [
        Line("best", so_far, color=2),
        Line("finished", points, color=1, dots=True, joined=False),
        Line("pruned", pruned, color=10, dots=True, joined=False),
    ]
    charts = [("In order", line_chart(lines, title="Trials in order", x="trial", y=study.plan.metric, percent=percent))]
    lines = []
    for trial in sorted(study.trials, key=lambda trial: trial is study.best):
        is_best = trial is study.best
        course = [(float(position), value) for position, value in enumerate(trial.reports, start=1)]
        lines.append(Line(f"trial {trial.number}", course, color=1 if is_best else 10, faint=not is_best))
    if any(len(line.points) > 1 for line in lines):
        name = "Best value so far by evaluation"
        chart = line_chart(lines, title=name, x="evaluation", y=study.plan.metric, percent=percent)
        charts.append(("During training", chart))
    return charts


def _settings(study: StudyResults, scored: Sequence[Trial], space: Space, percent: bool) -> list[tuple[str, str]]:
    """A chart of the metric by each setting of which several values were tried."""
    charts = []
    for parameter in space:
        key = parameter.key
        groups: dict[str, list[tuple[float, float]]] = {"finished": [], "pruned": []}
        for trial in scored:
            if key in trial.values:
                groups[trial.state].append((_place(parameter, trial.values[key]), trial.value or 0.0))
        if len({x for points in groups.values() for x, _ in points}) < 2:
            continue
        lines = [
            Line("pruned", sorted(groups["pruned"]), color=10, dots=True, joined=False),
            Line("finished", sorted(groups["finished"]), color=1, dots=True, joined=False),
        ]
        best = study.best
        if best is not None and key in best.values:
            mark = [(_place(parameter, best.values[key]), best.value or 0.0)]
            lines.append(Line("the best", mark, color=2, dots=True, joined=False))
        chart = line_chart(lines, title=key, x=key, y=study.plan.metric, percent=percent, ticks=_ticks(parameter))
        charts.append((key, chart))
    return charts


def _place(parameter: Parameter, value: Any) -> float:
    """The position of a value on an axis."""
    if isinstance(parameter, Choices):
        return float(parameter.choices.index(value))
    return math.log10(value) if parameter.log else float(value)


def _ticks(parameter: Parameter) -> list[tuple[float, str]]:
    if isinstance(parameter, Choices):
        if len(parameter.choices) > MAX_TICKS:
            return [(0.0, _short(parameter.choices[0])), (len(parameter.choices) - 1.0, _short(parameter.choices[-1]))]
        return [(float(place), _short(choice)) for place, choice in enumerate(parameter.choices)]
    if not parameter.log:
        return []
    low, high = math.log10(parameter.low), math.log10(parameter.high)
    powers = [float(power) for power in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)]
    marks = [(place, f"{10.0**place:g}") for place in powers]
    return marks or [(low, f"{parameter.low:g}"), (high, f"{parameter.high:g}")]


def _short(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 14 else text[:13] + "…"


def _table(study: StudyResults, space: Space) -> Table:
    """All trials, the best first."""
    order = {"finished": 0, "pruned": 1, "running": 2, "waiting": 3, "failed": 4}
    trials = sorted(study.trials, key=lambda trial: (order[trial.state], -(trial.value or 0.0), trial.number))
    columns = [Column("trial"), Column("state"), Column(f"validation {study.plan.metric}, %", 2, percent=True)]
    for parameter in space:
        digits = None if isinstance(parameter, Choices) else 4
        columns.append(Column(parameter.key, digits, show=_setting, missing="as in the recipe"))
    columns.append(Column("time, s", 1, show="{:,.1f}".format))
    if any(trial.error for trial in trials):
        columns.append(Column("error", long=True))
    rows, kinds = [], []
    for trial in trials:
        values = [trial.values.get(parameter.key) for parameter in space]
        row = [trial.number, trial.state, trial.value, *values, trial.seconds, trial.error or ""]
        rows.append(row[: len(columns)])
        kinds.append("best" if trial is study.best else "" if trial.state == "finished" else "base")
    return Table("Trials", columns, rows, kinds=kinds, sorted_by=2)


def _setting(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)
