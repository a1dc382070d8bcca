"""Group loss: the refinement, the anchors, the similarity."""

import math

import pytest
import torch
from cases import create
from checks import assert_close, assert_finite, make_batch, run

from nearfar.losses.group import refine


def similarities(samples=12, *, density=0.5, seed=0):
    """Symmetric, not negative, zero on the diagonal, with many zeros."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.rand(samples, samples, generator=generator, dtype=torch.float64)
    half = (half * (torch.rand(samples, samples, generator=generator) < density)).triu(diagonal=1)
    return half + half.T


def assignments(samples=12, classes=5, *, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(samples, classes, generator=generator, dtype=torch.float64)).softmax(dim=1)


def consistency(similarity, assignment):
    """F(X) = Σ_ij w_ij x_i · x_j, which the refinement is to increase."""
    return (similarity * (assignment @ assignment.T)).sum()


# --- refinement ---------------------------------------------------------------------------------------------


def test_two_of_two_opinions():
    """The toy example of the paper: C takes the label of A, which is more like it than B is."""
    similarity = torch.tensor([[0.0, 0.2, 0.9], [0.2, 0.0, 0.3], [0.9, 0.3, 0.0]])
    start = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
    once = refine(similarity, start, 1)
    assert_close(once, torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.75, 0.25]]), 1e-6)
    assert_close(refine(similarity, start, 2)[2], torch.tensor([0.9, 0.1]), 1e-6)
    assert refine(similarity, start, 20)[2, 0] > 0.999


@pytest.mark.parametrize("seed", range(5))
def test_rows_stay_distributions_and_agree_more_and_more(seed):
    similarity, assignment = similarities(seed=seed), assignments(seed=seed + 100)
    gained = 0.0
    for _ in range(50):
        refined = refine(similarity, assignment, 1)
        assert_close(refined.sum(dim=1), torch.ones(12, dtype=torch.float64), 1e-12)
        assert (refined >= 0).all()
        gain = (consistency(similarity, refined) - consistency(similarity, assignment)).item()
        assert gain >= -1e-12
        gained, assignment = gained + gain, refined
    assert gained > 0.1


def test_steps_are_repeated():
    similarity, assignment = similarities(), assignments()
    expected = refine(similarity, refine(similarity, refine(similarity, assignment, 1), 1), 1)
    assert_close(refine(similarity, assignment, 3), expected, 1e-12)
    assert_close(refine(similarity, assignment, 0), assignment, 1e-12)


def test_a_sample_similar_to_none_keeps_its_row():
    similarity, assignment = similarities(density=1.0), assignments()
    similarity[3], similarity[:, 3] = 0.0, 0.0
    moved = (refine(similarity, assignment, 5) - assignment).abs().amax(dim=1)
    assert moved[3] < 1e-12
    assert moved.sort().values[1] > 0.01


def test_a_label_that_was_ruled_out_stays_so():
    assignment = assignments()
    assignment[2] = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])
    assignment[5] = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    refined = refine(similarities(density=1.0), assignment, 3)
    assert torch.equal(refined[2], assignment[2])
    assert torch.equal(refined[5] > 0, assignment[5] > 0)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_every_step_is_differentiated(steps):
    similarity, assignment = similarities(6, density=1.0), assignments(6, 3)
    inputs = similarity.requires_grad_(), assignment.requires_grad_()
    assert torch.autograd.gradcheck(lambda similarity, assignment: refine(similarity, assignment, steps), inputs)


# --- anchors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 4, 100])
def test_every_class_has_its_anchors_or_is_made_of_them(count):
    _, labels = make_batch()
    loss = create("group", {"anchors_per_class": count})
    for seed in range(20):
        torch.manual_seed(seed)
        anchors = loss.draw_anchors(labels)
        for label, size in enumerate((5, 3, 2, 1, 1)):
            assert anchors[labels == label].sum() == min(count, size)


def test_every_sample_is_an_anchor_equally_often():
    labels, draws = torch.tensor([4, 4, 1, 4, 1, 4]), 600
    loss = create("group", {})
    torch.manual_seed(0)
    counts = torch.stack([loss.draw_anchors(labels) for _ in range(draws)]).sum(dim=0)
    chances = torch.where(labels == 4, 1 / 4, 1 / 2)
    assert ((counts - draws * chances).abs() < 4 * (draws * chances * (1 - chances)).sqrt()).all()


def test_only_singletons_leave_nothing_to_learn():
    embeddings, _ = make_batch(sizes=(1,) * 5)
    for average_over in ("rest", "all"):
        outcome = run(create("group", {"average_over": average_over}).double(), embeddings, torch.arange(5))
        assert outcome.value.item() == pytest.approx(0.0, abs=1e-12)
        assert not outcome.gradients["embeddings"].any()


# --- the whole ----------------------------------------------------------------------------------------------


def test_an_offset_and_a_scale_are_not_similar_or_dissimilar():
    """Correlation sees neither; with proxies that do not either, nothing changes."""
    embeddings, labels = make_batch(dim=6)
    loss = create("group", {}, dim=6).double()
    with torch.no_grad():
        loss.proxies.zero_()
    moved = embeddings * torch.linspace(0.5, 2.0, 12, dtype=torch.float64).unsqueeze(1) + 3.0
    assert_close(run(loss, moved, labels).value, run(loss, embeddings, labels).value, 1e-10)


def test_a_class_without_support_is_dear_but_finite():
    """The two samples of class 0 are opposite, and one of them is among the anchors of two other classes."""
    embeddings = torch.tensor([[1.0, 0.0, -1.0], [1.0, 0.1, -1.0], [1.0, -0.1, -1.0], [-1.0, 0.0, 1.0]])
    labels = torch.tensor([0, 1, 2, 0])
    loss = create("group", {"iterations": 1}, dim=3, num_classes=3)
    outcomes = [run(loss, embeddings, labels, seed=seed) for seed in range(10)]
    for outcome in outcomes:
        assert_finite(outcome)
    # Where the first is no anchor, only classes 1 and 2 support it; where it is, the last has no neighbors at all.
    values = sorted(outcome.value.item() for outcome in outcomes)
    assert values[-1] == pytest.approx(-math.log(1e-30), rel=0.1)
    logits = embeddings[3] @ loss.proxies.detach().T
    assert values[0] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels[3]).item(), rel=1e-5)


def test_refining_helps_a_batch_whose_classes_hold_together():
    embeddings, labels = make_batch("apart", sizes=(4, 4, 4), dim=8)
    values = [run(create("group", {"iterations": t}, dim=8).double(), embeddings, labels).value for t in (1, 2, 3, 4)]
    assert values == sorted(values, reverse=True)
