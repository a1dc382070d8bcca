"""Metrics of embeddings: retrieval, clustering, verification and decision thresholds, with confidence intervals.

Example:
    >>> import torch, nearfar as nf
    >>> embeddings = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
    >>> labels = torch.tensor([0, 0, 1, 1])
    >>> nf.metrics.retrieval(embeddings, labels, ks=(1,))["recall@1"]
    1.0
    >>> nf.metrics.clustering(embeddings, labels)["nmi"]
    1.0
"""

from nearfar.metrics.calibration import SearchThreshold, Threshold, calibrate, calibrate_search
from nearfar.metrics.clustering import ami, clustering, f1, nmi
from nearfar.metrics.intervals import Interval, class_intervals
from nearfar.metrics.kmeans import KMeans, kmeans
from nearfar.metrics.retrieval import retrieval
from nearfar.metrics.verification import verification

__all__ = [
    "Interval",
    "KMeans",
    "SearchThreshold",
    "Threshold",
    "ami",
    "calibrate",
    "calibrate_search",
    "class_intervals",
    "clustering",
    "f1",
    "kmeans",
    "nmi",
    "retrieval",
    "verification",
]
