"""Cross-batch memory in a training: how it goes in and out of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, tensor

from nearfar import losses


class Memory(losses.Memory):
    """A :class:`nearfar.losses.Memory` that goes in and out of checkpoints.

    >>> memory, again = Memory(3, dim=1), Memory(3, dim=1)
    >>> memory.add(tensor([[1.0], [2.0]]), tensor([1, 2]))
    >>> again.restore(memory.state())
    >>> again.labels.tolist()
    [1, 2]
    """

    def state(self) -> dict[str, Tensor]:
        """All of it, as tensors on the CPU."""
        return {
            "embeddings": self.all_embeddings.cpu(),
            "labels": self.all_labels.cpu(),
            "added": tensor(self.added),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on with what ``state`` gave."""
        if state["embeddings"].shape != self.all_embeddings.shape:
            ours, theirs = tuple(self.all_embeddings.shape), tuple(state["embeddings"].shape)
            raise ValueError(f"the memory is {ours} and the saved one {theirs}; both must be the same")
        self.all_embeddings.copy_(state["embeddings"])
        self.all_labels.copy_(state["labels"])
        self.added = int(state["added"])
