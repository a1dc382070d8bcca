"""The part of the battery that only losses of pairs can pass: galleries, and the weight view. See checks.py."""

import pytest
import torch
from checks import (
    NO_LENGTHS,
    SPREADS,
    assert_close,
    assert_finite,
    assert_same,
    degenerate_batches,
    make_batch,
    make_gallery,
    run,
    run_both,
    seeded,
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


def check_tile_size_with_a_gallery(case):
    """One row at a time or all at once: the same value, gradient and draws."""
    batch = make_gallery()
    loss = case.create().double()
    expected = run(loss, *batch)
    pairs = len(batch[1]) * len(batch[3])
    for budget in (1, 4_000, 20_000, 40 * pairs):  # the last keeps all weights, but computes them in tiles
        loss.memory_budget = budget
        assert_same(run(loss, *batch), expected, tolerance=1e-11)


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
    assert leaf.grad is not None
    assert gallery.grad is None
    assert_close(leaf.grad, expected.gradients["embeddings"], 1e-12)


def check_positions(case):
    """-1 means that an anchor is not in the gallery, as if no positions were given."""
    embeddings, labels, gallery, gallery_labels, _ = make_gallery()
    loss = case.create().double()
    nowhere = torch.full_like(labels, -1)
    expected = run(loss, embeddings, labels, gallery, gallery_labels)
    assert_same(run(loss, embeddings, labels, gallery, gallery_labels, nowhere), expected, tolerance=1e-12)


def check_degenerate_with_a_gallery(case):
    """Finite values, gradients and weights where there is little or nothing to learn."""
    for name, (embeddings, labels) in degenerate_batches().items():
        loss = case.create()
        assert_finite(run(loss, embeddings.float(), labels, embeddings.float(), labels))
        assert loss.pair_weights(embeddings.float(), labels).isfinite().all(), name


def check_half_precision_of_a_gallery(case):
    """A half-precision gallery gets gradients of its own type."""
    embeddings, labels = make_batch(dim=16)
    for dtype in (torch.bfloat16, torch.float16):
        mixed = run(case.create(), embeddings.float(), labels, embeddings.to(dtype), labels)
        assert mixed.gradients["gallery"].dtype == dtype


def check_default_device_with_a_gallery(case):
    """A gallery, and weights, are computed where they are, too."""
    batch = make_gallery()
    loss = case.create().double()
    expected, weights = run(loss, *batch), seeded(loss.pair_weights, *batch[:4], positions=batch[4])
    with torch.device("meta"):
        assert_same(run(loss, *batch), expected, tolerance=0.0)
        assert torch.equal(seeded(loss.pair_weights, *batch[:4], positions=batch[4]), weights)


def check_parameters_of_more_digits_with_a_gallery(case):
    """float64 parameters serve a float32 gallery, and its weights."""
    batch = make_gallery(torch.float32)
    loss = case.create().double()
    if not list(loss.parameters()):
        pytest.skip("learns nothing")
    embeddings, labels, gallery, *rest = batch
    exact = embeddings.double(), labels, gallery.double(), *rest
    assert_same(run(loss, *batch), run(loss, *exact), tolerance=1e-6)
    expected = seeded(loss.pair_weights, *exact[:4], positions=exact[4])
    assert torch.equal(seeded(loss.pair_weights, *batch[:4], positions=batch[4]), expected)


def check_lengths_beyond_all_numbers_in_a_gallery(case):
    """A gallery vector whose squared length overflows shows, whether or not it is chosen."""
    if case.key in NO_LENGTHS:
        pytest.skip("asks nothing of lengths")
    embeddings, labels, gallery, gallery_labels, positions = make_gallery(torch.float32)
    for row in range(len(gallery)):
        longer = gallery.clone()
        longer[row] *= 1e20
        assert run(case.create(), embeddings, labels, longer, gallery_labels, positions).value.isnan()


def check_gallery_untouched(case):
    """A loss writes into nothing it was given, nor into what autograd shares with others."""
    embeddings, labels, gallery, gallery_labels, positions = make_gallery()
    given = [embeddings, labels, gallery, gallery_labels, positions]
    before = [tensor.clone() for tensor in given]
    loss = case.create().double()
    loss(embeddings.requires_grad_(), labels, gallery.requires_grad_(), gallery_labels, positions=positions).backward()
    loss.pair_weights(embeddings, labels)
    loss.pair_weights(embeddings, labels, gallery, gallery_labels, positions=positions)
    assert all(torch.equal(tensor, old) for tensor, old in zip(given, before, strict=True))


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
    """Theorem 3.1 of the unified view: Σ_N w·s − Σ_P w·s has the gradient of the loss, w held constant."""
    settings = dict(case.settings) | ({"l2": 0.0} if case.key == "n_pair" else {})
    loss = nf.losses.create(case.key, **settings).double()
    for spread in SPREADS:
        embeddings, labels = make_batch(spread)
        expected = run(loss, embeddings, labels).gradients["embeddings"]
        torch.manual_seed(0)
        weights = loss.pair_weights(embeddings, labels)
        assert not weights.requires_grad
        assert not weights.diagonal().any()
        leaf = embeddings.clone().requires_grad_()
        near = similarities(case, leaf, leaf.detach() if case.query_only else leaf)
        same = labels.unsqueeze(0) == labels.unsqueeze(1)
        surrogate = torch.where(same, -weights * near, weights * near).sum()
        (actual,) = torch.autograd.grad(surrogate, leaf)
        assert_close(actual, expected, 1e-9)


def check_weights_of_a_gallery(case):
    """The same with a gallery, for both ends of the pairs."""
    settings = dict(case.settings) | ({"l2": 0.0} if case.key == "n_pair" else {})
    loss = nf.losses.create(case.key, **settings).double()
    embeddings, labels, gallery, gallery_labels, positions = make_gallery()
    expected = run(loss, embeddings, labels, gallery, gallery_labels, positions).gradients
    torch.manual_seed(0)
    weights = loss.pair_weights(embeddings, labels, gallery, gallery_labels, positions=positions)
    leaf, columns = embeddings.clone().requires_grad_(), gallery.clone().requires_grad_()
    near = similarities(case, leaf, columns.detach() if case.query_only else columns)
    same = labels.unsqueeze(1) == gallery_labels.unsqueeze(0)
    surrogate = torch.where(same, -weights * near, weights * near).sum()
    by_leaf, by_columns = torch.autograd.grad(surrogate, [leaf, columns], allow_unused=True)
    assert_close(by_leaf, expected["embeddings"], 1e-9)
    assert_close(torch.zeros_like(gallery) if by_columns is None else by_columns, expected["gallery"], 1e-9)


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


def check_tile_size_of_weights(case):
    """Weights do not depend on it either."""
    for embeddings, labels, *gallery in (make_batch(), make_gallery()):
        loss = case.create().double()
        keywords = {"positions": gallery.pop()} if gallery else {}
        torch.manual_seed(0)
        expected = loss.pair_weights(embeddings, labels, *gallery, **keywords)
        loss.memory_budget = 1
        torch.manual_seed(0)
        assert_close(loss.pair_weights(embeddings, labels, *gallery, **keywords), expected, 1e-11)


def check_weights_in_inference_mode(case):
    """Weights are derivatives, and found where none are asked for."""
    embeddings, labels = make_batch()
    loss = case.create().double()
    torch.manual_seed(0)
    expected = loss.pair_weights(embeddings, labels)
    torch.manual_seed(0)
    with torch.inference_mode():
        assert_close(loss.pair_weights(embeddings * 1.0, labels), expected, 1e-11)


PAIR_CHECKS = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
