"""How good a model is: the metrics of each part of a split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nearfar import metrics
from nearfar.data.loader import Loader
from nearfar.training.loop import device
from nearfar.training.loop.step import autocast
from nearfar.utils.progress import Progress

Rows = NDArray[np.int64]
Metrics = dict[str, Any]


@dataclass(frozen=True)
class Embedded:
    """The embeddings of some rows, in their order, on the device.

    Args:
        points: [n, d], float32.
        labels: [n].
        rows: [n], places in the store.
    """

    points: Tensor
    labels: Tensor
    rows: Rows


@torch.no_grad()
def embed(
    model: nn.Module,
    loader: Loader,
    rows: Rows,
    *,
    batch_size: int = 256,
    precision: str = "float32",
    channels_last: bool = True,
    progress: Progress | None = None,
) -> Embedded:
    """The embeddings of rows of a store. The model is in evaluation mode meanwhile, and then as it was.

    >>> from nearfar import networks
    >>> loader = Loader(np.eye(4, dtype=np.float32), np.arange(4), workers=0)
    >>> embed(networks.create("linear", in_dim=4, dim=2), loader, np.array([2, 0])).points.shape
    torch.Size([2, 2])
    """
    if not len(rows):
        raise ValueError("rows is empty; there is nothing to embed")
    was = model.training
    model.eval()
    try:
        points, labels, done = [], [], 0
        with device.untried():
            for batch in loader.all(rows, batch_size=batch_size):
                images = _filled(batch.images, batch_size if done else len(batch))
                if channels_last and images.ndim == 4:
                    images = images.contiguous(memory_format=torch.channels_last)
                with autocast(images.device, precision):
                    points.append(model(images)[: len(batch)].float())
                labels.append(batch.labels)
                done += len(batch)
                if progress is not None:
                    progress(done, len(rows))
        return Embedded(torch.cat(points), torch.cat(labels), rows)
    finally:
        model.train(was)


def _filled(images: Tensor, count: int) -> Tensor:
    """A last batch made as long as the others on a GPU, where another shape takes seconds to make ready for."""
    if not images.is_cuda or len(images) == count:
        return images
    return torch.cat([images, images.new_zeros(count - len(images), *images.shape[1:])])


def measure(
    found: Mapping[str, Embedded],
    *,
    ks: Sequence[int] = (1, 2, 4, 8),
    measure: str = "cosine",
    clustering: bool = False,
    per_query: bool = False,
) -> dict[str, Metrics]:
    """The metrics of each part. "query" and "gallery" together are the part "test"; clusters are of the queries.

    With ``per_query`` each part has that too, see ``nearfar.metrics.retrieval``.

    >>> labels = torch.tensor([0, 0, 1, 1])
    >>> points = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
    >>> measure({"test": Embedded(points, labels, np.arange(4))}, ks=(1,))["test"]["recall@1"]
    1.0
    """
    result: dict[str, Metrics] = {}
    for part, one in found.items():
        if part == "gallery":
            continue
        asked = found["gallery"] if part == "query" else None
        pair = () if asked is None else (asked.points, asked.labels)
        values = metrics.retrieval(one.points, one.labels, *pair, ks=ks, measure=measure, per_query=per_query)
        if clustering:
            values |= metrics.clustering(one.points, one.labels, normalize=measure == "cosine")
        result["test" if part == "query" else part] = values
    return result


def class_means(found: Embedded, class_labels: NDArray[Any]) -> NDArray[np.float32]:
    """The mean embedding of each class, [classes, d], in the order of ``class_labels``."""
    order = torch.from_numpy(np.asarray(class_labels, dtype=np.int64)).to(found.labels.device)
    codes = torch.searchsorted(order, found.labels)
    sums = torch.zeros(len(order), found.points.shape[1], dtype=torch.float64, device=found.points.device)
    sums.index_add_(0, codes, found.points.double())
    counts = torch.bincount(codes, minlength=len(order)).clamp(min=1).unsqueeze(1)
    means: NDArray[np.float32] = (sums / counts).float().cpu().numpy()
    return means
