"""Fairness: runs may be ranked only if they differ in nothing but the loss and its own settings.

docs/protocol.md explains what a difference in each kind of manifest entry means, and why.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nearfar.bench.comparison import manifest_keys as keys
from nearfar.bench.comparison.manifest_keys import Facts
from nearfar.bench.comparison.runs import repetitions
from nearfar.training.recipe.files import flat
from nearfar.training.run.provenance import relevant_code
from nearfar.training.run.reader import Run
from nearfar.utils.formatting import plural

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
        other_code: Why runs of other code are ranked nevertheless; empty if the code does not differ.
        test_looks: How often the test classes were evaluated for these runs.
    """

    fair: bool
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tried: tuple[str, ...] = ()
    other_code: str = ""
    test_looks: int = 0


def reason(other_code: str | None) -> str:
    """Check the reason to accept other code."""
    if other_code is not None and not other_code.strip():
        raise ValueError(f"other_code is {other_code!r}; a reason is needed, such as: only comments changed")
    return " ".join((other_code or "").split())


def judge(runs: Iterable[Run], *, other_code: str | None = None) -> Verdict:
    """Whether runs differ in nothing but the loss, its settings, and repetitions that all losses share.

    A setting that a grid varies is a subject of the comparison if all runs are of this grid and every loss has every
    combination of the values: it may differ between the runs, and so may what follows from it. Runs with the same value
    are checked like any others.

    Args:
        runs: Finished runs.
        other_code: Why runs of other code may be ranked; printed with the ranking.

    Returns:
        The verdict with its reasons and notes.
    """
    runs = list(runs)
    accepted = reason(other_code)
    tried, incomplete = _tried(runs)
    meant = tuple(f"recipe.{key}" for key in tried)
    differing = {key: values for key, values in _explained(differences(runs)).items() if not keys.within(key, meant)}
    by_value: dict[str, list[Run]] = {}  # those with the same value are checked like any others
    for run in runs if tried else ():
        by_value.setdefault(_text([run.settings.get(key) for key in tried]), []).append(run)
    for group in by_value.values():
        differing = _explained(differences(group)) | differing
    reasons = [_line(key, values) for key, values in differing.items()]
    reasons += incomplete + _repetitions(runs)
    notes = []
    if tried:
        notes.append(
            f"the grid varies {', '.join(tried)}; a value that is chosen by test results is chosen on the test classes"
        )
    chosen = dict.fromkeys(run.loss for run in runs if run.tables.get("tuning", {}).get("chosen_by") == "test")
    notes += [f"the settings of {loss} were chosen by test results" for loss in chosen]
    differing_code, unknown_code = _code(runs)
    if accepted:
        notes += [f"waived: {accepted} ({line})" for line in differing_code]
    else:
        reasons += differing_code
    looks = sum(run.test_looks for run in runs)
    notes += [*unknown_code, *_notes(runs)]
    if looks:
        runs_text = f"these {len(runs):,} runs" if len(runs) > 1 else "this run"
        notes.append(f"the test classes were evaluated {plural(looks, 'time')} for {runs_text}")
    return Verdict(not reasons, reasons, notes, tried, accepted if differing_code else "", looks)


def _tried(runs: Sequence[Run]) -> tuple[tuple[str, ...], list[str]]:
    """The settings that the grid of all trained runs varies; and lines on combinations that a loss does not have."""
    trained = [run for run in runs if not run.is_baseline]
    varied = [key for key in trained[0].settings if all(key in run.settings for run in trained)] if trained else []
    varied = [key for key in varied if not keys.is_luck(key)]
    if not varied or len({run.folder.absolute().parent for run in trained}) > 1:
        return (), []
    declared = trained[0].grid().get("settings", {})
    combinations: dict[str, set[str]] = {}
    for run in trained:
        combinations.setdefault(run.loss, set()).add(_text([run.settings[key] for key in varied]))
    values = [
        declared.get(key) or list({_text(run.settings[key]): run.settings[key] for run in trained}.values())
        for key in varied
    ]
    lines = []
    for combination in itertools.product(*values):
        lacking = [loss for loss, has in combinations.items() if _text(list(combination)) not in has]
        if lacking:
            words = ", ".join(f"{key} {_text(value)}" for key, value in zip(varied, combination, strict=True))
            lines.append(f"settings: {_listed(lacking)} without {words}, which the grid varies")
    return tuple(key for key in varied if not keys.is_loss(f"recipe.{key}")), lines


