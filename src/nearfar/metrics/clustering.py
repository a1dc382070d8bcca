"""Clustering: do k-means clusters of the embeddings find the classes?"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize as to_unit

from nearfar.metrics import scores
from nearfar.metrics.kmeans import MEMORY_BUDGET, kmeans
from nearfar.utils.inputs import Array, as_labels, as_vectors, check_finite
from nearfar.utils.progress import Progress
from nearfar.utils.validation import one_of, whole

BACKENDS = ("torch", "faiss")


def clustering(
    embeddings: Array,
    labels: Array,
    *,
    k: int | None = None,
    restarts: int = 5,
    iterations: int = 100,
    seed: int = 0,
    normalize: bool = True,
    normalization: str = "arithmetic",
    backend: str = "torch",
    memory_budget: int = MEMORY_BUDGET,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Agreement of k-means clusters with the classes: NMI, AMI and the F1 of pairs.

    Args:
        embeddings: [n, d], floating point: a tensor on any device, a NumPy array or a memory map.
        labels: [n], whole numbers, or text in a NumPy array; at least two classes.
        k: How many clusters; as many as there are classes unless given.
        restarts, iterations, seed: Of k-means; the clusters with the least inertia of all starts are judged.
        normalize: Cluster embeddings of length one, as cosine similarity sees them.
        normalization: Of NMI, ``"arithmetic"`` or, as in older papers, ``"geometric"``.
        backend: ``"torch"``, or ``"faiss"``, which finds other clusters of much the same quality and takes
            neither ``memory_budget`` nor ``progress``. Never chosen by what is installed: results would depend on it.
        memory_budget, progress: As for :func:`~nearfar.metrics.kmeans`.

    Returns:
        ``{"nmi": …, "ami": …, "f1": …, "clusters": k}``. Where every class has one member all scores are 1.

    >>> embeddings = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
    >>> clustering(embeddings, torch.tensor([3, 3, 8, 8]))
    {'nmi': 1.0, 'ami': 1.0, 'f1': 1.0, 'clusters': 2}
    """
    vectors = as_vectors("embeddings", embeddings)
    codes = as_labels("labels", labels, len(vectors)).cpu()
    one_of("normalization", normalization, scores.NORMALIZATIONS)
    one_of("backend", backend, BACKENDS)
    classes = len(torch.unique(codes))
    if classes == 1:
        raise ValueError("labels have one class; clusters say something about two or more")
    k = classes if k is None else whole("k", k, high=len(vectors))
    check_finite("embeddings", vectors)
    if backend == "faiss":
        assignment = _by_faiss(vectors, k, restarts, iterations, seed, normalize)
    else:
        assignment = kmeans(
            vectors,
            k,
            restarts=restarts,
            iterations=iterations,
            seed=seed,
            normalize=normalize,
            memory_budget=memory_budget,
            progress=progress,
        ).assignment
    return {
        "nmi": scores.nmi(codes, assignment, normalization=normalization),
        "ami": scores.ami(codes, assignment),
        "f1": scores.f1(codes, assignment),
        "clusters": k,
    }


def _by_faiss(vectors: Tensor, k: int, restarts: int, iterations: int, seed: int, normalize: bool) -> Tensor:
    try:
        import faiss
    except ImportError as error:
        raise ImportError("backend 'faiss' needs FAISS; install it with: pip install 'nearfar[faiss]'") from error
    points = vectors.float().cpu()
    array = np.ascontiguousarray((to_unit(points) if normalize else points).numpy())
    model: Any = faiss.Kmeans(
        array.shape[1],
        k,
        niter=whole("iterations", iterations),
        nredo=whole("restarts", restarts),
        seed=whole("seed", seed, low=0, high=2**31 - 1),
        min_points_per_centroid=1,  # it warns below 39
        max_points_per_centroid=len(array),  # and would leave out those above 256
    )
    model.train(array)
    return torch.from_numpy(model.index.search(array, 1)[1][:, 0])
