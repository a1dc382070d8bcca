"""Retrieval: does an image find its own class among its nearest neighbours?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

TILE_PAIRS = 1 << 22  # similarities held at a time


@torch.no_grad()
def retrieval(embeddings: Tensor, labels: Tensor, *, ks: Sequence[int] = (1, 2, 4, 8)) -> dict[str, float]:
    """Recall@k: the share of queries with one of their class among the k nearest others.

    Every embedding asks all the others, compared by cosine similarity. A query does not find itself: it
    is left out by its index, so that a duplicate of it still counts. Of equally similar embeddings
    the one with the lower index comes first. Queries whose class has no other member are left out.
    Nothing is sampled or approximated, and memory does not grow with the square of the embeddings.

    Parameters
    ----------
    embeddings : [n, d], floating point.
    labels : [n], whole numbers.
    ks : how many neighbours to look at, each ≥ 1; a k beyond n − 1 looks at all.

    Returns
    -------
    ``{"recall@1": …}`` with one number between 0 and 1 for each k.

    >>> points = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.9, 0.1]])
    >>> retrieval(points, torch.tensor([0, 0, 1]), ks=(1, 2))
    {'recall@1': 0.0, 'recall@2': 1.0}
    """
    _check(embeddings, labels, ks)
    labels = labels.to(embeddings.device)
    first = torch.cat(list(_first_hits(embeddings, labels)))
    asked = first >= 0
    if not bool(asked.any()):
        raise ValueError("labels have no class with two members, so there is nothing to retrieve")
    ranks = first[asked]
    return {f"recall@{k}": (ranks < k).double().mean().item() for k in ks}


def _first_hits(embeddings: Tensor, labels: Tensor) -> Iterator[Tensor]:
    """How many others come before the first of each query's class, −1 where there is none; in tiles."""
    wide = embeddings.dtype == torch.float64
    units = normalize(embeddings if wide else embeddings.float())
    count = len(units)
    index = torch.arange(count, device=units.device)
    height = max(1, TILE_PAIRS // count)
    for start in range(0, count, height):
        rows = index[start : start + height]
        similarity = units[rows] @ units.T
        same = labels[rows].unsqueeze(1) == labels
        myself = rows.unsqueeze(1) == index
        positive = same & ~myself
        # The nearest positive, and of equally near ones the first: argmax alone does not promise that.
        best = similarity.masked_fill(~positive, -torch.inf).amax(dim=1, keepdim=True)
        place = index.masked_fill(~(positive & (similarity == best)), count).amin(dim=1, keepdim=True)
        ahead = ~same & ((similarity > best) | ((similarity == best) & (index < place)))
        yield torch.where(positive.any(dim=1), ahead.sum(dim=1), -1)


def _check(embeddings: Tensor, labels: Tensor, ks: Sequence[int]) -> None:
    for name, value in (("embeddings", embeddings), ("labels", labels)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}; a torch.Tensor is needed")
    if embeddings.ndim != 2 or 0 in embeddings.shape:
        raise ValueError(f"embeddings has shape {tuple(embeddings.shape)}; needed is [n, d] with n ≥ 1 and d ≥ 1")
    if not embeddings.is_floating_point():
        raise TypeError(f"embeddings is of {embeddings.dtype}; floating point is needed")
    if labels.ndim != 1 or len(labels) != len(embeddings):
        raise ValueError(f"labels has shape {tuple(labels.shape)}; needed is [{len(embeddings)}]")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels is of {labels.dtype}; whole numbers are needed")
    strange = int((~embeddings.isfinite()).any(dim=1).sum())
    if strange:
        raise ValueError(f"embeddings contains NaN or infinity in {strange} of {len(embeddings)} rows")
    if not ks:
        raise ValueError("ks is empty; needed is at least one number of neighbours")
    for k in ks:
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"ks contains {k!r}; needed are whole numbers of at least 1")
