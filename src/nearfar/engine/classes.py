"""Embeddings against the proxies of all classes, computed one tile of classes at a time.

A cross-entropy depends on two numbers of an embedding's row of similarities: the similarity to its own class, and the
log-sum-exp over the other classes. A first pass over the classes computes these two. The loss and its slopes follow
from them, and a second pass computes each tile again and multiplies its weights with the embeddings and the proxies.
No tensor of size batch × classes is created. If everything fits into the memory budget there is one tile, which is
computed once.

Proxies are not copied to be normalized: the similarities and the weights are divided by their lengths instead.

If there are several tiles, cosines are computed in a shorter way, since their exponentials need no maximum: see
``_compute_cosines``.

The proxies can be distributed over processes (:class:`ClassShard`). Every process then goes over its own classes, and
the processes exchange the two numbers of each embedding between the passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import softplus

from nearfar.engine.autograd import Gradients, LossComputation, Needed, Tensors, differentiable
from nearfar.engine.measures import inverse
from nearfar.engine.rows import FLOOR, masked
from nearfar.engine.tiles import CPU_TILE_PAIRS

if TYPE_CHECKING:
    from nearfar.losses.proxies import ClassificationLoss

BYTES_PER_PAIR = 12  # of a float32 tile: similarities, probabilities or slopes, and temporary memory
POOLED_BYTES = 8  # of a float32 tile: the same for each class, where proxies are pooled
CPU_TILE_CLASSES = 1024  # with fewer, matrix products get slow
GPU_TILE_BYTES = 32 * 1024 * 1024  # if there must be several tiles of cosines, they fit into the cache of a large GPU
LARGEST_LOGARITHM = 80.0  # of a sum of exponentials: float32 numbers reach e^88
NEGLIGIBLE = 1e-30  # the smallest probability on a CPU, which is slow with subnormal numbers


@dataclass(frozen=True)
class ClassShard:
    """The classes whose proxies are in this process, while other processes hold the others."""

    start: int
    stop: int
    num_classes: int  # of all processes
    stack: Callable[[Tensor], Tensor]  # the tensors of one shape that all processes call it with, [processes, …]

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum over all processes, whose gradient is that of the own part."""
        own = part.detach()
        return part + (self.stack(own).sum(dim=0) - own)

    def combine(self, own: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        """Combine the similarity to the own class, [m, 1], NaN in other processes, and the log-sum-exp of others."""
        all_own, all_others = self.stack(torch.stack([own, others])).unbind(dim=1)
        known = ~all_own.isnan()
        similarity = masked(all_own, known).sum(dim=0)
        return torch.where(known.any(dim=0), similarity, math.nan), all_others.logsumexp(dim=0)


@dataclass
class _Tile:
    """All embeddings against some classes."""

    proxies: Tensor  # [c · k, d]
    inverse_norms: Tensor | None  # [c · k]; None: the proxies are not normalized
    values: Tensor  # [m, c · k], similarities times the ``prescale`` of the batch
    slopes: Tensor | None  # [m, c, k], of class similarities by proxy similarities
    probabilities: Tensor  # [m, c], softmax over classes without the own one
    logsumexp: Tensor  # [m, 1], over the same classes
    own: Tensor  # [m, 1], scaled similarity to the own class
    column: Tensor  # [m, 1], the column of the own class
    inside: Tensor | None  # [m, 1], whether the own class is in this tile; None: always


def _slices(loss: ClassificationLoss, height: int, proxies: Tensor) -> list[slice]:
    """Slices of classes such that a tile of ``height`` embeddings fits into the memory budget."""
    count, centers = len(proxies), proxies.shape[1] if loss.pools else 1
    bytes_per_class = height * BYTES_PER_PAIR
    if loss.pools:
        bytes_per_class = height * (BYTES_PER_PAIR * max(3, centers) + POOLED_BYTES)
    size = loss.memory_budget // (bytes_per_class * proxies.element_size() // 4)
    if size < count and proxies.device.type == "cpu":
        # If there must be several tiles, they are made small enough for the cache.
        size = min(size, max(CPU_TILE_CLASSES, CPU_TILE_PAIRS // (height * centers)))
    size = max(1, size)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


class _TiledClasses:
    """A batch and the classes it is compared with, cut into tiles of classes; ``count`` includes other processes."""

    def __init__(
        self,
        loss: ClassificationLoss,
        embeddings: Tensor,
        labels: Tensor,
        proxies: Tensor,
        count: int,
        tiles: list[slice],
    ) -> None:
        self.loss, self.labels, self.proxies, self.count, self.tiles = loss, labels, proxies, count, tiles
        self.centers = proxies.shape[1] if loss.pools else 1
        self.prescale = loss.pool_scale if loss.pools else loss.sharpness
        self.sharpness = loss.sharpness / self.prescale  # what is left of it
        self.factors: Tensor | None = None  # [m, 1], factors from embeddings to ``scaled``
        self.scaled = embeddings if self.prescale == 1.0 else embeddings * self.prescale
        if loss.unit_vectors and not loss.raw_embeddings:
            lengths = torch.linalg.vector_norm(embeddings, dim=1, keepdim=True)
            self.factors = inverse(lengths) if self.prescale == 1.0 else inverse(lengths).mul_(self.prescale)
            self.scaled = embeddings * self.factors
        self._buffers: dict[str, Tensor] = {}

    def _buffer(self, name: str, columns: int) -> Tensor:
        """A matrix to work in, [m, columns]; all tiles share the memory, and the first tile is the widest."""
        height = len(self.scaled)
        if name not in self._buffers:
            self._buffers[name] = self.scaled.new_empty(height * columns)
        return self._buffers[name][: height * columns].view(height, columns)

    def tile(self, classes: slice, others: Tensor | None = None) -> _Tile:
        """The tile of some classes.

        Probabilities are relative to these classes or, given the log-sum-exp over all classes but the own one in
        ``others``, [m, 1], to all classes.
        """
        proxies = self.proxies[classes].flatten(0, -2)
        values = torch.mm(self.scaled, proxies.T, out=self._buffer("values", len(proxies)))
        lengths, slopes = None, None
        if self.loss.unit_vectors:
            lengths = inverse(torch.linalg.vector_norm(proxies, dim=1))
            values.mul_(lengths)
        logits = values
        if self.loss.pools:
            logits, slopes = self.loss.pool(values.view(len(values), -1, self.centers))
            logits.mul_(self.sharpness)
        column, inside = self.labels.unsqueeze(1), None
        if logits.shape[1] < self.count:
            column = column - classes.start
            inside = (column >= 0) & (column < logits.shape[1])
            column = column.clamp_(0, logits.shape[1] - 1)
        own = logits.gather(1, column)
        hidden = torch.full_like(own, FLOOR) if inside is None else masked(own, ~inside, FLOOR)
        logits.scatter_(1, column, hidden)
        probabilities = self._buffer("probabilities", logits.shape[1])
        if others is None:
            torch.softmax(logits, dim=1, out=probabilities)
            # max softmax = exp(max) / Σ exp, so the sum needs no second exponential.
            logsumexp = logits.amax(dim=1, keepdim=True).sub_(probabilities.amax(dim=1, keepdim=True).log_())
            if len(self.tiles) == 1 and probabilities.device.type == "cpu":
                probabilities.clamp_(min=NEGLIGIBLE)
        else:
            logsumexp = others
            torch.sub(logits, others, out=probabilities)
            if probabilities.device.type == "cpu":
                probabilities.clamp_(min=math.log(NEGLIGIBLE))
            probabilities.exp_()
        if logits is values:
            values.scatter_(1, column, own)
        return _Tile(proxies, lengths, values, slopes, probabilities, logsumexp, own, column, inside)

    def weights(self, tile: _Tile, by_own: Tensor) -> Tensor:
        """The derivatives by the similarities of a tile, [m, c · k], without the factor of each row."""
        weights = tile.probabilities
        if tile.inside is not None:
            by_own = torch.where(tile.inside, by_own, weights.gather(1, tile.column))
        weights.scatter_(1, tile.column, by_own)
        return weights if tile.slopes is None else tile.slopes.mul_(weights.unsqueeze(2)).flatten(1)

    def proxy_cost(self, tile: _Tile) -> tuple[Tensor, Tensor]:
        """The penalty for the proxies of a tile, and M, [c, k, k], such that its gradient is M · proxies."""
        proxies = tile.proxies.view(-1, self.centers, tile.proxies.shape[1])
        similarity, lengths = proxies @ proxies.transpose(1, 2), proxies.new_ones(len(proxies), self.centers)
        if tile.inverse_norms is not None:
            lengths = tile.inverse_norms.view_as(lengths)
        both = lengths.unsqueeze(1) * lengths.unsqueeze(2)
        cost, slopes = self.loss.proxy_cost(similarity.mul_(both))
        along = (slopes * similarity).sum(dim=2)
        moves = slopes * both
        if tile.inverse_norms is not None:
            moves.diagonal(dim1=1, dim2=2).sub_(along * lengths.square())
        return cost / self.count, moves / self.count


def _slopes(
    loss: ClassificationLoss, own: Tensor, others: Tensor, anchor_values: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The loss of the batch, log(e^target + e^others) − target, and its derivatives by the scaled similarities.

    The derivative is the third result, [m, 1], times the probability of another class, or times the second result for
    the own class. The last one is the derivative by the anchor values, [m].
    """
    by_anchor_values = None
    if anchor_values is None:
        target, slope = loss.target(own)
    else:
        target, slope, by_anchor_values = loss.anchored_target(own, anchor_values.unsqueeze(1))
    gap, share = others - target, 1.0 / len(own)
    if loss.include_positive:
        value, by_others = softplus(gap, threshold=50.0).mean(), gap.sigmoid_().mul_(share)
    else:
        present = ~(others <= FLOOR / 2)  # without another class the loss is 0; NaN stays NaN
        value, by_others = masked(gap, present).mean(), present.to(gap.dtype).mul_(share)
    if by_anchor_values is not None:
        by_anchor_values = (by_anchor_values * by_others).squeeze(1).neg_()
        if loss.shard is not None and loss.shard.start > 0:
            by_anchor_values.zero_()  # all processes have the same, and their gradients are summed
    return value, torch.full_like(own, -1.0) if slope is None else slope.neg(), by_others, by_anchor_values


def _compute(
    loss: ClassificationLoss,
    embeddings: Tensor,
    labels: Tensor,
    proxies: Tensor,
    anchor_values: Tensor | None,
    count: int,
    needed: Needed,
) -> tuple[Tensor, Gradients]:
    """The loss and the needed gradients by embeddings, proxies and anchor values.

    Labels are rows of ``proxies``. There are ``count`` classes; with a shard, the others are in other processes.
    """
    tiles = _slices(loss, len(embeddings), proxies)
    if len(tiles) > 1 and _has_bounded_exponentials(loss, count):
        return _compute_cosines(loss, embeddings, labels, proxies, anchor_values, needed)
    batch = _TiledClasses(loss, embeddings, labels, proxies, count, tiles)
    # A label beyond the classes is in no tile, so its loss stays NaN.
    own = embeddings.new_full((len(labels), 1), math.nan)
    sums, costs, kept = [torch.full_like(own, FLOOR)] if not batch.tiles else [], [], None
    for classes in batch.tiles:
        tile = batch.tile(classes)
        own = tile.own if tile.inside is None else torch.where(tile.inside, tile.own, own)
        sums.append(tile.logsumexp)
        if loss.penalizes and not any(needed):
            costs.append(batch.proxy_cost(tile)[0])
        kept = tile if len(batch.tiles) == 1 else None
        del tile  # the next one uses its memory
    others = sums[0] if len(sums) == 1 else torch.cat(sums, dim=1).logsumexp(dim=1, keepdim=True)
    if loss.shard is not None:
        own, others = loss.shard.combine(own, others)
        if kept is not None:  # its probabilities are relative to the classes of this process
            kept.probabilities.mul_((kept.logsumexp - others).exp_()).clamp_(min=NEGLIGIBLE)
    value, by_own, by_others, by_anchor_values = _slopes(loss, own, others, anchor_values)
    gradients: Gradients = [None, None, None]
    if any(needed):
        gradients = [*_gradients(batch, kept, others, by_own, by_others, needed, costs), by_anchor_values]
    if loss.penalizes:
        cost = torch.stack(costs).sum() if costs else torch.zeros_like(value)
        value = value + (cost if loss.shard is None else loss.shard.sum(cost))
    return value, gradients


def _gradients(
    batch: _TiledClasses,
    only: _Tile | None,
    others: Tensor,
    by_own: Tensor,
    by_others: Tensor,
    needed: Needed,
    costs: list[Tensor],
) -> Gradients:
    """The gradients by embeddings and proxies; penalties are appended to ``costs``.

    ``only`` is the tile of all classes if there is just one.
    """
    loss = batch.loss
    by_row = by_others * batch.sharpness if loss.pools else by_others
    scaled = batch.scaled * by_row
    by_embeddings = None if batch.tiles else torch.zeros_like(batch.scaled)
    by_proxies = torch.empty_like(batch.proxies, memory_format=torch.contiguous_format) if needed[1] else None
    for classes in batch.tiles:
        tile = batch.tile(classes, others) if only is None else only
        weights, lengths = batch.weights(tile, by_own), tile.inverse_norms
        terms = None
        if lengths is not None:
            terms = tile.values.mul_(weights) if by_proxies is not None else None
            weights.mul_(lengths)
        if needed[0]:
            by_embeddings = (
                weights @ tile.proxies if by_embeddings is None else by_embeddings.addmm_(weights, tile.proxies)
            )
        if by_proxies is not None:
            by_tile = by_proxies[classes].flatten(0, -2)
            if lengths is None or terms is None:
                torch.mm(weights.T, scaled, out=by_tile)
            else:
                # The part of the gradient along the proxy is removed.
                off = (terms.T @ by_row).mul_(lengths.square().neg_().unsqueeze(1))
                torch.mul(tile.proxies, off, out=by_tile).addmm_(weights.T, scaled)
        if loss.penalizes:
            cost, moves = batch.proxy_cost(tile)
            costs.append(cost)
            if by_proxies is not None:
                grouped = (len(moves), batch.centers, -1)
                by_tile.view(grouped).baddbmm_(moves, tile.proxies.view(grouped))
        del tile, weights, terms  # the next tile uses their memory
    if by_embeddings is not None and batch.factors is not None:
        # The part of the gradient along the embedding is removed.
        along = torch.linalg.vecdot(by_embeddings, batch.scaled).unsqueeze(1)
        by_embeddings.addcmul_(batch.scaled, along, value=-1.0 / batch.prescale**2)
        by_embeddings.mul_(by_row * batch.factors)
    elif by_embeddings is not None:
        by_embeddings.mul_(by_row if batch.prescale == 1.0 else by_row * batch.prescale)
    return [by_embeddings, by_proxies]


def _has_bounded_exponentials(loss: ClassificationLoss, count: int) -> bool:
    """Whether the logits are cosines times a number so small that no sum of exponentials overflows."""
    is_cosine = loss.unit_vectors and not (loss.raw_embeddings or loss.pools or loss.penalizes)
    return is_cosine and loss.sharpness + math.log(count) <= LARGEST_LOGARITHM


class _CosineTiles:
    """Exponentials of the scaled cosines of a batch to the classes, which are cut into tiles.

    ``gradient`` has the shape of the proxies. Its memory stores tiles until their gradients are written to it.
    """

    def __init__(
        self, loss: ClassificationLoss, embeddings: Tensor, labels: Tensor, proxies: Tensor, gradient: Tensor | None
    ) -> None:
        self.labels, self.proxies = labels, proxies
        self.lengths = inverse(torch.linalg.vector_norm(embeddings, dim=1, keepdim=True)).mul_(loss.sharpness)
        self.scaled = embeddings * self.lengths
        self.inverse_norms = inverse(torch.linalg.vector_norm(proxies, dim=1, keepdim=True))
        (height, dim), count, bytes_each = embeddings.shape, len(proxies), embeddings.element_size()
        if embeddings.device.type == "cpu":
            size = max(CPU_TILE_CLASSES, CPU_TILE_PAIRS // height)
        else:
            size = max(1, GPU_TILE_BYTES // (height * bytes_each))
        # A tile, the unit vectors of its classes, and products of these with their gradients.
        size = min(count, size, max(1, loss.memory_budget // ((height + 2 * dim) * bytes_each)))
        self.tiles = [slice(start, min(start + size, count)) for start in range(0, count, size)]
        self.order = list(range(len(self.tiles)))  # in which tiles are computed
        self._powers = embeddings.new_empty(height * size)
        self._units, self._products = embeddings.new_empty(2, size, dim)
        # The column of the own class in each tile, and whether it is there: [tiles, m, 1].
        starts = torch.arange(0, count, size, device=labels.device).view(-1, 1, 1)
        columns, last = labels.view(-1, 1) - starts, (count - 1 - starts).clamp_(max=size - 1)
        self._columns = columns.clamp(min=0).minimum(last)
        self._inside = columns == self._columns
        self._stored: dict[int, Tensor] = {}
        if len(self.tiles) == 1:
            self._stored[0] = self._powers.view(height, size)
        elif gradient is not None:
            self._store_in(gradient)

    def _store_in(self, gradient: Tensor) -> None:
        """Find room for as many tiles as possible.

        Gradients of d numbers for each class are written to where tiles of m numbers for each class are. If d ≤ m,
        going up, the gradients stay behind the tiles. Otherwise they do so going down.
        """
        (height, dim), memory = self.scaled.shape, gradient.view(-1)
        shift = dim * self.tiles[0].stop if dim <= height else 0
        for number, classes in enumerate(self.tiles):
            start, stop = shift + height * classes.start, shift + height * classes.stop
            is_apart = stop <= dim * classes.start or dim * classes.stop <= start
            if stop <= len(memory) and is_apart:
                self._stored[number] = memory[start:stop].view(height, -1)
        if dim > height:
            self.order.reverse()

    def own(self) -> Tensor:
        """The scaled cosine to the own class, [m, 1]; NaN if it is not among the proxies."""
        places = self.labels.clamp(0, len(self.proxies) - 1)
        own = (self.proxies[places] * self.inverse_norms[places]).mul_(self.scaled).sum(dim=1)
        return masked(own, self.labels == places, math.nan).unsqueeze(1)

    def units(self, number: int) -> Tensor:
        """The unit vectors of the classes of a tile, [c, d]."""
        classes = self.tiles[number]
        units = self._units[: classes.stop - classes.start]
        return torch.mul(self.proxies[classes], self.inverse_norms[classes], out=units)

    def products(self, units: Tensor, others: Tensor) -> Tensor:
        """The products of vectors, [c, 1]."""
        return torch.mul(units, others, out=self._products[: len(units)]).sum(dim=1, keepdim=True)

    def powers(self, number: int, units: Tensor) -> Tensor:
        """The exponentials of a tile, [m, c], but 0 for the own class."""
        logits = torch.mm(self.scaled, units.T, out=self._room(number))
        return self._with_own(number, logits, FLOOR).exp_()

    def weights(self, number: int, units: Tensor, by_own: Tensor) -> Tensor:
        """The exponentials of a tile after ``powers``, [m, c], but ``by_own``, [m, 1], for the own class."""
        powers = self._room(number)
        if number not in self._stored:
            torch.mm(self.scaled, units.T, out=powers).exp_()
        return self._with_own(number, powers, by_own)

    def _room(self, number: int) -> Tensor:
        height, classes = len(self.scaled), self.tiles[number]
        room = self._stored.get(number)
        return self._powers[: height * (classes.stop - classes.start)].view(height, -1) if room is None else room

    def _with_own(self, number: int, matrix: Tensor, own: Tensor | float) -> Tensor:
        """Replace the numbers of the own classes, in place."""
        column, inside = self._columns[number], self._inside[number]
        before = matrix.gather(1, column)
        replaced = torch.where(inside, own, before) if isinstance(own, Tensor) else masked(before, ~inside, own)
        return matrix.scatter_(1, column, replaced)


def _compute_cosines(
    loss: ClassificationLoss,
    embeddings: Tensor,
    labels: Tensor,
    proxies: Tensor,
    anchor_values: Tensor | None,
    needed: Needed,
) -> tuple[Tensor, Gradients]:
    """As ``_compute``, for scaled cosines in several tiles.

    The exponentials are not divided by their sums: rows of the gradient are. So a tile is one matrix, which is computed
    in place, and tiles that were stored are not computed a second time.
    """
    by_proxies = torch.empty_like(proxies, memory_format=torch.contiguous_format) if needed[1] else None
    batch = _CosineTiles(loss, embeddings, labels, proxies, by_proxies)
    of_tiles = embeddings.new_empty(len(batch.tiles), len(labels))
    for number in batch.order:
        torch.sum(batch.powers(number, batch.units(number)), dim=1, out=of_tiles[number])
    sums = of_tiles.sum(dim=0).unsqueeze(1)
    own, others = batch.own(), sums.log().clamp_(min=FLOOR)
    if loss.shard is not None:
        own, others = loss.shard.combine(own, others)
        sums = others.exp()
    value, by_own, by_others, by_anchor_values = _slopes(loss, own, others, anchor_values)
    if not any(needed):
        return value, [None, None, None]
    by_row = by_others * masked(sums.reciprocal(), sums != 0)
    rows, by_own = batch.scaled * by_row, by_own * sums
    by_embeddings = torch.zeros_like(batch.scaled) if needed[0] else None
    for number in batch.order:
        units, classes = batch.units(number), batch.tiles[number]
        weights = batch.weights(number, units, by_own)
        if by_embeddings is not None:
            by_embeddings.addmm_(weights, units)
        if by_proxies is not None:
            # The part of the gradient along the proxy is removed.
            by_tile = torch.mm(weights.T, rows, out=by_proxies[classes])
            along = batch.products(units, by_tile)
            by_tile.addcmul_(units, along, value=-1.0).mul_(batch.inverse_norms[classes])
    if by_embeddings is not None:
        by_embeddings.mul_(by_row * batch.lengths)
        along = torch.linalg.vecdot(by_embeddings, batch.scaled).unsqueeze(1)
        by_embeddings.addcmul_(batch.scaled, along, value=-1.0 / loss.sharpness**2)
    return value, [by_embeddings, by_proxies, by_anchor_values]


def class_loss(
    loss: ClassificationLoss,
    embeddings: Tensor,
    labels: Tensor,
    proxies: Tensor,
    sampled: Tensor | None,
    anchor_values: Tensor | None,
) -> Tensor:
    """Compute the mean loss of a batch against proxies, differentiable once by embeddings, proxies and anchor values.

    If the loss has a shard, other processes hold the other proxies: all call this with the same batch and sampled
    classes, and the gradient by the embeddings is the part of these proxies.
    """
    shard = loss.shard

    def compute(inputs: Tensors, constants: Tensors, needed: Needed) -> tuple[Tensor, Gradients]:
        (embeddings, proxies, anchor_values), (labels, sampled) = inputs, constants
        assert embeddings is not None
        assert proxies is not None
        assert labels is not None
        if shard is not None:
            labels = labels - shard.start
        if sampled is None:
            count = len(proxies) if shard is None else shard.num_classes
            return _compute(loss, embeddings, labels, proxies, anchor_values, count, needed)
        count = len(sampled)
        if shard is not None:
            sampled = sampled[(sampled >= shard.start) & (sampled < shard.stop)] - shard.start
        place = torch.empty(len(proxies), dtype=torch.long, device=labels.device)
        place[sampled] = torch.arange(len(sampled), device=labels.device)
        places = labels.clamp(0, len(proxies) - 1)
        labels = torch.where(labels == places, place.gather(0, places), -1)
        value, (by_embeddings, by_sampled, by_anchor_values) = _compute(
            loss, embeddings, labels, proxies[sampled], anchor_values, count, needed
        )
        by_proxies = None if by_sampled is None else torch.zeros_like(proxies).index_copy_(0, sampled, by_sampled)
        return value, [by_embeddings, by_proxies, by_anchor_values]

    pairs = len(embeddings) * len(proxies)
    computation = LossComputation(compute, (labels, sampled), loss, loss.graph_key, pairs, static=(1,))
    return differentiable(computation, (embeddings, proxies, anchor_values))
