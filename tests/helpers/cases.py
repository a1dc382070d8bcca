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
    family: str = (
        "pair"  # compares twos (pair), threes (triple), fours (quadruple), with class vectors (proxy) or clusters
    )
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


def _cosine(key, *, mining="all", **settings):
    settings |= {} if mining == "all" else {"mining": MININGS.get(mining, mining)}
    return Case(key, settings, mining=mining)


def _triplet(*, mining="semi_hard", **settings):
    measure = MEASURES[settings.get("form", "cosine")]
    return Case(
        "triplet", settings | {"mining": MININGS.get(mining, mining)}, measure, settings.get("normalize", True), mining
    )


def _margin(*, mining="distance_weighted", **settings):
    return Case("margin", settings | {"mining": mining}, "euclidean", mining=mining)


def _distance(key, **settings):
    return Case(key, settings, "euclidean")


def _plain_distance(key, *, mining="all", **settings):
    settings |= {} if mining == "all" else {"mining": mining}
    return Case(key, settings, "euclidean", normalize=False, mining=mining)


def _snr(key, *, mining="all", **settings):
    return Case(key, {"form": "snr", "mining": mining} | settings, "snr", settings.get("normalize", True), mining)


def _n_pair(*, mining="all", **settings):
    paired = settings.get("form") == "pairs"
    return Case("n_pair", settings | {"mining": mining}, "dot", normalize=False, mining=mining, paired=paired)


def _proxy(key, **settings):
    return Case(key, settings, family="proxy")


def _adaface(**settings):
    return Case("adaface", settings, family="proxy", derivative=False)


def _group(**settings):
    return Case("group", settings, family="proxy", tiled=False)


def _clustering(key, *, twice=False, **settings):
    return Case(key, settings, family="clustering", tiled=False, twice=twice, waits=True)


def _smooth_ap(**settings):
    return Case("smooth_ap", settings, waits="max_positives" not in settings)


def _circle(*, mining="all", **settings):
    settings |= {} if mining == "all" else {"mining": mining}
    return Case("circle", settings, mining=mining, derivative=False)


def _fast_ap(**settings):
    return Case("fast_ap", settings, "squared_euclidean")


def _angular(**settings):
    return Case("angular", settings, family="triple", tiled=False)


def _views(key, **settings):
    return Case(key, settings, "squared_euclidean", normalize=False, family="triple", tiled=False)


def _nca(**settings):
    return Case("nca", settings, "squared_euclidean", normalize=settings.get("normalize", False))


def _hierarchical(**settings):
    return Case("hierarchical_triplet", settings, "squared_euclidean")


def _quadruplet(**settings):
    return Case("quadruplet", settings, "squared_euclidean", family="quadruple", tiled=False, waits=True)


def _ranked_list(**settings):
    derivative = settings.get("temperature") == 0
    return Case("ranked_list", settings, "euclidean", query_only=True, derivative=derivative)


