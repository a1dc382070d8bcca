"""How a batch is cut into tiles, and what that saves."""

import pytest
import torch
from cases import DEFAULTS

import nearfar as nf
from nearfar.engine.tiles import plus_transposed
from nearfar.losses import PairLoss


class Watched(PairLoss):
    """A loss that notes the shape of its tiles."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def rows(self, sim, pos, neg):
        self.shapes.append(tuple(sim.shape))
        return torch.where(neg, sim, 0.0).sum(dim=1) - torch.where(pos, sim, 0.0).sum(dim=1)


def shapes(loss, m=64):
    loss.shapes.clear()
    loss(torch.randn(m, 8, requires_grad=True), torch.arange(m) % 5)
    return loss.shapes


def test_a_small_batch_is_one_tile():
    assert shapes(Watched()) == [(64, 64)]


def test_the_smallest_budget_takes_one_row_at_a_time():
    loss = Watched()
    loss.memory_budget = 1
    assert shapes(loss) == [(1, 64)] * 64


@pytest.mark.parametrize("budget", [20_000, 50_000, 100_000])
def test_tiles_keep_to_the_budget_and_cover_every_anchor_once(budget):
    loss = Watched()
    loss.memory_budget = budget
    found = shapes(loss)
    assert sum(rows for rows, _ in found) == 64
    assert 1 < len(found) < 64
    assert max(rows * columns * 4 for rows, columns in found) <= budget


def test_the_budget_is_256_mib_and_set_per_loss():
    loss = nf.losses.Raw()
    assert loss.memory_budget == 256 * 2**20
    loss.memory_budget = 1
    assert nf.losses.Raw().memory_budget == 256 * 2**20


def peak_bytes(loss, embeddings, labels, budget):
    """The most memory that tensors of one forward and backward pass held at once."""
    loss.memory_budget = budget
    leaf = embeddings.clone().requires_grad_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss(leaf, labels).backward()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("case", [case for case in DEFAULTS if case.tiled], ids=lambda case: case.key)
def test_memory_is_that_of_a_tile_not_of_all_pairs(case):
    embeddings, labels = torch.randn(3000, 32), torch.arange(3000) // 4
    loss = case.create(dim=32, num_classes=3000)
    columns = loss.proxies.flatten(0, -2) if case.family == "proxy" else embeddings
    all_pairs = 3000 * len(columns) * 4
    assert peak_bytes(loss, embeddings, labels, budget=4 * 2**20) < all_pairs / 4


def test_the_memory_meter_sees_all_pairs_when_it_is_allowed_to_keep_them():
    embeddings, labels = torch.randn(1000, 32), torch.arange(1000) // 4
    assert peak_bytes(DEFAULTS[0].create(), embeddings, labels, budget=2**30) > 1000 * 1000 * 4


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 17])
def test_a_matrix_plus_its_transpose_in_blocks(size):
    matrix = torch.randn(size, size + 3)[:, :size]
    assert torch.equal(plus_transposed(matrix.clone(), block=4), matrix + matrix.T)
