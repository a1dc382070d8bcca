"""Embeddings against the proxies of all classes, one tile of classes at a time.

A cross-entropy sees two numbers of an embedding's row of similarities: the similarity to its own class, and
the log-sum-exp over the other classes. So a first pass over the classes finds these two, the loss and its
slopes follow from them, and a second pass computes each tile once more and carries its weights to the
embeddings and the proxies. Nothing of size batch × classes has to exist. Where it fits the memory budget there
is one tile, and it is computed once.

Nothing is copied to be normalised: the lengths of embeddings and proxies are divided out of the similarities
and of the weights.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import softplus

from nearfar.engine.function import differentiable
from nearfar.engine.graphs import Gradients, Needed, Step, Tensors
from nearfar.engine.masks import FLOOR, masked
from nearfar.engine.measures import Measure, inverse
from nearfar.engine.problem import CPU_TILE_PAIRS

BYTES_PER_PAIR = 16  # of a float32 tile: similarities, probabilities, and room for what their making takes
CPU_TILE_CLASSES = 1024  # with fewer, matrix products get slow
NEGLIGIBLE = 1e-30  # weights below this are 0


class ClassLoss(Protocol):
    """What the engine asks of a loss."""

    @property
    def comparison(self) -> Measure:
        """How embeddings and proxies are compared."""

    @property
    def scale(self) -> float:
        """What similarities are multiplied by in the log-sum-exp."""

    @property
    def include_positive(self) -> bool:
        """Whether the own class is part of the log-sum-exp, as in a cross-entropy."""

    @property
    def pools(self) -> bool:
        """Whether a class has several proxies, and ``pool`` and ``penalty`` are to be asked."""

    @property
    def memory_budget(self) -> int:
        """Working memory for a tile."""

    def recordable(self) -> Hashable:
        """All settings that decide what the loss computes; None where it cannot be recorded and replayed."""

    def target(self, own: Tensor) -> tuple[Tensor, Tensor | None]:
        """What stands for the scaled similarity to the own class, [m], and its derivative by that; None: 1."""

    def pool(self, similarities: Tensor) -> tuple[Tensor, Tensor]:
        """Similarities to proxies, [m, c, k], as similarities to classes, [m, c], and the derivatives, [m, c, k]."""

    def penalty(self, similarities: Tensor) -> tuple[Tensor, Tensor]:
        """What the similarities within each class, [c, k, k], cost in sum, and its derivative by them."""


@dataclass
class _Tile:
    """All embeddings against some classes."""

    proxies: Tensor  # [c · k, d]
    inverse_norms: Tensor | None  # [c · k]; None: the proxies are raw
    values: Tensor  # [m, c · k], similarities times the problem's ``spread``
    slopes: Tensor | None  # [m, c, k], of class similarities by proxy similarities
    probabilities: Tensor  # [m, c], softmax over these classes without the own one
    logsumexp: Tensor  # [m], of the same
    own: Tensor  # [m], scaled similarity to the own class
    column: Tensor  # [m, 1], where the own class stands
    inside: Tensor | None  # [m, 1], whether it does; None: always


class _Problem:
    """A batch and the classes it is compared with."""

    def __init__(self, loss: ClassLoss, embeddings: Tensor, labels: Tensor, proxies: Tensor) -> None:
        self.loss, self.labels, self.proxies = loss, labels, proxies
        self.embeddings = embeddings
        self.norms = self.inverse_norms = None
        if loss.comparison.unit:
            self.norms = torch.linalg.vector_norm(embeddings, dim=1)
            self.inverse_norms = inverse(self.norms)
        self.centers = proxies.shape[1] if loss.pools else 1
        self.spread = 1.0 if loss.pools else loss.scale  # similarities are scaled at once where nothing is pooled
        self.tiles = self._slices(len(embeddings), len(proxies))
        self._rooms: dict[str, Tensor] = {}

    def _room(self, name: str, columns: int) -> Tensor:
        """A matrix to work in, [m, columns]; every tile gets the same memory, the first is the widest."""
        height = len(self.embeddings)
        if name not in self._rooms:
            self._rooms[name] = self.embeddings.new_empty(height * columns)
        return self._rooms[name][: height * columns].view(height, columns)

    def _slices(self, height: int, count: int) -> list[slice]:
        """The classes, cut so that a tile keeps to the budget."""
        bytes_per_class = BYTES_PER_PAIR * self.proxies.element_size() // 4 * height * self.centers
        size = self.loss.memory_budget // bytes_per_class
        if size < count and self.proxies.device.type == "cpu":
            # When there must be several tiles, they may as well stay in the cache.
            size = min(size, max(CPU_TILE_CLASSES, CPU_TILE_PAIRS // (height * self.centers)))
        size = min(max(1, size), count)
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def tile(self, classes: slice) -> _Tile:
        """The classes of one slice."""
        proxies = self.proxies[classes].flatten(0, -2)
        values = torch.mm(self.embeddings, proxies.T, out=self._room("values", len(proxies)))
        lengths, slopes = None, None
        if self.inverse_norms is not None:
            lengths = inverse(torch.linalg.vector_norm(proxies, dim=1))
            values.mul_(lengths if self.spread == 1.0 else lengths * self.spread).mul_(self.inverse_norms.unsqueeze(1))
        elif self.spread != 1.0:
            values.mul_(self.spread)
        logits = values
        if self.loss.pools:
            logits, slopes = self.loss.pool(values.view(len(values), -1, self.centers))
            logits.mul_(self.loss.scale)
        column, inside = self.labels.unsqueeze(1), None
        if len(self.tiles) > 1:
            column = column - classes.start
            inside = (column >= 0) & (column < logits.shape[1])
            column = column.clamp_(0, logits.shape[1] - 1)
        own = logits.gather(1, column)
        hidden = torch.full_like(own, FLOOR) if inside is None else masked(own, ~inside, FLOOR)
        logits.scatter_(1, column, hidden)
        probabilities = torch.softmax(logits, dim=1, out=self._room("probabilities", logits.shape[1]))
        # max softmax = exp(max) / Σ exp, so the sum needs no second exponential.
        logsumexp = logits.amax(dim=1).sub_(probabilities.amax(dim=1).log_())
        if logits is values:
            values.scatter_(1, column, own)
        return _Tile(proxies, lengths, values, slopes, probabilities, logsumexp, own.squeeze(1), column, inside)

    def weights(self, tile: _Tile, by_own: Tensor, by_others: Tensor, others: Tensor) -> Tensor:
        """The derivative of the loss by the similarities of a tile over the length of each embedding, [m, c · k]."""
        if self.inverse_norms is not None:
            by_own, by_others = by_own * self.inverse_norms, by_others * self.inverse_norms
        if tile.inside is not None:
            by_others = by_others * (tile.logsumexp - others).exp_()  # the tile's share of all classes
        # What is too small to count would only slow the products down: processors dislike such numbers.
        weights = torch.threshold_(tile.probabilities, NEGLIGIBLE, 0.0).mul_(by_others.unsqueeze(1))
        own = by_own.unsqueeze(1)
        if tile.inside is not None:
            own = torch.where(tile.inside, own, weights.gather(1, tile.column))
        weights.scatter_(1, tile.column, own)
        return weights if tile.slopes is None else tile.slopes.mul_(weights.unsqueeze(2)).flatten(1)

    def penalty(self, tile: _Tile) -> tuple[Tensor, Tensor]:
        """What the proxies of a tile cost by themselves, and M, [c, k, k], with the gradient M · proxies."""
        proxies = tile.proxies.view(-1, self.centers, tile.proxies.shape[1])
        similarity, lengths = proxies @ proxies.transpose(1, 2), proxies.new_ones(len(proxies), self.centers)
        if tile.inverse_norms is not None:
            lengths = tile.inverse_norms.view_as(lengths)
        both = lengths.unsqueeze(1) * lengths.unsqueeze(2)
        cost, slopes = self.loss.penalty(similarity.mul_(both))
        along = (slopes * similarity).sum(dim=2)
        moves = slopes * both
        if tile.inverse_norms is not None:
            moves.diagonal(dim1=1, dim2=2).sub_(along * lengths.square())
        return cost / len(self.proxies), moves / len(self.proxies)


def _slopes(loss: ClassLoss, own: Tensor, others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of the batch, log(e^target + e^others) − target, and its derivatives by the similarities."""
    target, slope = loss.target(own)
    gap, share = others - target, loss.scale / len(own)
    if loss.include_positive:
        value, by_others = softplus(gap, threshold=50.0).mean(), gap.sigmoid_().mul_(share)
    else:
        present = others > FLOOR / 2  # where there is no other class there is nothing to tell apart
        value, by_others = masked(gap, present).mean(), present.to(gap.dtype).mul_(share)
    by_own = by_others.neg()
    return value, by_own if slope is None else by_own.mul_(slope), by_others


