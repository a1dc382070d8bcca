"""What the battery runs: every registered loss, one line for each way of using it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import nearfar as nf
from nearfar.losses import PairLoss

RANDOM_MININGS = ("random", "distance_weighted")


@dataclass(frozen=True)
class Case:
    """A loss with settings, and what the tests have to know of it."""

    key: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    measure: str = "cosine"  # how it compares two embeddings
    raw: bool = False  # whether it takes them as they are
    mining: str = "all"  # what it mines with, given or by default
    mining_margin: float = 0.1  # of valid_triplet
    query_only: bool = False  # whether columns are constants
    derivative: bool = True  # whether the gradient is the derivative of the value (with a constant gallery)

    @property
    def id(self) -> str:
        settings = ",".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.key}({settings})"

    @property
    def random(self) -> bool:
        return self.mining in RANDOM_MININGS

    @property
    def label_count(self) -> int | None:
        """How many classes there may be; None: labels are any whole numbers."""
        return self.settings.get("num_classes")

    def create(self) -> PairLoss:
        loss = nf.losses.create(self.key, **self.settings)
        assert isinstance(loss, PairLoss)
        return loss


def _cosine(key: str, *, mining: str = "all", **settings: Any) -> Case:
    return Case(key, settings if mining == "all" else settings | {"mining": mining}, mining=mining)


def _triplet(*, mining: str = "semi_hard", **settings: Any) -> Case:
    measure = "squared_euclidean" if settings.get("form") == "squared_distance" else "cosine"
    return Case("triplet", settings | {"mining": mining}, measure, mining=mining)


def _margin(*, mining: str = "distance_weighted", **settings: Any) -> Case:
    return Case("margin", settings | {"mining": mining}, "euclidean", mining=mining)


def _distance(key: str, **settings: Any) -> Case:
    return Case(key, settings, "euclidean")


def _raw_distance(key: str, **settings: Any) -> Case:
    return Case(key, settings, "euclidean", raw=True)


def _n_pair(*, mining: str = "all", **settings: Any) -> Case:
    return Case("n_pair", settings | {"mining": mining}, "dot", raw=True, mining=mining)


def _ranked_list(**settings: Any) -> Case:
    derivative = settings.get("temperature") == 0
    return Case("ranked_list", settings, "euclidean", query_only=True, derivative=derivative)


CASES = [
    _cosine("contrastive"),
    _cosine("contrastive", margin=0.1, average="pairs"),
    _cosine("contrastive", margin=-1.0, mining="valid_triplet"),
    _cosine("contrastive", mining="semi_hard"),
    _cosine("contrastive", mining="hard", average="pairs"),
    _cosine("contrastive", mining="random"),
    _cosine("contrastive", mining="distance_weighted"),
    _distance("contrastive", form="distance"),
    _distance("contrastive", form="distance", margin=1.3, average="pairs"),
    Case("triplet", {}, mining="semi_hard"),
    _triplet(mining="all"),
    _triplet(mining="all", margin=0.6, average="active"),
    _triplet(mining="all", form="squared_distance"),
    _triplet(mining="all", form="squared_distance", margin=0.2, average="active"),
    _triplet(mining="hard", average="active"),
    _triplet(mining="valid_triplet", margin=0.2),
    _triplet(mining="semi_hard", form="squared_distance", average="active"),
    _triplet(mining="random"),
    _triplet(mining="distance_weighted", form="squared_distance"),
    _raw_distance("lifted_structure"),
    _raw_distance("lifted_structure", margin=0.3),
    _raw_distance("lifted_structure", squared=False),
    _cosine("lifted_structure_generalized"),
    _cosine("lifted_structure_generalized", margin=-1.5),
    _cosine("lifted_structure_generalized", mining="hard"),
    _cosine("lifted_structure_generalized", mining="valid_triplet"),
    _cosine("lifted_structure_generalized", mining="random"),
    Case("n_pair", {}, "dot", raw=True),
    _n_pair(l2=0.0),
    _n_pair(mining="semi_hard"),
    _n_pair(mining="hard", l2=0.1),
    _n_pair(mining="valid_triplet"),
    _n_pair(mining="random"),
    Case("margin", {}, "euclidean", mining="distance_weighted"),
    _margin(mining="all"),
    _margin(mining="all", margin=0.5, beta=0.9, nu=0.3),
    _margin(mining="all", num_classes=5, nu=0.1),
    _margin(mining="semi_hard", num_classes=5),
    _margin(mining="hard"),
    _margin(mining="valid_triplet"),
    _margin(mining="random", num_classes=5),
    _cosine("binomial_deviance"),
    _cosine("binomial_deviance", alpha=4.0, beta=10.0, base=0.2),
    _cosine("binomial_deviance", mining="valid_triplet"),
    _cosine("binomial_deviance", mining="semi_hard"),
    _cosine("binomial_deviance", mining="distance_weighted"),
    _cosine("raw"),
    _cosine("raw", alpha=5.0, beta=20.0, base=0.1),
    _cosine("raw", mining="valid_triplet"),
    _cosine("raw", mining="semi_hard"),
    _cosine("raw", mining="hard"),
    _cosine("raw", mining="distance_weighted"),
    Case("multi_similarity", {}, mining="valid_triplet"),
    Case(
        "multi_similarity",
        {"alpha": 4.0, "beta": 30.0, "base": 0.2, "epsilon": 0.3},
        mining="valid_triplet",
        mining_margin=0.3,
    ),
    _ranked_list(),
    _ranked_list(temperature=0.0),
    _ranked_list(alpha=1.1, margin=0.6, balance=0.5),
    _ranked_list(query_weighting="violation"),
    _raw_distance("nra"),
    _raw_distance("nra", alpha=1.0, epsilon=0.01),
    _raw_distance("nra", alpha=2.5),
]

# One case for each loss with its defaults, for checks that are slow or do not depend on the settings.
DEFAULTS = [next(case for case in CASES if case.key == key) for key in dict.fromkeys(case.key for case in CASES)]
