"""k-means on a GPU: the starts and the quality of the CPU, and the same clusters every time."""

import numpy as np
import pytest
import torch

import nearfar as nf

pytestmark = pytest.mark.gpu


def groups(n, k, dim=32, *, noise):
    """Vectors scattered around k centres, and their groups."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(n) % k
    return torch.randn(k, dim, generator=generator)[labels] + noise * torch.randn(n, dim, generator=generator), labels


@pytest.mark.parametrize("k", [20, 500])
def test_groups_are_found_as_on_the_cpu(k):
    vectors, _ = groups(4000, k, noise=0.05)
    found, expected = nf.metrics.kmeans(vectors.cuda(), k), nf.metrics.kmeans(vectors, k)
    assert found.assignment.is_cuda
    assert found.centers.is_cuda
    assert found.inertia == pytest.approx(expected.inertia, rel=0.01)
    if k == 20:
        assert found.assignment.cpu().equal(expected.assignment)
        torch.testing.assert_close(found.centers.cpu(), expected.centers)


@pytest.mark.parametrize(("n", "k"), [(5000, 100), (20_000, 3000)])
def test_the_same_clusters_every_time(n, k):
    vectors = groups(n, k, noise=1.0)[0].cuda()
    first, second = (nf.metrics.kmeans(vectors, k, restarts=2, seed=5) for _ in range(2))
    assert first.assignment.equal(second.assignment)
    assert first.centers.equal(second.centers)
    assert first.inertia == second.inertia


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scores_of_every_precision(dtype):
    vectors, labels = groups(1000, 10, noise=0.05)
    expected = {"nmi": 1.0, "ami": 1.0, "f1": 1.0, "clusters": 10}
    assert nf.metrics.clustering(vectors.cuda().to(dtype), labels) == expected
    assert nf.metrics.clustering(vectors.cuda().to(dtype), labels.cuda()) == expected
    assert nf.metrics.clustering(vectors.cuda().to(dtype), labels.numpy().astype(np.str_)) == expected


def test_tiles_keep_to_the_budget():
    vectors = groups(20_000, 100, noise=1.0)[0].cuda()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    nf.metrics.kmeans(vectors, 5000, restarts=1, iterations=2, memory_budget=32 * 1024 * 1024)
    assert torch.cuda.max_memory_allocated() - before < 64 * 1024 * 1024  # the matrix would have 381 MiB


def test_rows_that_are_not_finite():
    vectors = groups(100, 10, noise=1.0)[0].cuda()
    vectors[41, 3] = torch.nan
    with pytest.raises(ValueError, match="embeddings contains NaN or infinity in 1 of 100 rows; the first is row 41"):
        nf.metrics.clustering(vectors, torch.arange(100) % 10)


def test_intervals_of_values_on_a_gpu():
    values, classes = torch.rand(100, generator=torch.Generator().manual_seed(0)), torch.arange(100) % 7
    expected = nf.metrics.class_intervals({"a": values}, classes)
    assert nf.metrics.class_intervals({"a": values.cuda()}, classes.cuda()) == expected