def _code(runs: Sequence[Run]) -> tuple[list[str], list[str]]:
    """Lines on differences of code outside the losses' own files, and on runs whose code is not known.

    Runs of earlier versions did not record their code. Those of one folder are taken to have the same.
    """
    names = _names(runs)
    known = [(names[id(run)], relevant_code(run.manifest.get("code"))) for run in runs]
    unknown = [run for run in runs if relevant_code(run.manifest.get("code")) is None]
    facts = {name: digests for name, digests in known if digests is not None}
    others = {key for digests in facts.values() for key in digests}
    for run in runs:  # the file of one loss may be used by runs of another, and is then compared
        for file, digest in (run.manifest.get("code") or {}).get("used", {}).items():
            if f"used.{file}" in others and (digests := facts.get(names[id(run)])) is not None:
                digests.setdefault(f"used.{file}", digest)
    differing = _differing([(name, False, digests) for name, digests in facts.items()])
    lines = []
    if differing:
        which = ", ".join(key.removeprefix("package.") for key in differing)
        versions = {name: [digests.get(key) for key in differing] for name, digests in facts.items()}
        lines.append(f"{_line('code', versions, 'version')} (they differ in {which})")
    folders = {run.folder.absolute().parent for run in unknown}
    if unknown and (facts or len(folders) > 1):
        lines.append(f"code: not recorded in {_listed([names[id(run)] for run in unknown])}")
        return lines, []
    note = f"the code of {_listed([names[id(run)] for run in unknown])} was not recorded; all are in one folder"
    return lines, [note] if len(unknown) > 1 else []


def differences(runs: Sequence[Run]) -> Differences:
    """Relevant manifest entries that differ between runs.

    Entries that follow from seed and fold are compared between runs of the same seed and fold. Baselines are compared
    only in what they share with trained runs.

    Args:
        runs: Finished runs.

    Returns:
        ``{key: {run: value}}``.
    """
    names = _names(runs)
    differing = _differing([(names[id(run)], run.is_baseline, keys.relevant(run.manifest)) for run in runs])
    repeated: dict[Any, list[tuple[str, bool, Facts]]] = {}
    for run in runs:
        repetition = {key: value for key, value in flat(run.manifest).items() if keys.within(key, keys.REPETITION)}
        repeated.setdefault((run.seed, run.fold), []).append((names[id(run)], run.is_baseline, repetition))
    for group in repeated.values():
        for key, values in _differing(group).items():
            differing.setdefault(key, {}).update(values)
    return differing


def _differing(runs: Sequence[tuple[str, bool, Facts]]) -> Differences:
    differing: Differences = {}
    for key in dict.fromkeys(key for _, _, facts in runs for key in facts):
        with_baselines, if_set = keys.within(key, keys.UNTRAINED), keys.within(key, SELECTION)
        values = {
            name: facts.get(key, NOT_SET)
            for name, is_baseline, facts in runs
            if (with_baselines or not is_baseline) and (key in facts or not if_set)
        }
        if len({_text(value) for value in values.values()}) > 1:
            differing[key] = values
    return differing


def _explained(differing: Differences) -> Differences:
    """Differences without those that follow from another one."""
    kept = {}
    for key, values in differing.items():
        causes = next((sections for place, sections in CAUSES.items() if keys.within(key, (place,))), ())
        if NOT_SET in values.values():  # a setting of one sampler, schedule, … that another does not have
            section = key.rpartition(".")[0]
            causes += (f"{section}.name",)
        if not any(keys.within(other, causes) for other in differing if other != key):
            kept[key] = values
    return kept


