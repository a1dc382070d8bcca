"""Bootstrap intervals: correct width, shared resampling for all metrics, NaN values ignored."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest
import torch

import nearfar as nf
from nearfar.metrics import Interval, bootstrap

module = importlib.import_module("nearfar.metrics.intervals")

NAN = math.nan


def test_the_width_is_that_of_the_normal_approximation() -> None:
    values = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    found = bootstrap(values, samples=4000)
    half = 1.96 * values.std().item() / math.sqrt(2000)
    assert found.mean == pytest.approx(values.mean().item(), abs=1e-6)
    assert found.low == pytest.approx(found.mean - half, abs=0.1 * half)
    assert found.high == pytest.approx(found.mean + half, abs=0.1 * half)


def test_it_covers_the_truth_as_often_as_it_says() -> None:
    # Recall of 200 queries, each found with probability 0.7: the interval of 90 % misses it in about 10 % of cases.
    generator = torch.Generator().manual_seed(0)
    inside = 0
    for seed in range(200):
        found = bootstrap((torch.rand(200, generator=generator) < 0.7).double(), confidence=0.9, seed=seed)
        inside += found.low <= 0.7 <= found.high
    assert 165 <= inside <= 192


def test_more_confidence_is_wider() -> None:
    values = torch.rand(100, generator=torch.Generator().manual_seed(0))
    widths = [found.high - found.low for found in (bootstrap(values, confidence=c) for c in (0.5, 0.9, 0.99))]
    assert widths == sorted(widths)


def test_two_queries_by_hand() -> None:
    # With 0 and 1 the mean of a sample is 0 or 1 in a quarter of all cases each, and ½ in the middle half.
    found = bootstrap(torch.tensor([0.0, 1.0]), samples=4000, confidence=0.4)
    assert found == Interval(mean=0.5, low=0.5, high=0.5)
    assert bootstrap(torch.tensor([0.0, 1.0]), confidence=0.6) == Interval(mean=0.5, low=0.0, high=1.0)


def test_the_same_seed_the_same_interval() -> None:
    values = torch.rand(50, generator=torch.Generator().manual_seed(0))
    assert bootstrap(values, seed=3) == bootstrap(values, seed=3) != bootstrap(values, seed=4)


def test_randomness_is_its_own() -> None:
    state = torch.get_rng_state()
    bootstrap(torch.rand(10, generator=torch.Generator()))
    assert torch.get_rng_state().equal(state)


def test_queries_without_an_answer_are_left_out() -> None:
    values = torch.rand(60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with_gaps = torch.cat([torch.tensor([NAN]), values[:20], torch.tensor([NAN, NAN]), values[20:]])
    assert bootstrap(with_gaps) == bootstrap(values)


def test_a_mapping_draws_the_same_queries_for_all() -> None:
    values = torch.rand(80, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values[5] = NAN
    found = bootstrap({"recall@1": values, "half": values / 2, "map": 1 - values})
    assert list(found) == ["recall@1", "half", "map"]
    assert found["recall@1"] == pytest.approx(bootstrap(values))
    assert found["half"] == pytest.approx([number / 2 for number in found["recall@1"]])
    assert found["map"].low == pytest.approx(1 - found["recall@1"].high)


def test_gaps_may_differ_between_metrics() -> None:
    found = bootstrap({"a": torch.tensor([1.0, 0.0, NAN, NAN]), "b": torch.tensor([NAN, 0.25, 0.75, NAN])})
    assert found == {"a": Interval(0.5, 0.0, 1.0), "b": Interval(0.5, 0.25, 0.75)}


def test_per_query_results_of_retrieval() -> None:
    generator = torch.Generator().manual_seed(0)
    embeddings, labels = torch.randn(60, 4, generator=generator), torch.randint(20, (60,), generator=generator)
    found = nf.metrics.retrieval(embeddings, labels, ks=(1, 4), per_query=True)
    assert found["queries_without_match"] > 0
    for name, interval in bootstrap(found["per_query"]).items():
        assert interval.mean == pytest.approx(found[name])
        assert interval.low < interval.mean < interval.high


@pytest.mark.parametrize("chunk", [1, 100, 999])
def test_chunks_do_not_matter(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"a": torch.rand(37, generator=torch.Generator().manual_seed(0))}
    at_once = bootstrap(values, samples=50)
    monkeypatch.setattr(module, "CHUNK", chunk)
    assert bootstrap(values, samples=50)["a"] == pytest.approx(at_once["a"], rel=1e-14)


def test_kinds_of_input() -> None:
    values = np.array([0.0, 1.0, 1.0, NAN])
    values.flags.writeable = False
    assert bootstrap(values) == bootstrap(torch.tensor([0.0, 1.0, 1.0, NAN]))
    assert bootstrap(np.array([False, True, True])) == bootstrap(values)


def test_a_single_query() -> None:
    assert bootstrap(torch.tensor([0.25])) == Interval(0.25, 0.25, 0.25)


@pytest.mark.parametrize(
    ("values", "keywords", "error", "message"),
    [
        ([0.5], {}, TypeError, "values is a list; a torch.Tensor or NumPy array is required"),
        (torch.ones(2, 2), {}, ValueError, r"values has shape \(2, 2\); \[queries\] is required"),
        (torch.ones(0), {}, ValueError, "values has no query with a value"),
        (torch.tensor([NAN, NAN]), {}, ValueError, "values has no query with a value: each of its 2 entries is NaN"),
        (torch.tensor([1.0, math.inf]), {}, ValueError, "values contains infinity in 1 of 2 entries"),
        ({"a": torch.ones(3), "b": torch.ones(2)}, {}, ValueError, r"b has shape \(2,\); \[3\] is required"),
        ({}, {}, ValueError, "values is empty"),
        (torch.ones(3), {"samples": 0}, ValueError, "samples is 0; it must be ≥ 1"),
        (torch.ones(3), {"confidence": 0.0}, ValueError, "confidence is 0.0; it must be > 0.0 and ≤ 1.0"),
        (torch.ones(3), {"confidence": 95}, ValueError, "confidence is 95; it must be > 0.0 and ≤ 1.0"),
        (torch.ones(3), {"seed": -1}, ValueError, "seed is -1"),
    ],
)
def test_errors_name_the_argument(values: Any, keywords: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bootstrap(values, **keywords)
