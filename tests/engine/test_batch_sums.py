"""Losses that are a function of sums over all pairs."""

import pytest
import torch
from checks import assert_close, assert_same, make_batch, make_gallery, run

import nearfar as nf
from nearfar.losses import PairLoss

BUDGETS = (1, 4_000, 20_000, 2**28)


class PerPair(PairLoss):
    """The contrastive loss averaged over pairs, from four sums: two sums and two numbers of terms."""

    from_sums = True

    def batch_sums(self, tile):
        pull = torch.where(tile.positives, -tile.values, 0.0)
        push = torch.where(tile.negatives, (tile.values - 0.5).relu(), 0.0)
        active = (push > 0).sum().to(push.dtype)
        return torch.stack([pull.sum(), push.sum(), tile.positives.sum().to(push.dtype), active])

    def loss_of_sums(self, sums):
        return (sums[:2] / sums[2:].detach().clamp(min=1.0)).sum()


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("batch", [make_batch(), make_gallery()], ids=["batch", "gallery"])
def test_autograd_finds_the_derivatives_of_plain_totals(batch, budget):
    loss = PerPair()
    loss.memory_budget = budget
    assert_same(run(loss, *batch), run(nf.losses.Contrastive(average="pairs"), *batch), tolerance=1e-11)


@pytest.mark.parametrize("budget", BUDGETS)
def test_pair_weights(budget):
    loss, batch = PerPair(), make_batch()
    loss.memory_budget = budget
    assert_close(loss.pair_weights(*batch), nf.losses.Contrastive(average="pairs").pair_weights(*batch), 1e-11)


class Watched(nf.losses.Histogram):
    """Notes how many rows its tiles have."""

    def __init__(self):
        super().__init__()
        self.heights = []

    def batch_sums(self, tile):
        self.heights.append(len(tile.values))
        return super().batch_sums(tile)


def test_a_single_tile_is_computed_once_and_several_twice():
    embeddings, labels = make_batch(sizes=(4, 4))
    loss = Watched()
    loss(embeddings.requires_grad_(), labels)
    assert loss.heights == [8]
    loss.heights.clear()
    loss.memory_budget = 1
    loss(embeddings, labels)
    assert loss.heights == [1] * 16


def test_without_a_gradient_one_pass_is_enough():
    embeddings, labels = make_batch(sizes=(4, 4))
    loss = Watched()
    loss.memory_budget = 1
    loss(embeddings, labels)
    assert loss.heights == [1] * 8


def test_what_is_missing_is_named():
    class Empty(PairLoss):
        from_sums = True

    with pytest.raises(NotImplementedError, match=r"Empty sets from_sums and must define batch_sums\(tile\)"):
        Empty()(*make_batch())

    class Half(Empty):
        def batch_sums(self, tile):
            return tile.values.sum()

    with pytest.raises(NotImplementedError, match=r"Half sets from_sums and must define loss_of_sums\(sums\)"):
        Half()(*make_batch())
