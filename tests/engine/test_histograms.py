"""Soft histograms: counts that have a derivative."""

import math

import pytest
import torch

from nearfar.engine.histograms import SoftHistograms

LOW, HIGH = -1.0, 1.0


def triangles(values, pos, neg, bins):
    """The same, [a, 2, nodes], the wasteful way: every value against every node."""
    nodes = torch.linspace(LOW, HIGH, bins + 1, dtype=values.dtype)
    share = (1 - (values.clamp(LOW, HIGH).unsqueeze(2) - nodes).abs() * bins / (HIGH - LOW)).relu()
    return torch.stack([(share * mask.unsqueeze(2)).sum(dim=1) for mask in (neg, pos)], dim=1)


def rows():
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(5, 40, generator=generator, dtype=torch.float64) * 2.2 - 1.1  # some beyond both ends
    kind = torch.randint(3, values.shape, generator=generator)
    kind[3], kind[4] = 1, 2  # a row of negatives, a row of neither
    return values, kind == 0, kind == 1


@pytest.mark.parametrize("bins", [1, 2, 7, 100])
def test_counts_are_sums_of_triangles(bins):
    values, pos, neg = rows()
    histograms = SoftHistograms(values, pos, neg, low=LOW, high=HIGH, bins=bins)
    expected = triangles(values, pos, neg, bins)
    torch.testing.assert_close(histograms.counts(), expected)
    torch.testing.assert_close(histograms.sums(), expected.sum(dim=0))
    torch.testing.assert_close(histograms.counts().sum(dim=2), torch.stack([neg.sum(1), pos.sum(1)], 1).double())


@pytest.mark.parametrize("bins", [1, 2, 7, 100])
@pytest.mark.parametrize("per_row", [True, False])
def test_weights_are_their_derivative(bins, per_row):
    values, pos, neg = rows()
    values = values.clamp(-0.999, 0.999).requires_grad_()  # the ends are corners
    slopes = torch.randn(5 if per_row else 1, 2, bins + 1, dtype=torch.float64)
    (expected,) = torch.autograd.grad((triangles(values, pos, neg, bins) * slopes).sum(), values)
    found = SoftHistograms(values, pos, neg, low=LOW, high=HIGH, bins=bins)
    torch.testing.assert_close(found.weights(slopes if per_row else slopes[0]), expected)


def test_values_at_the_nodes_and_at_both_ends():
    values = torch.tensor([[-1.0, -0.5, 0.0, 1.0, 1.0 + 1e-6, -1.0 - 1e-6]])
    every = torch.ones_like(values, dtype=torch.bool)
    counts = SoftHistograms(values, every, ~every, low=LOW, high=HIGH, bins=4).counts()
    assert counts.tolist() == [[[0, 0, 0, 0, 0], [2, 1, 1, 0, 2]]]


def test_nan_is_counted_somewhere_and_shows():
    values = torch.tensor([[math.nan, 0.5]])
    every = torch.ones_like(values, dtype=torch.bool)
    histograms = SoftHistograms(values, every, ~every, low=LOW, high=HIGH, bins=4)
    assert histograms.sums().isnan().any()
    assert histograms.weights(torch.ones(2, 5)).isfinite().all()
