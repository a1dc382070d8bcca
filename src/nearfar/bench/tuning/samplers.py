"""Samplers that enumerate values: every combination, or one key after the other."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Point = dict[str, Any]  # values by key
SHUFFLED = 100_000  # combinations that are shuffled; of more, random ones are drawn until one is new


@dataclass(frozen=True)
class TakenPoint:
    """A point that a worker has taken."""

    point: Point  # its values
    score: float | None  # its result; None while it is unknown, or if the trial failed
    ended: bool  # whether the trial has ended


class Wait(Exception):
    """Raised when the next point depends on trials that other workers are running."""


def next_combination(values: Mapping[str, Sequence[Any]], taken: Iterable[TakenPoint], seed: int = 0) -> Point | None:
    """Return the next combination in a shuffled order, or None when all are taken.

    Optuna's ``GridSampler`` is not used: it lists all combinations in memory, lets two machines take the same one, and
    would repeat trials that another sampler has run.
    """
    numbers = {_number(values, one.point) for one in taken}
    count = math.prod(map(len, values.values()))
    if len(numbers) >= count:
        return None
    generator = random.Random(seed)
    if count <= SHUFFLED:
        order: Iterable[int] = generator.sample(range(count), count)
    else:
        order = iter(lambda: generator.randrange(count), -1)
    return _point(values, next(number for number in order if number not in numbers))


def next_in_turn(values: Mapping[str, Sequence[Any]], taken: Iterable[TakenPoint]) -> Point | None:
    """Return the next value of the first key that is not tuned yet, or None when all keys are tuned.

    Earlier keys have their best value, later keys that of the recipe.
    """
    taken, settled = list(taken), Point()
    for key, choices in values.items():
        stage = [one for one in taken if list(one.point) == [*settled, key] and settled.items() <= one.point.items()]
        started = [one.point[key] for one in stage]
        for value in choices:
            if value not in started:
                return {**settled, key: value}
        if not all(one.ended for one in stage):
            raise Wait
        scored = [one for one in stage if one.score is not None]
        if scored:  # otherwise the value of the recipe is kept
            settled[key] = max(scored, key=lambda one: one.score or 0.0).point[key]
    return None


def _point(values: Mapping[str, Sequence[Any]], number: int) -> Point:
    """Return the combination with a number, as digits of it to the bases of the numbers of values."""
    found: Point = {}
    for key, choices in values.items():
        number, digit = divmod(number, len(choices))
        found[key] = choices[digit]
    return found


def _number(values: Mapping[str, Sequence[Any]], point: Point) -> int:
    """Return the number of a combination; inverse of ``_point``."""
    found, factor = 0, 1
    for key, choices in values.items():
        found += factor * list(choices).index(point[key])
        factor *= len(choices)
    return found