def _compute(
    loss: ClassLoss, embeddings: Tensor, labels: Tensor, proxies: Tensor, needed: Needed
) -> tuple[Tensor, Gradients]:
    """The loss and the needed gradients by embeddings and proxies."""
    problem = _Problem(loss, embeddings, labels, proxies)
    own, sums, penalty = None, [], None
    for classes in problem.tiles:
        tile = problem.tile(classes)
        own = tile.own if own is None or tile.inside is None else torch.where(tile.inside.squeeze(1), tile.own, own)
        sums.append(tile.logsumexp)
        if loss.pools:
            cost, _ = problem.penalty(tile)
            penalty = cost if penalty is None else penalty + cost
    assert own is not None
    others = sums[0] if len(sums) == 1 else torch.stack(sums).logsumexp(dim=0)
    value, by_own, by_others = _slopes(loss, own, others)
    value = value if penalty is None else value + penalty
    if not any(needed):
        return value, [None, None]

    by_embeddings, by_proxies = None, torch.empty_like(proxies, memory_format=torch.contiguous_format)
    along: Tensor | None = None  # how much of the gradient is along the embedding, and does not turn it
    for classes in problem.tiles:
        tile = tile if len(sums) == 1 else problem.tile(classes)
        weights, lengths = problem.weights(tile, by_own, by_others, others), tile.inverse_norms
        by_some = by_proxies[classes].flatten(0, -2)
        if lengths is None or problem.norms is None:
            torch.mm(weights.T, embeddings, out=by_some)
        else:
            terms = tile.values.mul_(weights)
            along = terms.sum(dim=1) if along is None else along.add_(terms.sum(dim=1))
            # The part of the gradient along the proxy comes off.
            off = (problem.norms @ terms).mul_(lengths).mul_(lengths).div_(-problem.spread)
            torch.mul(tile.proxies, off.unsqueeze(1), out=by_some).addmm_(weights.mul_(lengths).T, embeddings)
        by_embeddings = weights @ tile.proxies if by_embeddings is None else by_embeddings.addmm_(weights, tile.proxies)
        if loss.pools:
            moves = problem.penalty(tile)[1]
            grouped = (len(moves), problem.centers, -1)
            by_some.view(grouped).baddbmm_(moves, tile.proxies.view(grouped))
    if by_embeddings is not None and along is not None and problem.inverse_norms is not None:
        off = along.mul_(problem.inverse_norms).unsqueeze(1)
        by_embeddings.addcmul_(embeddings, off, value=-1.0 / problem.spread)
    return value, [by_embeddings, by_proxies]


