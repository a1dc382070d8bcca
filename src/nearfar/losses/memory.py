"""Cross-batch memory: embeddings of earlier batches as additional columns of a pair loss."""

import torch
from torch import Tensor, nn

from nearfar.utils.validation import whole


class Memory(nn.Module):
    """A ring buffer of the last embeddings of a training and their labels, without gradients.

    The anchors are always those of the batch. They are compared with the batch itself, where both members of a pair
    get a gradient, and with the stored embeddings.

    The memory has buffers and no parameters: ``to(device)`` moves it, ``state_dict()`` contains all of it, and it has
    nothing to optimize.

    Args:
        size: Number of stored embeddings.
        dim: Dimension of the embeddings.
        device: Device of the stored embeddings.

    Reference:
        Wang et al., "Cross-LossBatch Memory for Embedding Learning", CVPR 2020.

    Example:
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

        When it is full, the oldest embeddings are overwritten:

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
        self.added = 0  # in total; not a buffer, so that the host can read it without waiting for the device

    def __len__(self) -> int:
        return min(self.added, self.size)

    @property
    def embeddings(self) -> Tensor:
        """The stored embeddings, [n, dim]."""
        return self.all_embeddings[: len(self)]

    @property
    def labels(self) -> Tensor:
        """The labels of the stored embeddings, [n]."""
        return self.all_labels[: len(self)]

    @torch.no_grad()
    def add(self, embeddings: Tensor, labels: Tensor) -> None:
        """Store a batch; if it is larger than the memory, only its end.

        NaN and infinity are stored as zeros, otherwise every later loss would be NaN.

        Args:
            embeddings: Embeddings, [m, dim].
            labels: Labels, [m].
        """
        expected = (len(labels), self.all_embeddings.shape[1])
        if embeddings.shape != expected:
            raise ValueError(
                f"embeddings has shape {tuple(embeddings.shape)}; this memory and the labels need {expected}"
            )
        embeddings, labels = embeddings.detach()[-self.size :].nan_to_num(0.0, 0.0, 0.0), labels[-self.size :]
        start = self.added % self.size
        before_end = min(len(labels), self.size - start)
        for buffer, given in ((self.all_embeddings, embeddings), (self.all_labels, labels)):
            buffer[start : start + before_end] = given[:before_end]
            buffer[: len(labels) - before_end] = given[before_end:]
        self.added += len(labels)

    def loss(self, loss: nn.Module, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of a batch whose columns are the batch and the memory.

        Args:
            loss: A loss that accepts a gallery.
            embeddings: Embeddings of the batch, [m, dim].
            labels: Labels of the batch, [m].
        """
        if not isinstance(labels, Tensor):
            raise TypeError(f"labels is a {type(labels).__name__}; a memory stores class labels, so a tensor is needed")
        if not len(self):
            plain: Tensor = loss(embeddings, labels)
            return plain
        gallery = torch.cat([embeddings, self.embeddings.to(embeddings.dtype)])
        positions = torch.arange(len(labels), device=embeddings.device)
        value: Tensor = loss(embeddings, labels, gallery, torch.cat([labels, self.labels]), positions=positions)
        return value

    def get_extra_state(self) -> Tensor:
        """Return the number of added embeddings as a tensor, since some files contain nothing but tensors."""
        return torch.tensor(self.added)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore what ``get_extra_state`` returned."""
        self.added = int(state)

    def extra_repr(self) -> str:
        return f"{self.size}, dim={self.all_embeddings.shape[1]}"
