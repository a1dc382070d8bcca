"""Metrics run on the device of their arguments, whatever the default device is."""

import numpy as np
import pytest
import torch

from nearfar import metrics

POINTS = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(60) % 5
CLUSTERS = torch.arange(60) // 13
PLACES = torch.arange(20)
SHOP = (POINTS[:20], LABELS[:20], POINTS, LABELS)


@pytest.mark.parametrize(
    "measured",
    [
        lambda: metrics.retrieval(POINTS, LABELS, at_k=("precision", "map"), groups=CLUSTERS),
        lambda: metrics.retrieval(POINTS, LABELS, measure="euclidean"),
        lambda: metrics.retrieval(POINTS.repeat(20, 1), LABELS.repeat(20)),  # sorted
        lambda: metrics.retrieval(*SHOP, positions=PLACES, groups=CLUSTERS[:20], gallery_groups=CLUSTERS),
        lambda: metrics.retrieval(POINTS.numpy(), np.array(list("abcde"))[LABELS.numpy()]),
        lambda: metrics.retrieval(POINTS[:1] + 1e-6 * POINTS, LABELS),  # all close
        lambda: metrics.verification(POINTS, LABELS, rates=0.25),
        lambda: metrics.verification(*SHOP, rates=0.25, measure="euclidean"),
        lambda: [part.tolist() for part in metrics.kmeans(POINTS, 7)[:2]],
        lambda: metrics.kmeans(POINTS.repeat(10, 1), 300, restarts=1, iterations=2).assignment.tolist(),
        lambda: metrics.clustering(POINTS, LABELS),
        lambda: [score(LABELS, CLUSTERS) for score in (metrics.nmi, metrics.ami, metrics.f1)],
        lambda: metrics.class_intervals({"a": POINTS[:, 0].numpy(), "b": POINTS[:, 1]}, LABELS),
    ],
)
def test_the_default_device_does_not_matter(measured):
    expected = measured()
    torch.set_default_device("meta")  # as "cuda" would be, but for that nothing can be computed there
    try:
        found = measured()
    finally:
        torch.set_default_device(None)
    assert found == expected
