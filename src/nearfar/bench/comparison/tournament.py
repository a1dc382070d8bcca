"""Tournaments: who ranks where, over many experiments (Table 11 of the thesis)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nearfar.bench.comparison.fairness import Verdict, judge
from nearfar.bench.comparison.outcomes import Outcome, repetitions


@dataclass(frozen=True)
class Standing:
    """A loss in a tournament; reads as a table as well: ``row["total"]``, ``dict(row)``.

    Args:
        loss: Which.
        total: Sum of its ranks.
        average: Their mean.
        std: Their standard deviation with n − 1 degrees of freedom; NaN after one experiment.
        ranks: One for each experiment, in order.
    """

    loss: str
    total: int
    average: float
    std: float
    ranks: tuple[int, ...]

    def keys(self) -> Iterator[str]:
        return iter(("loss", "total", "average", "std", "ranks"))

    def __getitem__(self, key: str) -> Any:
        if key not in self.keys():
            raise KeyError(f"{key!r}; a standing has {', '.join(self.keys())}")
        return getattr(self, key)


def tournament(scores: Mapping[str, Mapping[str, float]]) -> list[Standing]:
    """Rank losses in each experiment and add up: one row for each loss, best first.

    The best score has rank 1; equal scores share the better rank (two firsts are followed by a third). Losses with the
    same total stand in the order in which they came.

    Args:
        scores: {experiment: {loss: score}}, where more is better; each experiment has all losses.

    >>> for row in tournament({
    ...     "resnet50/64": {"triplet": 57.6, "margin": 59.7, "proxy_anchor": 62.9},
    ...     "resnet50/512": {"triplet": 63.5, "margin": 63.5, "proxy_anchor": 69.5},
    ... }):
    ...     print(row.loss, row.total, row.average, round(row.std, 2))
    proxy_anchor 2 1.0 0.0
    margin 4 2.0 0.0
    triplet 5 2.5 0.71
    """
    if not isinstance(scores, Mapping) or not all(isinstance(each, Mapping) for each in scores.values()):
        raise TypeError("scores is no table of tables; needed is {experiment: {loss: score}}")
    if not scores:
        raise ValueError("scores is empty; needed is at least one experiment")
    losses = list(dict.fromkeys(loss for experiment in scores.values() for loss in experiment))
    for name, experiment in scores.items():
        missing = [loss for loss in losses if loss not in experiment]
        if missing:
            raise ValueError(f"experiment {name!r} has no score of {', '.join(missing)}; each needs all losses")
        for loss, score in experiment.items():
            if not _is_number(score):
                raise ValueError(f"the score of {loss!r} in {name!r} is {score!r}; a finite number is needed")
    if not losses:
        raise ValueError("scores has no loss; needed is {experiment: {loss: score}}")
    ranks = {loss: tuple(_rank(loss, experiment) for experiment in scores.values()) for loss in losses}
    rows = [Standing(loss, sum(own), statistics.fmean(own), _std(own), own) for loss, own in ranks.items()]
    return sorted(rows, key=lambda row: row.total)


def experiments(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    """Runs by experiment: data set, network, size of the embedding and protocol; only what differs is named."""
    outcomes = list(outcomes)
    places = [(run.data, run.network, str(run.dim), run.protocol) for run in outcomes]
    shown = [at for at in range(4) if len({place[at] for place in places}) > 1] or [0, 1, 2]
    found: dict[str, list[Outcome]] = {}
    for place, run in zip(places, outcomes, strict=True):
        found.setdefault(" ".join(place[at] for at in shown), []).append(run)
    return found


def scores(outcomes: Iterable[Outcome], metric: str = "recall@1") -> dict[str, dict[str, float]]:
    """{experiment: {loss: mean over seeds and folds}}, without baselines."""
    found: dict[str, dict[str, float]] = {}
    for name, runs in experiments(outcomes).items():
        groups = repetitions(run for run in runs if not run.is_baseline)
        words = labels(list(groups.values()))
        found[name] = {
            word: statistics.fmean(run.score(metric) for run in each)
            for word, each in zip(words, groups.values(), strict=True)
        }
    return {name: each for name, each in found.items() if each}


def shared(scores: Mapping[str, Mapping[str, float]]) -> tuple[dict[str, dict[str, float]], str]:
    """The scores of the losses that all experiments have, and what to say of the others."""
    every = list(dict.fromkeys(loss for each in scores.values() for loss in each))
    common = [loss for loss in every if all(loss in each for each in scores.values())]
    left = f"only the {len(common)} losses take part that all experiments have" if len(common) < len(every) else ""
    return {name: {loss: each[loss] for loss in common} for name, each in scores.items()}, left


def judged(outcomes: Iterable[Outcome]) -> Verdict:
    """Whether each experiment is fair on its own; a tournament asks no more."""
    found = experiments(outcomes)
    verdicts = {name: judge(runs) for name, runs in found.items()}

    def lines(part: str) -> list[str]:
        told: list[tuple[str, str]] = [(name, line) for name, one in verdicts.items() for line in getattr(one, part)]
        return [f"{name}: {line}" if len(found) > 1 else line for name, line in told]

    fair = all(verdict.fair for verdict in verdicts.values())
    tried = dict.fromkeys(key for verdict in verdicts.values() for key in verdict.tried)
    return Verdict(fair, lines("reasons"), lines("notes"), tuple(tried))


def labels(groups: Sequence[Sequence[Outcome]]) -> list[str]:
    """What to call each group of repetitions: the loss, with what tells it from others of its name."""
    found = []
    for runs in groups:
        alike = [_facts(other[0]) for other in groups if other[0].loss == runs[0].loss]
        own = _facts(runs[0])
        telling = [
            f"{key}={own.get(key, 'default')}"
            for key in dict.fromkeys(key for one in alike for key in one)
            if any(one.get(key) != alike[0].get(key) for one in alike)
        ]
        found.append(f"{runs[0].loss} ({', '.join(telling)})" if telling else runs[0].loss)
    once = [
        word if found.count(word) == 1 else f"{word} [{runs[0].name}]" for word, runs in zip(found, groups, strict=True)
    ]
    return [
        word if once.count(word) == 1 else f"{base} [{runs[0].folder}]"
        for word, base, runs in zip(once, found, groups, strict=True)
    ]


def _facts(run: Outcome) -> dict[str, Any]:
    """What may tell runs of one name apart: the settings of the loss or of the grid, and on what it was trained."""
    settings = {} if run.is_baseline else run.recipe.get("loss", {})
    tried = {key.rpartition(".")[2]: value for key, value in run.settings.items() if not key.startswith("loss.")}
    return settings | tried | run.place | {"normalize": run.recipe.get("network", {}).get("normalize", True)}


def _is_number(score: Any) -> bool:
    """Whether it is finite, of any library's kind of numbers; truth values and text are none."""
    if isinstance(score, (bool, str, bytes)):
        return False
    try:
        return math.isfinite(float(score))
    except (TypeError, ValueError):
        return False


def _rank(loss: str, experiment: Mapping[str, float]) -> int:
    return 1 + sum(other > experiment[loss] for other in experiment.values())


def _std(values: Sequence[int]) -> float:
    return statistics.stdev(values) if len(values) > 1 else math.nan
