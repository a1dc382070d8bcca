"""Losses made of losses: weighted sums, prefixes of embeddings, regularizers."""

import copy
import pickle
from itertools import combinations

import pytest
import torch
from cases import create
from checks import assert_same, make_batch, make_gallery, run

import nearfar as nf
from nearfar.distributed import sharing_mode
from nearfar.losses import Matryoshka, MultipleLosses, Regularized


def summed(batch, *terms):
    total = torch.zeros((), dtype=torch.float64)
    for weight, loss in terms:
        total = total + weight * loss(*batch)
    return total


# --- weighted sums --------------------------------------------------------------------------------------------


def both():
    one, other = create("multi_similarity", {}).double(), create("proxy_anchor", {}).double()
    return one, other, MultipleLosses([one, other], weights=[2.0, 0.5])


def test_a_sum_has_the_value_and_gradients_of_its_terms():
    one, other, loss = both()
    embeddings, labels = make_batch()
    found, first, second = (run(each, embeddings, labels) for each in (loss, one, other))
    assert found.value == pytest.approx(2.0 * first.value + 0.5 * second.value)
    expected = 2.0 * first.gradients["embeddings"] + 0.5 * second.gradients["embeddings"]
    torch.testing.assert_close(found.gradients["embeddings"], expected)
    torch.testing.assert_close(found.gradients["losses.1.proxies"], 0.5 * second.gradients["proxies"])


def test_weights_are_one_unless_given():
    one, other, _ = both()
    batch = make_batch()
    assert MultipleLosses([one, other])(*batch).item() == pytest.approx((one(*batch) + other(*batch)).item())


def test_a_gallery_is_for_losses_that_compare_embeddings():
    one, other, loss = both()
    embeddings, labels, gallery, gallery_labels, positions = make_gallery()
    expected = 2.0 * one(embeddings, labels, gallery, gallery_labels, positions=positions)
    expected = expected + 0.5 * other(embeddings, labels)
    found = loss(embeddings, labels, gallery, gallery_labels, positions=positions)
    assert found.item() == pytest.approx(expected.item())


def test_a_sum_of_pair_losses_takes_other_supervision():
    embeddings, labels = make_batch()
    raw, circle = create("raw", {}), create("circle", {})
    same = nf.supervision.Masks(labels.unsqueeze(1) == labels)
    expected = raw(embeddings, labels) + circle(embeddings, labels)
    assert MultipleLosses([raw, circle])(embeddings, same).item() == pytest.approx(expected.item())
    with pytest.raises(TypeError, match="labels is a Masks, but MultipleLosses learns vectors for each class"):
        both()[2](embeddings, same)


def test_proxies_keep_their_learning_rates():
    _, other, loss = both()
    (group,) = loss.param_groups(lr=0.01)
    assert group["params"] == [other.proxies]
    assert group["lr"] == pytest.approx(1.0)
    twice = MultipleLosses([other, other])
    assert len(twice.param_groups(lr=0.01)) == 1
    (group,) = nf.losses.param_groups(loss, 0.01)
    assert group["lr"] == pytest.approx(1.0)


def test_what_the_terms_declare_is_known_of_the_sum():
    raw, softmax, triplet = create("raw", {}), create("softmax", {}), create("triplet", {})
    assert sharing_mode(MultipleLosses([raw, softmax])) == "columns"
    assert sharing_mode(MultipleLosses([softmax, softmax])) == "rows"
    assert sharing_mode(MultipleLosses([raw, triplet])) == "whole"
    assert MultipleLosses([raw, create("raw", {"mining": "random"})]).draws
    assert not MultipleLosses([raw, triplet]).draws


