"""Tournaments: ranks of losses over experiments, and the Friedman test over datasets.

Experiments on one dataset (sizes of the embedding, networks) share its classes, so they are not independent: their
ranks are averaged, and the datasets are what the test counts (Demšar 2006). The thesis adds up ranks over all
experiments (its Table 11).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearfar.bench.comparison.outcomes import Outcome, repetitions
from nearfar.utils.validation import one_of

STYLES = ("friedman", "thesis")
ALPHA = 0.05
PERMUTATIONS = 10_000  # of the Friedman test


@dataclass(frozen=True)
class Standing:
    """A loss in a tournament. It can also be read as a mapping: ``row["total"]``, ``dict(row)``.

    Args:
        loss: Its label.
        total: Sum of its ranks.
        average: Mean of its ranks; in the style "friedman" the mean over datasets.
        std: Standard deviation of its ranks with n − 1 degrees of freedom; NaN for a single experiment.
        ranks: Its rank in each experiment.
    """

    loss: str
    total: float
    average: float
    std: float
    ranks: tuple[float, ...]

    def keys(self) -> Iterator[str]:
        """The names of the fields."""
        return iter(("loss", "total", "average", "std", "ranks"))

    def __getitem__(self, key: str) -> Any:
        if key not in self.keys():
            raise KeyError(f"{key!r}; a standing has {', '.join(self.keys())}")
        return getattr(self, key)


@dataclass(frozen=True)
class Friedman:
    """The Friedman test of equal losses, and the critical difference of Nemenyi."""

    data: int  # number of datasets
    losses: int  # number of losses
    statistic: float  # friedman's statistic, corrected for ties
    p: float  # its p-value, by permutation of the ranks within each dataset
    critical: float  # average ranks that differ by less cannot be told apart


def tournament(
    scores: Mapping[str, Mapping[str, float]], *, style: str = "friedman", data: Mapping[str, str] | None = None
) -> list[Standing]:
    """Rank losses in each experiment and average their ranks.

    The best score has rank 1. Losses with the same total keep their order.

    Args:
        scores: ``{experiment: {loss: score}}``, where larger is better; each experiment has all losses.
        style: "friedman": equal scores share the middle of their ranks, and averages are over datasets. "thesis": equal
            scores share the better rank, two first places are followed by the third, and averages are over experiments.
        data: The dataset of each experiment; by default each has its own.

    Returns:
        One row for each loss, best first.

    Raises:
        ValueError: If there is no score, a loss is missing from an experiment, or a score is not a finite number.

    >>> for row in tournament({
    ...     "resnet50/64": {"triplet": 57.6, "margin": 59.7, "proxy_anchor": 62.9},
    ...     "resnet50/512": {"triplet": 63.5, "margin": 63.5, "proxy_anchor": 69.5},
    ... }):
    ...     print(row.loss, row.total, row.average, round(row.std, 2))
    proxy_anchor 2.0 1.0 0.0
    margin 4.5 2.25 0.35
    triplet 5.5 2.75 0.35
    """
    one_of("style", style, STYLES)
    losses = _checked(scores)
    ranks = _ranks(scores, losses, "average" if style == "friedman" else "min")
    averages = ranks.mean(axis=1) if style == "thesis" else _by_data(scores, ranks, data).mean(axis=1)
    rows = [
        Standing(loss, float(own.sum()), float(average), _std(own.tolist()), tuple(own.tolist()))
        for loss, own, average in zip(losses, ranks, averages, strict=True)
    ]
    return sorted(rows, key=lambda row: row.average if style == "friedman" else row.total)


def friedman(
    scores: Mapping[str, Mapping[str, float]], data: Mapping[str, str] | None = None, *, seed: int = 0
) -> Friedman | None:
    """Test whether any losses differ in rank over datasets."""
    from scipy import stats

    losses = _checked(scores)
    ranks = _by_data(scores, _ranks(scores, losses, "average"), data).T  # [datasets, losses]
    blocks, count = ranks.shape
    if blocks < 2 or count < 2:
        return None
    middle = (count + 1) / 2
    spread = np.square(ranks - middle).sum()

    def statistic(tables: NDArray[np.float64]) -> NDArray[np.float64]:
        found = (count - 1) * np.square((tables - middle).sum(axis=-2)).sum(axis=-1)
        return found / spread if spread > 0 else np.zeros_like(found)

    own = float(statistic(ranks))
    rng = np.random.default_rng(seed)
    drawn = statistic(rng.permuted(np.broadcast_to(ranks, (PERMUTATIONS, *ranks.shape)), axis=-1))
    p = (1 + int((drawn >= own * (1 - 1e-12)).sum())) / (1 + PERMUTATIONS)
    studentized = float(stats.studentized_range.ppf(1 - ALPHA, count, np.inf))
    critical = studentized / math.sqrt(2) * math.sqrt(count * (count + 1) / (6 * blocks))
    return Friedman(blocks, count, own, p, critical)


def _checked(scores: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The losses of all experiments, each of which has them all."""
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
    return losses


