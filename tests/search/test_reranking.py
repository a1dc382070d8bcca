"""Re-ranking of neighbors, against loops over sets."""

import math

import numpy as np
import pytest
from search_cases import vectors

from nearfar.metrics.k_reciprocal import mixed, squared_distances
from nearfar.search import Index


def by_sets(points, k1, k2, old):
    """The paper's formulas, one set at a time: the first point is the query."""
    count = len(points)
    units = points / np.linalg.norm(points, axis=1, keepdims=True)
    distance = [
        [float(((units[i] - units[j]) ** 2).sum()) if i != j else 0.0 for j in range(count)] for i in range(count)
    ]
    distance = [[value / max(row) for value in row] for row in distance]
    order = [sorted(range(count), key=lambda j, i=i: (distance[i][j], j)) for i in range(count)]

    def near(i, k):
        return set(order[i][: k + 1])

    def reciprocal(i, k):
        return {j for j in near(i, k) if i in near(j, k)}

    encoded = []
    for i in range(count):
        own = reciprocal(i, k1)
        grown = set(own)
        for j in own:
            half = reciprocal(j, max(1, round(k1 / 2)))
            if len(half & own) > 2 / 3 * len(half):
                grown |= half
        weights = [math.exp(-distance[i][j]) if j in grown else 0.0 for j in range(count)]
        encoded.append([weight / sum(weights) for weight in weights])
    averaged = [[sum(encoded[j][g] for j in order[i][:k2]) / k2 for g in range(count)] for i in range(count)]
    found = []
    for j in range(1, count):
        less = sum(min(a, b) for a, b in zip(averaged[0], averaged[j], strict=True))
        more = sum(max(a, b) for a, b in zip(averaged[0], averaged[j], strict=True))
        found.append((1 - old) * (1 - less / more) + old * distance[0][j])
    return found


@pytest.mark.parametrize(("k1", "k2", "old"), [(6, 3, 0.3), (4, 1, 0.0), (20, 6, 0.5)])
def test_k_reciprocal_distances(k1, k2, old):
    points = vectors(40).astype(np.float64)
    ours = mixed(squared_distances(points, "cosine"), neighbors=k1, averaged=k2, old=old)
    np.testing.assert_allclose(ours, by_sets(points, k1, k2, old), atol=1e-9)


def test_reranking_brings_more_of_the_class(tmp_path):
    rng = np.random.default_rng(1)
    labels = np.arange(200) // 10
    points = rng.standard_normal((20, 12))[labels] + 1.1 * rng.standard_normal((200, 12))
    with Index.from_vectors(points.astype(np.float32), out=tmp_path / "i", labels=[str(n) for n in labels]) as index:

        def right(**settings):
            found = [index.search(row, 9, **settings) for row in range(0, 200, 3)]
            return sum(sum(map(bool, results.right)) for results in found) / sum(len(results) for results in found)

        plain = right()
        assert right(rerank="k_reciprocal") > plain + 0.02
        assert right(expand=4) > plain + 0.02
        results = index.search(7, 9, rerank="k_reciprocal")
        assert 7 not in results.ids
        assert results.scores == sorted(results.scores, reverse=True)
        assert len(index.search(7, 500, rerank="k_reciprocal")) == 199
        assert set(index.search(7, 5, rerank="k_reciprocal", where={"label": ["3", "4"]}).labels) <= {"3", "4"}


def test_expansion_is_a_weighted_mean(tmp_path):
    points = np.array([[1, 0], [0.8, 0.6], [0, 1], [-1, 0]], dtype=np.float32)
    with Index.from_vectors(points, out=tmp_path / "i") as index:
        results = index.search(np.array([1.0, 0.0]), 4, expand=2)
        mean = points[0] + points[0] + 0.8**3 * points[1]
        expected = points @ (mean / np.linalg.norm(mean))
        np.testing.assert_allclose(results.scores, sorted(expected, reverse=True), atol=1e-6)
