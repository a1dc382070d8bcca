"""All triplets of a row, counted and never listed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nearfar.losses.triplet import count_by_comparing, count_by_sorting


def rows(*, ties: bool) -> tuple[Tensor, Tensor, Tensor]:
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
def test_counts_of_active_triplets(count, ties: bool, margin: float) -> None:
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


def test_many_positives_are_left_to_sorting() -> None:
    pos = torch.ones(2, 100, dtype=torch.bool)
    assert count_by_comparing(torch.randn(2, 100), pos, ~pos, 0.1) is None
