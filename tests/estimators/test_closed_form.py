"""Metrics in closed form against explicit loops, and the properties they promise."""

import numpy as np
import pytest
from estimator_cases import blobs

from nearfar import estimators as E

X, Y = blobs(30, 4)


def test_mahalanobis_is_the_inverse_covariance():
    np.testing.assert_allclose(E.Mahalanobis().fit(X).get_mahalanobis_matrix(), np.linalg.inv(np.cov(X.T)), rtol=1e-9)


def test_shrinkage_moves_the_covariance_to_a_multiple_of_the_identity():
    covariance = np.cov(X.T)
    expected = np.linalg.inv(0.7 * covariance + 0.3 * np.trace(covariance) / 4 * np.eye(4))
    np.testing.assert_allclose(E.Mahalanobis(shrinkage=0.3).fit(X).get_mahalanobis_matrix(), expected, rtol=1e-9)
    full = E.Mahalanobis(shrinkage=1.0).fit(X).get_mahalanobis_matrix()
    np.testing.assert_allclose(full, np.eye(4) * full[0, 0], atol=1e-12)


def test_automatic_shrinkage_is_that_of_ledoit_and_wolf():
    from sklearn.covariance import ledoit_wolf_shrinkage

    share = float(ledoit_wolf_shrinkage(X))
    automatic, given = E.Mahalanobis(shrinkage="auto").fit(X), E.Mahalanobis(shrinkage=share).fit(X)
    np.testing.assert_allclose(automatic.components_, given.components_)


def test_a_constant_feature_has_no_weight():
    data = np.column_stack([X, np.full(len(X), 3.0)])
    assert np.abs(E.Mahalanobis().fit(data).get_mahalanobis_matrix()[-1]).max() < 1e-9


def within_chunks(chunks):
    total = np.zeros((4, 4))
    for i in np.flatnonzero(chunks >= 0):
        difference = X[i] - X[chunks == chunks[i]].mean(axis=0)
        total += np.outer(difference, difference)
    return total / (chunks >= 0).sum()


def test_rca_whitens_the_variation_within_classes():
    model = E.RCA().fit(X, Y)
    np.testing.assert_allclose(model.get_mahalanobis_matrix(), np.linalg.inv(within_chunks(Y)), rtol=1e-9)


def test_rca_reads_linked_pairs_as_chunks():
    links = np.array([[0, 3, 1], [3, 6, 1], [1, 4, 1], [2, 5, 1], [8, 11, 1], [0, 1, 0]])
    chunks = np.full(len(X), -1)
    chunks[[0, 3, 6]], chunks[[1, 4]], chunks[[2, 5]], chunks[[8, 11]] = 0, 1, 2, 3
    model = E.RCA().fit(X, pairs=links)
    np.testing.assert_allclose(model.get_mahalanobis_matrix(), np.linalg.inv(within_chunks(chunks)), rtol=1e-6)


def test_rca_of_fewer_dimensions_whitens_the_kept_ones():
    model = E.RCA(n_components=2).fit(X, Y)
    kept = model.components_
    np.testing.assert_allclose(kept @ within_chunks(Y) @ kept.T, np.eye(2), atol=1e-9)


def lfda_scatters(neighbors):
    n = len(X)
    scale = np.empty(n)
    for i in range(n):
        same = [j for j in range(n) if j != i and Y[j] == Y[i]]
        scale[i] = np.sort([np.linalg.norm(X[i] - X[j]) for j in same])[neighbors - 1]
    within, between = np.zeros((4, 4)), np.zeros((4, 4))
    for i in range(n):
        for j in range(n):
            outer = np.outer(X[i] - X[j], X[i] - X[j]) / 2
            if Y[i] == Y[j]:
                affinity = np.exp(-(np.linalg.norm(X[i] - X[j]) ** 2) / (scale[i] * scale[j]))
                size = (Y[i] == Y).sum()
                within += affinity / size * outer
                between += affinity * (1 / n - 1 / size) * outer
            else:
                between += outer / n
    return within, between


@pytest.mark.parametrize("neighbors", [2, 5])
def test_lfda_solves_the_eigenproblem_of_its_scatter_matrices(neighbors):
    from scipy.linalg import eigh

    within, between = lfda_scatters(neighbors)
    values, vectors = eigh(between, within)
    expected = (vectors * np.sqrt(values.clip(0)))[:, ::-1][:, :2]
    model = E.LFDA(n_components=2, neighbors=neighbors).fit(X, Y)
    np.testing.assert_allclose(model.get_mahalanobis_matrix(), expected @ expected.T, rtol=1e-5, atol=1e-6)
    plain = E.LFDA(neighbors=neighbors, embedding="plain").fit(X, Y).components_
    np.testing.assert_allclose(plain @ within @ plain.T, np.eye(4), atol=1e-5)


def test_orthonormalized_lfda_has_orthonormal_directions():
    kept = E.LFDA(n_components=3, embedding="orthonormalized").fit(X, Y).components_
    np.testing.assert_allclose(kept @ kept.T, np.eye(3), atol=1e-9)
