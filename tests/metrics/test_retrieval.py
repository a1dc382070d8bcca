"""Recall@k against a loop that sorts every query's neighbours."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import nearfar as nf

module = importlib.import_module("nearfar.metrics.retrieval")


def recall_by_loop(embeddings: Tensor, labels: Tensor, k: int) -> float:
    """Sort the others of each query by similarity, then index; look at the first k."""
    rows = [row / row.norm() for row in embeddings.double()]
    classes = labels.tolist()
    hits = []
    for i, row in enumerate(rows):
        others = [j for j in range(len(rows)) if j != i]
        if not any(classes[j] == classes[i] for j in others):
            continue
        nearness = {j: float(row @ rows[j]) for j in others}
        nearest = sorted(others, key=lambda j: (-nearness[j], j))[:k]
        hits.append(any(classes[j] == classes[i] for j in nearest))
    return sum(hits) / len(hits)


# Along an axis, of any length: similarities are exactly −1, 0 or 1, and ties are everywhere.
AXIS_VECTOR = st.tuples(st.integers(0, 2), st.sampled_from([-2.0, -1.0, 1.0, 4.0]))


@settings(derandomize=True, deadline=None)  # what passes once passes everywhere
@given(st.lists(st.tuples(AXIS_VECTOR, st.integers(-1, 2)), min_size=4, max_size=12))
def test_ties_go_to_the_lower_index(points: list[tuple[tuple[int, float], int]]) -> None:
    labels = torch.tensor([label for _, label in points])
    assume(len(labels.unique()) < len(labels))  # a class with two members, or there is nothing to retrieve
    embeddings = torch.zeros(len(points), 3)
    for row, ((axis, length), _) in enumerate(points):
        embeddings[row, axis] = length
    ks = (1, 2, 3, 20)
    assert nf.metrics.retrieval(embeddings, labels, ks=ks) == {
        f"recall@{k}": pytest.approx(recall_by_loop(embeddings, labels, k)) for k in ks
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_embeddings_as_in_the_loop(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(60, 5, generator=generator, dtype=dtype)
    labels = torch.randint(12, (60,), generator=generator)
    found = nf.metrics.retrieval(embeddings, labels)
    assert list(found) == ["recall@1", "recall@2", "recall@4", "recall@8"]
    for k in (1, 2, 4, 8):
        assert found[f"recall@{k}"] == pytest.approx(recall_by_loop(embeddings, labels, k))


def test_a_hand_worked_example() -> None:
    # Neighbours of 0 (class 7): 1 (class 8), then 2 (class 7). Of 1: 0, then 2. Of 2: 1, then 0.
    embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
    found = nf.metrics.retrieval(embeddings, torch.tensor([7, 8, 7]), ks=(1, 2))
    assert found == {"recall@1": 0.0, "recall@2": 1.0}


def test_a_duplicate_is_found_and_the_query_is_not() -> None:
    twins = torch.tensor([[0.6, 0.8], [0.6, 0.8]])
    assert nf.metrics.retrieval(twins, torch.tensor([3, 3]), ks=(1,)) == {"recall@1": 1.0}
    three = torch.tensor([[0.6, 0.8], [0.6, 0.8], [1.0, 0.0]])
    assert nf.metrics.retrieval(three, torch.tensor([4, 3, 3]), ks=(1,)) == {"recall@1": 0.0}


def test_a_query_without_positives_is_left_out() -> None:
    embeddings = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
    assert nf.metrics.retrieval(embeddings, torch.tensor([0, 0, 1]), ks=(1,)) == {"recall@1": 1.0}


def test_length_does_not_matter() -> None:
    embeddings = torch.randn(30, 4, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(30) % 6
    longer = embeddings * torch.arange(1, 31).unsqueeze(1)
    assert nf.metrics.retrieval(longer, labels) == nf.metrics.retrieval(embeddings, labels)


@pytest.mark.parametrize("pairs", [1, 50, 77, 10_000])
def test_tiles_do_not_matter(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings = torch.randn(40, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    labels = torch.arange(40) % 7
    whole = nf.metrics.retrieval(embeddings, labels)
    monkeypatch.setattr(module, "TILE_PAIRS", pairs)
    assert nf.metrics.retrieval(embeddings, labels) == whole


GOOD, LABELS = torch.eye(4), torch.tensor([0, 0, 1, 1])


@pytest.mark.parametrize(
    ("embeddings", "labels", "ks", "error", "message"),
    [
        (GOOD.tolist(), LABELS, (1,), TypeError, "embeddings is a list"),
        (GOOD, [0, 0, 1, 1], (1,), TypeError, "labels is a list"),
        (GOOD[0], LABELS, (1,), ValueError, r"embeddings has shape \(4,\)"),
        (GOOD[:0], LABELS[:0], (1,), ValueError, r"embeddings has shape \(0, 4\)"),
        (GOOD.long(), LABELS, (1,), TypeError, "embeddings is of torch.int64"),
        (GOOD, LABELS[:3], (1,), ValueError, r"labels has shape \(3,\); needed is \[4\]"),
        (GOOD, LABELS.float(), (1,), TypeError, "labels is of torch.float32"),
        (GOOD / GOOD, LABELS, (1,), ValueError, "embeddings contains NaN or infinity in 4 of 4 rows"),
        (GOOD, torch.arange(4), (1,), ValueError, "no class with two members"),
        (GOOD, LABELS, (), ValueError, "ks is empty"),
        (GOOD, LABELS, (1, 0), ValueError, "ks contains 0"),
        (GOOD, LABELS, (1.5,), ValueError, "ks contains 1.5"),
    ],
)
def test_errors_name_the_argument(embeddings, labels, ks, error, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=message):
        nf.metrics.retrieval(embeddings, labels, ks=ks)
