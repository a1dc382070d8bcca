"""All triplets of a row, counted and never listed."""

import pytest
import torch
from checks import Watch

import nearfar as nf
from nearfar.losses.triplet import count_by_comparing, count_by_sorting


def rows(*, ties):
    torch.manual_seed(0)
    sim = torch.randn(6, 14)
    if ties:
        sim = (sim * 4).round() / 4  # margins of a quarter then put many negatives level with a threshold
    kind = torch.randint(3, sim.shape)
    kind[4], kind[5] = 0, 1  # a row without negatives, a row without positives
    return sim, kind == 0, kind == 1


@pytest.mark.parametrize("count", [count_by_comparing, count_by_sorting])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("margin", [-0.25, 0.0, 0.25])
def test_counts_of_active_triplets(count, ties, margin):
    sim, pos, neg = rows(ties=ties)
    expected, total = torch.zeros_like(sim), torch.zeros(len(sim))
    for i in range(len(sim)):
        for p in pos[i].nonzero().flatten():
            for n in neg[i].nonzero().flatten():
                if sim[i, n] > sim[i, p] - margin:
                    expected[i, n] += 1
                    expected[i, p] -= 1
                    total[i] += sim[i, n] - sim[i, p] + margin
    found, weights, active = count(sim, pos, neg, margin)
    torch.testing.assert_close(found, total)
    assert torch.equal(weights, expected)
    assert torch.equal(active, expected.relu().sum(dim=1))


def test_many_positives_are_left_to_sorting():
    pos = torch.ones(2, 100, dtype=torch.bool)
    assert count_by_comparing(torch.randn(2, 100), pos, ~pos, 0.1) is None


@pytest.mark.parametrize("mining", ["all", "valid_triplet"])
def test_soft_triplets_are_never_all_there(mining):
    """128 · 31 · 96 of them would take 1.5 MB."""
    loss = nf.losses.Triplet(mining=mining, soft_margin=True)
    loss.memory_budget = 2**19
    embeddings = torch.randn(128, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with Watch() as watch:
        loss(embeddings, torch.arange(128) % 4).backward()
    assert watch.largest <= 2**17


@pytest.mark.parametrize(("mining", "recorded"), [("all", False), ("valid_triplet", False), ("hard", True)])
def test_a_step_of_many_kernels_is_not_recorded(mining, recorded):
    assert (nf.losses.Triplet(mining=mining, soft_margin=True).graph_key() is not None) == recorded
    assert nf.losses.Triplet(mining=mining).graph_key() is not None
