"""Embeddings of earlier batches as more columns for a pair loss: cross-batch memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nearfar.utils.validation import whole


class Memory(nn.Module):
    """The last embeddings of a training and their labels, without gradients, the oldest overwritten first.

    Anchors are always those of the batch. They are compared with the batch itself, where gradients flow both ways, and
    with what is remembered. While it is filling, only what is there is compared with.

    It has buffers and no parameters: ``to(device)`` moves it, ``state_dict()`` holds all of it, and an optimiser has
    nothing to do with it.

    Args:
        size: How many embeddings are remembered.
        dim: Their dimensions.
        device: Where they are.

    Reference:
        Wang et al.: Cross-Batch Memory for Embedding Learning. CVPR 2020.

    >>> from nearfar import losses
    >>> network, loss, memory = nn.Linear(8, 4), losses.Contrastive(), Memory(64, dim=4)
    >>> optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    >>> for step in range(3):
    ...     images, labels = torch.randn(16, 8), torch.arange(16) // 4
    ...     embeddings = network(images)
    ...     value = memory.loss(loss, embeddings, labels)
    ...     optimizer.zero_grad()
    ...     value.backward()
    ...     optimizer.step()
    ...     memory.add(embeddings, labels)
    >>> len(memory)
    48

    Of more than it can hold, the oldest go first:

    >>> memory = Memory(3, dim=1)
    >>> memory.add(torch.tensor([[1.0], [2.0]]), torch.tensor([1, 2]))
    >>> memory.add(torch.tensor([[3.0], [4.0]]), torch.tensor([3, 4]))
    >>> memory.labels.tolist()
    [4, 2, 3]
    """

    all_embeddings: Tensor
    all_labels: Tensor

    def __init__(self, size: int, *, dim: int, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.size = whole("size", size)
        self.register_buffer("all_embeddings", torch.zeros(size, whole("dim", dim), device=device))
        self.register_buffer("all_labels", torch.zeros(size, dtype=torch.int64, device=device))
        self.added = 0  # in all; no buffer, so that the host knows what is where without asking the device

    def __len__(self) -> int:
        return min(self.added, self.size)

    @property
    def embeddings(self) -> Tensor:
        """What is remembered, [n, dim]."""
        return self.all_embeddings[: len(self)]

    @property
    def labels(self) -> Tensor:
        """The labels of what is remembered, [n]."""
        return self.all_labels[: len(self)]

    @torch.no_grad()
    def add(self, embeddings: Tensor, labels: Tensor) -> None:
        """Remember a batch; of one that is larger than the memory, its end.

        What is no number is remembered as a vector of zeros, or it would spoil every batch from now on.
        """
        embeddings, labels = embeddings.detach()[-self.size :].nan_to_num(0.0, 0.0, 0.0), labels[-self.size :]
        start = self.added % self.size
        before_end = min(len(labels), self.size - start)
        for mine, given in ((self.all_embeddings, embeddings), (self.all_labels, labels)):
            mine[start : start + before_end] = given[:before_end]
            mine[: len(labels) - before_end] = given[before_end:]
        self.added += len(labels)

    def loss(self, loss: nn.Module, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch whose columns are the batch and the memory."""
        if not len(self):
            plain: Tensor = loss(embeddings, labels)
            return plain
        gallery = torch.cat([embeddings, self.embeddings.to(embeddings.dtype)])
        positions = torch.arange(len(labels), device=embeddings.device)
        value: Tensor = loss(embeddings, labels, gallery, torch.cat([labels, self.labels]), positions=positions)
        return value

    def get_extra_state(self) -> Tensor:
        """How many were added, for ``state_dict``; as a tensor, for files that hold nothing else."""
        return torch.tensor(self.added)

    def set_extra_state(self, state: Tensor) -> None:
        """What ``get_extra_state`` gave."""
        self.added = int(state)

    def extra_repr(self) -> str:
        return f"{self.size}, dim={self.all_embeddings.shape[1]}"
