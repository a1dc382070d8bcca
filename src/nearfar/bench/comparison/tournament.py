"""Tournaments: ranks of losses added up over experiments (Table 11 of the thesis)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nearfar.bench.comparison.outcomes import Outcome, repetitions


@dataclass(frozen=True)
class Standing:
    """A loss in a tournament. It can also be read as a mapping: ``row["total"]``, ``dict(row)``.

    Args:
        loss: Its label.
        total: Sum of its ranks.
        average: Mean of its ranks.
        std: Standard deviation of its ranks with n − 1 degrees of freedom; NaN for a single experiment.
        ranks: Its rank in each experiment.
    """

    loss: str
    total: int
    average: float
    std: float
    ranks: tuple[int, ...]

    def keys(self) -> Iterator[str]:
        """The names of the fields."""
        return iter(("loss", "total", "average", "std", "ranks"))

    def __getitem__(self, key: str) -> Any:
        if key not in self.keys():
            raise KeyError(f"{key!r}; a standing has {', '.join(self.keys())}")
        return getattr(self, key)


def tournament(scores: Mapping[str, Mapping[str, float]]) -> list[Standing]:
    """Rank losses in each experiment and add up their ranks.

    The best score has rank 1. Equal scores share the better rank: two first places are followed by the third. Losses
    with the same total keep their order.

    Args:
        scores: ``{experiment: {loss: score}}``, where larger is better; each experiment has all losses.

    Returns:
        One row for each loss, best first.

    Raises:
        ValueError: If there is no score, a loss is missing from an experiment, or a score is not a finite number.

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
        raise TypeError("scores is not a mapping of mappings; needed is {experiment: {loss: score}}")
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


def by_experiment(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    """Group runs by experiment: dataset, network, size of the embedding and protocol.

    Args:
        outcomes: Finished runs.

    Returns:
        The runs of each experiment. Its name consists of what differs between the experiments.
    """
    outcomes = list(outcomes)
    places = [tuple(map(str, run.place.values())) for run in outcomes]
    shown = [at for at in range(4) if len({place[at] for place in places}) > 1] or [0, 1, 2]
    found: dict[str, list[Outcome]] = {}
    for place, run in zip(places, outcomes, strict=True):
        found.setdefault(" ".join(place[at] for at in shown), []).append(run)
    return found


def by_label(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    """Group runs that differ in seed or fold alone, under labels that distinguish the groups.

    Args:
        outcomes: Finished runs.

    Returns:
        The runs of each group by its label: the loss, and what distinguishes it from others of its name.
    """
    groups = list(repetitions(outcomes).values())
    return dict(zip(labels(groups), groups, strict=True))


def scores(outcomes: Iterable[Outcome], metric: str = "recall@1") -> dict[str, dict[str, float]]:
    """Mean scores over seeds and folds, without baselines.

    Args:
        outcomes: Finished runs.
        metric: The test metric.

    Returns:
        ``{experiment: {loss: score}}``.
    """
    found = {}
    for name, runs in by_experiment(outcomes).items():
        groups = by_label(run for run in runs if not run.is_baseline)
        found[name] = {label: statistics.fmean(run.score(metric) for run in own) for label, own in groups.items()}
    return {name: each for name, each in found.items() if each}


def shared(scores: Mapping[str, Mapping[str, float]]) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Keep the losses that all experiments have.

    Args:
        scores: ``{experiment: {loss: score}}``.

    Returns:
        The scores of the common losses, and the names of the losses left out.
    """
    every = list(dict.fromkeys(loss for each in scores.values() for loss in each))
    common = [loss for loss in every if all(loss in each for each in scores.values())]
    kept = {name: {loss: each[loss] for loss in common} for name, each in scores.items()}
    return kept, [loss for loss in every if loss not in common]


def labels(groups: Sequence[Sequence[Outcome]]) -> list[str]:
    """A distinct label for each group of repetitions.

    Args:
        groups: Runs that differ in seed or fold alone.

    Returns:
        The loss of each group, with the settings or folders that distinguish it from others of its name.
    """
    found = []
    for runs in groups:
        same_name = [_facts(other[0]) for other in groups if other[0].loss == runs[0].loss]
        own = _facts(runs[0])
        distinct = [
            f"{key}={own.get(key, 'default')}"
            for key in dict.fromkeys(key for each in same_name for key in each)
            if any(each.get(key) != same_name[0].get(key) for each in same_name)
        ]
        found.append(f"{runs[0].loss} ({', '.join(distinct)})" if distinct else runs[0].loss)
    with_names = [
        label if found.count(label) == 1 else f"{label} [{runs[0].name}]"
        for label, runs in zip(found, groups, strict=True)
    ]
    return [
        label if with_names.count(label) == 1 else f"{base} [{runs[0].folder}]"
        for label, base, runs in zip(with_names, found, groups, strict=True)
    ]


def _facts(run: Outcome) -> dict[str, Any]:
    """What can distinguish runs of one loss: its settings, those that the grid varies, and the experiment."""
    settings = {} if run.is_baseline else run.recipe.get("loss", {})
    tried = {key.rpartition(".")[2]: value for key, value in run.settings.items() if not key.startswith("loss.")}
    return settings | tried | run.place | {"normalize": run.recipe.get("network", {}).get("normalize", True)}


def _is_number(score: Any) -> bool:
    """Whether a value is a finite number of any library; booleans and text are not."""
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
