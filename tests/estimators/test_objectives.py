"""Values and gradients of every objective against explicit loops in float64."""

import numpy as np
import pytest
import torch
from estimator_cases import blobs, check_objective, problem_of, squared

from nearfar import estimators as E
from nearfar.estimators.lmnn import SparsePairs, target_neighbors, within_reach
from nearfar.estimators.pair_methods import pola_update
from nearfar.estimators.solvers import over_rows

X, Y = blobs()
DATA = torch.as_tensor(X)
PAIRS = np.array([[0, 3, 1], [1, 4, 1], [2, 8, 1], [6, 9, 1], [0, 1, 0], [2, 4, 0], [5, 7, 0], [3, 8, 0], [9, 11, 0]])
TRIPLETS = np.array([[0, 3, 1], [1, 4, 2], [2, 8, 3], [6, 9, 10], [7, 1, 0], [11, 5, 4]])
QUADRUPLETS = np.array([[0, 3, 1, 2], [1, 4, 5, 6], [2, 8, 0, 7], [6, 9, 10, 3]])


def delta(i, j):
    return DATA[int(i)] - DATA[int(j)]


# --- neighbors at random ------------------------------------------------------------------------------


FEW = 9
NUMBERS = X[:FEW, 0] ** 2 + 3


def probabilities(g, i):
    weights = {j: torch.exp(-(g @ delta(i, j)).square().sum()) for j in range(FEW) if j != i}
    total = torch.stack([*weights.values()]).sum()
    return {j: weight / total for j, weight in weights.items()}


def nca(g):
    return -torch.stack([p for i in range(FEW) for j, p in probabilities(g, i).items() if Y[i] == Y[j]]).sum()


def mcml(g):
    terms = []
    for i in range(FEW):
        terms.append(torch.stack([-p.log() for j, p in probabilities(g, i).items() if Y[i] == Y[j]]).mean())
    return torch.stack(terms).sum()


def mlkr(g):
    terms = []
    for i in range(FEW):
        predicted = torch.stack([p * NUMBERS[j] for j, p in probabilities(g, i).items()]).sum()
        terms.append((NUMBERS[i] - predicted) ** 2)
    return torch.stack(terms).sum()


@pytest.mark.parametrize(
    ("estimator", "y", "oracle"),
    [(E.NCA, Y[:FEW], nca), (E.MCML, Y[:FEW], mcml), (E.MLKR, NUMBERS, mlkr)],
    ids=["NCA", "MCML", "MLKR"],
)
@pytest.mark.parametrize("n_components", [None, 2])
def test_random_neighbors(monkeypatch, estimator, y, oracle, n_components):
    problem = problem_of(monkeypatch, estimator(max_iter=2, n_components=n_components), X[:FEW], y)
    check_objective(problem, oracle, symmetric=False)


def test_mcml_ignores_a_sample_that_is_alone_in_its_class(monkeypatch):
    y = Y.copy()
    y[5] = 7
    alone = problem_of(monkeypatch, E.MCML(max_iter=1), X, y)
    value, gradient = alone.objective(alone.start)
    assert torch.isfinite(value)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("tile", [1, 7, 24])
def test_tiles_do_not_change_the_sum(tile):
    def weigh(distances, rows):
        return distances.exp().neg().sum() + distances.square().sum(), -distances.exp() + 2 * distances

    points = (DATA / 4).requires_grad_()
    distances = (points[:, None] - points).square().sum(dim=2)
    expected = -distances.exp().sum() + distances.square().sum()
    (slope,) = torch.autograd.grad(expected, points)
    value, gradient = over_rows(points.detach(), weigh, tile)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(gradient, slope)


# --- pairs --------------------------------------------------------------------------------------------


def itml(a):
    total = a.trace() - torch.logdet(a) - len(a)
    for i, j, same in PAIRS:
        bound = 1.3 if same else 4.1
        ratio = squared(a, delta(i, j)) / bound
        if (ratio > 1) == bool(same):
            total = total + 0.7 * (ratio - ratio.log() - 1)
    return total


def lsml(a):
    total = a.trace() - torch.logdet(a) - len(a)
    for (i, j, k, m), weight in zip(QUADRUPLETS, (1.0, 2.0, 0.5, 1.0), strict=True):
        excess = squared(a, delta(i, j)).sqrt() - squared(a, delta(k, m)).sqrt()
        total = total + weight * excess.clamp_min(0) ** 2 / len(QUADRUPLETS)
    return total


def mmc(a):
    near = torch.stack([squared(a, delta(i, j)) for i, j, same in PAIRS if same])
    far = torch.stack([squared(a, delta(i, j)).sqrt() for i, j, same in PAIRS if not same])
    return near.mean() - far.mean().log()


def test_itml(monkeypatch):
    problem = problem_of(monkeypatch, E.ITML(gamma=0.7, bounds=(1.3, 4.1)), X, pairs=PAIRS)
    check_objective(problem, lambda g: itml(g.T @ g), symmetric=False)


