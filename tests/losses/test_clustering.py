"""Losses of clusterings: spectral clustering and facility location."""

import itertools
import math
import warnings

import pytest
import torch
from checks import assert_close, make_batch, run
from class_oracles import normalized_mutual_information
from sklearn.metrics import normalized_mutual_info_score
from torch.nn.functional import normalize

import nearfar as nf
from nearfar.losses import spectral_clustering


def one_point_per_class(dim, sizes=(4, 3, 2)):
    """Every sample exactly on the point of its class."""
    points = torch.randn(len(sizes), dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.cat([torch.full((size,), label) for label, size in enumerate(sizes)])
    return points[labels], labels


# --- spectral clustering ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [3, 7])
def test_spectral_clustering_is_content_with_a_point_for_each_class(dim):
    """The columns then span the indicators of the classes, whatever invertible map the points went through."""
    embeddings, labels = one_point_per_class(dim)
    mix = torch.randn(dim, dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for points in (embeddings, embeddings @ mix):
        outcome = run(nf.losses.SpectralClustering(), points, labels)
        assert outcome.value.item() == pytest.approx(0.0, abs=1e-12)
        assert outcome.gradients["embeddings"].abs().max() < 1e-10


def test_spectral_clustering_does_not_see_rotations_and_lengths():
    embeddings, labels = make_batch()
    rotation, _ = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    lengths = torch.linspace(0.5, 3.0, len(labels), dtype=torch.float64).unsqueeze(1)
    loss = nf.losses.SpectralClustering()
    expected, actual = run(loss, embeddings, labels), run(loss, lengths * embeddings @ rotation, labels)
    assert_close(actual.value, expected.value, 1e-11)
    assert_close(actual.gradients["embeddings"] * lengths, expected.gradients["embeddings"] @ rotation, 1e-10)


def test_spectral_clustering_warns_once_that_a_small_batch_teaches_nothing():
    embeddings, labels = make_batch(sizes=(2, 2), dim=4)
    loss = nf.losses.SpectralClustering()
    with pytest.warns(UserWarning, match="more embeddings than dimensions: from 4 of dimension 4 nothing is learned"):
        outcome = run(loss, embeddings, labels)
    assert outcome.value.item() == pytest.approx((4 - 2) / 2)  # ½‖I − C‖², C of rank 2
    assert not outcome.gradients["embeddings"].any()
    with warnings.catch_warnings(action="error"):
        loss(embeddings, labels)
        nf.losses.SpectralClustering()(*one_point_per_class(16))  # of lower rank: something to learn


@pytest.mark.parametrize(("count", "dim"), [(12, 5), (12, 12), (5, 12)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_points_of_full_rank_need_no_singular_values(monkeypatch, count, dim, dtype, tolerance):
    points = torch.randn(count, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points[:, -1] = points[:, 0] + 0.2 * points[:, -1]
    labels = torch.arange(count) // 2
    same = (labels.unsqueeze(1) == labels).double()
    ideal = same / same.sum(dim=1)
    expected = spectral_clustering._by_singular_values(points, ideal)
    monkeypatch.delattr(spectral_clustering, "_by_singular_values")
    actual = spectral_clustering.projection_gap(points.to(dtype), ideal.to(dtype))
    for found, wanted in zip(actual, expected, strict=True):
        assert_close(found.double(), wanted.double(), tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("step", [0.0, 1e-7])
def test_dependent_points_need_singular_values(monkeypatch, dtype, step):
    points, ideal = (
        torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=dtype),
        torch.eye(6, dtype=dtype),
    )
    points[:, 2] = points[:, 1] + step * points[:, 2]
    called = []
    by_singular_values = spectral_clustering._by_singular_values
    monkeypatch.setattr(
        spectral_clustering, "_by_singular_values", lambda *given: called.append(1) or by_singular_values(*given)
    )
    rank = spectral_clustering.projection_gap(points, ideal)[2]
    assert called
    assert int(rank) == (3 if step and dtype == torch.float64 else 2)


def test_both_decompositions_agree_on_the_rank_of_a_large_batch():
    """A singular value below max(m, d) · eps of the largest, which Cholesky in float64 would still resolve."""
    points = torch.tensor([[1.0, 2e-4], [1.0, -2e-4]]).repeat(1024, 1)
    ideal = torch.eye(len(points))
    actual, expected = (
        decompose(points, ideal)
        for decompose in (spectral_clustering.projection_gap, spectral_clustering._by_singular_values)
    )
    assert int(actual[2]) == int(expected[2]) == 1
    for found, wanted in zip(actual, expected, strict=True):
        assert_close(found.double(), wanted.double(), 1e-6)


# --- facility location --------------------------------------------------------------------------------------


def at_angles(*degrees):
    angles = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def brute_force(embeddings, labels, gamma):
    """The loss with the best of all sets of medoids."""
    distances = torch.cdist(normalize(embeddings, dim=1), normalize(embeddings, dim=1))
    classes = [(labels == label).nonzero().flatten() for label in labels.unique()]
    of_classes = -sum(distances[members][:, members].sum(dim=0).min().item() for members in classes)
    scores = []
    for medoids in itertools.combinations(range(len(labels)), len(classes)):
        nearest, owners = distances[:, medoids].min(dim=1)
        error = 1 - normalized_mutual_information(labels.tolist(), owners.tolist())
        scores.append(-nearest.sum().item() + gamma * error)
    return max(0.0, max(scores) - of_classes)


def test_the_loops_have_the_mutual_information_of_scikit_learn():
    for seed in range(10):
        one, other = torch.randint(4, (2, 12), generator=torch.Generator().manual_seed(seed)).tolist()
        assert normalized_mutual_information(one, other) == pytest.approx(normalized_mutual_info_score(one, other))


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_facility_location_asks_nothing_of_classes_far_apart(gamma):
    """A point for each class: any other clustering leaves a whole class far from its medoid."""
    outcome = run(nf.losses.FacilityLocation(gamma=gamma), *one_point_per_class(7))
    assert outcome.value.item() == pytest.approx(0.0, abs=1e-12)
    assert outcome.gradients["embeddings"].isfinite().all()


@pytest.mark.parametrize("gamma", [0.0, 1.0, 3.0])
def test_facility_location_of_two_classes_across_two_clusters(gamma):
    """Each cluster has a sample of both classes, so the clustering tells nothing of them: NMI is 0."""
    embeddings = at_angles(0, 10, 180, 190)
    value = nf.losses.FacilityLocation(gamma=gamma)(embeddings, torch.tensor([0, 1, 0, 1]))
    clusters, classes = 2 * 2 * math.sin(math.radians(5)), 2 + 2  # chords of 10° and of 180°
    assert value.item() == pytest.approx(classes - clusters + gamma)


@pytest.mark.parametrize("gamma", [0.1, 1.0, 5.0])
def test_facility_location_is_found_greedily_and_nearly_as_good_as_by_brute_force(gamma):
    reached, batches = 0, 30
    for seed in range(batches):
        embeddings, labels = make_batch("mixed", sizes=(3, 3, 2), dim=3, seed=seed)
        best = brute_force(embeddings, labels, gamma)
        values = [nf.losses.FacilityLocation(gamma=gamma, refinements=t)(embeddings, labels).item() for t in (0, 1, 5)]
        assert values[0] <= values[1] + 1e-12 <= values[2] + 2e-12 <= best + 1e-9
        reached += values[2] >= best - 1e-9
    assert reached > batches / 2
