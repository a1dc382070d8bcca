"""What the battery runs: every registered loss, one line for each way of using it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import nearfar as nf
from nearfar.losses.triplet import MEASURES

RANDOM_MININGS = ("random", "distance_weighted")
MININGS = {"semi_hard_or_none": {"name": "semi_hard", "fallback": "none"}}  # by the names of the oracles
CLASSES = 20  # more than a batch has embeddings, so that there are classes to leave out


def create(key, settings, *, dim=4, num_classes=CLASSES):
    """A loss by key; one with class vectors has as many and as long ones as asked for, the same every time.

    It is in evaluation mode, so that running statistics of earlier batches have no effect.
    """
    sizes = {"num_classes": num_classes, "dim": dim}
    required = [name for name, default in nf.losses.defaults(key).items() if default is inspect.Parameter.empty]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nf.losses.create(key, **{name: sizes[name] for name in required} | dict(settings)).eval()


@dataclass(frozen=True)
class Case:
    """A loss with settings, and what the tests have to know of it."""

    key: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    measure: str = "cosine"  # how it compares two embeddings
    normalize: bool = True  # whether they are scaled to length one first
    mining: str = "all"  # what it mines with, given or by default
    mining_margin: float = 0.1  # of valid_triplet
    query_only: bool = False  # whether columns are constants
    derivative: bool = True  # whether the gradient is the derivative of the value (with a constant gallery)
    paired: bool = False  # whether only the first two embeddings of a class are used, so that their order matters
    family: str = "pair"  # compares twos, threes (triple), fours (quadruple), with class vectors (proxy) or clusters
    tiled: bool = True  # whether a memory budget settles how much is computed at once
    twice: bool = False  # whether the gradient can be differentiated again
    waits: bool = False  # whether it makes the host wait for a GPU

    @property
    def id(self):
        settings = ",".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.key}({settings})"

    @property
    def draws(self):
        """What it draws at random: pairs, the anchors of a group, or classes."""
        if self.mining in RANDOM_MININGS:
            return "pairs"
        if self.key == "group":
            return "anchors"
        return "classes" if self.settings.get("sample_rate", 1.0) < 1 else None

    @property
    def random(self):
        return self.draws is not None

    @property
    def label_count(self):
        """How many classes there may be; None: labels are any whole numbers."""
        return CLASSES if self.family == "proxy" else self.settings.get("num_classes")

    def create(self, *, dim=4, num_classes=CLASSES):
        return create(self.key, self.settings, dim=dim, num_classes=num_classes)


RAW = {"measure": "euclidean", "normalize": False}
VIEWS = {"measure": "squared_euclidean", "normalize": False, "family": "triple", "tiled": False}
CLUSTERS = {"family": "clustering", "tiled": False, "waits": True}
# What the tests have to know of a loss, unless it compares cosines of pairs, or it is one with class vectors.
KINDS = {
    "triplet": {"mining": "semi_hard"},
    "multi_similarity": {"mining": "valid_triplet"},
    "margin": {"measure": "euclidean", "mining": "distance_weighted"},
    "lifted_structure": RAW,
    "nra": RAW,
    "n_pair": {"measure": "dot", "normalize": False},
    "nca": {"measure": "squared_euclidean", "normalize": False},
    "fast_ap": {"measure": "squared_euclidean"},
    "hierarchical_triplet": {"measure": "squared_euclidean"},
    "ranked_list": {"measure": "euclidean", "query_only": True},
    "circle": {"derivative": False},
    "angular": {"family": "triple", "tiled": False},
    "vicreg": VIEWS,
    "barlow_twins": VIEWS,
    "quadruplet": {"measure": "squared_euclidean", "family": "quadruple", "tiled": False, "waits": True},
    "adaface": {"derivative": False},
    "center": {"tiled": False},
    "group": {"tiled": False},
    "spectral_clustering": CLUSTERS,
    "facility_location": {**CLUSTERS, "twice": True},
}


def loss(key, *, mining=None, **settings):
    """A loss with settings, as a case; a mining by its name among the oracles."""
    kind = {"family": "proxy"} if issubclass(nf.losses.get(key), nf.losses.ProxyLoss) else {}
    kind |= KINDS.get(key, {})
    if mining is not None:
        kind["mining"], settings["mining"] = mining, MININGS.get(mining, mining)
    if key in ("contrastive", "triplet"):
        kind["measure"] = MEASURES[settings.get("form", "cosine")]
    if key == "ranked_list":
        kind["derivative"] = settings.get("temperature") == 0
    if key == "smooth_ap":
        kind["waits"] = "max_positives" not in settings
    kind["normalize"] = settings.get("normalize", kind.get("normalize", True))
    kind["mining_margin"] = settings.get("epsilon", 0.1)
    return Case(key, settings, paired=settings.get("form") == "pairs", **kind)


def mined(key, *minings):
    """The same loss with several minings."""
    return [loss(key, mining=mining) for mining in minings]


CASES = [
    loss("contrastive"),
    loss("contrastive", margin=0.1, average="pairs"),
    loss("contrastive", margin=-1.0, mining="valid_triplet"),
    *mined("contrastive", "semi_hard", "semi_hard_or_none", "random", "distance_weighted"),
    loss("contrastive", mining="hard", average="pairs"),
    loss("contrastive", form="distance"),
    loss("contrastive", form="distance", margin=1.3, average="pairs"),
    loss("contrastive", form="distance", normalize=False),
    loss("contrastive", form="distance", normalize=False, margin=2.5, average="pairs"),
    loss("contrastive", form="distance", normalize=False, margin=2.0, mining="valid_triplet"),
    loss("contrastive", form="distance", normalize=False, margin=2.0, mining="semi_hard"),
    loss("contrastive", form="snr"),
    loss("contrastive", form="snr", margin=2.5, average="pairs"),
    loss("contrastive", form="snr", normalize=False, mining="semi_hard"),
    loss("contrastive", form="snr", normalize=False, margin=3.0, average="pairs"),
    loss("triplet"),
    loss("triplet", mining="all"),
    loss("triplet", mining="all", margin=0.6, average="active"),
    loss("triplet", mining="all", form="squared_distance"),
    loss("triplet", mining="all", form="squared_distance", margin=0.2, average="active"),
    loss("triplet", mining="hard", average="active"),
    loss("triplet", mining="all", form="distance", average="active"),
    loss("triplet", mining="all", form="distance", normalize=False, margin=0.5),
    loss("triplet", mining="hard", form="distance", soft_margin=True),
    loss("triplet", mining="valid_triplet", margin=0.2),
    loss("triplet", mining="semi_hard", form="squared_distance", average="active"),
    loss("triplet", mining="semi_hard_or_none"),
    loss("triplet", mining="semi_hard_or_none", form="squared_distance", normalize=False, average="active"),
    loss("triplet", mining="random"),
    loss("triplet", mining="distance_weighted", form="squared_distance"),
    loss("triplet", mining="semi_hard", form="squared_distance", normalize=False),
    loss("triplet", mining="all", form="squared_distance", normalize=False, margin=3.0, average="active"),
    loss("triplet", mining="hard", form="squared_distance", normalize=False),
    loss("triplet", mining="valid_triplet", form="squared_distance", normalize=False),
    loss("triplet", mining="random", form="squared_distance", normalize=False),
    loss("triplet", mining="all", soft_margin=True),
    loss(
        "triplet",
        mining="all",
        soft_margin=True,
        form="squared_distance",
        normalize=False,
        margin=0.5,
        average="active",
    ),
    loss("triplet", mining="semi_hard", soft_margin=True, margin=-0.3),
    loss("triplet", mining="hard", soft_margin=True, form="squared_distance", average="active"),
    loss("triplet", mining="valid_triplet", soft_margin=True, form="squared_distance"),
    loss("triplet", mining="random", soft_margin=True),
    loss("triplet", mining="distance_weighted", soft_margin=True, margin=0.2),
    loss("triplet", form="snr", mining="all"),
    loss("triplet", form="snr", mining="semi_hard", average="active"),
    loss("triplet", form="snr", mining="hard", normalize=False, soft_margin=True),
    loss("triplet", form="snr", mining="valid_triplet", normalize=False, margin=0.5, average="active"),
    loss("lifted_structure"),
    loss("lifted_structure", margin=0.3),
    loss("lifted_structure", squared=False),
    loss("lifted_structure_generalized"),
    loss("lifted_structure_generalized", margin=-1.5),
    *mined("lifted_structure_generalized", "hard", "valid_triplet", "random"),
    loss("n_pair"),
    loss("n_pair", l2=0.0),
    *mined("n_pair", "semi_hard", "valid_triplet", "random"),
    loss("n_pair", mining="hard", l2=0.1),
    loss("n_pair", form="pairs"),
    loss("n_pair", form="pairs", l2=0.0),
    loss("n_pair", form="pairs", mining="valid_triplet"),
    loss("n_pair", form="joint"),
    loss("n_pair", form="joint", mining="hard", l2=0.0),
    loss("n_pair", form="joint", mining="semi_hard"),
    loss("margin"),
    *mined("margin", "all", "hard", "valid_triplet"),
    loss("margin", mining="all", margin=0.5, beta=0.9, nu=0.3),
    loss("margin", mining="all", num_classes=5, nu=0.1),
    loss("margin", mining="semi_hard", num_classes=5),
    loss("margin", mining="random", num_classes=5),
    loss("binomial_deviance"),
    loss("binomial_deviance", alpha=4.0, beta=10.0, base=0.2),
    *mined("binomial_deviance", "valid_triplet", "semi_hard", "distance_weighted"),
    loss("raw"),
    loss("raw", alpha=5.0, beta=20.0, base=0.1),
    *mined("raw", "valid_triplet", "semi_hard", "hard", "distance_weighted"),
    loss("multi_similarity"),
    loss("multi_similarity", alpha=4.0, beta=30.0, base=0.2, epsilon=0.3),
    loss("ranked_list"),
    loss("ranked_list", temperature=0.0),
    loss("ranked_list", alpha=1.1, margin=0.6, balance=0.5),
    loss("ranked_list", query_weighting="violation"),
    loss("nra"),
    loss("nra", alpha=1.0, epsilon=0.01),
    loss("nra", alpha=2.5),
    loss("nra", alpha=0.5),
    loss("circle"),
    loss("circle", margin=0.2, scale=8.0),
    loss("circle", margin=0.0),  # some weights are 0
    *mined("circle", "hard", "valid_triplet", "random", "distance_weighted"),
    loss("circle", mining="semi_hard", scale=16.0),
    loss("sup_con"),
    loss("sup_con", temperature=0.7),
    *mined("sup_con", "semi_hard", "hard", "valid_triplet", "random"),
    loss("nt_xent"),
    loss("nt_xent", temperature=0.5),
    *mined("nt_xent", "semi_hard", "hard", "valid_triplet", "distance_weighted"),
    loss("nt_xent", symmetric=True),
    loss("nt_xent", learn_temperature=True, mining="valid_triplet"),
    loss("nt_xent", symmetric=True, learn_temperature=True, temperature=0.2),
    loss("nca"),
    loss("nca", form="probability", scale=0.5),
    loss("nca", normalize=True, scale=10.0),
    loss("tuplet_margin"),
    loss("tuplet_margin", slack=0.4, scale=8.0),
    loss("tuplet_margin", slack=0.0, mining="valid_triplet"),
    loss("threshold_consistent_margin"),
    loss("threshold_consistent_margin", positive_margin=0.6, negative_margin=0.1),
    loss("threshold_consistent_margin", positive_weight=2.0, negative_weight=0.5),
    loss("cosent"),
    loss("cosent", scale=3.0),
    loss("cosent", scale=3.0, graded=True),
    loss("angular"),
    loss("angular", angle=15.0),
    loss("angular", angle=70.0),
    loss("vicreg"),
    loss("vicreg", invariance=3.0, variance=2.0, covariance=4.0),
    loss("barlow_twins"),
    loss("barlow_twins", redundancy=0.4),
    loss("hierarchical_triplet"),
    loss("hierarchical_triplet", margin=0.5, num_classes=5),
    loss("hierarchical_triplet", num_classes=5, levels=4),
    loss("quadruplet"),
    loss("quadruplet", margin=0.3, second_margin=0.8),
    loss("histogram"),
    loss("histogram", bins=7),
    loss("histogram", bins=1),
    loss("smooth_ap"),
    loss("smooth_ap", temperature=0.2),
    loss("smooth_ap", temperature=0.2, max_positives=100),
    loss("fast_ap"),
    loss("fast_ap", bins=25),
    loss("fast_ap", bins=1),
    loss("softmax"),
    loss("softmax", sample_rate=0.65),
    loss("normalized_softmax"),
    loss("normalized_softmax", temperature=0.5),
    loss("normalized_softmax", sample_rate=0.1),
    loss("proxy_nca"),
    loss("proxy_nca", scale=3.0, include_positive=True),
    loss("proxy_nca", sample_rate=0.65),
    loss("proxy_nca", include_positive=True, sample_rate=0.9),
    loss("proxy_nca", normalize=False, scale=2.0),
    loss("proxy_nca", measure="dot", normalize=False, scale=1.0),
    loss("proxy_nca", measure="dot", scale=3.0, sample_rate=0.65),
    loss("proxy_nca", measure="euclidean", scale=1.0),
    loss("proxy_nca", measure="euclidean", normalize=False, scale=2.0, include_positive=True),
    loss("proxy_nca", measure="euclidean", normalize=False, sample_rate=0.65, scale=1.0),
    loss("proxy_nca", assignment="dynamic"),
    loss("proxy_nca", assignment="dynamic", measure="euclidean", normalize=False, scale=1.0, num_proxies=3),
    loss("proxy_nca", assignment="dynamic", measure="dot", scale=2.0, include_positive=True, num_proxies=5),
    loss("arcface"),
    loss("arcface", margin=0.2, scale=8.0),
    loss("arcface", margin=1.5, scale=4.0),  # nearly half of all angles are beyond π − margin
    loss("arcface", sample_rate=0.65),
    loss("arcface", centers=3),
    loss("arcface", centers=2, margin=1.5, scale=4.0, sample_rate=0.65),
    loss("cosface"),
    loss("cosface", margin=0.1, scale=8.0),
    loss("cosface", sample_rate=0.65),
    loss("sphereface"),
    loss("sphereface", margin=3, scale=8.0),
    loss("sphereface", margin=2, sample_rate=0.65),
    loss("adaface"),
    loss("adaface", margin=1.2, concentration=2.0, scale=8.0),  # many angles are beyond 0 or π
    loss("adaface", sample_rate=0.65, momentum=0.5),
    loss("center"),
    loss("soft_triple"),
    loss("soft_triple", centers=3, alpha=5.0, gamma=2.0, tau=1.0, margin=0.01),
    loss("soft_triple", centers=1),
    loss("soft_triple", centers=2, sample_rate=0.65),
    loss("proxy_anchor"),
    loss("proxy_anchor", alpha=8.0, margin=0.3),
    loss("proxy_repel"),
    loss("proxy_repel", alpha=8.0, margin=0.3),
    loss("proxy_repel", through_batch=True),
    loss("proxy_repel", through_batch=True, alpha=0.5),
    loss("proxy_repel", repelled="absent", alpha=8.0),
    loss("proxy_repel", repelled="absent", through_batch=True, alpha=0.5),
    loss("group"),
    loss("group", iterations=1, anchors_per_class=0),
    loss("group", iterations=3, temperature=0.5, anchors_per_class=2),
    loss("group", keep_diagonal=True, average_over="all"),
    loss("group", classification_weight=0.5),
    loss("group", similarity="cosine"),
    loss("group", similarity="gaussian"),
    loss("group", similarity="gaussian", bandwidth=0.5, keep_diagonal=True),
    loss("group", similarity="learned"),
    loss("spectral_clustering"),
    loss("facility_location"),
    loss("facility_location", gamma=10.0),
    loss("facility_location", gamma=0.1, refinements=0),
]

# One case for each loss with its defaults, for checks that are slow or do not depend on the settings.
DEFAULTS = [next(case for case in CASES if case.key == key) for key in dict.fromkeys(case.key for case in CASES)]
