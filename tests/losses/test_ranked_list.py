"""Ranked list: a gradient of its own kind."""

import pytest
import torch
from checks import assert_close, make_batch, run

import nearfar as nf


def test_only_the_query_of_a_list_moves():
    """One query with a violation; the positive it is far from stays where it is."""
    embeddings = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    both = run(nf.losses.RankedList(), embeddings, torch.tensor([0, 0]))
    alone = run(nf.losses.RankedList(), embeddings[:1], torch.tensor([0]), embeddings[1:], torch.tensor([0]))
    assert_close(both.gradients["embeddings"][0], alone.gradients["embeddings"][0] / 2, 1e-12)
    assert not alone.gradients["gallery"].any()


def test_the_weights_of_negatives_are_constants():
    """d/dd of Σ w(α − d)/Σ w with w held is −w/Σ w: the weights of the pairs add up to the balance."""
    embeddings, labels = make_batch("mixed", sizes=(1,) * 8)
    loss = nf.losses.RankedList(alpha=2.0, margin=0.0, balance=3.0)
    weights = loss.pair_weights(embeddings, labels) * len(labels)
    assert_close(weights.sum(dim=1), torch.full((8,), 3.0, dtype=torch.float64), 1e-12)


@pytest.mark.parametrize("temperature", [10.0, 60.0])
@pytest.mark.parametrize("budget", [1, 2**28])
def test_violation_weighting_up_to_the_sharpest_temperature_allowed(temperature, budget):
    """Two negatives at a distance near 1.4, where the weights span the most that is allowed."""
    loss = nf.losses.RankedList(alpha=2.0, temperature=temperature, query_weighting="violation")
    loss.memory_budget = budget
    outcome = run(loss, torch.tensor([[1.0, 0.0], [0.1, 1.0]]), torch.tensor([0, 1]))
    assert outcome.value.item() == pytest.approx(2.0 - (2 - 0.2 / 1.01**0.5) ** 0.5, rel=1e-4)
    assert outcome.gradients["embeddings"].isfinite().all()
    assert outcome.gradients["embeddings"].any()


def test_violation_weighting_refuses_weights_beyond_float32():
    with pytest.raises(ValueError, match=r"temperature · alpha is 2000.*≤ 120"):
        nf.losses.RankedList(alpha=2.0, temperature=1000.0, query_weighting="violation")
