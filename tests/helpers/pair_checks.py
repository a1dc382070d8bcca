"""The part of the battery that only losses of pairs can pass: galleries, and the weight view. See checks.py."""

import pytest
import torch
from checks import (
    NO_LENGTHS,
    SPREADS,
    assert_close,
    assert_same,
    make_batch,
    make_gallery,
    run,
    run_both,
    seeded,
    weights,
)

import nearfar as nf

# --- galleries ----------------------------------------------------------------------------------------------


def check_oracle_with_a_gallery(case):
    """Also with a gallery that holds some of the anchors, and with one that holds none."""
    embeddings, labels, gallery, gallery_labels, positions = make_gallery()
    assert_same(*run_both(case, embeddings, labels, gallery, gallery_labels, positions), tolerance=1e-9)
    others = len(gallery) - int((positions >= 0).sum())
    assert_same(*run_both(case, embeddings, labels, gallery[:others], gallery_labels[:others]), tolerance=1e-9)


def check_gradcheck_with_a_gallery(case):
    """The gradient is the numerical derivative; by a constant gallery there is none."""
    if not case.derivative:
        pytest.skip("the gradient is the paper's, not the derivative")
    loss = case.create().double()
    embeddings, labels = make_batch(sizes=(3, 2, 1), dim=3, seed=3)
    gallery, gallery_labels = make_batch(sizes=(2, 2, 1), dim=3, seed=4)

    def of_gallery(embeddings, gallery):
        return seeded(loss, embeddings, labels, gallery, gallery_labels)

    inputs = embeddings.requires_grad_(), gallery.requires_grad_(not case.query_only)
    assert torch.autograd.gradcheck(of_gallery, inputs)


def check_gallery_is_the_batch(case):
    """The batch as its own gallery: the same value, and the gradients of both ends add up."""
    embeddings, labels = make_batch()
    loss = case.create().double()
    expected = run(loss, embeddings, labels)
    actual = run(loss, embeddings, labels, embeddings, labels, torch.arange(len(labels)))
    if case.query_only:
        assert not actual.gradients["gallery"].any()
    actual.gradients["embeddings"] += actual.gradients.pop("gallery")
    assert_same(actual, expected, tolerance=1e-11)


def check_constant_gallery(case):
    """A gallery that asks for no gradient changes nothing for the anchors."""
    embeddings, labels, gallery, gallery_labels, positions = make_gallery()
    loss = case.create().double()
    expected = run(loss, embeddings, labels, gallery, gallery_labels, positions)
    torch.manual_seed(0)
    leaf = embeddings.clone().requires_grad_()
    value = loss(leaf, labels, gallery, gallery_labels, positions=positions)
    value.backward()
    assert_close(value.detach(), expected.value, 1e-12)
    assert gallery.grad is None
    assert_close(leaf.grad, expected.gradients["embeddings"], 1e-12)


def check_positions(case):
    """-1 means that an anchor is not in the gallery, as if no positions were given."""
    embeddings, labels, gallery, gallery_labels, _ = make_gallery()
    loss = case.create().double()
    nowhere = torch.full_like(labels, -1)
    expected = run(loss, embeddings, labels, gallery, gallery_labels)
    assert_same(run(loss, embeddings, labels, gallery, gallery_labels, nowhere), expected, tolerance=1e-12)


def check_lengths_beyond_all_numbers_in_a_gallery(case):
    """A gallery vector whose squared length overflows shows, whether or not it is chosen."""
    if case.key in NO_LENGTHS:
        pytest.skip("asks nothing of lengths")
    embeddings, labels, gallery, gallery_labels, positions = make_gallery(torch.float32)
    for row in range(len(gallery)):
        longer = gallery.clone()
        longer[row] *= 1e20
        assert run(case.create(), embeddings, labels, longer, gallery_labels, positions).value.isnan()


# --- the weight view ----------------------------------------------------------------------------------------


def similarities(case, embeddings, columns):
    """[m, n], larger for nearer pairs, by the textbook."""
    if case.normalize:
        embeddings, columns = (torch.nn.functional.normalize(vectors, dim=1) for vectors in (embeddings, columns))
    if case.measure in ("cosine", "dot"):
        return embeddings @ columns.T
    if case.measure == "snr":
        noise = (embeddings.unsqueeze(1) - columns.unsqueeze(0)).var(dim=2)
        return -noise / embeddings.var(dim=1, keepdim=True)
    squares = (embeddings.unsqueeze(1) - columns.unsqueeze(0)).square().sum(dim=2)
    if case.measure == "squared_euclidean":
        return -squares
    apart = squares > 0
    return -torch.where(apart, squares, 1.0).sqrt() * apart


def check_gradient_equivalence(case):
    """Theorem 3.1 of the unified view: Σ_N w·s − Σ_P w·s has the gradient of the loss, by both ends, w held fixed."""
    settings = dict(case.settings) | ({"l2": 0.0} if case.key == "n_pair" else {})
    loss = nf.losses.create(case.key, **settings).double()
    for embeddings, labels, *gallery in (*map(make_batch, SPREADS), make_gallery()):
        expected = run(loss, embeddings, labels, *gallery).gradients
        by_pairs = weights(loss, embeddings, labels, *gallery)
        assert not by_pairs.requires_grad
        assert gallery or not by_pairs.diagonal().any()
        leaves = [vectors.clone().requires_grad_() for vectors in (embeddings, *gallery[:1])]
        near = similarities(case, leaves[0], leaves[-1].detach() if case.query_only else leaves[-1])
        same = labels.unsqueeze(1) == (gallery[1] if gallery else labels)
        surrogate = torch.where(same, -by_pairs * near, by_pairs * near).sum()
        actual = torch.autograd.grad(surrogate, leaves, allow_unused=True, materialize_grads=True)
        for gradient, name in zip(actual, ("embeddings", "gallery"), strict=False):
            assert_close(gradient, expected[name], 1e-9)


MOVE_PAIRS_AGAINST_THEIR_CLASS = {
    "nra": "the nearest and the farthest neighbor",
    "sup_con": "a positive that is much nearer than the others",
    "nca": "a positive that is much nearer than the others",
    "tuplet_margin": "a positive that is nearer than the slack",
    "smooth_ap": "a positive that is in the way of another",
    "fast_ap": "a positive, to where positives are denser",
}


def check_weights_are_not_negative(case):
    """Every loss pulls positives and pushes negatives, but for those that are documented to do otherwise."""
    if case.key in MOVE_PAIRS_AGAINST_THEIR_CLASS:
        pytest.skip(f"moves {MOVE_PAIRS_AGAINST_THEIR_CLASS[case.key]} against the class")
    for spread in SPREADS:
        embeddings, labels = make_batch(spread)
        assert (case.create().double().pair_weights(embeddings, labels) >= 0).all()


PAIR_CHECKS = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
