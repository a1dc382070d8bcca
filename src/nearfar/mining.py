"""Minings: which pairs of an anchor's row a loss uses.

A mining selects some of the positives and negatives of a tile. Some minings choose sets (``select``); others choose
triplets (``triplets``), whose members are then the sets.

>>> import nearfar as nf
>>> loss = nf.losses.Raw(mining=nf.mining.create("valid_triplet", margin=0.2))
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Never

import torch
from torch import Tensor

from nearfar.engine import Tile, masked
from nearfar.engine.rows import FLOOR, positive_columns, scatter_mask
from nearfar.utils.registry import Registry
from nearfar.utils.validation import check_constructor, number, one_of

__all__ = [
    "All", "Choice", "DistanceWeighted", "Hard", "MinedTriplets", "Mining", "RandomNegative", "SemiHard",
    "TripletMining", "ValidTriplet", "create", "names",
]  # fmt: skip

PML_MINERS = {  # classes of pytorch-metric-learning, and ours
    "BatchHardMiner": "nf.mining.Hard",
    "DistanceWeightedMiner": "nf.mining.DistanceWeighted",
    "MultiSimilarityMiner": "nf.mining.ValidTriplet",
    "TripletMarginMiner": "nf.mining.SemiHard",
}
CERTAIN = 2.0**52  # the integer that stands for a probability of one: finer than the resolution of float32


class MinedTriplets(NamedTuple):
    """For each anchor, k pairs of a positive and a negative column, and which of them are valid."""

    positive: Tensor  # [a, k]
    negative: Tensor  # [a, k]
    valid: Tensor  # [a, k]


class Mining(ABC):
    """A selection of pairs.

    Every loss that accepts a mining also accepts one of your own: derive from this class and define ``select``.

    Attributes:
        name: Key of the mining.
        unit_only: Whether it needs unit vectors.
        draws: Whether it uses the random numbers of the tile.
        bytes_per_pair: Additional working memory for each entry of a float32 tile.
        cuda_graph: Declared by the class and not inherited: the selection depends on nothing but the tile and the
            public attributes, so it can be recorded as a CUDA graph together with its loss.

    Example:
        >>> class Similar(Mining):
        ...     def select(self, tile):
        ...         return tile.positives, tile.negatives & (tile.similarity > 0)
        >>> import nearfar as nf
        >>> nf.losses.Raw(mining=Similar()).mining
        Similar()
    """

    name: ClassVar[str] = "own"
    unit_only: ClassVar[bool] = False
    draws: ClassVar[bool] = False
    bytes_per_pair: ClassVar[int] = 0
    cuda_graph: ClassVar[bool] = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "cuda_graph" not in vars(cls):
            cls.cuda_graph = False
        check_constructor(cls)

    @abstractmethod
    def select(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Return the masks of the selected positives and negatives, [a, n] each.

        Args:
            tile: Some anchors against all columns.
        """

    def triplets(self, tile: Tile) -> MinedTriplets | None:
        """Return the selected triplets, or None for every triplet of the selected sets."""
        return None

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"


Choice = str | Mining | Mapping[str, Any]  # a name, a mining, or a table of a name and settings


class All(Mining):
    """Selects every pair, and every triplet where triplets are given."""

    name = "all"
    cuda_graph = True

    def select(self, tile: Tile) -> tuple[Tensor, Tensor]:
        return tile.positives, tile.negatives

    def triplets(self, tile: Tile) -> MinedTriplets | None:
        return None if tile.triplets is None else MinedTriplets(*tile.triplets)


class ValidTriplet(Mining):
    """Selects the pairs that can be in a triplet with a loss: "VTHM", also the mining of Multi-Similarity.

    A negative is selected if it is more similar than the least similar positive minus ``margin``; a positive if it is
    less similar than the most similar negative plus ``margin``. Anchors without a positive or without a negative get
    no pair.

    Args:
        margin: Tolerance of the comparisons.

    Reference:
        "A Unified View of Deep Metric Learning via Gradient Analysis", section 5.1.
    """

    name = "valid_triplet"
    cuda_graph = True
    bytes_per_pair = 4

    def __init__(self, *, margin: float = 0.1) -> None:
        self.margin = number("margin", margin)

    def select(self, tile: Tile) -> tuple[Tensor, Tensor]:
        sim = tile.similarity
        farthest_positive = masked(sim, tile.positives, math.inf).amin(dim=1, keepdim=True)
        nearest_negative = masked(sim, tile.negatives, -math.inf).amax(dim=1, keepdim=True)
        positives = tile.positives & (sim < nearest_negative + self.margin)
        return positives, tile.negatives & (sim > farthest_positive - self.margin)


class TripletMining(Mining):
    """A mining that selects triplets; for losses of sets, their members are the sets."""

    bytes_per_pair = 44

    @abstractmethod
    def triplets(self, tile: Tile) -> MinedTriplets:
        """Return the selected triplets."""

    def select(self, tile: Tile) -> tuple[Tensor, Tensor]:
        positive, negative, valid = self.triplets(tile)
        width = tile.values.shape[1]
        return scatter_mask(positive, valid, width), scatter_mask(negative, valid, width)


class Hard(TripletMining):
    """Selects the least similar positive with the most similar negative."""

    name = "hard"
    cuda_graph = True
    bytes_per_pair = 8

    def triplets(self, tile: Tile) -> MinedTriplets:
        sim = tile.similarity
        farthest, positive = masked(sim, tile.positives, math.inf).min(dim=1, keepdim=True)
        nearest, negative = masked(sim, tile.negatives, -math.inf).max(dim=1, keepdim=True)
        return MinedTriplets(positive, negative, (farthest < math.inf) & (nearest > -math.inf))


