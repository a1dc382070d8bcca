"""Angular loss with a gallery, in blocks of classes, and at its largest angle."""

import checks
import pair_checks
import pytest
import torch
from cases import CASES
from checks import assert_finite, assert_same, make_batch, make_gallery, run, run_both

import nearfar as nf
from nearfar.losses import angular

GALLERY_CHECKS = [
    pair_checks.check_oracle_with_a_gallery,
    pair_checks.check_gradcheck_with_a_gallery,
    pair_checks.check_gallery_is_the_batch,
    pair_checks.check_constant_gallery,
    pair_checks.check_positions,
    checks.check_half_precision,
]


@pytest.mark.parametrize("case", [case for case in CASES if case.key == "angular"], ids=lambda case: case.id)
@pytest.mark.parametrize("check", GALLERY_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_a_gallery(check, case):
    check(case)


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_the_height_of_blocks_does_not_matter(rows, monkeypatch):
    batches = make_batch(), make_gallery()
    expected = [run(nf.losses.Angular(), *batch) for batch in batches]
    monkeypatch.setattr(angular, "CPU_BLOCK_ROWS", rows)
    for batch, outcome in zip(batches, expected, strict=True):
        assert_same(run(nf.losses.Angular(), *batch), outcome, tolerance=1e-11)


@pytest.mark.parametrize("gallery_labels", [None, torch.tensor([9, 7, 3, 2, 7, 50, 2])], ids=["batch", "gallery"])
def test_blocks_are_whole_classes(gallery_labels, monkeypatch):
    monkeypatch.setattr(angular, "CPU_BLOCK_ROWS", 3)
    labels = torch.tensor([7, 2, 7, 2, 9, 7, 7, -1])
    found = angular.blocks(labels, gallery_labels)
    assert len(found) > 1
    assert sorted(torch.cat([rows for rows, _ in found]).tolist()) == list(range(len(labels)))
    column_labels = labels if gallery_labels is None else gallery_labels
    for rows, columns in found:
        classes = labels[rows].unique()
        assert sorted(rows.tolist()) == torch.isin(labels, classes).nonzero().flatten().tolist()
        assert sorted(columns.tolist()) == torch.isin(column_labels, classes).nonzero().flatten().tolist()


@pytest.fixture
def in_a_band(monkeypatch):
    """Compute batches in a band, as large ones on a GPU; return how many rows the blocks had."""
    used = []
    banded = angular.Angular._banded

    def noted(loss, rows, *others):
        used.append(rows)
        return banded(loss, rows, *others)

    monkeypatch.setattr(angular, "can_wait", lambda tensor: True)
    monkeypatch.setattr(angular, "BAND_FROM", 1)
    monkeypatch.setattr(angular, "BAND_ROWS", 1)
    monkeypatch.setattr(angular.Angular, "_banded", noted)
    return used


BAND_CHECKS = [checks.check_float32, checks.check_permutation, checks.check_no_grad, checks.check_degenerate]


@pytest.mark.parametrize("case", [case for case in CASES if case.key == "angular"], ids=lambda case: case.id)
@pytest.mark.parametrize("check", BAND_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_a_band(check, case, in_a_band):
    check(case)


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("case", [case for case in CASES if case.key == "angular"], ids=lambda case: case.id)
def test_a_band_computes_the_oracle(case, rows, in_a_band, monkeypatch):
    monkeypatch.setattr(angular, "BAND_ROWS", rows)
    embeddings, labels = make_batch(sizes=(3, 1, 2, 4, 2, 1, 3, 4, 2, 3, 3))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    actual, expected = run_both(case, embeddings[order], labels[order] * 7 - 20)
    assert in_a_band == [max(rows, 3)]
    assert_same(actual, expected, tolerance=1e-9)


def test_large_classes_need_no_band(in_a_band):
    run(nf.losses.Angular(), *make_batch(sizes=(5, 5)))
    assert not in_a_band


def test_the_largest_angle_where_negatives_have_nothing_in_common():
    """The positive's negative is opposite to the anchor's, and the other way round: the smallest products there are."""
    embeddings = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    labels = torch.tensor([0, 0, 1, 1])
    outcome = run(nf.losses.Angular(angle=70.0), embeddings, labels)
    assert_finite(outcome)
    expected = run(nf.losses.Angular(angle=70.0), embeddings.double(), labels)
    assert outcome.value.item() == pytest.approx(expected.value.item(), rel=1e-6)
    assert outcome.value > 10.0
