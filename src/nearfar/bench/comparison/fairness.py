"""Fairness: runs may be ranked only if they differ in nothing but the loss and its own settings.

docs/benchmark.md explains what a difference in each kind of manifest entry means, and why.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nearfar.bench.comparison import manifest_keys as keys
from nearfar.bench.comparison.manifest_keys import Facts, flat
from nearfar.bench.comparison.outcomes import Outcome, repetitions

Differences = dict[str, dict[str, Any]]

# Entries that follow from settings; reported only if no setting explains them. The first matching prefix counts.
CAUSES = {
    "data.source": ("recipe.data",),
    "batch.ranks": (),
    "network": ("recipe.network", "recipe.augmentation", "recipe.evaluation", "recipe.data", "weights"),
    "batch": ("recipe.sampler", "recipe.data", "recipe.split"),
    "length": ("recipe.training", "recipe.sampler", "recipe.stages", "recipe.data", "recipe.split"),
    "selection": ("recipe.split", "recipe.selection"),
    "data": ("recipe.data", "recipe.split"),
}
# Reported for runs that select an epoch; "selection" tells which runs do.
SELECTION = ("recipe.evaluation.every", "recipe.selection")
MAX_NAMES = 4  # names of runs in a line; more are counted
NOT_SET = "not set"


@dataclass(frozen=True)
class Verdict:
    """Whether runs may be ranked.

    Args:
        fair: Whether they may be ranked.
        reasons: Why not, one line for each difference.
        notes: Differences that do not affect the ranking: machines, versions, skipped steps.
        tried: Settings other than the loss's own that are compared, because a grid varies them.
    """

    fair: bool
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tried: tuple[str, ...] = ()


def judge(outcomes: Iterable[Outcome]) -> Verdict:
    """Whether runs differ in nothing but the loss, its settings, and repetitions that all losses share.

    A setting that a grid varies is a subject of the comparison: it may differ between the runs, and so may what follows
    from it. Runs with the same value are checked like any others.

    Args:
        outcomes: Finished runs.

    Returns:
        The verdict with its reasons and notes.
    """
    outcomes = list(outcomes)
    tried = tuple(key for key in _tried(outcomes) if not keys.is_loss(f"recipe.{key}"))
    meant = tuple(f"recipe.{key}" for key in tried)
    found = {key: values for key, values in _explained(differences(outcomes)).items() if not keys.within(key, meant)}
    for runs in _by_value(outcomes, tried):
        found = _explained(differences(runs)) | found
    reasons = [_line(key, values) for key, values in found.items()]
    reasons += _repetitions(outcomes)
    notes = [f"the grid varies {', '.join(tried)}"] if tried else []
    return Verdict(not reasons, reasons, notes + _notes(outcomes), tried)


def _tried(outcomes: Sequence[Outcome]) -> list[str]:
    """The settings that the grids of all trained runs vary."""
    trained = [run.settings for run in outcomes if not run.is_baseline]
    return [key for key in trained[0] if all(key in own for own in trained)] if trained else []


def _by_value(outcomes: Sequence[Outcome], tried: Sequence[str]) -> list[list[Outcome]]:
    """Runs grouped by the values of the varied settings; empty if none is varied."""
    found: dict[str, list[Outcome]] = {}
    for run in outcomes if tried else ():
        found.setdefault(_text([run.settings.get(key) for key in tried]), []).append(run)
    return list(found.values())


def differences(outcomes: Sequence[Outcome]) -> Differences:
    """Relevant manifest entries that differ between runs.

    Entries that follow from seed and fold are compared between runs of the same seed and fold. Baselines are compared
    only in what they share with trained runs.

    Args:
        outcomes: Finished runs.

    Returns:
        ``{key: {run: value}}``.
    """
    names = _names(outcomes)
    found: Differences = {}
    kept = [(names[id(run)], run.is_baseline, keys.relevant(run.manifest)) for run in outcomes]
    found |= _differing(kept)
    repeated: dict[Any, list[tuple[str, bool, Facts]]] = {}
    for run in outcomes:
        own = {key: value for key, value in flat(run.manifest).items() if keys.within(key, keys.REPETITION)}
        repeated.setdefault((run.seed, run.fold), []).append((names[id(run)], run.is_baseline, own))
    for runs in repeated.values():
        for key, values in _differing(runs).items():
            found.setdefault(key, {}).update(values)
    return found


def _differing(runs: Sequence[tuple[str, bool, Facts]]) -> Differences:
    found: Differences = {}
    for key in dict.fromkeys(key for _, _, own in runs for key in own):
        known = [one for one in runs if not one[1] or keys.within(key, keys.UNTRAINED)]
        known = [one for one in known if key in one[2] or not keys.within(key, SELECTION)]
        values = {name: own.get(key, NOT_SET) for name, _, own in known}
        if len({_text(value) for value in values.values()}) > 1:
            found[key] = values
    return found


def _explained(found: Differences) -> Differences:
    """Differences without those that follow from another one."""
    kept = {}
    for key, values in found.items():
        causes = next((each for place, each in CAUSES.items() if keys.within(key, (place,))), ())
        if NOT_SET in values.values():  # a setting of one sampler, schedule, … that another does not have
            section = key.rpartition(".")[0]
            causes += (f"{section}.name",)
        if not any(keys.within(other, causes) for other in found if other != key):
            kept[key] = values
    return kept


def _repetitions(outcomes: Sequence[Outcome]) -> list[str]:
    """A reason if not every loss has the same seeds and folds."""
    groups = {key: runs for key, runs in repetitions(outcomes).items() if not runs[0].is_baseline}
    had: dict[str, list[str]] = {}
    for key, runs in groups.items():
        had.setdefault(_repeated(runs), []).append(key.loss)
    if len(had) < 2:
        return []
    return ["repetitions: " + "; ".join(f"{times} of {', '.join(losses)}" for times, losses in had.items())]


def _repeated(runs: Sequence[Outcome]) -> str:
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
        kept = {key: value for key, value in own.items() if keys.within(key, keys.NOTED)}
        kept |= {key: own[key] for key in ("recipe.network.normalize",) if key in own}
        kept = {key: value for key, value in kept.items() if not keys.within(key, keys.IGNORED)}
        runs.append((names[id(run)], False, kept))
    told = differences(outcomes)
    found = {key: values for key, values in _differing(runs).items() if key not in told}
    lines = [_line(key, values) for key, values in found.items()]
    if any(key.startswith("hardware") for key in found):
        lines.append("seconds and memory are not comparable: they were measured on different machines")
    for run in outcomes:
        if run.metrics.get("skipped"):
            lines.append(f"{names[id(run)]} skipped {run.metrics['skipped']} steps whose loss was NaN or infinite")
    return lines + _duplicates(outcomes, names)


def _duplicates(outcomes: Sequence[Outcome], names: dict[int, str]) -> list[str]:
    lines = []
    for runs in repetitions(outcomes).values():
        seen: dict[Any, str] = {}
        for run in runs:
            before = seen.setdefault((run.seed, run.fold), names[id(run)])
            if before != names[id(run)]:
                lines.append(f"{before} and {names[id(run)]} are the same training")
    return lines


def _line(key: str, values: dict[str, Any]) -> str:
    """ "network.dim: 64 in a, b; 512 in c"."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(_text(value), []).append(name)
    told = "; ".join(f"{_shortened(whole)} in {_listed(names)}" for whole, names in groups.items())
    return f"{key.removeprefix('recipe.')}: {told}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:12]}…{text[-12:]}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= MAX_NAMES else f"{len(names)} runs"


def _names(outcomes: Sequence[Outcome]) -> dict[int, str]:
    """A name for each run: that of its folder, or the whole path if two folders share it."""
    taken = [run.name for run in outcomes]
    return {id(run): run.name if taken.count(run.name) == 1 else str(run.folder) for run in outcomes}
