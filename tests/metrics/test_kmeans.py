"""k-means: Lloyd's conditions hold, for any tiles, start and precision."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans as Peer
from torch.nn.functional import normalize

from nearfar.metrics.kmeans import KMeans, Lloyd, TiledVectors, kmeans


def groups(n, k, dim=8, *, noise=0.3, seed=0):
    """Vectors scattered around k centers, and their groups."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % k
    centers = torch.randn(k, dim, generator=generator)
    return centers[labels] + noise * torch.randn(n, dim, generator=generator), labels


def assert_lloyd(found, vectors):
    """Check that every vector has its nearest center, every center is the mean of its vectors, and the inertia."""
    vectors, centers = vectors.double(), found.centers.double()
    squares = torch.cdist(vectors, centers, compute_mode="donot_use_mm_for_euclid_dist").square()
    nearest = squares.min(dim=1).values
    own = squares.gather(1, found.assignment.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(own, nearest, rtol=1e-5, atol=1e-6)
    for number in found.assignment.unique().tolist():
        torch.testing.assert_close(
            centers[number], vectors[found.assignment == number].mean(dim=0), rtol=1e-5, atol=1e-6
        )
    assert found.inertia == pytest.approx(float(own.sum()), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("n", "k"), [(200, 1), (200, 2), (200, 30), (200, 150), (200, 199), (1500, 1100)])
def test_lloyds_conditions_hold(n, k):
    vectors, _ = groups(n, 20, noise=1.0)
    found = kmeans(vectors, k, restarts=2, iterations=1000)
    assert len(found.assignment.unique()) == k
    assert_lloyd(found, vectors)


def test_as_many_clusters_as_vectors():
    vectors, _ = groups(50, 5)
    found = kmeans(vectors, 50)
    assert found.inertia == pytest.approx(0.0, abs=1e-9)
    assert sorted(found.assignment.tolist()) == list(range(50))


@pytest.mark.parametrize("noise", [0.1, 0.3, 1.0])
def test_as_good_as_the_peer(noise):
    vectors, _ = groups(1000, 25, noise=noise)
    theirs = Peer(25, n_init=5, random_state=0).fit(vectors.numpy()).inertia_
    assert kmeans(vectors, 25, restarts=5).inertia < 1.02 * theirs


def test_many_centers_are_drawn_in_few_rounds():
    vectors, _ = groups(2000, 400, noise=0.02)
    theirs = Peer(400, n_init=1, random_state=0).fit(vectors.numpy()).inertia_
    at_random = Peer(400, n_init=1, init="random", random_state=0).fit(vectors.numpy()).inertia_
    ours = kmeans(vectors, 400, restarts=1).inertia
    assert ours - theirs < (at_random - theirs) / 2


def test_the_same_seed_the_same_clusters():
    vectors, _ = groups(500, 20, noise=1.0)
    first, second, third = (kmeans(vectors, 20, restarts=1, seed=seed) for seed in (7, 7, 8))
    assert first.assignment.equal(second.assignment)
    assert first.centers.equal(second.centers)
    assert first.inertia == second.inertia != third.inertia


def test_randomness_is_its_own():
    vectors, _ = groups(100, 5)
    state = torch.get_rng_state()
    kmeans(vectors, 5)
    assert torch.get_rng_state().equal(state)


def test_the_best_start_is_kept():
    vectors, _ = groups(400, 30, noise=0.5)
    inertias = [kmeans(vectors, 30, restarts=restarts).inertia for restarts in range(1, 6)]
    assert inertias == sorted(inertias, reverse=True)
    assert inertias[-1] < inertias[0]


@pytest.mark.parametrize(
    ("n", "k", "budget"), [(40, 5, 1), (400, 40, 6_000), (400, 40, 30_000), (400, 200, 12_000), (400, 40, 1 << 30)]
)
def test_tiles_do_not_matter(n, k, budget):
    vectors, _ = groups(n, k, noise=0.8)
    usual = kmeans(vectors, k, restarts=2)
    found = kmeans(vectors, k, restarts=2, memory_budget=budget)
    assert found.assignment.equal(usual.assignment)
    assert found.inertia == pytest.approx(usual.inertia, rel=1e-12)


def test_the_budget_decides_about_tiles_and_the_copy():
    vectors = torch.randn(1000, 16)
    points = TiledVectors(vectors, unit=False, memory_budget=100_000)
    assert points.kept is None
    assert points.side**2 + 6 * points.side * 16 <= 25_000
    points = TiledVectors(vectors, unit=False, memory_budget=128_000)
    assert points.kept is not None
    assert points.side**2 + 6 * points.side * 16 <= 16_000


@pytest.mark.parametrize("scale", [2.0**70, 2.0**-90])
def test_the_size_of_numbers_does_not_matter(scale):
    vectors = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
    found, other = kmeans(vectors, 6), kmeans(vectors * scale, 6)
    assert torch.equal(other.assignment, found.assignment)
    assert torch.equal(other.centers, found.centers * scale)
    assert other.inertia == found.inertia * scale**2


def test_a_large_offset_costs_no_digits():
    vectors, _ = groups(300, 10, noise=0.3)
    vectors = vectors.double()
    usual, far = kmeans(vectors, 10), kmeans(vectors + 1e6, 10)
    assert far.assignment.equal(usual.assignment)
    assert far.inertia == pytest.approx(usual.inertia, rel=1e-5)
    torch.testing.assert_close(far.centers - 1e6, usual.centers, rtol=0, atol=1e-6)


@pytest.mark.parametrize("budget", [1 << 28, 10_000])
def test_normalize(budget):
    vectors, _ = groups(300, 10)
    longer = vectors * torch.rand(300, 1, generator=torch.Generator().manual_seed(0)).exp()
    longer[7] = 0
    unit = normalize(longer.double()).float()
    found = kmeans(longer, 10, normalize=True, memory_budget=budget)
    assert found.assignment.equal(kmeans(unit, 10).assignment)
    assert_lloyd(found, unit)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_precisions(dtype):
    vectors, _ = groups(300, 10)
    found = kmeans(vectors.to(dtype), 10)
    assert found.assignment.equal(kmeans(vectors.to(dtype).double(), 10).assignment)
    assert found.centers.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_autocast_does_not_matter():
    vectors, _ = groups(300, 10, noise=1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = kmeans(vectors, 10)
    assert found.assignment.equal(kmeans(vectors, 10).assignment)


@pytest.mark.parametrize("budget", [1 << 28, 10_000])
def test_a_memory_map(tmp_path, budget):
    vectors, _ = groups(300, 10)
    np.save(tmp_path / "vectors.npy", vectors.numpy())
    mapped = np.load(tmp_path / "vectors.npy", mmap_mode="r")
    assert kmeans(mapped, 10, memory_budget=budget).assignment.equal(kmeans(vectors, 10).assignment)


def test_fewer_different_vectors_than_clusters():
    vectors = torch.tensor([[0.1, 0.2], [0.3, 0.4], [5.0, 6.0]]).repeat(4, 1)
    found = kmeans(vectors, 7)
    assert len(found.assignment.unique()) == 3
    assert found.inertia == pytest.approx(0.0, abs=1e-10)
    assert found.centers.isfinite().all()


def test_an_empty_cluster_gets_the_farthest_vector():
    vectors = torch.tensor([[0.0], [1.0], [2.0], [30.0]])
    lloyd = Lloyd(TiledVectors(vectors, unit=False, memory_budget=1 << 20), 2, torch.Generator().manual_seed(0))
    lloyd.assignment = torch.tensor([1, 1, 1, 1])
    lloyd.distances = torch.tensor([1.0, 0.0, 1.0, 841.0])
    lloyd.iterate(0.0)
    assert lloyd.assignment.tolist() == [1, 1, 1, 0]


def test_clusters_that_empty_on_the_way_are_filled():
    vectors, _ = groups(600, 30, noise=0.02)
    lloyd = Lloyd(TiledVectors(vectors, unit=False, memory_budget=1 << 20), 30, torch.Generator().manual_seed(0))
    lloyd.assignment = torch.zeros(600, dtype=torch.long)
    lloyd.distances = (vectors - vectors[0]).square().sum(dim=1)
    while lloyd.iterate(0.0):
        pass
    assert len(lloyd.assignment.unique()) == 30


def test_centers_that_stay_are_not_compared_again(monkeypatch):
    vectors, _ = groups(600, 40, noise=0.5)
    compared = []
    nearest = TiledVectors.nearest

    def count(self, rows, centers):
        compared.append(len(self.squares[rows]) * len(centers))
        return nearest(self, rows, centers)

    monkeypatch.setattr(TiledVectors, "nearest", count)
    lloyd = Lloyd(TiledVectors(vectors, unit=False, memory_budget=1 << 20), 40, torch.Generator().manual_seed(0))
    pairs = []
    go_on = True
    while go_on:
        compared.clear()
        go_on = lloyd.iterate(0.0)
        pairs.append(sum(compared))
    assert pairs[0] == 600 * 40
    assert pairs[-1] < 600 * 40 / 4
    found = KMeans(lloyd.assignment, lloyd.centers, 0.0, len(pairs))
    found = found._replace(inertia=lloyd.points.inertia(found.centers, found.assignment))
    assert_lloyd(found._replace(centers=found.centers / lloyd.points.scale + vectors.mean(dim=0)), vectors)


def test_tolerance_and_iterations_end_a_start():
    vectors, _ = groups(600, 40, noise=1.0)
    settled = kmeans(vectors, 40, restarts=1)
    hasty = kmeans(vectors, 40, restarts=1, tolerance=0.01)
    once = kmeans(vectors, 40, restarts=1, iterations=1)
    assert settled.iterations > hasty.iterations > once.iterations == 1
    assert settled.inertia < hasty.inertia < once.inertia


def test_progress_goes_up_to_its_end():
    vectors, _ = groups(200, 10)
    calls = []
    kmeans(vectors, 10, restarts=3, iterations=50, progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1] == (150, 150)


def test_never_a_matrix_of_all_vectors_by_all_centers():
    code = """if True:
        import resource, torch
        from nearfar.metrics.kmeans import kmeans
        torch.set_num_threads(1)
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        vectors = torch.randn(12_000, 2)
        kmeans(vectors[:100], 10)
        before = peak()
        kmeans(vectors, 12_000, restarts=1, iterations=1)
        print(peak() - before)
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 128  # MiB; the matrix would have 549


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"k": 0}, ValueError, "k is 0; it must be ≥ 1 and ≤ 20"),
        ({"k": 21}, ValueError, "k is 21; it must be ≥ 1 and ≤ 20"),
        ({"k": 2.0}, TypeError, "k is 2.0; a whole number"),
        ({"restarts": 0}, ValueError, "restarts is 0"),
        ({"iterations": 0}, ValueError, "iterations is 0"),
        ({"tolerance": -0.1}, ValueError, "tolerance is -0.1"),
        ({"seed": -1}, ValueError, "seed is -1"),
        ({"seed": 2**63}, ValueError, "seed is 9223372036854775808"),
        ({"memory_budget": 0}, ValueError, "memory_budget is 0"),
        ({"vectors": torch.zeros(20)}, ValueError, r"vectors has shape \(20,\)"),
        ({"vectors": torch.full((20, 2), torch.nan)}, ValueError, "vectors contains NaN or infinity in 20 of 20 rows"),
    ],
)
def test_errors_name_the_argument(keywords, error, message):
    with pytest.raises(error, match=message):
        kmeans(**{"vectors": torch.randn(20, 2), "k": 3, **keywords})