def _ranks(scores: Mapping[str, Mapping[str, float]], losses: Sequence[str], ties: str) -> NDArray[np.float64]:
    """[losses, experiments], where equal scores share the middle ("average") or the better ("min") rank."""
    from scipy import stats

    table = np.array([[-float(experiment[loss]) for experiment in scores.values()] for loss in losses])
    found: NDArray[np.float64] = stats.rankdata(table, method=ties, axis=0).astype(np.float64)
    return found


def _by_data(
    scores: Mapping[str, Any], ranks: NDArray[np.float64], data: Mapping[str, str] | None
) -> NDArray[np.float64]:
    """[losses, datasets], the mean rank in the experiments of each dataset."""
    names = [name if data is None else data[name] for name in scores]
    blocks = [ranks[:, [name == own for name in names]].mean(axis=1) for own in dict.fromkeys(names)]
    return np.stack(blocks, axis=1)


def by_experiment(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    """Group runs by experiment: dataset, network, size of the embedding and protocol."""
    outcomes = list(outcomes)
    places = [tuple(map(str, run.place.values())) for run in outcomes]
    shown = [at for at in range(4) if len({place[at] for place in places}) > 1] or [0, 1, 2]
    found: dict[str, list[Outcome]] = {}
    for place, run in zip(places, outcomes, strict=True):
        found.setdefault(" ".join(place[at] for at in shown), []).append(run)
    return found


def by_label(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    """Group runs that differ in seed or fold alone, under labels that distinguish the groups."""
    groups = list(repetitions(outcomes).values())
    return dict(zip(labels(groups), groups, strict=True))


def entries(outcomes: Iterable[Outcome]) -> dict[str, dict[str, list[Outcome]]]:
    """Group trained runs by experiment and label. A label has the same settings of the loss in all experiments.

    A loss whose settings differ between experiments is several losses, unless studies of the same number of trials
    chose them.
    """
    found = {
        name: by_label(run for run in runs if not run.is_baseline) for name, runs in by_experiment(outcomes).items()
    }
    settings: dict[str, list[dict[str, Any]]] = {}
    for groups in found.values():
        for label, runs in groups.items():
            settings.setdefault(label, []).append(_own_settings(runs[0]))

    def name(label: str, run: Outcome) -> str:
        each, own = settings[label], _own_settings(run)
        keys = dict.fromkeys(key for one in each for key in one)
        differing = [key for key in keys if any(one.get(key) != own.get(key) for one in each)]
        words = [f"{key}={own.get(key, 'default')}" for key in differing]
        return f"{label} ({', '.join(words)})" if words else label

    return {
        experiment: {name(label, runs[0]): runs for label, runs in groups.items()}
        for experiment, groups in found.items()
        if groups
    }


def _own_settings(run: Outcome) -> dict[str, Any]:
    """The settings of a loss that identify it: how many trials chose them, or else their values."""
    tuning = run.recipe.get("tuning", {})
    if tuning.get("chosen_by") == "study":
        return {"trials": tuning.get("trials")}
    own = {key: value for key, value in run.recipe.get("loss", {}).items() if key != "name"}
    return own | {"multiplier": run.recipe.get("optimizer", {}).get("loss_multiplier")}


def scores(outcomes: Iterable[Outcome], metric: str = "recall@1") -> dict[str, dict[str, float]]:
    """Mean scores over seeds and folds, without baselines."""
    return {
        name: {label: statistics.fmean(run.score(metric) for run in runs) for label, runs in groups.items()}
        for name, groups in entries(outcomes).items()
    }


def shared(scores: Mapping[str, Mapping[str, float]]) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Keep the losses that all experiments have."""
    every = list(dict.fromkeys(loss for each in scores.values() for loss in each))
    common = [loss for loss in every if all(loss in each for each in scores.values())]
    kept = {name: {loss: each[loss] for loss in common} for name, each in scores.items()}
    return kept, [loss for loss in every if loss not in common]


def labels(groups: Sequence[Sequence[Outcome]]) -> list[str]:
    """A distinct label for each group of repetitions."""
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


def _std(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else math.nan
