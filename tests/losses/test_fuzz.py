"""The search for NaN: settings and batches far beyond what anybody trains with."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from cases import create
from checks import assert_finite, run
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import nearfar as nf
from nearfar.losses import ProxyLoss


def among(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


SHARPNESS = among(1e-3, 1.0, 2.0, 50.0, 1000.0)
TEMPERATURE = among(1e-6, 1e-3, 0.1, 1.0, 100.0)
BASE = among(-1.0, 0.0, 0.5, 1.0, 30.0)
MARGIN = among(-2.0, -0.5, 0.0, 0.1, 1.0, 100.0)
SAMPLE_RATE = among(0.01, 0.5, 1.0)
MINING = st.sampled_from(nf.mining.names())
RAW_MINING = st.sampled_from([name for name in nf.mining.names() if name != "distance_weighted"])

FUZZ: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "contrastive": {
        "form": among("cosine", "distance"),
        "margin": among(0.0, 0.5, 1.0, 100.0),
        "average": among("anchors", "pairs"),
        "mining": MINING,
    },
    "triplet": {
        "form": among("cosine", "squared_distance"),
        "margin": MARGIN,
        "average": among("all", "active"),
        "mining": MINING,
    },
    "lifted_structure": {"margin": MARGIN, "squared": st.booleans()},
    "lifted_structure_generalized": {"margin": MARGIN, "mining": MINING},
    "n_pair": {"l2": among(0.0, 0.02, 1.0), "mining": RAW_MINING},
    "margin": {
        "margin": among(0.0, 0.2, 10.0),
        "beta": among(-10.0, 0.0, 1.2, 10.0),
        "num_classes": among(None, 12),
        "nu": among(0.0, 1.0),
        "mining": MINING,
    },
    "binomial_deviance": {"alpha": SHARPNESS, "beta": SHARPNESS, "base": BASE, "mining": MINING},
    "raw": {"alpha": SHARPNESS, "beta": SHARPNESS, "base": BASE, "mining": MINING},
    "multi_similarity": {"alpha": SHARPNESS, "beta": SHARPNESS, "base": BASE, "epsilon": MARGIN},
    "ranked_list": {
        "alpha": among(0.01, 1.2, 2.0, 100.0),
        "margin": among(0.0, 0.4, 10.0),
        "temperature": among(0.0, 10.0, 1000.0),
        "balance": among(0.0, 1.0, 100.0),
        "query_weighting": among("mean", "violation"),
    },
    "nra": {"alpha": among(0.5, 1.0, 4.0, 50.0, 1000.0), "epsilon": among(1e-4, 1.0)},
    "circle": {"margin": among(0.0, 0.4, 1.0), "scale": SHARPNESS, "mining": MINING},
    "sup_con": {"temperature": TEMPERATURE, "mining": MINING},
    "nt_xent": {"temperature": TEMPERATURE, "mining": MINING},
    "angular": {"angle": among(0.01, 15.0, 40.0, 70.0)},
    "histogram": {"bins": among(1, 2, 100, 5000)},
    "smooth_ap": {"temperature": TEMPERATURE},
    "fast_ap": {"bins": among(1, 2, 10, 5000)},
    "softmax": {"sample_rate": SAMPLE_RATE},
    "normalized_softmax": {"temperature": TEMPERATURE, "sample_rate": SAMPLE_RATE},
    "proxy_nca": {"scale": SHARPNESS, "include_positive": st.booleans(), "sample_rate": SAMPLE_RATE},
    "arcface": {"margin": among(0.0, 0.5, 1.0, 1.57), "scale": SHARPNESS, "sample_rate": SAMPLE_RATE},
    "cosface": {"margin": among(0.0, 0.35, 100.0), "scale": SHARPNESS, "sample_rate": SAMPLE_RATE},
    "soft_triple": {
        "centers": among(1, 2, 10),
        "alpha": SHARPNESS,
        "gamma": among(0.0, 10.0, 1000.0),
        "tau": among(0.0, 0.2, 100.0),
        "margin": among(0.0, 0.1, 100.0),
        "sample_rate": SAMPLE_RATE,
    },
    "proxy_anchor": {"alpha": SHARPNESS, "margin": MARGIN},
    "proxy_repel": {"alpha": SHARPNESS, "margin": MARGIN, "through_batch": st.booleans()},
    "group": {
        "iterations": among(1, 2, 20),
        "temperature": TEMPERATURE,
        "anchors_per_class": among(0, 1, 5),
        "keep_diagonal": st.booleans(),
        "average_over": among("rest", "all"),
        "classification_weight": among(0.0, 1.0),
    },
    "spectral_clustering": {},
    "facility_location": {"gamma": among(0.0, 1.0, 1000.0), "refinements": among(0, 1, 5)},
}

MAGNITUDES = (1e-20, 1e-10, 1e-3, 1.0, 1e3, 1e8, 1e15)


@st.composite
def fuzz_batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Small float32 batches with copies, opposites, zeros and lengths of all magnitudes."""
    m, dim = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    embeddings = torch.randn(m, dim, generator=generator)
    kind = draw(st.sampled_from(["plain", "copies", "opposites", "zeros", "grid", "one point"]))
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
    scale = draw(st.sampled_from(MAGNITUDES))
    if draw(st.booleans()):
        embeddings = embeddings * scale
    else:
        embeddings[some] *= scale
    labels = torch.randint(draw(st.integers(1, 12)), (m,), generator=generator)
    return embeddings, labels


PLACES = ("anywhere", "tiny", "huge", "zero", "one point", "on embeddings", "opposite embeddings")


def place_proxies(loss: ProxyLoss, where: str, embeddings: torch.Tensor) -> None:
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


def test_every_registered_loss_is_searched_in_all_its_settings() -> None:
    known = {
        key: {name for name, default in nf.losses.defaults(key).items() if default is not inspect.Parameter.empty}
        for key in nf.losses.names()
    }
    rates = {"beta_lr", "lr_multiplier"}
    assert {key: set(choices) | rates for key, choices in FUZZ.items()} == {
        key: names | rates for key, names in known.items()
    }


@pytest.mark.filterwarnings("ignore:.*more embeddings than dimensions")
@pytest.mark.parametrize("key", sorted(FUZZ))
def test_a_thousand_random_batches_give_no_nan(key: str) -> None:
    @settings(
        max_examples=1000,
        phases=[Phase.generate, Phase.shrink],
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        batch=fuzz_batches(),
        choice=st.fixed_dictionaries(FUZZ[key]),
        rows=st.sampled_from(["all"] * 9 + ["one"]),
        place=st.sampled_from(PLACES),
    )
    def search(batch: tuple[torch.Tensor, torch.Tensor], choice: dict[str, Any], rows: str, place: str) -> None:
        if choice.get("query_weighting") == "violation":  # the product has a bound of its own
            choice["temperature"] = min(choice["temperature"], 120.0 / choice["alpha"])
        loss = create(key, choice, dim=batch[0].shape[1], num_classes=15)
        if isinstance(loss, ProxyLoss):
            place_proxies(loss, place, batch[0])
        if rows == "one":
            loss.memory_budget = 1
        assert_finite(run(loss, *batch))

    search()
