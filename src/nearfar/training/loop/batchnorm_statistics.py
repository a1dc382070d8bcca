"""The running statistics of batch norms, for a step that comes to nothing."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class Statistics:
    """What live batch norms knew before a batch; frozen ones learn nothing from it, and cost nothing.

    All of it lies in one tensor, so that a GPU has a few kernels to run, and none of them waits for the host. The
    buffers stay where they are in memory, as a CUDA graph that writes to them needs it.

    Args:
        layers: Batch norms.

    >>> norm = nn.BatchNorm1d(2)
    >>> before = Statistics([norm])
    >>> _ = norm(torch.full((3, 2), torch.nan))
    >>> before.put_back(unless=torch.tensor(False))
    >>> norm.running_mean.tolist(), int(norm.num_batches_tracked)
    ([0.0, 0.0], 0)
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for layer in layers:
            for name in BUFFERS if layer.training else ():
                buffer = getattr(layer, name, None)
                if buffer is not None:
                    kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        self._kept = [(buffers, _flat(buffers)) for buffers in kinds.values()]

    @torch.no_grad()
    def put_back(self, *, unless: Tensor) -> None:
        """Let batch norms forget the batch, ``unless`` this is true on the device."""
        for buffers, before in self._kept:
            chosen = torch.where(unless, _flat(buffers), before)
            parts = torch.split(chosen, [each.numel() for each in buffers])
            torch._foreach_copy_(buffers, [part.view_as(each) for part, each in zip(parts, buffers, strict=True)])


def _flat(buffers: list[Tensor]) -> Tensor:
    """A copy of all of them, one after the other."""
    return torch.cat([each.reshape(-1) for each in buffers])