def test_a_sum_can_be_copied_and_saved():
    _, _, loss = both()
    batch = make_batch()
    other = both()[2]
    other.load_state_dict(loss.state_dict())
    for copied in (other, copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert_same(run(copied, *batch), run(loss, *batch), tolerance=1e-12)


def test_wrong_sums_are_errors():
    one, other, _ = both()
    with pytest.raises(ValueError, match="weights has 1 numbers for 2 losses"):
        MultipleLosses([one, other], weights=[1.0])
    with pytest.raises(ValueError, match="weights is -1"):
        MultipleLosses([one], weights=[-1])
    with pytest.raises(TypeError, match=r"losses is \['CrossEntropyLoss'\]"):
        MultipleLosses([torch.nn.CrossEntropyLoss()])
    with pytest.raises(TypeError, match=r"losses is \[\]"):
        MultipleLosses([])


# --- prefixes -------------------------------------------------------------------------------------------------


def test_prefixes_share_a_loss_or_have_their_own():
    embeddings, labels = make_batch()
    one = create("multi_similarity", {})
    loss = Matryoshka(one, dims=[2, 3, 4], weights=[0.5, 1.0, 2.0])
    expected = summed((embeddings, labels), (2.0, one))
    expected += 0.5 * one(embeddings[:, :2], labels) + one(embeddings[:, :3], labels)
    assert loss(embeddings, labels).item() == pytest.approx(expected.item())
    own = Matryoshka(lambda dim: create("proxy_anchor", {}, dim=dim), dims=[2, 4]).double()
    first, second = own.parts
    expected = first(embeddings[:, :2], labels) + second(embeddings, labels)
    assert own(embeddings, labels).item() == pytest.approx(expected.item())
    assert len(own.param_groups(lr=0.1)) == 2


def test_the_gradient_of_prefixes_is_the_numerical_one():
    embeddings, labels = make_batch(sizes=(3, 2, 1), dim=3, seed=3)
    gallery, gallery_labels = make_batch(sizes=(2, 2, 1), dim=3, seed=4)
    loss = Matryoshka(create("raw", {}), dims=[1, 3])
    inputs = embeddings.requires_grad_(), gallery.requires_grad_()
    assert torch.autograd.gradcheck(lambda e, g: loss(e, labels, g, gallery_labels), inputs)


def test_wrong_prefixes_are_errors():
    for dims in ([], [4, 2], [2, 2]):
        with pytest.raises(ValueError, match=r"dims is .*increasing"):
            Matryoshka(create("raw", {}), dims=dims)
    with pytest.raises(ValueError, match="dims has 8, and embeddings have 4 dimensions"):
        Matryoshka(create("raw", {}), dims=[4, 8])(*make_batch())


# --- regularizers ---------------------------------------------------------------------------------------------


def cosine(one, other):
    return (one * other).sum() / (one.square().sum() * other.square().sum()).sqrt()


def by_hand(name, rows):
    """A regularizer as a loop over rows, or over classes of centers."""
    if name == "sparse_centers":
        pairs = [pair for centers in rows for pair in combinations(list(centers), 2)]
        return sum((2 - 2 * cosine(*pair)).sqrt() for pair in pairs) / (2 * len(pairs))
    if name == "orthogonal":
        squares = [cosine(*pair) ** 2 for pair in combinations(list(rows), 2)]
        return sum(squares) / len(squares)
    if name == "center_invariant":
        squares = [row.square().sum() for row in rows]
        return sum((square - sum(squares) / len(squares)) ** 2 for square in squares) / len(squares) / 4
    of_row = {"l1": lambda row: sum(abs(x) for x in row), "l2": lambda row: sum(x * x for x in row)}
    of_row["zero_mean"] = lambda row: abs(sum(row))
    return sum(of_row[name](row) for row in rows) / len(rows)


@pytest.mark.parametrize("name", ["l1", "l2", "zero_mean", "center_invariant", "orthogonal", "sparse_centers"])
def test_a_regularizer_has_the_value_and_gradient_of_a_loop(name):
    inner = create("arcface", {"centers": 3 if name == "sparse_centers" else 1}).double()
    loss, batch = Regularized(inner, name, weight=0.7), make_batch()
    found, plain = run(loss, *batch), run(inner, *batch)
    of = "embeddings" if name in ("l1", "l2", "zero_mean") else "proxies"
    leaf = (batch[0] if of == "embeddings" else inner.proxies).detach().clone().requires_grad_()
    expected = by_hand(name, leaf)
    (gradient,) = torch.autograd.grad(expected, leaf)
    assert (found.value - plain.value).item() == pytest.approx(0.7 * expected.item())
    key = of if of == "embeddings" else "losses.0.proxies"
    torch.testing.assert_close(found.gradients[key] - plain.gradients[of], 0.7 * gradient)


@pytest.mark.parametrize("name", ["l1", "l2", "zero_mean", "center_invariant", "orthogonal", "sparse_centers"])
def test_zeros_and_equal_proxies_have_finite_gradients(name):
    inner = create("arcface", {"centers": 2})
    with torch.no_grad():
        inner.proxies[:] = inner.proxies[0, 0].clone()
        inner.proxies[1] = 0.0
    embeddings, labels = make_batch(dtype=torch.float32)
    found = run(Regularized(inner, name), embeddings * 0, labels)
    assert found.value.isfinite()
    assert all(gradient.isfinite().all() for gradient in found.gradients.values())


def test_autocast_does_not_reach_into_the_terms():
    loss, batch = Regularized(create("arcface", {}), "orthogonal"), make_batch(dtype=torch.float32)
    expected = run(loss, *batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(run(loss, *batch), expected, tolerance=1e-7)


def test_wrong_regularizers_are_errors():
    with pytest.raises(ValueError, match="regularizer is 'l3'; allowed are l1, l2"):
        Regularized(create("raw", {}), "l3")
    with pytest.raises(ValueError, match="'orthogonal' is for losses with proxies; Raw has none"):
        Regularized(create("raw", {}), "orthogonal")
    with pytest.raises(ValueError, match="'sparse_centers' needs a loss with several centers"):
        Regularized(create("arcface", {}), "sparse_centers")(*make_batch(dtype=torch.float32))


def test_terms_can_be_nested():
    inner = Matryoshka(lambda dim: create("proxy_anchor", {}, dim=dim), dims=[2, 4])
    loss = Regularized(MultipleLosses([create("raw", {}), inner]), "orthogonal", weight=0.1)
    loss(*make_batch(dtype=torch.float32)).backward()
    assert len(loss.param_groups(lr=0.1)) == 2
    assert all(parameter.grad is not None for parameter in loss.parameters())
