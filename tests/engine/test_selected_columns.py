"""Losses that depend on a few columns of each anchor are those of all columns."""

import checks
import pair_checks
import pytest
import torch
from cases import CASES
from checks import assert_same, make_batch, run

import nearfar as nf
from nearfar.engine import tiles
from nearfar.engine.measures import PreparedVectors

SELECTING = [case for case in CASES if case.family == "pair" and case.create().selects_columns]
CHECKS = [
    checks.check_oracle,
    checks.check_gradcheck,
    checks.check_permutation,
    checks.check_tile_size,
    checks.check_degenerate,
    checks.check_half_precision,
    pair_checks.check_oracle_with_a_gallery,
    pair_checks.check_gradcheck_with_a_gallery,
    pair_checks.check_constant_gallery,
]


@pytest.mark.parametrize("case", SELECTING, ids=lambda case: case.id)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_selected_columns(check, case, monkeypatch):
    monkeypatch.setattr(tiles, "SELECT_FROM", 0)
    check(case)


def test_which_losses_select():
    assert {"nra", "triplet", "margin"} <= {case.key for case in SELECTING}
    assert not nf.losses.Triplet(mining="semi_hard").selects_columns
    assert not nf.losses.MultiSimilarity().selects_columns

    class Other(nf.losses.Triplet):
        """May use other pairs than those of its mining."""

    class OtherRanks(nf.losses.NRA):
        """May use other distances."""

    assert not Other(mining="hard").selects_columns
    assert not OtherRanks().selects_columns


@pytest.mark.parametrize(("limit", "few"), [(144, True), (145, False)])
def test_small_batches_do_not_select(limit, few, monkeypatch):
    monkeypatch.setattr(tiles, "SELECT_FROM", limit)
    widths = []
    rows = nf.losses.NRA.rows

    def watched(loss, sim, *masks):
        widths.append(sim.shape[1])
        return rows(loss, sim, *masks)

    monkeypatch.setattr(nf.losses.NRA, "rows", watched)
    run(nf.losses.NRA(), *make_batch(sizes=(3,) * 4))
    assert widths == [4 if few else 12]


@pytest.mark.parametrize("seed", range(4))
def test_of_equal_distances_the_same_pair_is_moved(seed, monkeypatch):
    """On a grid around the origin, where differences of squares have no rounding errors."""
    points = torch.randint(-3, 4, (8, 2), generator=torch.Generator().manual_seed(seed)).double()
    batch = torch.cat([points, -points]), torch.arange(8).repeat(2) % 3
    expected = run(nf.losses.NRA(), *batch)
    monkeypatch.setattr(tiles, "SELECT_FROM", 0)
    assert_same(run(nf.losses.NRA(), *batch), expected, tolerance=1e-12)
    weights = nf.losses.NRA().pair_weights(*batch)
    assert int((weights != 0).sum(dim=1).max()) <= 4


def test_no_more_vectors_are_gathered_at_once_than_there_are_anchors(monkeypatch):
    monkeypatch.setattr(tiles, "SELECT_FROM", 0)
    sizes = []
    gather = PreparedVectors.gather

    def watched(vectors, index):
        sizes.append(len(index))
        return gather(vectors, index)

    monkeypatch.setattr(PreparedVectors, "gather", watched)
    run(nf.losses.NRA(), *make_batch(sizes=(3,) * 4))
    assert sizes == [12] * 4