def test_lsml(monkeypatch):
    problem = problem_of(monkeypatch, E.LSML(), X, quadruplets=QUADRUPLETS, weights=[1.0, 2.0, 0.5, 1.0])
    check_objective(problem, lambda g: lsml(g.T @ g), symmetric=False)


def test_mmc(monkeypatch):
    check_objective(problem_of(monkeypatch, E.MMC(), X, pairs=PAIRS), mmc, symmetric=True)


def test_a_covariance_prior_is_where_itml_and_lsml_start(monkeypatch):
    expected = torch.as_tensor(np.linalg.inv(np.cov(X.T)))
    for estimator, given in ((E.ITML, {"pairs": PAIRS}), (E.LSML, {"triplets": TRIPLETS})):
        problem = problem_of(monkeypatch, estimator(prior="covariance"), X, **given)
        torch.testing.assert_close(problem.start.T @ problem.start, expected, rtol=1e-6, atol=1e-6)


def cyclic_projections(gamma, bounds, sweeps=400):
    """The algorithm of the paper: Bregman projections on one constraint after another."""
    a = np.eye(X.shape[1])
    dual = np.zeros(len(PAIRS))
    slack = np.where(PAIRS[:, 2] == 1, *bounds)
    for _ in range(sweeps):
        for c, (i, j, same) in enumerate(PAIRS):
            sign, difference = (1 if same else -1), X[i] - X[j]
            p = difference @ a @ difference
            alpha = min(dual[c], sign * gamma / (gamma + 1) * (1 / p - 1 / slack[c]))
            beta = sign * alpha / (1 - sign * alpha * p)
            slack[c] = gamma * slack[c] / (gamma + sign * alpha * slack[c])
            dual[c] -= alpha
            moved = a @ difference
            a = a + beta * np.outer(moved, moved)
    return a


@pytest.mark.parametrize("gamma", [1.0, 3.0])
def test_itml_finds_the_solution_of_the_cyclic_projections(gamma):
    model = E.ITML(gamma=gamma, bounds=(1.3, 4.1), max_iter=2000, tol=0).fit(X, pairs=PAIRS)
    expected = cyclic_projections(gamma, (1.3, 4.1))
    np.testing.assert_allclose(model.get_mahalanobis_matrix(), expected, atol=1e-6)
    assert np.abs(expected - np.eye(3)).max() > 0.1  # the bounds matter


def test_pola_moves_to_the_closest_metric_without_loss():
    """The projections of the paper, for a similar pair that is too far and a dissimilar one that is too close."""
    a, b = torch.eye(3, dtype=torch.float64), 2.0
    for sign, length in ((1.0, 3.0), (-1.0, 0.5)):
        pair = delta(0, 1) * length / delta(0, 1).norm()
        loss = sign * (float(squared(a, pair)) - b) + 1
        assert loss > 0
        alpha = loss / (float(pair @ pair) ** 2 + 1)
        plain, limit = a - sign * alpha * torch.outer(pair, pair), b + sign * alpha
        assert sign * (float(squared(plain, pair)) - limit) + 1 == pytest.approx(0)
        values, vectors = np.linalg.eigh(plain.numpy())
        expected = vectors @ np.diag(values.clip(0)) @ vectors.T
        got, threshold = pola_update(a, b, pair, sign)
        np.testing.assert_allclose(got.numpy(), expected, atol=1e-12)
        assert threshold == pytest.approx(max(1.0, limit))


def test_pola_does_not_move_for_a_pair_without_loss():
    a = torch.eye(3, dtype=torch.float64)
    same, threshold = pola_update(a, 1.5, torch.tensor([3.0, 0.0, 0.0], dtype=torch.float64), -1.0)
    assert same is a
    assert threshold == 1.5


# --- the general model ----------------------------------------------------------------------------------


def regularizer(name, a, near, reference):
    if name == "frobenius":
        return a.square().sum() / 2
    if name == "logdet":
        return a.trace() - torch.logdet(a) - len(a)
    c = torch.eye(len(a), dtype=a.dtype)
    if reference == "similar":
        c = torch.stack([torch.outer(d, d) for d in near]).mean(dim=0)
    return (a @ c).trace()


def charges(loss, a):
    terms = []
    if loss == "relative":
        for i, j, k in TRIPLETS:
            terms.append((squared(a, delta(i, j)) - squared(a, delta(i, k)) + 0.8).clamp_min(0))
        return torch.stack(terms).sum()
    for i, j, same in PAIRS:
        distance, bound = squared(a, delta(i, j)), 1.3 if same else 4.1
        excess = distance - bound if same else bound - distance
        terms.append(excess**2 if loss == "squared" else excess.clamp_min(0))
    return torch.stack(terms).sum()


