"""Whether runs may be ranked: only where they differ in the loss and its own settings alone.

docs/benchmark.md says for each kind of fact what a difference in it means, and why.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nearfar.bench.comparison import facts
from nearfar.bench.comparison.facts import flat
from nearfar.bench.comparison.outcomes import Outcome, repetitions

__all__ = ["Verdict", "differences", "flat", "judge"]

Differences = dict[str, dict[str, Any]]

# What follows from settings; told only where no setting explains it. The first that fits counts.
CAUSES = {
    "data.source": ("recipe.data",),
    "batch.ranks": (),
    "network": ("recipe.network", "recipe.augmentation", "recipe.evaluation", "recipe.data", "weights"),
    "batch": ("recipe.sampler", "recipe.data", "recipe.split"),
    "length": ("recipe.training", "recipe.sampler", "recipe.stages", "recipe.data", "recipe.split"),
    "selection": ("recipe.split", "recipe.selection"),
    "data": ("recipe.data", "recipe.split"),
}
# Told of those that choose an epoch; that others choose none is told by "selection".
CHOOSING = ("recipe.evaluation.every", "recipe.selection")
SHOWN = 4  # names of runs in a line; more are counted
GONE = "not set"


@dataclass(frozen=True)
class Verdict:
    """Whether some runs may be ranked.

    Args:
        fair: Whether they may.
        reasons: Why not, a line for each difference.
        notes: What else to know: machines, versions, skipped steps.
        tried: Settings beside the loss's own that are compared, because a grid tries values of them.
    """

    fair: bool
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tried: tuple[str, ...] = ()


def judge(outcomes: Iterable[Outcome]) -> Verdict:
    """Whether these runs differ in nothing but the loss, its settings, and repetitions that all of them have.

    Where a grid tries values of a setting, that setting is what is compared: it may differ between its runs, and so
    may what follows from it. Runs of one value are judged as any others.
    """
    outcomes = list(outcomes)
    tried = tuple(key for key in _tried(outcomes) if not facts.is_loss(f"recipe.{key}"))
    meant = tuple(f"recipe.{key}" for key in tried)
    found = {key: values for key, values in _explained(differences(outcomes)).items() if not facts.within(key, meant)}
    for runs in _by_value(outcomes, tried):
        found = _explained(differences(runs)) | found
    reasons = [_line(key, values) for key, values in found.items()]
    reasons += _repetitions(outcomes)
    notes = [f"compared are values of {', '.join(tried)}, as the grid says"] if tried else []
    return Verdict(not reasons, reasons, notes + _notes(outcomes), tried)


def _tried(outcomes: Sequence[Outcome]) -> list[str]:
    """The settings of which all these runs were made to try values."""
    trained = [run.settings for run in outcomes if not run.is_baseline]
    return [key for key in trained[0] if all(key in own for own in trained)] if trained else []


def _by_value(outcomes: Sequence[Outcome], tried: Sequence[str]) -> list[list[Outcome]]:
    """Runs that share the values of what is tried, if anything is."""
    found: dict[str, list[Outcome]] = {}
    for run in outcomes if tried else ():
        found.setdefault(_whole([run.settings.get(key) for key in tried]), []).append(run)
    return list(found.values())


def differences(outcomes: Sequence[Outcome]) -> Differences:
    """Facts that matter and are not the same everywhere: {key: {run: value}}.

    What follows from seed and fold is compared between runs of the same seed and fold; what was not trained, only in
    what it has.
    """
    names = _names(outcomes)
    found: Differences = {}
    kept = [(names[id(run)], run.is_baseline, facts.that_matter(run.manifest)) for run in outcomes]
    found |= _unlike(kept)
    repeated: dict[Any, list[tuple[str, bool, facts.Facts]]] = {}
    for run in outcomes:
        own = {key: value for key, value in flat(run.manifest).items() if facts.within(key, facts.REPETITION)}
        repeated.setdefault((run.seed, run.fold), []).append((names[id(run)], run.is_baseline, own))
    for runs in repeated.values():
        for key, values in _unlike(runs).items():
            found.setdefault(key, {}).update(values)
    return found


def _unlike(runs: Sequence[tuple[str, bool, facts.Facts]]) -> Differences:
    found: Differences = {}
    for key in dict.fromkeys(key for _, _, own in runs for key in own):
        asked = [one for one in runs if not one[1] or facts.within(key, facts.UNTRAINED)]
        asked = [one for one in asked if key in one[2] or not facts.within(key, CHOOSING)]
        values = {name: own.get(key, GONE) for name, _, own in asked}
        if len({_whole(value) for value in values.values()}) > 1:
            found[key] = values
    return found


def _explained(found: Differences) -> Differences:
    """Without what only follows from another difference."""
    kept = {}
    for key, values in found.items():
        causes = next((each for place, each in CAUSES.items() if facts.within(key, (place,))), ())
        if GONE in values.values():  # a setting of one sampler, schedule, … that another does not have
            section = key.rpartition(".")[0]
            causes += (f"{section}.name",)
        if not any(facts.within(other, causes) for other in found if other != key):
            kept[key] = values
    return kept


def _repetitions(outcomes: Sequence[Outcome]) -> list[str]:
    """That every loss has the same seeds and folds."""
    groups = {key: runs for key, runs in repetitions(outcomes).items() if not runs[0].is_baseline}
    had: dict[str, list[str]] = {}
    for key, runs in groups.items():
        had.setdefault(_times(runs), []).append(key.loss)
    if len(had) < 2:
        return []
    return ["repetitions: " + "; ".join(f"{times} of {', '.join(losses)}" for times, losses in had.items())]


def _times(runs: Sequence[Outcome]) -> str:
    seeds = sorted({run.seed for run in runs})
    folds = sorted({run.fold for run in runs if run.fold is not None})
    words = f"seed {', '.join(map(str, seeds))}"
    words += f", fold {', '.join(map(str, folds))}" if folds else ""
    return words if len(runs) <= max(1, len(seeds)) * max(1, len(folds)) else f"{words} ({len(runs)} runs)"


def _notes(outcomes: Sequence[Outcome]) -> list[str]:
    names = _names(outcomes)
    runs = []
    for run in outcomes:
        own = flat(run.manifest)
        kept = {key: value for key, value in own.items() if facts.within(key, facts.NOTED)}
        kept |= {key: own[key] for key in ("recipe.network.normalize",) if key in own}
        kept = {key: value for key, value in kept.items() if not facts.within(key, facts.IGNORED)}
        runs.append((names[id(run)], False, kept))
    told = differences(outcomes)
    found = {key: values for key, values in _unlike(runs).items() if key not in told}
    lines = [_line(key, values) for key, values in found.items()]
    if any(key.startswith("hardware") for key in found):
        lines.append("seconds and memory are not comparable: they were measured on different machines")
    for run in outcomes:
        if run.metrics.get("skipped"):
            lines.append(f"{names[id(run)]} left out {run.metrics['skipped']} steps whose loss was no number")
    return lines + _doubles(outcomes, names)


def _doubles(outcomes: Sequence[Outcome], names: dict[int, str]) -> list[str]:
    lines = []
    for runs in repetitions(outcomes).values():
        seen: dict[Any, str] = {}
        for run in runs:
            before = seen.setdefault((run.seed, run.fold), names[id(run)])
            if before != names[id(run)]:
                lines.append(f"{before} and {names[id(run)]} are the same training twice")
    return lines


def _line(key: str, values: dict[str, Any]) -> str:
    """ "network.dim: 64 in a, b; 512 in c"."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(_whole(value), []).append(name)
    told = "; ".join(f"{_word(whole)} in {_few(names)}" for whole, names in groups.items())
    return f"{key.removeprefix('recipe.')}: {told}"


def _whole(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


def _word(words: str) -> str:
    return words if len(words) <= 40 else f"{words[:12]}…{words[-12:]}"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= SHOWN else f"{len(names)} runs"


def _names(outcomes: Sequence[Outcome]) -> dict[int, str]:
    """What to call each run: its folder's name, or the whole path where two folders share it."""
    taken = [run.name for run in outcomes]
    return {id(run): run.name if taken.count(run.name) == 1 else str(run.folder) for run in outcomes}