class SemiHard(TripletMining):
    """Selects, for each positive, the most similar negative that is less similar than the positive.

    Args:
        fallback: What a positive gets if no negative is less similar: "least_similar": the least similar negative;
            "none": nothing, so it is in no triplet, as printed in Thesis 2.20.

    Reference:
        Schroff et al., "FaceNet: A Unified Embedding for Face Recognition and Clustering", CVPR 2015. Thesis 2.20.
    """

    name = "semi_hard"
    cuda_graph = True

    def __init__(self, *, fallback: str = "least_similar") -> None:
        self.fallback = one_of("fallback", fallback, ("least_similar", "none"))

    def triplets(self, tile: Tile) -> MinedTriplets:
        sim = tile.similarity
        positive, filled = positive_columns(tile.positives)
        # Negatives in ascending order of similarity, everything else behind them.
        ordered, order = masked(sim, tile.negatives, math.inf).sort(dim=1)
        farther = torch.searchsorted(ordered, sim.gather(1, positive).contiguous())
        negative = order.gather(1, (farther - 1).clamp(min=0))
        has_negative = ordered[:, :1] < math.inf if self.fallback == "least_similar" else farther > 0
        return MinedTriplets(positive, negative, filled & has_negative)


class RandomTripletMining(TripletMining):
    """A mining that draws a random negative for each positive."""

    draws = True

    @abstractmethod
    def cumulative(self, tile: Tile) -> Tensor:
        """Return the cumulative probability of the negatives along each row, [a, n], up to a factor per row.

        As integers: their cumulative sum is exact and deterministic on a GPU.
        """

    def triplets(self, tile: Tile) -> MinedTriplets:
        positive, filled = positive_columns(tile.positives)
        cumulative = self.cumulative(tile)
        total = cumulative[:, -1:]
        drawn = (tile.uniform().gather(1, positive) * total).to(cumulative.dtype)
        negative = torch.searchsorted(cumulative, drawn, right=True).clamp_(max=cumulative.shape[1] - 1)
        # The total is 0 if there is no candidate, and rounding can move a number past the last candidate.
        return MinedTriplets(positive, negative, filled & (drawn < total))


class RandomNegative(RandomTripletMining):
    """Selects, for each positive, a random negative, all with equal probability."""

    name = "random"
    cuda_graph = True

    def cumulative(self, tile: Tile) -> Tensor:
        return tile.negatives.cumsum(dim=1, dtype=torch.int32)


class DistanceWeighted(RandomTripletMining):
    """Selects, for each positive, a random negative such that all distances have about the same probability.

    Distances between random unit vectors concentrate at √2, with the density q(d) ∝ d^(D−2) (1 − d²/4)^((D−3)/2). A
    negative is drawn with a probability ∝ 1/q(max(d, ``nearest``)), and never beyond ``farthest``.

    Args:
        nearest: Distances below this count as this.
        farthest: The largest distance of a negative.

    Reference:
        Wu et al., "Sampling Matters in Deep Embedding Learning", ICCV 2017.
    """

    name = "distance_weighted"
    cuda_graph = True
    unit_only = True

    def __init__(self, *, nearest: float = 0.5, farthest: float = 1.4) -> None:
        self.nearest, self.farthest = number("nearest", nearest), number("farthest", farthest)
        if not 0 < self.nearest < self.farthest <= 2:
            raise ValueError(f"nearest={nearest}, farthest={farthest}; allowed is 0 < nearest < farthest ≤ 2")

    def cumulative(self, tile: Tile) -> Tensor:
        values, power = tile.values.detach(), tile.measure.power
        square = values * values if power == 1 else values if power == 2 else 2.0 - 2.0 * values
        eligible = tile.negatives & (square <= self.farthest**2)
        square = square.clamp(min=self.nearest**2, max=4.0 - 1e-6)  # the density at d = 2 is 0
        rarity = -0.5 * ((tile.dim - 2) * square.log() + (tile.dim - 3) * torch.log1p(-0.25 * square))
        rarity = masked(rarity, eligible, FLOOR)
        return torch.softmax(rarity, dim=1).mul_(eligible).mul_(CERTAIN).long().cumsum(dim=1)


_MININGS: Registry[type[Mining]] = Registry("mining")
for _mining in (All, SemiHard, Hard, DistanceWeighted, ValidTriplet, RandomNegative):
    _MININGS.register(_mining.name, _mining)
names = _MININGS.names
"""Return the names of all minings, sorted."""


def is_known(mining: Mining) -> bool:
    """Whether a mining is one of those that ``names`` lists, and not a user's own."""
    return type(mining) in _MININGS.entries.values()


def create(mining: Choice, **settings: Any) -> Mining:
    """Create a mining.

    Args:
        mining: The name of a mining, a table of a name and settings, or a mining, which is returned as it is.
        **settings: Settings of the mining.

    Example:
        >>> create("valid_triplet", margin=0.2)
        ValidTriplet(margin=0.2)
        >>> create({"name": "valid_triplet", "margin": 0.2})
        ValidTriplet(margin=0.2)
    """
    if isinstance(mining, Mapping):
        table = dict(mining)
        if "name" not in table:
            raise ValueError(f"mining is {table!r}; a table must contain a name")
        return create(table.pop("name"), **(table | settings))
    if isinstance(mining, Mining):
        if settings:
            raise TypeError(
                f"mining is {mining!r}, which has its settings; {', '.join(settings)} is only allowed with a name"
            )
        return mining
    selected: Mining = _MININGS.create(mining, **settings)
    return selected


def __getattr__(name: str) -> Never:
    if name in PML_MINERS:
        raise AttributeError(f"{name} is a class of pytorch-metric-learning; nearfar has {PML_MINERS[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
