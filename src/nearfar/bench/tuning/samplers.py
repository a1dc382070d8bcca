"""Samplers that enumerate values: every combination, or one key after the other."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Point = dict[str, Any]  # values by key
SHUFFLED = 100_000  # combinations that are shuffled; of more, random ones are drawn until one is new


class Tried(NamedTuple):
    """A point with a trial."""

    point: Point
    score: float | None  # its result; None while it is unknown, or if the trial failed
    ended: bool  # whether the trial has ended


def next_combination(values: Mapping[str, Sequence[Any]], tried: Iterable[Tried], seed: int = 0) -> Point | None:
    """Return the next combination in a shuffled order, or None when all are tried.

    Optuna's ``GridSampler`` is not used: it lists all combinations in memory, and lets two machines take the same one.
    """
    known = {tuple(trial.point.get(key) for key in values) for trial in tried}
    count, generator = math.prod(map(len, values.values())), random.Random(seed)
    if count <= SHUFFLED:
        combinations: Iterable[tuple[Any, ...]] = generator.sample([*itertools.product(*values.values())], count)
    elif len(known) < count:
        combinations = (tuple(map(generator.choice, values.values())) for _ in itertools.count())
    else:
        return None
    return next((dict(zip(values, new, strict=True)) for new in combinations if new not in known), None)


def next_in_turn(values: Mapping[str, Sequence[Any]], tried: Sequence[Tried]) -> Point | None:
    """Return the next value of the first key that is not tuned yet.

    Earlier keys have their best value, later keys that of the recipe. Returns None when all keys are tuned, and while
    the best value of a key depends on trials that have not ended.
    """
    settled = Point()
    for key, choices in values.items():
        stage = {
            trial.point[key]: trial
            for trial in tried
            if trial.point.keys() == {*settled, key} and settled.items() <= trial.point.items()
        }
        for value in choices:
            if value not in stage:
                return {**settled, key: value}
        if not all(trial.ended for trial in stage.values()):
            return None
        scores = {value: trial.score for value, trial in stage.items() if trial.score is not None}
        if scores:  # otherwise the value of the recipe is kept
            settled[key] = max(scores, key=lambda value: scores[value])
    return None
