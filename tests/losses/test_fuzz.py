"""The search for NaN: settings and batches far beyond what anybody trains with."""

import inspect
import os
from random import Random

import pytest
import torch
from cases import create
from checks import assert_finite, run

import nearfar as nf
from nearfar.losses import ProxyLoss

BATCHES = int(os.environ.get("NEARFAR_FUZZ", "300"))  # for each loss

EITHER = (False, True)
MINING = tuple(nf.mining.names())
SHARPNESS = (1e-3, 1.0, 2.0, 50.0, 1000.0)
COMMON = {  # what a setting of a name may be in any loss; those that are True or False are both
    "alpha": SHARPNESS,
    "beta": SHARPNESS,
    "scale": SHARPNESS,
    "temperature": (1e-6, 1e-3, 0.1, 1.0, 100.0),
    "base": (-1.0, 0.0, 0.5, 1.0, 30.0),
    "margin": (-2.0, -0.5, 0.0, 0.1, 1.0, 100.0),
    "sample_rate": (0.01, 0.5, 1.0),
    "mining": MINING,
}
FUZZ = {  # and what it may be in one
    "contrastive": {
        "form": ("cosine", "distance", "snr"), "margin": (0.0, 0.5, 1.0, 100.0), "average": ("anchors", "pairs"),
    },
    "triplet": {"form": ("cosine", "distance", "squared_distance", "snr"), "average": ("all", "active")},
    "n_pair": {
        "form": ("per_positive", "pairs", "joint"), "l2": (0.0, 0.02, 1.0),
        "mining": tuple(name for name in MINING if name != "distance_weighted"),
    },
    "margin": {
        "margin": (0.0, 0.2, 10.0), "beta": (-10.0, 0.0, 1.2, 10.0), "num_classes": (None, 12), "nu": (0.0, 1.0),
    },
    "multi_similarity": {"epsilon": COMMON["margin"]},
    "ranked_list": {
        "alpha": (0.01, 1.2, 2.0, 100.0), "margin": (0.0, 0.4, 10.0), "temperature": (0.0, 10.0, 1000.0),
        "balance": (0.0, 1.0, 100.0), "query_weighting": ("mean", "violation"),
    },
    "nra": {"alpha": (0.5, 1.0, 4.0, 50.0, 1000.0), "epsilon": (1e-4, 1.0)},
    "circle": {"margin": (0.0, 0.4, 1.0)},
    "nca": {"form": ("log", "probability")},
    "tuplet_margin": {"slack": (0.0, 0.1, 1.57)},
    "threshold_consistent_margin": {
        "positive_margin": (-1.0, 0.9, 1.0), "negative_margin": (-1.0, 0.5, 1.0),
        "positive_weight": (0.0, 1.0, 100.0), "negative_weight": (0.0, 1.0, 100.0),
    },
    "cosent": {"scale": (1e-3, 1.0, 20.0, 40.0)},
    "vicreg": {"invariance": (0.0, 25.0), "variance": (0.0, 25.0), "covariance": (0.0, 1.0)},
    "barlow_twins": {"redundancy": (0.0, 0.005, 100.0)},
    "angular": {"angle": (0.01, 15.0, 40.0, 70.0)},
    "hierarchical_triplet": {"num_classes": (None, 12), "levels": (1, 16)},
    "quadruplet": {"second_margin": COMMON["margin"]},
    "histogram": {"bins": (1, 2, 100, 5000)},
    "smooth_ap": {"max_positives": (None, 10_000)},
    "fast_ap": {"bins": (1, 2, 10, 5000)},
    "proxy_nca": {
        "measure": ("squared_euclidean", "euclidean", "dot"), "assignment": ("static", "dynamic"),
        "num_proxies": (None, 1, 20),
    },
    "arcface": {"centers": (1, 3), "margin": (0.0, 0.5, 1.0, 1.57)},
    "cosface": {"margin": (0.0, 0.35, 100.0)},
    "sphereface": {"margin": (1, 2, 4, 9), "scale": (None, *SHARPNESS)},
    "adaface": {"margin": (0.0, 0.4, 1.57), "concentration": (1e-3, 0.333, 100.0), "momentum": (0.0, 0.99)},
    "soft_triple": {
        "centers": (1, 2, 10), "gamma": (0.0, 10.0, 1000.0), "tau": (0.0, 0.2, 100.0), "margin": (0.0, 0.1, 100.0),
    },
    "proxy_repel": {"repelled": ("all", "absent")},
    "group": {
        "iterations": (1, 2, 20), "anchors_per_class": (0, 1, 5), "bandwidth": (0.01, 1.0, 1000.0),
        "similarity": ("correlation", "cosine", "gaussian", "learned"), "average_over": ("rest", "all"),
        "classification_weight": (0.0, 1.0),
    },
    "facility_location": {"gamma": (0.0, 1.0, 1000.0), "refinements": (0, 1, 5)},
}  # fmt: skip