def _repetitions(runs: Sequence[Run]) -> list[str]:
    """Lines on pairs of seed and fold that a loss lacks, or has more than once."""
    trained = [run for run in runs if not run.is_baseline]
    grid = trained[0].grid() if len({run.folder.absolute().parent for run in trained}) == 1 else {}
    groups = repetitions(trained)
    every = dict.fromkeys((run.seed, run.fold) for group in groups.values() for run in group)
    folds = {fold for _, fold in every}
    if folds != {None}:
        folds |= set(range(grid.get("protocol_settings", {}).get("folds", 0)))
    every |= dict.fromkeys((seed, fold) for seed in grid.get("seeds", ()) for fold in folds)
    names, doubled = _names(runs), []
    without: dict[tuple[str, ...], list[str]] = {}  # the losses that lack the same repetitions
    labels = [group[0].loss for group in groups.values()]
    for group in groups.values():
        loss = group[0].loss
        label = loss if labels.count(loss) == 1 else f"{loss} ({group[0].name}, …)"
        held = [(run.seed, run.fold) for run in group]
        lacking = [_pair(pair) for pair in sorted(every, key=str) if pair not in held]
        if lacking:
            without.setdefault(tuple(lacking), []).append(label)
        for pair in sorted({pair for pair in held if held.count(pair) > 1}, key=str):
            doubles = [names[id(run)] for run in group if (run.seed, run.fold) == pair]
            doubled.append(f"repetitions: {label} has {_pair(pair)} {len(doubles)} times, in {_listed(doubles)}")
    lines = []
    for pairs, losses in without.items():
        every_loss = len(losses) == len(groups) > 1
        who = "every loss lacks" if every_loss else f"{', '.join(losses)} {'lacks' if len(losses) == 1 else 'lack'}"
        lines.append(f"repetitions: {who} {_listed(pairs)}")
    return [*lines, *doubled]


def _pair(pair: tuple[int, int | None]) -> str:
    """ "seed 0", or "seed 0 fold 1"."""
    seed, fold = pair
    return f"seed {seed}" if fold is None else f"seed {seed} fold {fold}"


def _notes(runs: Sequence[Run]) -> list[str]:
    names = _names(runs)
    facts = []
    for run in runs:
        manifest = flat(run.manifest)
        kept = {key: value for key, value in manifest.items() if keys.within(key, keys.NOTED)}
        kept |= {key: manifest[key] for key in ("recipe.network.normalize",) if key in manifest}
        kept = {key: value for key, value in kept.items() if not keys.within(key, keys.IGNORED)}
        facts.append((names[id(run)], False, kept))
    told = differences(runs)
    noted = {key: values for key, values in _differing(facts).items() if key not in told}
    lines = [_line(key, values) for key, values in noted.items()]
    if any(key.startswith("hardware") for key in noted):
        lines.append("seconds and memory are not comparable: they were measured on different machines")
    for run in runs:
        if run.metrics.get("skipped"):
            lines.append(f"{names[id(run)]} skipped {run.metrics['skipped']} steps whose loss was NaN or infinite")
    return lines


def _line(key: str, values: Mapping[str, Any], numbered: str = "") -> str:
    """ "network.dim: 64 in a, b; 512 in c"; with ``numbered``, "code: version 1 in a, b; version 2 in c"."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(_text(value), []).append(name)
    told = "; ".join(
        f"{f'{numbered} {number}' if numbered else _shortened(whole)} in {_listed(names)}"
        for number, (whole, names) in enumerate(groups.items(), start=1)
    )
    return f"{key.removeprefix('recipe.')}: {told}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:12]}…{text[-12:]}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= MAX_NAMES else f"{len(names)} runs"


def _names(runs: Sequence[Run]) -> dict[int, str]:
    """A name for each run: that of its folder, or the whole path if two folders share it."""
    taken = [run.name for run in runs]
    return {id(run): run.name if taken.count(run.name) == 1 else str(run.folder) for run in runs}
