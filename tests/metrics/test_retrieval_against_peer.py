"""The same numbers from pytorch-metric-learning 2.9.0, on data without ties.

The peer searches with its own ``CustomKNN``, which needs no faiss, in float32. With k=None it looks at all answers.
"""

import pytest
import torch

import nearfar as nf

pytest.importorskip("pytorch_metric_learning")
from pytorch_metric_learning.distances import CosineSimilarity, LpDistance
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN

PEER_NAMES = {
    "precision@1": "precision_at_1",
    "r_precision": "r_precision",
    "map@r": "mean_average_precision_at_r",
    "map": "mean_average_precision",
    "mrr": "mean_reciprocal_rank",
}
DISTANCES = {"cosine": CosineSimilarity(), "euclidean": LpDistance(normalize_embeddings=False)}

both_measures = pytest.mark.parametrize("measure", list(DISTANCES))


def clusters(count, classes, seed):
    """Classes that overlap, some with a single member or none."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    centers = torch.randn(classes, 8, generator=torch.Generator().manual_seed(99))
    return centers[labels] + torch.randn(count, 8, generator=generator), labels


def by_the_peer(measure, *arguments):
    calculator = AccuracyCalculator(
        include=tuple(PEER_NAMES.values()),
        k=None,
        knn_func=CustomKNN(DISTANCES[measure]),
        kmeans_func=lambda *_: None,
        device=torch.device("cpu"),
    )
    found = calculator.get_accuracy(*arguments)
    return {ours: found[theirs] for ours, theirs in PEER_NAMES.items()}


# Some 3 in a class and some with nobody else, some 12, and two classes of some 100, which are sorted for.
@both_measures
@pytest.mark.parametrize("classes", [70, 17, 2])
def test_the_peer_finds_the_same(measure, classes):
    for question in (
        clusters(200, classes, seed=classes),
        clusters(50, classes, seed=1) + clusters(180, classes, seed=2),
    ):
        found = nf.metrics.retrieval(*question, measure=measure)
        assert {name: found[name] for name in PEER_NAMES} == pytest.approx(by_the_peer(measure, *question))
