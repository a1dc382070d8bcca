"""Which pairs of an anchor's row a loss gets to see.

A mining turns the positives and negatives of a tile into those worth learning from. Some choose sets
(``select``); the others choose triplets (``triplets``), whose positives and negatives are then the sets.

>>> import nearfar as nf
>>> loss = nf.losses.Raw(mining=nf.mining.create("valid_triplet", margin=0.2))
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from nearfar.engine import FLOOR, Tile, masked, positive_columns, scatter_mask
from nearfar.utils.validation import number, refuse_unknown

CERTAIN = 2.0**52  # the whole number that stands for a probability of one: finer than float32 is


class Triplets(NamedTuple):
    """For each anchor k pairs of columns, positive and negative, and which of them are real."""

    positive: Tensor  # [a, k]
    negative: Tensor  # [a, k]
    real: Tensor  # [a, k]


class Mining(ABC):
    """A choice of pairs. ``name`` is its key; ``unit_only`` says that it needs unit vectors.

    Any loss that takes a mining takes one of your own as well: derive from this class and define ``select``.
    """

    name: ClassVar[str] = "own"
    unit_only: ClassVar[bool] = False
    draws: ClassVar[bool] = False  # whether it asks the tile for random numbers
    bytes_per_pair: ClassVar[int] = 0

    @abstractmethod
    def select(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """The chosen positives and negatives, [a, n] each."""

    def triplets(self, tile: Tile) -> Triplets | None:
        """The chosen triplets, or None where every triplet of the chosen sets is meant."""
        return None

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"


Choice = str | Mining | Mapping[str, Any]  # a name, a mining, or a table of a name and settings


class All(Mining):
    """Every pair."""

    name = "all"

    def select(self, tile: Tile) -> tuple[Tensor, Tensor]:
        return tile.positives, tile.negatives


class ValidTriplet(Mining):
    """Pairs that could be in a triplet with a loss: "VTHM", also the mining of Multi-Similarity.

    A negative stays when it is nearer than the farthest positive, give or take ``margin``; a positive
    when it is farther than the nearest negative. Anchors without a positive (or a negative) keep nothing.

    Reference: A Unified View of Deep Metric Learning via Gradient Analysis, section 5.1.
    """

    name = "valid_triplet"
    bytes_per_pair = 4

    def __init__(self, *, margin: float = 0.1) -> None:
        self.margin = number("margin", margin)

    def select(self, tile: Tile) -> tuple[Tensor, Tensor]:
        sim = tile.similarity
        farthest_positive = masked(sim, tile.positives, math.inf).amin(dim=1, keepdim=True)
        nearest_negative = masked(sim, tile.negatives, -math.inf).amax(dim=1, keepdim=True)
        positives = tile.positives & (sim < nearest_negative + self.margin)
        return positives, tile.negatives & (sim > farthest_positive - self.margin)


class Paired(Mining):
    """A mining that chooses triplets; for losses of sets their members are the sets."""

    bytes_per_pair = 44

    @abstractmethod
    def triplets(self, tile: Tile) -> Triplets: ...

    def select(self, tile: Tile) -> tuple[Tensor, Tensor]:
        positive, negative, real = self.triplets(tile)
        width = tile.values.shape[1]
        return scatter_mask(positive, real, width), scatter_mask(negative, real, width)


class Hard(Paired):
    """The farthest positive with the nearest negative."""

    name = "hard"
    bytes_per_pair = 8

    def triplets(self, tile: Tile) -> Triplets:
        sim = tile.similarity
        far, positive = masked(sim, tile.positives, math.inf).min(dim=1, keepdim=True)
        near, negative = masked(sim, tile.negatives, -math.inf).max(dim=1, keepdim=True)
        return Triplets(positive, negative, (far < math.inf) & (near > -math.inf))


class SemiHard(Paired):
    """For each positive the nearest negative that is farther; where there is none, the farthest negative.

    Reference: FaceNet (Schroff et al., 2015); equation 2.20 of the thesis.
    """

    name = "semi_hard"

    def triplets(self, tile: Tile) -> Triplets:
        sim = tile.similarity
        positive, real = positive_columns(tile.positives)
        # Negatives from far to near, everything else behind them.
        ordered, order = masked(sim, tile.negatives, math.inf).sort(dim=1)
        farther = torch.searchsorted(ordered, sim.gather(1, positive).contiguous())
        negative = order.gather(1, (farther - 1).clamp_(min=0))
        return Triplets(positive, negative, real & (ordered[:, :1] < math.inf))


class Drawn(Paired):
    """For each positive a negative drawn at random."""

    draws = True

    @abstractmethod
    def steps(self, tile: Tile) -> Tensor:
        """How likely the negatives up to each column are, [a, n], up to a factor per row.

        In whole numbers: their running sum is exact, and has a deterministic form on a GPU.
        """

    def triplets(self, tile: Tile) -> Triplets:
        positive, real = positive_columns(tile.positives)
        steps = self.steps(tile)
        total = steps[:, -1:]
        ticket = (tile.uniform().gather(1, positive) * total).to(steps.dtype)
        negative = torch.searchsorted(steps, ticket, right=True).clamp_(max=steps.shape[1] - 1)
        # Without a chance there is no ticket, and rounding can push one past the last chance.
        return Triplets(positive, negative, real & (ticket < total))


class Random(Drawn):
    """For each positive any negative, all equally likely."""

    name = "random"

    def steps(self, tile: Tile) -> Tensor:
        return tile.negatives.cumsum(dim=1, dtype=torch.int32)


class DistanceWeighted(Drawn):
    """For each positive a negative drawn so that all distances are equally likely.

    Distances between random unit vectors pile up at √2 with density
    q(d) ∝ d^(D−2) (1 − d²/4)^((D−3)/2); a negative is drawn with probability ∝ 1/q(max(d, ``nearest``)),
    and never beyond ``farthest``.

    Reference: Sampling Matters in Deep Embedding Learning (Wu et al., 2017).
    """

    name = "distance_weighted"
    unit_only = True

    def __init__(self, *, nearest: float = 0.5, farthest: float = 1.4) -> None:
        self.nearest, self.farthest = number("nearest", nearest), number("farthest", farthest)
        if not 0 < self.nearest < self.farthest <= 2:
            raise ValueError(f"nearest={nearest}, farthest={farthest}; allowed is 0 < nearest < farthest ≤ 2")

    def steps(self, tile: Tile) -> Tensor:
        values, power = tile.values.detach(), tile.measure.power
        square = values * values if power == 1 else values if power == 2 else 2.0 - 2.0 * values
        eligible = tile.negatives & (square <= self.farthest**2)
        square = square.clamp(min=self.nearest**2, max=4.0 - 1e-6)  # d = 2 has no density at all
        rarity = -0.5 * ((tile.dim - 2) * square.log() + (tile.dim - 3) * torch.log1p(-0.25 * square))
        rarity = masked(rarity, eligible, FLOOR)
        return torch.softmax(rarity, dim=1).mul_(eligible).mul_(CERTAIN).long().cumsum(dim=1)


_MININGS = {mining.name: mining for mining in (All, SemiHard, Hard, DistanceWeighted, ValidTriplet, Random)}


def names() -> list[str]:
    """The minings there are."""
    return list(_MININGS)


def is_known(mining: Mining) -> bool:
    """Whether a mining is one of those, and not of somebody's own."""
    return type(mining) in _MININGS.values()


def create(mining: Choice, **settings: float) -> Mining:
    """A mining by name, with settings of its own, or by a table of both; a mining is returned as it is.

    >>> create("valid_triplet", margin=0.2)
    ValidTriplet(margin=0.2)
    >>> create({"name": "valid_triplet", "margin": 0.2})
    ValidTriplet(margin=0.2)
    """
    if isinstance(mining, Mapping):
        table = dict(mining)
        if "name" not in table:
            raise ValueError(f"mining is {table!r}; a table of a mining needs its name")
        return create(table.pop("name"), **(table | settings))
    if isinstance(mining, Mining):
        if settings:
            raise TypeError(
                f"mining is {mining!r}, which has its settings; {', '.join(settings)} goes with a name only"
            )
        return mining
    if mining not in _MININGS:
        raise ValueError(f"mining is {mining!r}; allowed are {', '.join(_MININGS)}")
    kind = _MININGS[mining]
    refuse_unknown(f"mining {mining}", settings, inspect.signature(kind).parameters)
    made: Mining = kind(**settings)
    return made
