"""Metrics in the feature space of a kernel."""

import numpy as np
import pytest
import torch
from estimator_cases import blobs

from nearfar.estimators import LFDA, LMNN, RCA, KernelMetric, LinearMetric, Mahalanobis
from nearfar.metrics import retrieval

X, Y = blobs(20, 3)


def rbf(x, y):
    return float(np.exp(-0.5 * ((x - y) ** 2).sum()))


def polynomial(x, y):
    return float((0.5 * x @ y + 2) ** 3)


@pytest.mark.parametrize(
    ("settings", "function"),
    [
        ({"kernel": "rbf", "gamma": 0.5}, rbf),
        ({"kernel": "polynomial", "gamma": 0.5, "degree": 3, "coef0": 2.0}, polynomial),
        ({"kernel": rbf}, rbf),
    ],
    ids=["rbf", "polynomial", "function"],
)
def test_distances_are_those_of_the_kernel(settings, function):
    model = KernelMetric(**settings).fit(X)
    for i, j in ((0, 1), (3, 17), (5, 5)):
        expected = function(X[i], X[i]) - 2 * function(X[i], X[j]) + function(X[j], X[j])
        assert model.pair_distance(X[[i]], X[[j]])[0] ** 2 == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert model.metric_(X[i], X[j]) ** 2 == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_a_linear_kernel_gives_the_linear_metric():
    linear, kernel = Mahalanobis().fit(X), KernelMetric(Mahalanobis(), kernel="linear").fit(X)
    np.testing.assert_allclose(kernel.pair_distance(X[:9], X[9:18]), linear.pair_distance(X[:9], X[9:18]), rtol=1e-6)


def test_learned_distances_are_those_of_the_coordinates():
    model = KernelMetric(LFDA(n_components=2), n_components=5).fit(X, Y)
    coordinates = model.coordinates_.transform(X)
    expected = model.base_.pair_distance(coordinates[:9], coordinates[9:18])
    np.testing.assert_allclose(model.pair_distance(X[:9], X[9:18]), expected)


def test_pairs_and_triplets_reach_the_linear_method():
    pairs = np.array([[0, 3, 1], [1, 4, 1], [0, 1, 0], [2, 4, 0]])
    assert KernelMetric(LinearMetric()).fit(X, pairs=pairs).transform(X).shape[0] == 20
    triplets = np.array([[0, 3, 1], [1, 4, 2]])
    assert KernelMetric(LinearMetric(loss="relative")).fit(X, triplets=triplets).transform(X).shape[0] == 20


@pytest.mark.parametrize(
    ("model", "given", "error", "message"),
    [
        (KernelMetric(kernel="poly"), {}, ValueError, "kernel is 'poly'; allowed are rbf, polynomial, linear, sigmoid"),
        (KernelMetric(n_components=0), {}, ValueError, "n_components is 0; it must be ≥ 1"),
        (KernelMetric("lmnn"), {}, TypeError, "base is 'lmnn'; it must be a linear estimator"),
        (KernelMetric(), {"pairs": [[0, 3, 1]]}, ValueError, "pairs given without base"),
        (KernelMetric(kernel=lambda x, y: 1.0), {}, ValueError, "all samples of X are the same for the kernel"),
    ],
)
def test_errors(model, given, error, message):
    with pytest.raises(error, match=message):
        model.fit(X, **given)


def xor(n=200):
    random = np.random.RandomState(0)
    signs = random.choice([-1, 1], size=(n, 2))
    return signs * 2 + random.normal(size=(n, 2)) * 0.6, (signs[:, 0] * signs[:, 1] > 0).astype(int)


def test_xor_needs_a_kernel():
    """Opposite corners are of one class: no linear metric brings them together, but those of two kernels do."""
    samples, labels = xor()

    def precision(model):
        mapped = torch.as_tensor(model.fit(samples[:120], labels[:120]).transform(samples[120:]))
        return float(retrieval(mapped, torch.as_tensor(labels[120:]), measure="euclidean")["r_precision"])

    assert precision(RCA()) < 0.6
    assert precision(LMNN()) < 0.6
    assert precision(KernelMetric(RCA(n_components=1), kernel="polynomial", degree=2)) > 0.9
    assert precision(KernelMetric(RCA(n_components=1), kernel="rbf", gamma=0.1, n_components=10)) > 0.9
