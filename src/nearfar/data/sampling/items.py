"""Samplers that draw items: at random, or hard ones of the whole training set."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearfar.data.sampling.base import Indices, Labels, Sampler, register
from nearfar.data.transforms.random_streams import stream
from nearfar.utils.validation import whole

BLOCK = 1024  # items that are compared with all others at once


@register
class Random(Sampler):
    """Shuffles the items of each epoch; the incomplete last batch is dropped.

    Args:
        steps: Batches per epoch; None for n // batch_size. With more, items are shuffled again.

    Example:
        >>> import numpy as np
        >>> sampler = Random(np.zeros(6, dtype=np.int64), batch_size=3)
        >>> sorted(np.concatenate(list(sampler.epoch(0))).tolist())
        [0, 1, 2, 3, 4, 5]
    """

    key = "random"

    def __init__(self, labels: Labels, *, batch_size: int, steps: int | None = None, seed: int = 0) -> None:
        super().__init__(labels, batch_size, steps, seed)
        if batch_size > len(self.labels):
            raise ValueError(f"batch_size is {batch_size}; labels has {len(self.labels)} items")
        self._last_order: tuple[tuple[int, int], Indices] | None = None

    def _batch_function(self, epoch: int) -> Callable[[int], Indices]:
        per_pass = len(self.labels) // self.batch_size  # batches of one pass over all items

        def draw(step: int) -> Indices:
            order = self._order(epoch, step // per_pass)
            start = step % per_pass * self.batch_size
            return order[start : start + self.batch_size].copy()

        return draw

    def _order(self, epoch: int, number: int) -> Indices:
        """Return the shuffled positions of a pass; the last ones are cached for the next step."""
        last = self._last_order
        if last is None or last[0] != (epoch, number):
            order = stream(self.seed, "order", epoch, number).permutation(len(self.labels))
            last = self._last_order = ((epoch, number), order)
        return last[1]


@register
class Given(Sampler):
    """Draws given pairs or triplets, every one once per epoch; the incomplete last batch is dropped.

    A batch holds the first members of all drawn pairs, then the second members, and so on. An item that is in several
    of the pairs is in the batch several times. Given relations are not shared among processes.

    Args:
        relations: Positions in ``labels`` of the members of each pair, [p, 2], or triplet, [p, 3].
        batch_size: Items per batch: a multiple of 2 for pairs, of 3 for triplets.
        steps: Batches per epoch; None for as many as show every relation once.

    Example:
        >>> sampler = Given([0, 1, 2, 3], relations=np.array([[0, 1], [2, 3]]), batch_size=4)
        >>> drawn = sampler.drawn(epoch=0, step=0)
        >>> sampler.batch(epoch=0, step=0).tolist() == [*(2 * drawn), *(2 * drawn + 1)]
        True
    """

    key = "given"

    def __init__(
        self, labels: Labels, *, relations: Indices, batch_size: int, steps: int | None = None, seed: int = 0
    ) -> None:
        self.relations = np.asarray(relations, dtype=np.int64)
        width = self.relations.shape[1]
        if whole("batch_size", batch_size) % width or not 0 < batch_size // width <= len(self.relations):
            raise ValueError(
                f"batch_size is {batch_size}; it must be a multiple of {width}, and hold at most the "
                f"{len(self.relations):,} given ones"
            )
        order = np.arange(len(self.relations))
        self._order = Random(order, batch_size=batch_size // width, steps=steps, seed=seed)
        super().__init__(labels, batch_size, self._order.steps, seed)

    def check_ranks(self, ranks: int) -> None:
        if ranks > 1:
            raise ValueError(f"ranks is {ranks}; given pairs and triplets are trained by a single process")

    def drawn(self, epoch: int, step: int) -> Indices:
        """Return the numbers of the pairs or triplets of a batch."""
        return self._order.batch(epoch, step)

    def _batch_function(self, epoch: int) -> Callable[[int], Indices]:
        draw = self._order.batch_function(epoch)
        return lambda step: self.relations[draw(step)].T.reshape(-1)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "relations": self.relations.tobytes()}


def hard_items(embeddings: Tensor, labels: Labels, neighbors: int) -> Indices:
    """Return, for each item, the positions of its nearest items of other classes and of its farthest of its own class.

    Args:
        embeddings: Embeddings of all items, [n, d].
        labels: Their labels, [n].
        neighbors: Number of negatives for each item.

    Returns:
        [n, neighbors + 1], nearest negatives first and the positive last; the item itself if it is alone in its class.

    Example:
        >>> hard_items(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]), [0, 0, 1], neighbors=1).tolist()
        [[2, 1], [2, 0], [1, 2]]
    """
    points = torch.nn.functional.normalize(embeddings, dim=1)
    classes = torch.as_tensor(np.asarray(labels), device=points.device)
    index, tables = torch.arange(len(points), device=points.device), []
    for rows in torch.split(index, BLOCK):
        similar = points[rows] @ points.T
        same = classes[rows].unsqueeze(1) == classes
        negatives = similar.masked_fill(same, -torch.inf).topk(neighbors, dim=1).indices
        itself = rows.unsqueeze(1) == index
        # An item alone in its class has only itself, which is nearer than nothing.
        positive = similar.masked_fill(~same, torch.inf).masked_fill(itself, 2.0).argmin(dim=1, keepdim=True)
        tables.append(torch.cat([negatives, positive], dim=1))
    return torch.cat(tables).cpu().numpy()


class NeighborSampler(Sampler):
    """Base class of samplers that know hard items of every item; until :meth:`update`, items are drawn at random."""

    learns = "items"
    depends_on = (*Sampler.depends_on, "neighbors")

    def __init__(self, labels: Labels, batch_size: int, neighbors: int, steps: int | None, seed: int) -> None:
        super().__init__(labels, batch_size, steps, seed)
        if batch_size > len(self.labels):
            raise ValueError(f"batch_size is {batch_size}; labels has {len(self.labels)} items")
        _, self._codes, counts = np.unique(self.labels, return_inverse=True, return_counts=True)
        if len(counts) < 2 or counts.max() < 2:
            raise ValueError("labels must have two classes, and one of them two items")
        self._members = np.split(np.argsort(self._codes, kind="stable"), np.cumsum(counts)[:-1])
        self._paired = np.flatnonzero(counts > 1)  # classes with a pair
        self.neighbors = min(whole("neighbors", neighbors), int(len(self.labels) - counts.max()))

    def update(self, learned: NDArray[Any] | None) -> None:
        if learned is not None and learned.shape != (len(self.labels), self.neighbors + 1):
            raise ValueError(
                f"table has shape {list(learned.shape)}; needed is [{len(self.labels)}, {self.neighbors + 1}]"
            )
        self.learned = None if learned is None else np.asarray(learned, dtype=np.int64)

    def _candidates(self, table: Indices | None, rng: np.random.Generator) -> Iterable[int]:
        """Items of a batch in the order in which they are taken; an item may occur several times."""
        raise NotImplementedError

    def _batch_function(self, epoch: int) -> Callable[[int], Indices]:
        table = self.learned

        def draw(step: int) -> Indices:
            rng = stream(self.seed, "batches", epoch, step)
            batch = dict.fromkeys(self._candidates(table, rng))
            chosen = list(batch)[: self.batch_size]
            if len(chosen) < self.batch_size:  # too few different items
                rest = rng.permutation(len(self.labels))
                chosen += [item for item in rest.tolist() if item not in batch][: self.batch_size - len(chosen)]
            return np.array(chosen, dtype=np.int64)

        return draw


@register
class Importance(NeighborSampler):
    """Draws some items of a few classes and fills the batch with their hardest negatives in the whole training set.

    Args:
        classes: Classes that are drawn. NRA describes a single one; the thesis random pairs, of as many classes.
        per_class: Items of each of these classes.
        neighbors: How many of the nearest items of other classes are known of each item.

    Differences:
        The paper looks for neighbors among the items of the current batch candidates; here the trainer embeds the whole
        training set after every epoch.

    Reference:
        Oh Song et al., "Deep Metric Learning via Lifted Structured Feature Embedding", CVPR 2016. NRA II, thesis
        2.3.1.3.

    Example:
        >>> sampler = Importance([0, 0, 1, 1, 2, 2], batch_size=4, classes=1)
        >>> len(sampler.batch(epoch=0, step=0))
        4
    """

    key = "importance"
    depends_on = (*NeighborSampler.depends_on, "classes", "per_class")

    def __init__(
        self,
        labels: Labels,
        *,
        batch_size: int,
        classes: int,
        per_class: int = 2,
        neighbors: int = 32,
        steps: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(labels, batch_size, neighbors, steps, seed)
        self.classes, self.per_class = whole("classes", classes), whole("per_class", per_class, low=2)
        if classes > len(self._paired) or classes * per_class > batch_size:
            raise ValueError(
                f"classes is {classes} and per_class {per_class}; {len(self._paired)} classes have two items, and a "
                f"batch has {batch_size} items in all"
            )

    def _candidates(self, table: Indices | None, rng: np.random.Generator) -> Iterable[int]:
        anchors: list[int] = []
        for code in rng.choice(self._paired, self.classes, replace=False):
            members = self._members[code]
            anchors += rng.choice(members, min(self.per_class, len(members)), replace=False).tolist()
        # The nearest negative of every anchor, then the next nearest of every anchor, and so on.
        return anchors if table is None else [*anchors, *table[anchors, :-1].T.flatten().tolist()]


@register
class HardTriplets(NeighborSampler):
    """Draws random anchors, each with its farthest positive and its nearest negative: offline hard mining.

    Args:
        batch_size: Items per batch, three for each anchor.

    Reference:
        Schroff et al., "FaceNet: A Unified Embedding for Face Recognition and Clustering", CVPR 2015. Thesis 2.18–2.19.

    Example:
        >>> sampler = HardTriplets([0, 0, 1, 1, 2, 2], batch_size=3)
        >>> sampler.update(hard_items(torch.eye(6), sampler.labels, neighbors=1))
        >>> len(sampler.batch(epoch=0, step=0))
        3
    """

    key = "hard_triplets"
    random_positive = False  # whether the positive is drawn, instead of the farthest

    def __init__(self, labels: Labels, *, batch_size: int, steps: int | None = None, seed: int = 0) -> None:
        super().__init__(labels, batch_size, 1, steps, seed)

    def _candidates(self, table: Indices | None, rng: np.random.Generator) -> Iterable[int]:
        for anchor in rng.permutation(len(self.labels)).tolist():
            members = self._members[self._codes[anchor]]
            if len(members) == 1:
                continue
            yield anchor
            if table is None:
                yield int(rng.choice(members[members != anchor]))
                yield int(rng.choice(np.flatnonzero(self._codes != self._codes[anchor])))
            else:
                yield int(rng.choice(members[members != anchor]) if self.random_positive else table[anchor, -1])
                yield int(table[anchor, rng.integers(self.neighbors)])


@register
class SmartTriplets(HardTriplets):
    """Draws random anchors and positives, each with a negative among the nearest of the whole set: smart mining.

    Args:
        batch_size: Items per batch, three for each anchor.
        neighbors: Number of nearest items of other classes of which one is drawn, so that outliers do not dominate.

    Differences:
        The paper finds neighbors approximately in a graph and adapts how hard they are during training; here they are
        exact, and ``neighbors`` is a setting.

    Reference:
        Harwood et al., "Smart Mining for Deep Metric Learning", ICCV 2017. Unified View Table 2.

    Example:
        >>> len(SmartTriplets([0, 0, 1, 1, 2, 2], batch_size=3).batch(epoch=0, step=0))
        3
    """

    key = "smart_triplets"
    random_positive = True

    def __init__(
        self, labels: Labels, *, batch_size: int, neighbors: int = 20, steps: int | None = None, seed: int = 0
    ) -> None:
        NeighborSampler.__init__(self, labels, batch_size, neighbors, steps, seed)
