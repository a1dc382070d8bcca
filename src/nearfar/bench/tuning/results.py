"""Results of a study: trials.json and best.toml."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nearfar.bench.tuning.space import decode, to_dict
from nearfar.bench.tuning.study import Study, TuningPlan
from nearfar.training.recipe.files import load, to_toml
from nearfar.training.run.folder import finite
from nearfar.utils.atomic import write_json, write_text

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

    plan: TuningPlan  # what was tuned, and how
    trials: tuple[Trial, ...]  # the trials in order

    @property
    def best(self) -> Trial | None:
        """Finished trial with the largest value; the first one of equals; None before one has finished."""
        done = [trial for trial in self.trials if trial.state == "finished" and trial.value is not None]
        return max(done, key=lambda trial: (trial.value or 0.0, -trial.number), default=None)

    def budget(self) -> dict[str, Any]:
        """Return what the choice of the best settings cost, as the section [tuning] of a recipe has it."""
        ended = [trial for trial in self.trials if trial.state in ("finished", "pruned", "failed")]
        space = hashlib.blake2b(json.dumps(to_dict(self.plan.space), sort_keys=True).encode(), digest_size=8)
        return {
            "trials": len(ended),
            "space": space.hexdigest(),
            "seconds": round(sum(trial.seconds or 0.0 for trial in ended), 1),
            "chosen_by": "study",
        }

    def count(self, state: str) -> int:
        """Return the number of trials in a state."""
        return sum(trial.state == state for trial in self.trials)

    def write(self) -> None:
        """Write trials.json and best.toml, a recipe that evaluates the test classes if the tuned one does."""
        plan, best = self.plan, self.best
        table = {
            "study": plan.study,
            "part": "validation",
            "metric": plan.metric,
            "sampler": plan.sampler,
            "space": to_dict(plan.space),
            "budget": self.budget(),
            "best": None if best is None else best.number,
            "trials": [vars(trial) for trial in self.trials],
        }
        write_json(plan.out / LIST, finite(table))
        if best is not None:
            head = (
                f"# Tuned: trial {best.number} of the study {plan.study!r} ({plan.sampler}), validation {plan.metric} "
                f"{best.value:.4f}.\n# {settings_text(best.values)}\n\n"
            )
            budget = {f"tuning.{key}": value for key, value in self.budget().items()}
            write_text(plan.out / BEST, head + to_toml(load(plan.recipe, overrides={**best.values, **budget})))


def read(study: Study) -> StudyResults:
    """Return the current results of a study."""
    states, space = study.states, study.plan.space
    names = {states.COMPLETE: "finished", states.PRUNED: "pruned", states.RUNNING: "running", states.WAITING: "waiting"}
    trials = [
        Trial(
            number=trial.number + 1,
            state=names.get(trial.state, "failed"),
            value=trial.value if trial.state in (states.COMPLETE, states.PRUNED) else None,
            values=decode(space, trial.params),
            reports=tuple(trial.intermediate_values[step] for step in sorted(trial.intermediate_values)),
            **{name: trial.user_attrs.get(name) for name in ("seconds", "folder", "error")},
        )
        for trial in study.counted()
    ]
    return StudyResults(study.plan, tuple(trials))


def settings_text(values: Mapping[str, Any]) -> str:
    """Return settings in one line."""
    texts = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in values.items()}
    return " ".join(f"{key}={text}" for key, text in texts.items())