@pytest.mark.parametrize("loss", ["hinge", "relative", "squared"])
@pytest.mark.parametrize(
    ("name", "reference"),
    [("frobenius", "similar"), ("trace", "similar"), ("trace", "identity"), ("logdet", "similar")],
)
def test_linear_metric(monkeypatch, name, reference, loss):
    model = E.LinearMetric(
        regularizer=name, loss=loss, reference=reference, trade_off=0.3, upper=1.3, lower=4.1, margin=0.8
    )
    given = {"triplets": TRIPLETS} if loss == "relative" else {"pairs": PAIRS}
    near = [delta(i, j) for i, j, _ in TRIPLETS] if loss == "relative" else [delta(i, j) for i, j, s in PAIRS if s]

    def oracle(a):
        return regularizer(name, a, near, reference) + 0.3 * charges(loss, a)

    check_objective(problem_of(monkeypatch, model, X, **given), oracle, symmetric=True)


def test_linear_metric_of_low_rank(monkeypatch):
    def oracle(g):
        return regularizer("frobenius", g.T @ g, [], "similar") + charges("hinge", g.T @ g)

    problem = problem_of(monkeypatch, E.LinearMetric(n_components=2, upper=1.3, lower=4.1), X, pairs=PAIRS)
    check_objective(problem, oracle, symmetric=False)


def test_targets_are_wanted_squared_distances(monkeypatch):
    targets = np.linspace(1, 9, len(PAIRS))[::-1]
    mixed = np.random.RandomState(0).permutation(len(PAIRS))  # similar and dissimilar pairs in any order

    def oracle(a):
        terms = [(squared(a, delta(i, j)) - t) ** 2 for (i, j, _), t in zip(PAIRS, targets, strict=True)]
        return a.square().sum() / 2 + torch.stack(terms).sum()

    model = E.LinearMetric(loss="squared")
    problem = problem_of(monkeypatch, model, X, pairs=PAIRS[mixed], targets=targets[mixed])
    check_objective(problem, oracle, symmetric=True)


# --- LMNN ---------------------------------------------------------------------------------------------


ORDER = np.argsort(Y, kind="stable")
SORTED, LABELS = DATA[ORDER], torch.as_tensor(Y[ORDER])


def targets_by_loops(k):
    found = []
    for i in range(len(SORTED)):
        same = [j for j in range(len(SORTED)) if j != i and LABELS[j] == LABELS[i]]
        found.append(sorted(same, key=lambda j, i=i: float((SORTED[i] - SORTED[j]).square().sum()))[:k])
    return found


def lmnn(g):
    total = torch.zeros((), dtype=torch.float64)
    for i, near in enumerate(targets_by_loops(3)):
        for j in near:
            pull = (g @ (SORTED[i] - SORTED[j])).square().sum()
            total = total + 0.4 * pull
            for other in range(len(SORTED)):
                if LABELS[other] != LABELS[i]:
                    push = (g @ (SORTED[i] - SORTED[other])).square().sum()
                    total = total + 0.6 * (1 + pull - push).clamp_min(0)
    return total


def test_target_neighbors():
    assert target_neighbors(SORTED, LABELS, 3).tolist() == targets_by_loops(3)


def test_a_small_class_has_fewer_target_neighbors():
    assert target_neighbors(DATA[:3], torch.tensor([0, 0, 1]), 2).tolist() == [[1, -1], [0, -1], [-1, -1]]


def test_impostors_are_all_samples_within_reach():
    targets = target_neighbors(SORTED, LABELS, 3)
    expected = set()
    for i, near in enumerate(targets_by_loops(3)):
        limit = max(float((SORTED[i] - SORTED[j]).square().sum()) for j in near) + 1
        for other in range(len(SORTED)):
            if LABELS[other] != LABELS[i] and float((SORTED[i] - SORTED[other]).square().sum()) < limit:
                expected.add((i, other))
    found = within_reach(SORTED, LABELS, targets)
    assert set(zip(found.rows.tolist(), found.columns.tolist(), strict=True)) == expected
    assert len(found.rows) == len(expected) > 0
    assert len(within_reach(SORTED, LABELS, targets, len(expected)).rows) == len(expected)
    assert 4 < len(within_reach(SORTED, LABELS, targets, 4).rows) < len(expected)  # ends early


def test_pairs_of_a_union_are_there_once():
    one = SparsePairs(torch.tensor([0, 2]), torch.tensor([1, 0]), 3)
    both = one.union(SparsePairs(torch.tensor([0, 1]), torch.tensor([1, 2]), 3))
    assert list(zip(both.rows.tolist(), both.columns.tolist(), strict=True)) == [(0, 1), (1, 2), (2, 0)]


@pytest.mark.parametrize("rows", [2, 3])
def test_lmnn_objective(rows):
    g = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows), dtype=torch.float64).requires_grad_()
    expected = lmnn(g)
    (slope,) = torch.autograd.grad(expected, g)
    targets = target_neighbors(SORTED, LABELS, 3)
    pairs = within_reach(SORTED @ g.detach().T, LABELS, targets)
    assert pairs is not None
    value, gradient = E.LMNN(push=0.6)._objective(g.detach(), SORTED, targets, pairs)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(gradient, slope)


def test_lmnn_ends_with_the_objective_over_all_samples():
    model = E.LMNN(push=0.6, rounds=3).fit(X, Y)
    assert model.objective_[-1] == pytest.approx(float(lmnn(torch.as_tensor(model.components_))))
