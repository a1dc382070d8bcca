"""The search for NaN: settings and batches far beyond what anybody trains with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import assert_finite, run
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import nearfar as nf


def among(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


SHARPNESS = among(1e-3, 1.0, 2.0, 50.0, 1000.0)
BASE = among(-1.0, 0.0, 0.5, 1.0, 30.0)
MARGIN = among(-2.0, -0.5, 0.0, 0.1, 1.0, 100.0)
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


def test_every_registered_loss_is_searched_in_all_its_settings() -> None:
    known = {key: set(nf.losses.defaults(key)) - {"beta_lr"} for key in nf.losses.names()}
    assert {key: set(strategies) for key, strategies in FUZZ.items()} == known


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
    @given(batch=fuzz_batches(), choice=st.fixed_dictionaries(FUZZ[key]), rows=st.sampled_from(["all"] * 9 + ["one"]))
    def search(batch: tuple[torch.Tensor, torch.Tensor], choice: dict[str, Any], rows: str) -> None:
        if choice.get("query_weighting") == "violation":  # the product has a bound of its own
            choice["temperature"] = min(choice["temperature"], 120.0 / choice["alpha"])
        loss = nf.losses.create(key, **choice)
        if rows == "one":
            loss.memory_budget = 1
        assert_finite(run(loss, *batch))

    search()
