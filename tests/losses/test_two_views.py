"""VICReg and Barlow Twins of two views, which are embeddings and gallery."""

import pytest
import torch
from cases import CASES
from checks import assert_same, make_batch, make_gallery, run, run_both

OF_VIEWS = [case for case in CASES if case.key in ("vicreg", "barlow_twins")]
each = pytest.mark.parametrize("case", OF_VIEWS, ids=lambda case: case.id)


def views(count=9):
    generator = torch.Generator().manual_seed(0)
    first, noise = (torch.randn(count, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    return first, torch.arange(count), first + 0.5 * noise, torch.arange(count)


def vicreg_by_the_authors(x, y, invariance, variance, covariance):
    """main_vicreg.py of the authors, after the projector."""
    distance = torch.nn.functional.mse_loss(x, y)
    x, y = x - x.mean(dim=0), y - y.mean(dim=0)
    std_x, std_y = (torch.sqrt(z.var(dim=0) + 0.0001) for z in (x, y))
    narrow = torch.relu(1 - std_x).mean() / 2 + torch.relu(1 - std_y).mean() / 2
    crossed = sum(
        (cov - cov.diag().diag()).pow(2).sum() / x.shape[1] for cov in ((z.T @ z) / (len(z) - 1) for z in (x, y))
    )
    return invariance * distance + variance * narrow + covariance * crossed


def barlow_twins_by_the_authors(x, y, redundancy):
    """main.py of the authors, after the projector."""
    norm = torch.nn.BatchNorm1d(x.shape[1], affine=False).double()
    c = norm(x).T @ norm(y) / len(x)
    return (c.diagonal() - 1).pow(2).sum() + redundancy * (c - c.diag().diag()).pow(2).sum()


@each
def test_two_views_have_the_loss_of_the_authors(case):
    first, items, second, _ = views()
    authors = {"vicreg": vicreg_by_the_authors, "barlow_twins": barlow_twins_by_the_authors}[case.key]
    settings = {"vicreg": (25.0, 25.0, 1.0), "barlow_twins": (0.005,)}[case.key]
    expected = authors(first, second, *(tuple(case.settings.values()) or settings))
    assert case.create()(first, items, second, items).item() == pytest.approx(expected.item(), rel=1e-9)


@each
def test_views_and_galleries_have_the_numbers_of_the_loops(case):
    assert_same(*run_both(case, *views()), tolerance=1e-9)
    assert_same(*run_both(case, *make_gallery()), tolerance=1e-9)


@each
def test_the_gradient_by_both_views_is_the_numerical_one(case):
    first, items, second, _ = views(5)
    loss = case.create()
    inputs = first.requires_grad_(), second.requires_grad_()
    assert torch.autograd.gradcheck(lambda one, other: loss(one, items, other, items), inputs)


@each
def test_the_batch_as_its_own_gallery_changes_nothing(case):
    embeddings, labels = make_batch()
    loss = case.create()
    found = run(loss, embeddings, labels, embeddings, labels, torch.arange(len(labels)))
    found.gradients["embeddings"] += found.gradients.pop("gallery")
    assert_same(found, run(loss, embeddings, labels), tolerance=1e-11)
