"""Metrics of re-ranked results, against one ranking at a time."""

import numpy as np
import pytest
import torch

from nearfar import metrics
from nearfar.metrics import k_reciprocal
from nearfar.metrics.k_reciprocal import mixed, squared_distances

RNG = np.random.default_rng(0)
LABELS = np.arange(48) % 8
POINTS = RNG.normal(size=(8, 6))[LABELS] + RNG.normal(size=(48, 6))
CAMERAS = RNG.integers(0, 3, 48)


def by_hand(points, query, items, measure, candidates):
    """All items, the nearest of them re-ranked."""
    distance = squared_distances(points[[query, *items]], measure)[0, 1:]
    order = [items[place] for place in np.argsort(distance, kind="stable")]
    near = order[:candidates]
    again = mixed(squared_distances(points[[query, *near]], measure))
    return [near[place] for place in np.argsort(again, kind="stable")] + order[candidates:]


@pytest.mark.parametrize("measure", ["cosine", "euclidean"])
@pytest.mark.parametrize("gallery", [False, True])
@pytest.mark.parametrize("cameras", [False, True])
@pytest.mark.parametrize("candidates", [100, 12])
def test_metrics_of_reranked_results(measure, gallery, cameras, candidates, monkeypatch):
    monkeypatch.setattr(k_reciprocal, "CANDIDATES", candidates)
    monkeypatch.setattr(k_reciprocal, "CPU_BYTES", 8 * 48 * 5)  # five queries at a time
    queries = range(16) if gallery else range(48)
    pool = range(16, 48) if gallery else range(48)
    groups = {"groups": CAMERAS[queries], "gallery_groups": CAMERAS[pool]} if gallery else {"groups": CAMERAS}
    found = metrics.retrieval(
        torch.from_numpy(POINTS[queries]),
        LABELS[queries],
        *((POINTS[pool], LABELS[pool]) if gallery else ()),
        ks=(1, 3),
        measure=measure,
        rerank="k_reciprocal",
        per_query=True,
        **(groups if cameras else {}),
    )
    precisions = []
    for query in queries:
        ranked = by_hand(POINTS, query, [item for item in pool if item != query], measure, candidates)
        kept = [i for i in ranked if not (cameras and LABELS[i] == LABELS[query] and CAMERAS[i] == CAMERAS[query])]
        hits = np.flatnonzero(LABELS[kept] == LABELS[query])
        precisions.append(np.mean((np.arange(len(hits)) + 1) / (hits + 1)) if len(hits) else np.nan)
    np.testing.assert_allclose(found["per_query"]["map"].numpy(), precisions)
    assert found["map"] == pytest.approx(np.nanmean(precisions))


def test_only_known_rerankings(monkeypatch):
    with pytest.raises(ValueError, match="rerank is 'best'; allowed are k_reciprocal"):
        metrics.retrieval(POINTS, LABELS, rerank="best")


def test_nothing_to_retrieve():
    with pytest.raises(ValueError, match="no class has two members"):
        metrics.retrieval(POINTS[:8], LABELS[:8], rerank="k_reciprocal")