CASES = [
    _cosine("contrastive"),
    _cosine("contrastive", margin=0.1, average="pairs"),
    _cosine("contrastive", margin=-1.0, mining="valid_triplet"),
    _cosine("contrastive", mining="semi_hard"),
    _cosine("contrastive", mining="semi_hard_or_none"),
    _cosine("contrastive", mining="hard", average="pairs"),
    _cosine("contrastive", mining="random"),
    _cosine("contrastive", mining="distance_weighted"),
    _distance("contrastive", form="distance"),
    _distance("contrastive", form="distance", margin=1.3, average="pairs"),
    _plain_distance("contrastive", form="distance", normalize=False),
    _plain_distance("contrastive", form="distance", normalize=False, margin=2.5, average="pairs"),
    _plain_distance("contrastive", form="distance", normalize=False, margin=2.0, mining="valid_triplet"),
    _plain_distance("contrastive", form="distance", normalize=False, margin=2.0, mining="semi_hard"),
    _snr("contrastive"),
    _snr("contrastive", margin=2.5, average="pairs"),
    _snr("contrastive", normalize=False, mining="semi_hard"),
    _snr("contrastive", normalize=False, margin=3.0, average="pairs"),
    Case("triplet", {}, mining="semi_hard"),
    _triplet(mining="all"),
    _triplet(mining="all", margin=0.6, average="active"),
    _triplet(mining="all", form="squared_distance"),
    _triplet(mining="all", form="squared_distance", margin=0.2, average="active"),
    _triplet(mining="hard", average="active"),
    _triplet(mining="all", form="distance", average="active"),
    _triplet(mining="all", form="distance", normalize=False, margin=0.5),
    _triplet(mining="hard", form="distance", soft_margin=True),
    _triplet(mining="valid_triplet", margin=0.2),
    _triplet(mining="semi_hard", form="squared_distance", average="active"),
    _triplet(mining="semi_hard_or_none"),
    _triplet(mining="semi_hard_or_none", form="squared_distance", normalize=False, average="active"),
    _triplet(mining="random"),
    _triplet(mining="distance_weighted", form="squared_distance"),
    _triplet(mining="semi_hard", form="squared_distance", normalize=False),
    _triplet(mining="all", form="squared_distance", normalize=False, margin=3.0, average="active"),
    _triplet(mining="hard", form="squared_distance", normalize=False),
    _triplet(mining="valid_triplet", form="squared_distance", normalize=False),
    _triplet(mining="random", form="squared_distance", normalize=False),
    _triplet(mining="all", soft_margin=True),
    _triplet(mining="all", soft_margin=True, form="squared_distance", normalize=False, margin=0.5, average="active"),
    _triplet(mining="semi_hard", soft_margin=True, margin=-0.3),
    _triplet(mining="hard", soft_margin=True, form="squared_distance", average="active"),
    _triplet(mining="valid_triplet", soft_margin=True, form="squared_distance"),
    _triplet(mining="random", soft_margin=True),
    _triplet(mining="distance_weighted", soft_margin=True, margin=0.2),
    _snr("triplet"),
    _snr("triplet", mining="semi_hard", average="active"),
    _snr("triplet", mining="hard", normalize=False, soft_margin=True),
    _snr("triplet", mining="valid_triplet", normalize=False, margin=0.5, average="active"),
    _plain_distance("lifted_structure"),
    _plain_distance("lifted_structure", margin=0.3),
    _plain_distance("lifted_structure", squared=False),
    _cosine("lifted_structure_generalized"),
    _cosine("lifted_structure_generalized", margin=-1.5),
    _cosine("lifted_structure_generalized", mining="hard"),
    _cosine("lifted_structure_generalized", mining="valid_triplet"),
    _cosine("lifted_structure_generalized", mining="random"),
    Case("n_pair", {}, "dot", normalize=False),
    _n_pair(l2=0.0),
    _n_pair(mining="semi_hard"),
    _n_pair(mining="hard", l2=0.1),
    _n_pair(mining="valid_triplet"),
    _n_pair(mining="random"),
    _n_pair(form="pairs"),
    _n_pair(form="pairs", l2=0.0),
    _n_pair(form="pairs", mining="valid_triplet"),
    _n_pair(form="joint"),
    _n_pair(form="joint", mining="hard", l2=0.0),
    _n_pair(form="joint", mining="semi_hard"),
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
    _plain_distance("nra"),
    _plain_distance("nra", alpha=1.0, epsilon=0.01),
    _plain_distance("nra", alpha=2.5),
    _plain_distance("nra", alpha=0.5),
    _circle(),
    _circle(margin=0.2, scale=8.0),
    _circle(margin=0.0),  # some weights are 0
    _circle(mining="hard"),
    _circle(mining="semi_hard", scale=16.0),
    _circle(mining="valid_triplet"),
    _circle(mining="random"),
    _circle(mining="distance_weighted"),
    _cosine("sup_con"),
    _cosine("sup_con", temperature=0.7),
    _cosine("sup_con", mining="semi_hard"),
    _cosine("sup_con", mining="hard"),
    _cosine("sup_con", mining="valid_triplet"),
    _cosine("sup_con", mining="random"),
    _cosine("nt_xent"),
    _cosine("nt_xent", temperature=0.5),
    _cosine("nt_xent", mining="semi_hard"),
    _cosine("nt_xent", mining="hard"),
    _cosine("nt_xent", mining="valid_triplet"),
    _cosine("nt_xent", mining="distance_weighted"),
    _cosine("nt_xent", symmetric=True),
    _cosine("nt_xent", learn_temperature=True, mining="valid_triplet"),
    _cosine("nt_xent", symmetric=True, learn_temperature=True, temperature=0.2),
    _nca(),
    _nca(form="probability", scale=0.5),
    _nca(normalize=True, scale=10.0),
    _cosine("tuplet_margin"),
    _cosine("tuplet_margin", slack=0.4, scale=8.0),
    _cosine("tuplet_margin", slack=0.0, mining="valid_triplet"),
    _cosine("threshold_consistent_margin"),
    _cosine("threshold_consistent_margin", positive_margin=0.6, negative_margin=0.1),
    _cosine("threshold_consistent_margin", positive_weight=2.0, negative_weight=0.5),
    _cosine("cosent"),
    _cosine("cosent", scale=3.0),
    _cosine("cosent", scale=3.0, graded=True),
    _angular(),
    _angular(angle=15.0),
    _angular(angle=70.0),
    _views("vicreg"),
    _views("vicreg", invariance=3.0, variance=2.0, covariance=4.0),
    _views("barlow_twins"),
    _views("barlow_twins", redundancy=0.4),
    _hierarchical(),
    _hierarchical(margin=0.5, num_classes=5),
    _hierarchical(num_classes=5, levels=4),
    _quadruplet(),
    _quadruplet(margin=0.3, second_margin=0.8),
    _cosine("histogram"),
    _cosine("histogram", bins=7),
    _cosine("histogram", bins=1),
    _smooth_ap(),
    _smooth_ap(temperature=0.2),
    _smooth_ap(temperature=0.2, max_positives=100),
    _fast_ap(),
    _fast_ap(bins=25),
    _fast_ap(bins=1),
    _proxy("softmax"),
    _proxy("softmax", sample_rate=0.65),
    _proxy("normalized_softmax"),
    _proxy("normalized_softmax", temperature=0.5),
    _proxy("normalized_softmax", sample_rate=0.1),
    _proxy("proxy_nca"),
    _proxy("proxy_nca", scale=3.0, include_positive=True),
    _proxy("proxy_nca", sample_rate=0.65),
    _proxy("proxy_nca", include_positive=True, sample_rate=0.9),
    _proxy("proxy_nca", normalize=False, scale=2.0),
    _proxy("proxy_nca", measure="dot", normalize=False, scale=1.0),
    _proxy("proxy_nca", measure="dot", scale=3.0, sample_rate=0.65),
    _proxy("proxy_nca", measure="euclidean", scale=1.0),
    _proxy("proxy_nca", measure="euclidean", normalize=False, scale=2.0, include_positive=True),
    _proxy("proxy_nca", measure="euclidean", normalize=False, sample_rate=0.65, scale=1.0),
    _proxy("proxy_nca", assignment="dynamic"),
    _proxy("proxy_nca", assignment="dynamic", measure="euclidean", normalize=False, scale=1.0, num_proxies=3),
    _proxy("proxy_nca", assignment="dynamic", measure="dot", scale=2.0, include_positive=True, num_proxies=5),
    _proxy("arcface"),
    _proxy("arcface", margin=0.2, scale=8.0),
    _proxy("arcface", margin=1.5, scale=4.0),  # nearly half of all angles are beyond π − margin
    _proxy("arcface", sample_rate=0.65),
    _proxy("arcface", centers=3),
    _proxy("arcface", centers=2, margin=1.5, scale=4.0, sample_rate=0.65),
    _proxy("cosface"),
    _proxy("cosface", margin=0.1, scale=8.0),
    _proxy("cosface", sample_rate=0.65),
    _proxy("sphereface"),
    _proxy("sphereface", margin=3, scale=8.0),
    _proxy("sphereface", margin=2, sample_rate=0.65),
    _adaface(),
    _adaface(margin=1.2, concentration=2.0, scale=8.0),  # many angles are beyond 0 or π
    _adaface(sample_rate=0.65, momentum=0.5),
    Case("center", {}, family="proxy", tiled=False),
    _proxy("soft_triple"),
    _proxy("soft_triple", centers=3, alpha=5.0, gamma=2.0, tau=1.0, margin=0.01),
    _proxy("soft_triple", centers=1),
    _proxy("soft_triple", centers=2, sample_rate=0.65),
    _proxy("proxy_anchor"),
    _proxy("proxy_anchor", alpha=8.0, margin=0.3),
    _proxy("proxy_repel"),
    _proxy("proxy_repel", alpha=8.0, margin=0.3),
    _proxy("proxy_repel", through_batch=True),
    _proxy("proxy_repel", through_batch=True, alpha=0.5),
    _proxy("proxy_repel", repelled="absent", alpha=8.0),
    _proxy("proxy_repel", repelled="absent", through_batch=True, alpha=0.5),
    _group(),
    _group(iterations=1, anchors_per_class=0),
    _group(iterations=3, temperature=0.5, anchors_per_class=2),
    _group(keep_diagonal=True, average_over="all"),
    _group(classification_weight=0.5),
    _group(similarity="cosine"),
    _group(similarity="gaussian"),
    _group(similarity="gaussian", bandwidth=0.5, keep_diagonal=True),
    _group(similarity="learned"),
    _clustering("spectral_clustering"),
    _clustering("facility_location", twice=True),
    _clustering("facility_location", twice=True, gamma=10.0),
    _clustering("facility_location", twice=True, gamma=0.1, refinements=0),
]

# One case for each loss with its defaults, for checks that are slow or do not depend on the settings.
DEFAULTS = [next(case for case in CASES if case.key == key) for key in dict.fromkeys(case.key for case in CASES)]
