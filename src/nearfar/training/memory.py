"""Embeddings of earlier batches as more columns for a pair loss: cross-batch memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from nearfar.losses import PairLoss
from nearfar.settings import whole


class Memory:
    """The last embeddings of a training and their labels, without gradients, the oldest overwritten first.

    Anchors are always those of the batch. They are compared with the batch itself, where gradients flow both ways, and
    with what is remembered. While it is filling, only what is there is compared with.

    Parameters
        size    how many embeddings are remembered.
        dim     their dimensions.
        device  where they are.

    Reference
        Wang et al.: Cross-Batch Memory for Embedding Learning. CVPR 2020.

    >>> memory = Memory(3, dim=1)
    >>> memory.add(torch.tensor([[1.0], [2.0]]), torch.tensor([1, 2]))
    >>> memory.add(torch.tensor([[3.0], [4.0]]), torch.tensor([3, 4]))
    >>> memory.labels.tolist()
    [4, 2, 3]
    """

    def __init__(self, size: int, *, dim: int, device: torch.device | str = "cpu") -> None:
        self.size = whole("size", size)
        self._embeddings = torch.zeros(size, whole("dim", dim), device=device)
        self._labels = torch.zeros(size, dtype=torch.int64, device=device)
        self._added = 0  # in all, so that the host knows what is where without asking the device

    def __len__(self) -> int:
        return min(self._added, self.size)

    @property
    def embeddings(self) -> Tensor:
        """What is remembered, [n, dim]."""
        return self._embeddings[: len(self)]

    @property
    def labels(self) -> Tensor:
        """The labels of what is remembered, [n]."""
        return self._labels[: len(self)]

    @torch.no_grad()
    def add(self, embeddings: Tensor, labels: Tensor) -> None:
        """Remember a batch; of one that is larger than the memory, its end.

        What is no number is remembered as a vector of zeros, or it would spoil every batch from now on.
        """
        embeddings, labels = embeddings.detach()[-self.size :].nan_to_num(0.0, 0.0, 0.0), labels[-self.size :]
        start = self._added % self.size
        before_end = min(len(labels), self.size - start)
        for mine, given in ((self._embeddings, embeddings), (self._labels, labels)):
            mine[start : start + before_end] = given[:before_end]
            mine[: len(labels) - before_end] = given[before_end:]
        self._added += len(labels)

    def loss(self, loss: nn.Module, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch whose columns are the batch and the memory."""
        if not len(self):
            plain: Tensor = loss(embeddings, labels)
            return plain
        gallery = torch.cat([embeddings, self.embeddings.to(embeddings.dtype)])
        positions = torch.arange(len(labels), device=embeddings.device)
        value: Tensor = loss(embeddings, labels, gallery, torch.cat([labels, self.labels]), positions=positions)
        return value

    def state(self) -> dict[str, Tensor]:
        """All of it, as tensors on the CPU."""
        return {
            "embeddings": self._embeddings.cpu(),
            "labels": self._labels.cpu(),
            "added": torch.tensor(self._added),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on with what ``state`` gave."""
        if state["embeddings"].shape != self._embeddings.shape:
            ours, theirs = tuple(self._embeddings.shape), tuple(state["embeddings"].shape)
            raise ValueError(f"the memory is {ours} and the saved one {theirs}; both must be the same")
        self._embeddings.copy_(state["embeddings"])
        self._labels.copy_(state["labels"])
        self._added = int(state["added"])


def check_remembers(loss: nn.Module) -> None:
    """Refuse a memory for losses that compare with something else than columns."""
    if not isinstance(loss, PairLoss):
        name = getattr(loss, "key", type(loss).__name__)
        raise ValueError(
            f"training.memory is above 0 and the loss is {name!r}; a memory is for losses of pairs, such as contrastive"
        )