def class_loss(
    loss: ClassLoss, embeddings: Tensor, labels: Tensor, proxies: Tensor, sampled: Tensor | None = None
) -> Tensor:
    """The mean loss of a batch against proxies, [C, d] or [C, k, d], differentiable once by both.

    ``sampled``, [s], names the classes to compare with, those of the batch among them; None: all.
    """

    def compute(inputs: Tensors, constants: Tensors, needed: Needed) -> tuple[Tensor, Gradients]:
        (embeddings, proxies), (labels, sampled) = inputs, constants
        assert embeddings is not None
        assert proxies is not None
        assert labels is not None
        if sampled is None:
            return _compute(loss, embeddings, labels, proxies, needed)
        place = torch.empty(len(proxies), dtype=torch.long, device=labels.device)
        place[sampled] = torch.arange(len(sampled), device=labels.device)
        value, (by_embeddings, by_some) = _compute(loss, embeddings, place[labels], proxies[sampled], needed)
        by_proxies = None if by_some is None else torch.zeros_like(proxies).index_copy_(0, sampled, by_some)
        return value, [by_embeddings, by_proxies]

    pairs = embeddings.shape[0] * proxies.shape[0]
    step = Step(compute, (labels, sampled), loss, loss.recordable, pairs, lasting=(1,))
    value: Tensor = differentiable(step, (embeddings, proxies))
    return value
