"""How embeddings are compared: values and gradients by the textbook."""

import pytest
import torch
from checks import assert_close, make_batch

from nearfar.engine import measures
from nearfar.losses import PairLoss

MEASURES = [
    ("cosine", True),
    ("dot", True),
    ("dot", False),
    ("euclidean", True),
    ("euclidean", False),
    ("squared_euclidean", True),
    ("squared_euclidean", False),
    ("snr", True),
    ("snr", False),
]
every_measure = pytest.mark.parametrize(("name", "normalize"), MEASURES)


class Probe(PairLoss):
    """Σ of given factors times what the measure says; keeps what it saw."""

    def __init__(self, measure, normalize, factors):
        super().__init__()
        self.measure, self.normalize, self.factors = measure, normalize, factors
        self.seen = torch.empty(0)

    def rows(self, sim, pos, neg):
        self.seen = sim.detach().clone()
        return torch.where(pos | neg, sim * self.factors, 0.0).sum(dim=1)


def textbook(name, normalize, rows, columns):
    if normalize:
        rows, columns = (vectors / vectors.norm(dim=1, keepdim=True) for vectors in (rows, columns))
    if name in ("cosine", "dot"):
        return torch.einsum("id,jd->ij", rows, columns)
    if name == "snr":
        return (rows[:, None] - columns[None]).var(dim=2) / rows.var(dim=1, keepdim=True)
    squares = (rows[:, None] - columns[None]).square().sum(dim=2)
    return squares if name == "squared_euclidean" else squares.sqrt()


@every_measure
def test_values_and_gradients(name, normalize):
    (rows, labels), (columns, column_labels) = make_batch(seed=0), make_batch(sizes=(4, 2, 1), seed=1)
    factors = torch.randn(len(rows), len(columns), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    leaves = [tensor.clone().requires_grad_() for tensor in (rows, columns)]
    probe = Probe(name, normalize, factors)
    actual = torch.autograd.grad(probe(leaves[0], labels, leaves[1], column_labels), leaves)
    values = textbook(name, normalize, *leaves)
    expected = torch.autograd.grad((factors * values).sum() / len(rows), leaves)
    assert_close(probe.seen, values.detach(), 1e-13)
    for mine, other in zip(actual, expected, strict=True):
        assert_close(mine, other, 1e-12)


@every_measure
def test_a_length_does_not_matter_unless_vectors_are_not_normalized(name, normalize):
    embeddings, labels = make_batch()
    factors = torch.ones(len(labels), len(labels), dtype=torch.float64)
    one, other = Probe(name, normalize, factors), Probe(name, normalize, factors)
    same = torch.allclose(one(embeddings, labels), other(3.0 * embeddings, labels))
    assert same == (normalize or name == "snr")  # a ratio, which a common factor does not change


@pytest.mark.parametrize("offset", [100.0, 10_000.0])
@pytest.mark.parametrize("name", ["euclidean", "squared_euclidean"])
def test_distances_do_not_suffer_from_a_common_offset(name, offset):
    embeddings, labels = make_batch("mixed", dim=16, dtype=torch.float32)
    embeddings = embeddings + offset
    probe = Probe(name, False, torch.ones(len(labels), len(labels)))
    leaf = embeddings.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(probe(leaf, labels), leaf)
    exact = embeddings.double().requires_grad_()
    apart = ~torch.eye(len(labels), dtype=torch.bool)
    squares = (exact[:, None] - exact[None]).square().sum(dim=2)[apart]
    values = squares if name == "squared_euclidean" else squares.sqrt()
    (expected,) = torch.autograd.grad(values.sum() / len(labels), exact)
    assert_close(probe.seen[apart], values.detach(), 1e-4)
    assert_close(gradient, expected, 1e-4)


@every_measure
def test_equal_and_zero_vectors_have_finite_gradients(name, normalize):
    embeddings = torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 0.0], [0.0, 0.0], [-1.0, -2.0]])
    leaf = embeddings.clone().requires_grad_()
    Probe(name, normalize, torch.ones(5, 5))(leaf, torch.tensor([0, 0, 1, 2, 1])).backward()
    assert leaf.grad.isfinite().all()


def test_equal_vectors_are_not_pushed_apart_in_a_random_direction():
    leaf = torch.ones(4, 3, requires_grad=True)
    Probe("euclidean", False, torch.ones(4, 4))(leaf, torch.tensor([0, 0, 1, 1])).backward()
    assert not leaf.grad.any()


def test_measures_by_name():
    assert measures.create("euclidean").normalize
    assert not measures.create("euclidean", normalize=False).normalize
    assert measures.create("euclidean").is_distance
    assert not measures.create("cosine").is_distance


@pytest.mark.parametrize(
    ("name", "normalize", "words"),
    [("manhattan", True, "'manhattan'; allowed are cosine, dot"), ("cosine", False, "'cosine' normalizes")],
)
def test_measures_that_are_not_there(name, normalize, words):
    with pytest.raises(ValueError, match=words):
        measures.create(name, normalize=normalize)


@pytest.mark.parametrize("normalize", [True, False])
def test_snr_without_variance_has_no_distance_and_no_gradient(normalize):
    embeddings = torch.cat([torch.tensor([[3.3] * 7, [0.1] * 7]), torch.randn(4, 7)])
    leaf = embeddings.requires_grad_()
    probe = Probe("snr", normalize, torch.ones(6, 6))
    probe(leaf, torch.tensor([0, 1, 0, 1, 2, 2])).backward()
    assert not probe.seen[:2].any()
    assert (probe.seen[2:, :2] - 1.0).abs().max() < 1e-5  # the whole signal is noise
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("budget", [1, 1 << 28])
def test_snr_of_columns_that_are_weighted_has_anchors_in_rows(budget):
    class Weighted(PairLoss):
        measure, needs_column_values = "snr", True
        memory_budget = budget

        def column_values(self, tile):
            return torch.where(tile.positives | tile.negatives, tile.values, 0.0).sum(dim=1)

        def on_tile(self, tile):
            assert tile.column_values is not None
            return torch.where(tile.negatives, tile.values * tile.column_values, 0.0).sum(dim=1)

    embeddings, labels = make_batch()
    leaf = embeddings.requires_grad_()
    value = Weighted()(leaf, labels)
    (gradient,) = torch.autograd.grad(value, leaf)
    values = textbook("snr", True, leaf, leaf)
    negatives = labels[:, None] != labels
    expected = torch.where(negatives, values * values.sum(dim=0), 0.0).sum() / len(labels)
    assert_close(value.detach(), expected.detach(), 1e-11)
    assert_close(gradient, torch.autograd.grad(expected, leaf)[0], 1e-10)
