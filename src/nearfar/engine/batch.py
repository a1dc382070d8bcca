"""The checked input of a loss."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nearfar.supervision import Supervision


@dataclass(frozen=True)
class LossBatch:
    """Embeddings, how they are related, and what they are compared with.

    Args:
        embeddings: Embeddings, [m, d], float32 or float64.
        relations: Labels, [m], int64; or another supervision, which answers for one block of pairs after another.
        gallery: Columns to compare with, [n, d]; None: the embeddings themselves.
        gallery_labels: Labels of the gallery, [n]; None without a gallery, and if ``relations`` are no labels.
        positions: The column of each embedding in the gallery, [m], −1: not in it. None: it has none of them.
        anchor_values: A number of the loss for each embedding, [m], which is differentiated.
        noise: Uniform random numbers in [0, 1) for the rows and then the columns, [m + n].

    Example:
        >>> batch = LossBatch(torch.eye(2), torch.tensor([0, 1]))
        >>> batch.column_labels
        tensor([0, 1])
    """

    embeddings: Tensor
    relations: Tensor | Supervision
    gallery: Tensor | None = None
    gallery_labels: Tensor | None = None
    positions: Tensor | None = None
    anchor_values: Tensor | None = None
    noise: Tensor | None = None

    @property
    def labels(self) -> Tensor:
        """The labels of the embeddings, [m], for losses that need them: see ``Loss.needs_labels``."""
        assert isinstance(self.relations, Tensor)
        return self.relations

    @property
    def column_labels(self) -> Tensor:
        """The labels of what the embeddings are compared with, [n]."""
        return self.labels if self.gallery_labels is None else self.gallery_labels

    @property
    def columns(self) -> Tensor:
        """What the embeddings are compared with, [n, d]."""
        return self.embeddings if self.gallery is None else self.gallery

    def swapped(self) -> LossBatch:
        """Return the batch with its gallery as embeddings, and the other way round."""
        assert self.gallery is not None
        positions = self.positions
        if positions is not None:
            # The embedding that each column is; −1: none.
            width = len(self.gallery)
            anchors = torch.arange(len(positions), dtype=positions.dtype, device=positions.device)
            anchor_of = positions.new_full((width + 1,), -1)
            positions = anchor_of.scatter_(0, torch.where(positions < 0, width, positions), anchors)[:width]
        if not isinstance(self.relations, Tensor):
            return LossBatch(self.gallery, self.relations.transposed(), self.embeddings, None, positions)
        return LossBatch(self.gallery, self.column_labels, self.embeddings, self.relations, positions)

    def without_gallery(self) -> LossBatch:
        """Return the batch for a loss that does not compare embeddings with each other."""
        return replace(self, gallery=None, gallery_labels=None, positions=None)