def choices(key):
    """What each setting of a loss may be; learning rates have nothing to do with its value."""
    settings = {
        name: default
        for name, default in nf.losses.defaults(key).items()
        if default is not inspect.Parameter.empty and name not in ("beta_lr", "lr_multiplier")
    }
    ranges = COMMON | {name: EITHER for name, default in settings.items() if isinstance(default, bool)}
    ranges |= FUZZ.get(key, {})
    return {name: ranges[name] for name in settings}


MAGNITUDES = (1e-20, 1e-10, 1e-3, 1.0, 1e3, 1e8, 1e15)


def fuzz_batch(draw):
    """A small float32 batch with copies, opposites, zeros and lengths of all magnitudes."""
    m, dim = draw.randint(1, 12), draw.randint(1, 4)
    generator = torch.Generator().manual_seed(draw.randrange(2**32))
    embeddings = torch.randn(m, dim, generator=generator)
    kind = draw.choice(["plain", "copies", "opposites", "zeros", "grid", "one point"])
    some = torch.rand(m, generator=generator) < 0.5
    if kind == "copies":
        embeddings[some] = embeddings[0].clone()
    elif kind == "opposites":
        embeddings[some] = -embeddings[0].clone()
    elif kind == "zeros":
        embeddings[some] = 0.0
    elif kind == "grid":
        embeddings = embeddings.round()
    elif kind == "one point":
        embeddings = embeddings[:1].expand(m, dim).clone()
    scale = draw.choice(MAGNITUDES)
    if draw.choice(EITHER):
        embeddings = embeddings * scale
    else:
        embeddings[some] *= scale
    labels = torch.randint(draw.randint(1, 12), (m,), generator=generator)
    return embeddings, labels


PLACES = ("anywhere", "tiny", "huge", "zero", "one point", "on embeddings", "opposite embeddings")


def place_proxies(loss, where, embeddings):
    """Move the class vectors to where they may do harm."""
    scales = {"tiny": 1e-20, "huge": 1e15, "zero": 0.0}
    signs = {"on embeddings": 1.0, "opposite embeddings": -1.0}
    with torch.no_grad():
        proxies = loss.proxies.view(-1, embeddings.shape[1])
        if where == "one point":
            proxies.copy_(proxies[:1].clone())
        elif where in signs:
            proxies.copy_(signs[where] * embeddings[torch.arange(len(proxies)) % len(embeddings)])
        else:
            proxies[::2] *= scales.get(where, 1.0)


@pytest.mark.filterwarnings("ignore:.*more embeddings than dimensions")
@pytest.mark.parametrize("key", nf.losses.names())
def test_random_batches_give_no_nan(key):
    draw, ranges = Random(key), choices(key)
    for number in range(BATCHES):
        batch = fuzz_batch(draw)
        choice = {name: draw.choice(values) for name, values in ranges.items()}
        if choice.get("query_weighting") == "violation":  # the product has a bound of its own
            choice["temperature"] = min(choice["temperature"], 120.0 / choice["alpha"])
        if choice.get("form") == "snr" and choice["mining"] == "distance_weighted":
            choice["mining"] = "random"
        if choice.get("form") == "cosine" or choice.get("mining") == "distance_weighted":  # these are of unit vectors
            choice.pop("normalize", None)
        if choice.get("form") == "snr" and not choice["normalize"]:  # a ratio of squares may be too large a number
            batch = torch.where(batch[0].abs() > 1e-4, batch[0].clamp(-1e4, 1e4), 0.0), batch[1]
        if key == "vicreg":
            batch = batch[0].clamp(-1e8, 1e8), batch[1]  # it has fourth powers
        if choice.get("learn_temperature"):
            choice["temperature"] = max(choice["temperature"], 0.01)
        if choice.get("assignment"):
            choice.pop("num_proxies" if choice["assignment"] == "static" else "sample_rate")
        loss = create(key, choice, dim=batch[0].shape[1], num_classes=15)
        place = draw.choice(PLACES)
        if isinstance(loss, ProxyLoss):
            place_proxies(loss, place, batch[0])
        if isinstance(loss, nf.losses.HierarchicalTriplet):
            loss.update(*batch)
        if draw.random() < 0.1:
            loss.memory_budget = 1  # a row at a time
        try:
            assert_finite(run(loss, *batch))
        except Exception as error:
            error.add_note(f"batch {number} with {choice}, proxies {place}: {batch}")
            raise
