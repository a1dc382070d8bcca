"""Results of a study: trials.json and best.toml."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearfar.bench.tuning.space import decode, to_dict
from nearfar.bench.tuning.study import Study
from nearfar.training.recipe.files import load, to_toml
from nearfar.training.run.folder import finite
from nearfar.utils.atomic import write_json, write_text

if TYPE_CHECKING:
    from nearfar.bench.tuning.tuner import TuningPlan

BEST, LIST = "best.toml", "trials.json"


@dataclass(frozen=True)
class Trial:
    """One trial of a study."""

    number: int  # number of the trial, from 1
    state: str  # "finished", "pruned", "failed", "running" or "waiting"
    value: float | None  # metric on the validation classes; of a pruned trial the best until then
    values: dict[str, Any]  # its settings by key of the recipe
    reports: tuple[float, ...] = ()  # best value up to each evaluation
    seconds: float | None = None  # training time; None if it did not finish
    folder: str | None = None  # run folder below trials/
    error: str | None = None  # why it failed


@dataclass(frozen=True)
class StudyResults:
    """All trials of a study."""

    out: Path  # folder of the study
    metric: str  # metric on the validation classes that is maximized
    trials: tuple[Trial, ...]  # the trials in order

    @property
    def best(self) -> Trial | None:
        """Finished trial with the largest value; the first one of equals; None before one has finished."""
        done = [trial for trial in self.trials if trial.state == "finished" and trial.value is not None]
        return max(done, key=lambda trial: (trial.value or 0.0, -trial.number), default=None)

    def budget(self, plan: TuningPlan) -> dict[str, Any]:
        """Return what the choice of the best settings cost, as the section [tuning] of a recipe has it."""
        ended = [trial for trial in self.trials if trial.state in ("finished", "pruned", "failed")]
        space = hashlib.blake2b(json.dumps(to_dict(plan.space), sort_keys=True).encode(), digest_size=8)
        return {
            "trials": len(ended),
            "space": space.hexdigest(),
            "seconds": round(sum(trial.seconds or 0.0 for trial in ended), 1),
            "chosen_by": "study",
        }

    def count(self, state: str) -> int:
        """Return the number of trials in a state."""
        return sum(trial.state == state for trial in self.trials)


def read(study: Study, plan: TuningPlan) -> StudyResults:
    """Return the current results of a study."""
    return StudyResults(plan.out, plan.metric, tuple(_trial(study, plan, one) for one in study.counted()))


def write(study: Study, plan: TuningPlan) -> StudyResults:
    """Write trials.json and best.toml, and return the results."""
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
                "budget": found.budget(plan),
                "best": None if best is None else best.number,
                "trials": [vars(trial) for trial in found.trials],
            }
        ),
    )
    if best is not None:
        write_text(plan.out / BEST, _best(found, best, plan))
    return found


def settings_text(values: Mapping[str, Any]) -> str:
    """Return settings in one line."""
    return " ".join(f"{key}={_short(value)}" for key, value in values.items())


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _best(found: StudyResults, best: Trial, plan: TuningPlan) -> str:
    """Return best.toml: the complete recipe, which evaluates the test classes if the tuned recipe does."""
    head = (
        f"# Tuned: trial {best.number} of the study {plan.study!r} ({plan.sampler}), validation {plan.metric} "
        f"{best.value:.4f}.\n# {settings_text(best.values)}\n\n"
    )
    budget = {f"tuning.{key}": value for key, value in found.budget(plan).items()}
    return head + to_toml(load(plan.recipe, overrides={**best.values, **budget}))


def _trial(study: Study, plan: TuningPlan, one: Any) -> Trial:
    states = study.states
    names = {states.COMPLETE: "finished", states.PRUNED: "pruned", states.RUNNING: "running", states.WAITING: "waiting"}
    attributes = one.user_attrs
    return Trial(
        number=one.number + 1,
        state=names.get(one.state, "failed"),
        value=one.value if one.state in (states.COMPLETE, states.PRUNED) else None,
        values=decode(plan.space, one.params),
        reports=tuple(one.intermediate_values[step] for step in sorted(one.intermediate_values)),
        seconds=attributes.get("seconds"),
        folder=attributes.get("folder"),
        error=attributes.get("error"),
    )
