"""Samplers that go through values one by one: every combination, or one key after the other."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Point = dict[str, Any]  # values by key
SHUFFLED = 100_000  # combinations; more are drawn at random until one is new


@dataclass(frozen=True)
class Tried:
    """A point that somebody has taken.

    Args:
        point: Its values.
        score: How good it was; None while it is not known, or where it failed.
        ended: Whether nobody works on it any more.
    """

    point: Point
    score: float | None
    ended: bool


class Wait(Exception):
    """The next point depends on trials that others are still making."""


def grid_point(values: Mapping[str, Sequence[Any]], tried: Iterable[Tried], seed: int = 0) -> Point | None:
    """A combination that nobody has taken yet; None when there is none left. Combinations come in a shuffled order.

    >>> values = {"loss.alpha": [1, 2], "loss.beta": [5]}
    >>> found = []
    >>> while (point := grid_point(values, found)) is not None:
    ...     found.append(Tried(point, 0.5, True))
    >>> sorted(one.point["loss.alpha"] for one in found)
    [1, 2]
    """
    taken = {_place(values, one.point) for one in tried}
    count = math.prod(map(len, values.values()))
    if len(taken) >= count:
        return None
    generator = random.Random(seed)
    if count <= SHUFFLED:
        order: Iterable[int] = generator.sample(range(count), count)
    else:
        order = iter(lambda: generator.randrange(count), -1)
    return _point(values, next(place for place in order if place not in taken))


def next_in_turn(values: Mapping[str, Sequence[Any]], tried: Iterable[Tried]) -> Point | None:
    """The next value of the first key that is not settled; keys before it stay at their best, those after it as in the
    recipe. None when all keys are settled; ``Wait`` while trials of others decide what is next.

    >>> values = {"loss.margin": [0.0, 0.5], "loss.alpha": [1, 2]}
    >>> tried = [Tried({"loss.margin": 0.0}, 0.4, True), Tried({"loss.margin": 0.5}, 0.6, True)]
    >>> next_in_turn(values, tried)
    {'loss.margin': 0.5, 'loss.alpha': 1}
    """
    tried, settled = list(tried), Point()
    for key, choices in values.items():
        stage = [one for one in tried if list(one.point) == [*settled, key] and settled.items() <= one.point.items()]
        taken = [one.point[key] for one in stage]
        for value in choices:
            if value not in taken:
                return {**settled, key: value}
        if not all(one.ended for one in stage):
            raise Wait
        scored = [one for one in stage if one.score is not None]
        if scored:  # otherwise the recipe's own value stays
            settled[key] = max(scored, key=lambda one: one.score or 0.0).point[key]
    return None


def _point(values: Mapping[str, Sequence[Any]], place: int) -> Point:
    found: Point = {}
    for key, choices in values.items():
        place, rest = divmod(place, len(choices))
        found[key] = choices[rest]
    return found


def _place(values: Mapping[str, Sequence[Any]], point: Point) -> int:
    """The number of a combination: the reverse of ``_point``."""
    found, factor = 0, 1
    for key, choices in values.items():
        found += factor * list(choices).index(point[key])
        factor *= len(choices)
    return found
