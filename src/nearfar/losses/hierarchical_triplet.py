"""Hierarchical triplet loss: margins from a tree of the classes."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nearfar.engine import LossBatch, Mean, Tile, unit
from nearfar.engine.rows import count
from nearfar.losses.base import PairLoss, check_classes, register
from nearfar.losses.triplet import every_triplet, listed_triplets
from nearfar.utils.tensors import check_vectors
from nearfar.utils.validation import number, whole

FARTHEST = 4.0  # squared distance of opposite unit vectors


@register("hierarchical_triplet", "NRA Table II")
class HierarchicalTriplet(PairLoss):
    """Triplets whose margin is larger, the farther apart the classes of anchor and negative are in a tree.

    Formula:
        loss = ½ mean over triplets of [d²_ap − d²_an + margin + h(y_a, y_n) − v(y_a)]+
        v(c) = mean squared distance within class c;  h(b, c): the threshold at which b and c are first connected
        thresholds: t_l = v̄ + l (4 − v̄)/levels for l = 0 … levels, v̄ the mean of v

    Args:
        margin: β, the margin between classes that are not told apart by the tree.
        num_classes: Number of classes, for a tree; None: there is none, and all margins are ``margin``.
        levels: Number of levels of the tree.

    Differences:
        Until ``update`` has seen embeddings of all classes, and for classes without any, h − v is 0. Two classes are
        connected at a threshold if a chain of classes with mean squared distances up to it leads from one to the other.
        Distances are squared, in which the paper measures its margins. Its batches, random classes and their neighbors,
        come from the sampler "neighbor_classes".

    Reference:
        Ge et al., "Deep Metric Learning with Hierarchical Triplet Loss", ECCV 2018. NRA Table II, Group Loss Table 2.

    Example:
        >>> import torch, nearfar as nf
        >>> labels = torch.tensor([0, 0, 1, 1])
        >>> loss = nf.losses.HierarchicalTriplet(num_classes=2)
        >>> loss.update(torch.eye(4), labels)
        >>> loss(torch.eye(4), labels)
        tensor(0.0500)
    """

    deterministic = True  # no CUDA graph: the margins are no public setting and change from epoch to epoch
    measure = "squared_euclidean"
    closed_form = True
    row_bytes = 80
    fixed = ("num_classes",)

    def __init__(self, *, margin: float = 0.1, num_classes: int | None = None, levels: int = 16) -> None:
        super().__init__()
        self.margin = number("margin", margin)
        self.num_classes = None if num_classes is None else whole("num_classes", num_classes)
        self.levels = whole("levels", levels)
        self.register_buffer("margins", None if num_classes is None else torch.zeros(num_classes, num_classes))
        self.margins: Tensor | None

    @torch.no_grad()
    def update(self, embeddings: Tensor, labels: Tensor) -> None:
        """Build the tree of the classes from embeddings of the training set, for example after every epoch.

        Args:
            embeddings: Embeddings of all training images, [n, d].
            labels: Their classes, [n].
        """
        from scipy.cluster.hierarchy import cophenet, linkage
        from scipy.spatial.distance import squareform

        if self.margins is None or self.num_classes is None:
            return
        embeddings, labels = check_vectors("embeddings", embeddings, "labels", labels)
        check_classes(labels, self.num_classes)
        sums = torch.zeros(self.num_classes, embeddings.shape[1], dtype=torch.float64, device=embeddings.device)
        sums.index_add_(0, labels, unit(embeddings.double()))
        sizes = torch.bincount(labels, minlength=self.num_classes)
        seen = (sizes > 0).cpu().numpy()
        means, counts = (sums / sizes.clamp(min=1).unsqueeze(1)).cpu().numpy()[seen], sizes.cpu().numpy()[seen]
        if len(means) < 2:
            return
        # The mean squared distance of unit vectors follows from the means of the classes.
        lengths = (means**2).sum(axis=1)
        within = np.where(counts > 1, 2 - 2 * (counts * lengths - 1) / np.maximum(counts - 1, 1), 0.0).clip(0)
        between = (2 - 2 * means @ means.T).clip(0)
        np.fill_diagonal(between, 0)
        lowest = within[counts > 1].mean() if (counts > 1).any() else 0.0
        step = max(FARTHEST - lowest, 1e-9) / self.levels  # 0 if every class consists of opposites
        joined = squareform(cophenet(linkage(squareform(between, checks=False), "single")))
        level = np.ceil((joined - lowest) / step - 1e-9).clip(0, self.levels)
        margins = lowest + level * step - within[:, None]
        rows = torch.from_numpy(np.flatnonzero(seen)).to(self.margins.device)
        self.margins.zero_()
        self.margins[rows.unsqueeze(1), rows] = torch.from_numpy(margins).to(self.margins)

    @property
    def needs_labels(self) -> str | None:
        return None if self.num_classes is None else "has margins for each pair of classes"

    def compute(self, batch: LossBatch) -> Tensor:
        if self.num_classes is not None:
            check_classes(batch.labels, self.num_classes)
            check_classes(batch.column_labels, self.num_classes)
        return super().compute(batch)

    def on_tile(self, tile: Tile) -> Sequence[Mean]:
        sim, (pos, neg) = tile.similarity, self.mining.select(tile)
        if self.margins is not None and tile.labels is not None:
            of_rows, of_columns = tile.labels
            margins = self.margins.index_select(0, of_rows).index_select(1, of_columns).to(sim.dtype)
            sim = torch.where(neg, sim + margins, sim)
        given, number = self.mining.triplets(tile), count(pos, sim) * count(neg, sim)
        if given is None:
            total, _ = every_triplet(sim, pos, neg, self.margin)
        else:
            (total, _), number = listed_triplets(sim, given, self.margin, soft=False), count(given.valid, sim)
        return [Mean(total.chain(0.5 * total.value, -0.5), number)]
