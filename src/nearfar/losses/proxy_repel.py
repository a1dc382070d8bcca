"""Proxy-Repel: proxies push each other apart."""

import math
from collections.abc import Hashable
from itertools import combinations_with_replacement

import torch
from torch import Tensor
from torch.nn.functional import softplus

from nearfar.engine import LossBatch, Row, Tile, masked, unit
from nearfar.engine.autograd import Gradients, LossComputation, Needed, Tensors, differentiable
from nearfar.engine.measures import create as measure
from nearfar.engine.rows import FLOOR
from nearfar.engine.tiles import RowLoss, row_loss
from nearfar.losses.base import register
from nearfar.losses.proxies import ProxyLoss
from nearfar.losses.proxy_anchor import pull, share_of_present
from nearfar.utils.validation import number, one_of, positive

# Proxies of a tile: on a CPU it stays in the cache, on a GPU it keeps all processors busy.
CPU_SIDE = 1024
GPU_SIDE = 2048


@register("proxy_repel", "Thesis 6.1–6.2")
class ProxyRepel(ProxyLoss, RowLoss):
    """Each proxy pulls the embeddings of its class, and proxies push each other apart.

    Formula:
        loss = mean over proxies w with embeddings in the batch of log(1 + Σ_{x∈X_w} e^(−alpha (w·x − margin)))
             + mean over w∈W of log(1 + Σ_{v∈W, v≠w} e^(alpha (w·v + margin))),  W all proxies, or the absent ones

    Args:
        alpha: Steepness. The thesis uses 32.
        margin: λ. The thesis uses 0.1.
        through_batch: True: proxies are compared through the batch, by Σ_x (w·x)(x·v) instead of w·v.
        repelled: W. "all": all proxies. "absent": the proxies without embeddings in the batch, which is W⁻ of Thesis
            6.1 read literally.

    Differences:
        Thesis 6.1 prints W⁻ for the second term, and its text describes all proxies; both readings are available. A
        proxy does not repel itself, though the printed sum includes it. Through a batch of m embeddings, two proxies
        can have a similarity of up to m, so the second term grows with the batch. All pairs of proxies are compared:
        the time grows with the square of the number of classes.

    Reference:
        Psomas, "Metric Learning: A Deep Dive", 2020, chapter 6. Thesis 6.1–6.2.

    Example:
        >>> import torch, nearfar as nf
        >>> loss = nf.losses.ProxyRepel(num_classes=2, dim=4)
        >>> loss(torch.eye(4), torch.tensor([0, 0, 1, 1])).backward()
    """

    cuda_graph = deterministic = True
    closed_form = True

    def __init__(
        self,
        *,
        num_classes: int,
        dim: int,
        alpha: float = 32.0,
        margin: float = 0.1,
        through_batch: bool = False,
        repelled: str = "all",
        lr_multiplier: float = 100.0,
    ) -> None:
        super().__init__(num_classes, dim, lr_multiplier)
        self.alpha, self.margin = positive("alpha", alpha), number("margin", margin)
        self.through_batch = through_batch
        self.repelled = one_of("repelled", repelled, ("all", "absent"))

    def against_proxies(self, embeddings: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
        classes = torch.arange(self.num_classes, device=labels.device)
        weights = share_of_present(classes, labels, proxies.dtype)
        pulls = row_loss(self, LossBatch(proxies, classes, embeddings, labels, anchor_values=weights))
        absent = weights <= 0 if self.repelled == "absent" else None
        if not self.through_batch:
            return pulls + self._repulsion(proxies, absent)

        def through(proxies: Tensor, embeddings: Tensor, absent: Tensor | None) -> Tensor:
            return self._repulsion(unit(proxies) @ unit(embeddings).T, absent)

        return pulls + self.differentiate(through, (proxies, embeddings), (absent,), static=(0,))

    def on_tile(self, tile: Tile) -> Row:
        return pull(tile, self.alpha, self.margin)

    def _repulsion(self, points: Tensor, absent: Tensor | None) -> Tensor:
        """The mean over the proxies, or over the absent ones, of the loss of their similarities to all others."""

        def graph_key() -> Hashable:
            settings = self.graph_key()
            return None if settings is None else ("repulsion", settings)

        computation = LossComputation(self._repel, (absent,), self, graph_key, len(points) ** 2, static=(0,))
        return differentiable(computation, (points,))

    def _repel(self, inputs: Tensors, constants: Tensors, needed: Needed) -> tuple[Tensor, Gradients]:
        """Compute the repulsion with its gradient.

        Similarities are symmetric: a tile of some proxies against later ones gives the sums of both, and then both
        parts of the gradient. If there are several tiles, they are computed twice, so that no matrix of all pairs is
        created.
        """
        (proxies,), (absent,) = inputs, constants
        assert proxies is not None
        # Through the batch, proxies are rows of similarities and not normalized.
        comparison = measure("dot", normalize=not self.through_batch)
        vectors = comparison.prepare(proxies)
        # Two buffers of a tile, and as much again as one of them for temporary memory.
        most = max(1, math.isqrt(self.memory_budget // (3 * proxies.element_size())))
        side, count = CPU_SIDE if proxies.device.type == "cpu" else GPU_SIDE, len(proxies)
        # A single tile is computed once, several are computed twice.
        parts = 1 if count <= min(2 * side, most) else math.ceil(count / min(side, most))
        tiles = _Tiles(vectors.points, absent, self.alpha, math.ceil(count / parts))
        sums = tiles.logsumexp()
        share = torch.ones_like(sums) if absent is None else absent.to(sums.dtype)
        share /= share.sum().clamp(min=1.0)
        logits = sums + self.alpha * self.margin
        value = torch.dot(share, softplus(logits))
        if not needed[0]:
            return value, [None]
        slopes = self.alpha * share * logits.sigmoid()
        return value, [comparison.to_embeddings(tiles.gradient(slopes.log() - sums), vectors)]


class _Tiles:
    """The scaled similarities of all pairs of points, in square tiles on and above the diagonal."""

    def __init__(self, points: Tensor, absent: Tensor | None, scale: float, side: int) -> None:
        self.points, self.scale = points, scale
        blocks = [slice(start, min(start + side, len(points))) for start in range(0, len(points), side)]
        self.tiles = list(combinations_with_replacement(blocks, 2))
        self.offsets = None if absent is None else masked(torch.zeros_like(points[:, 0]), absent, FLOOR)
        self._buffers = [points.new_empty(side * side) for _ in range(2)]
        self._known: tuple[slice, slice] | None = None

    def _buffer(self, number: int, rows: slice, columns: slice) -> Tensor:
        height, width = rows.stop - rows.start, columns.stop - columns.start
        return self._buffers[number][: height * width].view(height, width)

    def _tile(self, rows: slice, columns: slice) -> Tensor:
        """The tile, in a buffer; ``FLOOR`` for points with themselves and for those that do not count."""
        tile = self._buffer(0, rows, columns)
        if self._known == (rows, columns):
            return tile
        self._known = rows, columns
        tile.addmm_(self.points[rows], self.points[columns].T, beta=0.0, alpha=self.scale)
        if self.offsets is not None:
            tile += self.offsets[columns]
            tile += self.offsets[rows].unsqueeze(1)
        if rows == columns:
            tile.fill_diagonal_(FLOOR)
        return tile

    def logsumexp(self) -> Tensor:
        """The log-sum-exp of each point's similarities to all others, [n]."""
        sums = torch.full_like(self.points[:, 0], -math.inf)
        for rows, columns in self.tiles:
            tile, powers = self._tile(rows, columns), self._buffer(1, rows, columns)
            for places, dim in ((rows, 1), (columns, 0)) if rows != columns else ((rows, 1),):
                top = tile.amax(dim=dim, keepdim=True)
                total = torch.sub(tile, top, out=powers).exp_().sum(dim=dim).log_()
                sums[places] = torch.logaddexp(sums[places], total.add_(top.squeeze(dim)))
        return sums

    def gradient(self, logs: Tensor) -> Tensor:
        """The gradient by the points, if e^(similarity + logs) is the derivative by a point's similarity, [n, d]."""
        gradient = torch.zeros_like(self.points)
        for rows, columns in self.tiles:
            tile, weights = self._tile(rows, columns), self._buffer(1, rows, columns)
            torch.add(tile, logs[rows].unsqueeze(1), out=weights).exp_()
            weights += tile.add_(logs[columns]).exp_()
            self._known = None
            gradient[rows].addmm_(weights, self.points[columns])
            if rows != columns:
                gradient[columns].addmm_(weights.T, self.points[rows])
        return gradient
