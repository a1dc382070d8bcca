"""Gradients from the few pairs that have a weight are those of the product of all weights."""

import checks
import pair_checks
import pytest
import torch
from cases import DEFAULTS
from checks import assert_close
from torch.nn.functional import embedding_bag

import nearfar as nf
from nearfar.engine import measures

PAIR_LOSSES = [case for case in DEFAULTS if case.family == "pair"]
CHECKS = [
    checks.check_oracle,
    checks.check_tile_size,
    checks.check_degenerate,
    pair_checks.check_oracle_with_a_gallery,
]


@pytest.fixture
def always_sparse(monkeypatch):
    monkeypatch.setattr(measures, "SPARSE_FROM", 0)
    monkeypatch.setattr(measures, "SPARSE_DIM", 0)
    monkeypatch.setattr(measures, "SPARSE", 0)


@pytest.fixture
def sparse_products(monkeypatch):
    """Gets the number of entries of each sparse product."""
    calls = []

    def bag(column, *args, **named):
        calls.append(len(column))
        return embedding_bag(column, *args, **named)

    monkeypatch.setattr(measures, "embedding_bag", bag)
    return calls


@pytest.mark.usefixtures("always_sparse")
@pytest.mark.parametrize("case", PAIR_LOSSES, ids=lambda case: case.id)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_losses(check, case):
    check(case)


def weights_of(shape, entries):
    generator = torch.Generator().manual_seed(entries)
    weights = torch.zeros(shape, dtype=torch.float64)
    places = torch.randperm(weights.numel(), generator=generator)[:entries]
    weights.view(-1)[places] = torch.randn(entries, generator=generator, dtype=torch.float64)
    return weights


@pytest.mark.usefixtures("always_sparse")
@pytest.mark.parametrize("shape", [(1, 1), (7, 30), (30, 7)])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_products(shape, share):
    weights = weights_of(shape, int(share * shape[0] * shape[1]))
    for matrix in (weights, weights.T):
        vectors = torch.randn(matrix.shape[1], 5, dtype=torch.float64)
        assert_close(measures.times(matrix, vectors), matrix @ vectors, 1e-14)


@pytest.mark.parametrize(
    ("size", "entries", "dim", "sparse"),
    [(91, 517, 256, True), (91, 518, 256, False), (90, 1, 256, False), (91, 1, 255, False)],
)
def test_which_products_are_sparse(size, entries, dim, sparse, sparse_products):
    weights, vectors = weights_of((size, size), entries), torch.randn(size, dim, dtype=torch.float64)
    assert_close(measures.times(weights, vectors), weights @ vectors, 1e-12)
    assert sparse_products == ([entries] if sparse else [])


def test_a_large_batch_with_few_weights(sparse_products, monkeypatch):
    embeddings, labels = torch.randn(600, 256), torch.arange(600) // 4

    def gradient():
        leaf = embeddings.clone().requires_grad_()
        (found,) = torch.autograd.grad(nf.losses.Contrastive()(leaf, labels), leaf)
        return found

    sparse = gradient()
    assert sparse_products == [600 * 3]  # no negative is within the margin
    monkeypatch.setattr(measures, "SPARSE_FROM", 1 << 40)
    assert_close(sparse, gradient(), 1e-6)
    assert len(sparse_products) == 1
