"""What a study found: trials.json, best.toml, and a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearfar.bench.tuning.space import meant, to_dict
from nearfar.bench.tuning.study import Study
from nearfar.reports import tuning
from nearfar.training.recipe.files import load, to_toml
from nearfar.training.run.folder import finite
from nearfar.utils.atomic import write_json, write_text

if TYPE_CHECKING:
    from nearfar.bench.tuning.plan import Plan

BEST, LIST, PAGE = "best.toml", "trials.json", "tuning.html"


@dataclass(frozen=True)
class Trial:
    """One training of a study.

    Args:
        number: From 1.
        state: "finished", "pruned", "failed", "running" or "waiting".
        value: The metric of the validation classes; for a pruned one the best until then.
        values: What was tried, by key of the recipe.
        reports: The best value up to each evaluation.
        seconds: How long it trained; None where it did not finish.
        folder: Of the run, below trials/.
        error: Why it failed.
    """

    number: int
    state: str
    value: float | None
    values: dict[str, Any]
    reports: tuple[float, ...] = ()
    seconds: float | None = None
    folder: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Results:
    """What was found.

    Args:
        out: Where it is written.
        metric: What was maximised, of the validation classes.
        trials: All of them, in order.
    """

    out: Path
    metric: str
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial | None:
        """The finished trial with the largest value; the earlier of two that are equal."""
        done = [trial for trial in self.trials if trial.state == "finished" and trial.value is not None]
        return max(done, key=lambda trial: (trial.value or 0.0, -trial.number), default=None)

    def count(self, state: str) -> int:
        """How many trials are in a state."""
        return sum(trial.state == state for trial in self.trials)


def read(study: Study, plan: Plan) -> Results:
    """What there is now."""
    return Results(plan.out, plan.metric, tuple(_trial(study, plan, one) for one in study.counted()))


def write(study: Study, plan: Plan) -> Results:
    """Write down what there is now, each file whole."""
    found = read(study, plan)
    best = found.best
    write_json(
        plan.out / LIST,
        finite(
            {
                "study": plan.study,
                "part": "validation",
                "metric": plan.metric,
                "sampler": plan.sampler,
                "space": to_dict(plan.space),
                "best": None if best is None else best.number,
                "trials": [vars(trial) for trial in found.trials],
            }
        ),
    )
    if best is not None:
        write_text(plan.out / BEST, _best(best, plan))
    write_text(plan.out / PAGE, tuning.html(found, plan.space, title=plan.study, sampler=plan.sampler))
    return found


def shown(values: Mapping[str, Any]) -> str:
    """Settings in a line.

    >>> shown({"loss.margin": 0.1, "loss.alpha": 32})
    'loss.margin=0.1 loss.alpha=32'
    """
    return " ".join(f"{key}={short(value)}" for key, value in values.items())


def short(value: Any) -> str:
    """A setting for people.

    >>> short(0.000123456789), short("semi_hard")
    ('0.0001235', 'semi_hard')
    """
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _best(best: Trial, plan: Plan) -> str:
    """The whole recipe; it measures the test again, if the first one did."""
    head = (
        f"# Tuned: trial {best.number} of the study {plan.study!r} ({plan.sampler}), validation {plan.metric} "
        f"{best.value:.4f}.\n# {shown(best.values)}\n\n"
    )
    return head + to_toml(load(plan.recipe, overrides=best.values))


def _trial(study: Study, plan: Plan, one: Any) -> Trial:
    states = study.states
    names = {states.COMPLETE: "finished", states.PRUNED: "pruned", states.RUNNING: "running", states.WAITING: "waiting"}
    attributes = one.user_attrs
    return Trial(
        number=one.number + 1,
        state=names.get(one.state, "failed"),
        value=one.value if one.state in (states.COMPLETE, states.PRUNED) else None,
        values=meant(plan.space, one.params),
        reports=tuple(one.intermediate_values[step] for step in sorted(one.intermediate_values)),
        seconds=attributes.get("seconds"),
        folder=attributes.get("folder"),
        error=attributes.get("error"),
    )
