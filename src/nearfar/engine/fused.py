"""Pair losses of large batches by fused Triton kernels on a GPU.

A loss describes itself as a ``Program``: what is summed over the positives and over the negatives of a row, and the
loss as a function of these sums. One kernel computes the sums. Autograd differentiates the loss by them, which is
cheap: they are a few numbers per anchor. Another kernel computes the similarities again, turns the derivatives into
pair weights and multiplies these with the embeddings. Similarities stay on the chip; weights do too or, for float32,
are written in strips of bounded memory.

Losses without a program, other supervision than labels, float64 and tensors on a CPU use the tiles of ``engine.tiles``.
"""

from __future__ import annotations

import importlib.util
import math
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from nearfar.engine.measures import Measure
from nearfar.engine.rows import masked
from nearfar.utils.validation import one_of

if TYPE_CHECKING:
    from nearfar.engine.measures import PreparedVectors
    from nearfar.engine.tiles import Tile, TiledBatch
    from nearfar.engine.triton_kernels import Comparison, KernelVectors

PRECISIONS = ("float32", "tf32", "bfloat16")


@dataclass(frozen=True)
class Terms:
    """What is summed over the positives, or over the negatives, of a row with values v."""

    # Exponents of a log-sum-exp. "linear": logit_scale · v. "circle": logit_scale · w · (v − delta) with the constant
    # w = [v − optimum]+, or [optimum − v]+ if logit_scale is negative. "none": there is none.
    logit: str = "none"
    logit_scale: float = 1.0
    optimum: float = 0.0
    delta: float = 0.0
    # Terms of a sum, where z = scale · v + shift. "linear": z, "square": z², "hinge": [z]+, "squared_hinge": [z]+²,
    # "softplus": log(1 + e^z). "none": there is none.
    total: str = "none"
    scale: float = 1.0
    shift: float = 0.0
    expected: bool = False  # whether the loss uses `Sums.expected`

    def numbers(self) -> tuple[float, ...]:
        """Return the numbers that the kernels take."""
        return self.logit_scale, self.optimum, self.delta, self.scale, self.shift


@dataclass(frozen=True)
class Sums:
    """Sums over the selected positives, or negatives, of each anchor, [m] each."""

    log: Tensor  # the log-sum-exp of the exponents; FLOOR without a pair
    expected: Tensor  # the mean of v with the weights of the softmax, as constants; 0 without a pair or if not used
    total: Tensor  # the sum
    active: Tensor  # its terms that are not zero; of "softplus" the sum of the sigmoids if shifted, otherwise 0
    number: Tensor  # the pairs


@dataclass(frozen=True)
class Program:
    """A loss in terms of sums over rows."""

    positives: Terms
    negatives: Terms
    loss: Callable[[Sums, Sums], Tensor] = field(compare=False)  # of the sums over positives and negatives, by autograd
    # A shift of each anchor's sums. "negatives": `log` of the negatives is added in the sum over the positives.
    # "anchor_values": they are subtracted in the sum over the positives and added in the other.
    shift: str = "none"
    # Only positives of a smaller and negatives of a larger similarity than these are used.
    bounds: tuple[float, float] = (math.inf, -math.inf)
    valid_triplet: float | None = None  # margin of the mining of that name; None: no mining


@dataclass(frozen=True)
class HardPairs:
    """Says that a loss depends on nothing but each anchor's least similar positive and most similar negative.

    A kernel finds these pairs, and the loss is computed by PyTorch from them.
    """


@dataclass(frozen=True)
class SemiHardPairs:
    """Says that a loss depends on nothing but what semi-hard mining selects.

    These are the positives of each anchor and, for each of them, the most similar negative that is less similar, or
    else the least similar negative. A kernel finds these pairs, and the loss mines among them and is computed by
    PyTorch. The host waits for the largest number of positives; with more than ``MOST_POSITIVES``, PyTorch computes
    everything.
    """


@dataclass(frozen=True)
class AllTriplets:
    """Says that a loss is the mean of [x]+ over all triplets, with x = s_n − s_p + margin.

    A kernel sums over the negatives of each positive, and another one computes the weights of the negatives. The host
    waits for the largest number of positives; with more than ``MOST_POSITIVES``, PyTorch computes everything.
    """

    margin: float
    soft: bool  # log(1 + e^x) instead of [x]+
    active: bool  # the mean over the triplets with a loss above zero


FusedProgram = Program | HardPairs | SemiHardPairs | AllTriplets
MOST_POSITIVES = 15  # a kernel compares all negatives with each of them
AUTOMATIC = 1 << 24  # pairs: from here on the kernels were faster than PyTorch for every loss, or as fast


class Setting:
    """Whether the kernels are used."""

    precision: ClassVar[str | None] = "float32"  # of products; None: the kernels are off
    smallest: ClassVar[int] = AUTOMATIC  # pairs from which on they are used


class KernelError(RuntimeError):
    """Triton cannot compile a kernel for this GPU, or the GPU has no room for it."""


def fall_back(error: KernelError) -> None:
    """Use PyTorch from now on, with a warning; raise the error if the kernels were turned on explicitly."""
    if Setting.smallest != AUTOMATIC:
        raise error
    warnings.warn(f"the fused kernels do not work on this GPU, so PyTorch is used: {error}", stacklevel=2)
    Setting.precision = None


def use_triton(enabled: bool | None = True, *, precision: str = "float32") -> None:
    """Say whether pair losses on a GPU are computed by fused Triton kernels, in this process.

    By default they are, in float32, for batches of at least 4,096 × 4,096 pairs, if Triton 3.6 or later is
    installed. Losses and inputs that the kernels cannot compute always use PyTorch.

    Args:
        enabled: True: for batches of every size. False: never. None: for large batches, as by default.
        precision: Products of embeddings: "float32" (three products of float16 each, which keep 22 bits), "tf32" or
            "bfloat16". Sums are float32.

    Raises:
        ImportError: If Triton is not installed.

    Example:
        >>> use_triton(None)
    """
    one_of("precision", precision, PRECISIONS)
    if enabled and importlib.util.find_spec("triton") is None:
        raise ImportError("use_triton needs Triton, which is not installed: pip install triton")
    Setting.precision = None if enabled is False else precision
    Setting.smallest = AUTOMATIC if enabled is None else 0


def mean_over(total: Tensor, count: Tensor) -> Tensor:
    """Return Σ total / Σ count; 0 if nothing was counted."""
    number = count.detach().sum()
    return total.sum() / masked(number, number > 0, 1.0)


def applies(batch: TiledBatch) -> bool:
    """Whether the kernels can compute a batch, if its loss has a program."""
    if batch.labels is None or batch.embeddings.dtype != torch.float32:
        return False
    if type(batch.measure) is not Measure:
        return False
    if batch.embeddings.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return False
    from nearfar.utils.kernels import usable

    return usable(batch.embeddings.device)


@dataclass
class FusedGradient:
    """The gradients of a loss that the kernels computed."""

    by_anchors: Tensor  # by the prepared anchors, [m, d]
    by_columns: Tensor | None  # by the prepared gallery, [n, d]

    def scale(self, factor: Tensor) -> None:
        """Multiply both by a number."""
        self.by_anchors.mul_(factor)
        if self.by_columns is not None:
            self.by_columns.mul_(factor)

    def merge(self, other: FusedGradient) -> None:
        """Add other gradients."""
        self.by_anchors.add_(other.by_anchors)
        if self.by_columns is not None and other.by_columns is not None:
            self.by_columns.add_(other.by_columns)

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        """Return the gradients by the prepared anchors and by the prepared gallery."""
        return self.by_anchors, self.by_columns


def evaluate(
    program: Program, batch: TiledBatch, *, differentiate: bool
) -> tuple[Tensor, FusedGradient | None, Tensor | None]:
    """Compute the loss of a batch, its gradients, and the derivative by the anchor values, [m]."""
    passes = 1 + differentiate + (program.valid_triplet is not None) + (program.shift == "negatives")
    compared = _Comparisons(batch, keep=passes > 1)
    positives, negatives = program.positives, program.negatives
    nothing = batch.embeddings.new_zeros(batch.height)
    bounds = shifts = anchor_values = None
    if program.valid_triplet is not None:
        bounds = compared.extremes() + program.valid_triplet
    elif program.bounds != (math.inf, -math.inf):
        upper, lower = program.bounds
        bounds = torch.stack([nothing - lower, nothing + upper])
    if program.shift == "anchor_values":
        assert batch.anchor_values is not None
        anchor_values = batch.anchor_values.detach().requires_grad_(differentiate)
        shifts = torch.stack([-anchor_values.detach(), anchor_values.detach()])
    if program.shift == "negatives":
        # The sum over the positives depends on that over the negatives: two passes.
        _, of_negatives = compared.sums(Terms(), negatives, bounds, None)
        shifts = torch.stack([of_negatives.log, nothing])
        of_positives, _ = compared.sums(positives, Terms(), bounds, shifts)
    else:
        of_positives, of_negatives = compared.sums(positives, negatives, bounds, shifts)

    with torch.set_grad_enabled(differentiate):
        leaves = [
            each.detach().requires_grad_(differentiate)
            for sums in (of_positives, of_negatives)
            for each in (sums.log, sums.expected, sums.total)
        ]
        pos = replace(of_positives, log=leaves[0], expected=leaves[1], total=leaves[2])
        neg = replace(of_negatives, log=leaves[3], expected=leaves[4], total=leaves[5])
        # A total changes with the shift of its anchor by the number of its active terms.
        if program.shift == "negatives":
            pos = replace(pos, total=pos.total + pos.active * (neg.log - neg.log.detach()))
        if anchor_values is not None:
            change = anchor_values - anchor_values.detach()
            pos = replace(pos, total=pos.total - pos.active * change)
            neg = replace(neg, total=neg.total + neg.active * change)
        loss = program.loss(pos, neg)
    if not differentiate:
        return loss, None, None
    wanted = leaves if anchor_values is None else [*leaves, anchor_values]
    slopes = torch.autograd.grad(loss, wanted, allow_unused=True)
    p_by_log, n_by_log = _by_logits(positives, *slopes[:2]), _by_logits(negatives, *slopes[3:5])
    absent = nothing, nothing
    numbers = [
        *(absent if bounds is None else bounds), *(absent if shifts is None else shifts),
        of_positives.log, of_negatives.log, p_by_log, n_by_log, slopes[2], slopes[5],
    ]  # fmt: skip
    params = torch.stack([nothing if each is None else each for each in numbers])
    gradient = _gradient(positives, negatives, batch, compared, params, bounded=bounds is not None)
    return loss.detach(), gradient, None if anchor_values is None else slopes[6]


def _by_logits(terms: Terms, by_log: Tensor | None, by_expected: Tensor | None) -> Tensor | None:
    """The derivative by the values, up to their share of the softmax, given those by its log-sum-exp and its mean."""
    found = None if by_log is None else by_log * terms.logit_scale
    return by_expected if found is None else found if by_expected is None else found + by_expected


def hard_columns(batch: TiledBatch) -> tuple[Tensor, Tensor]:
    """Find the columns of each anchor's least similar positive and most similar negative."""
    similarity, columns = _Comparisons(batch).extreme_columns()
    return columns.T.contiguous(), similarity.T.isfinite()


class _Comparisons:
    """The anchors against all columns, or against one chunk after the other of a gallery that needs no gradient.

    What the kernels read of a chunk fits into the memory budget of the loss. It is prepared again in each pass.
    ``keep`` keeps the dot products for later passes, if all of them fit into the memory of a strip of weights.
    """

    def __init__(self, batch: TiledBatch, *, keep: bool = False) -> None:
        assert batch.labels is not None
        assert batch.column_labels is not None
        self.batch = batch
        self.anchors = _vectors(batch, batch.anchors, batch.labels)
        width, dim = batch.width, batch.embeddings.shape[1]
        chunk = width
        if batch.gallery is not None and not batch.columns_need_grad:
            chunk = max(1, batch.loss.memory_budget // (2 * batch.embeddings.element_size() * dim))
        self.chunks = [slice(start, min(start + chunk, width)) for start in range(0, width, chunk)]
        fits = 4 * batch.height * width <= batch.loss.memory_budget // 2
        self.keep = keep and fits and len(self.chunks) == 1 and Setting.precision == "float32"
        self._whole: Comparison | None = None

    def __iter__(self) -> Iterator[Comparison]:
        if len(self.chunks) > 1:
            yield from (self._compare(chunk) for chunk in self.chunks)
        else:
            if self._whole is None:
                self._whole = self._compare(self.chunks[0])
            yield self._whole

    def _compare(self, chunk: slice) -> Comparison:
        from nearfar.engine.triton_kernels import Comparison

        batch, columns, own = self.batch, self.anchors, _positions(self.batch, chunk)
        if batch.gallery is not None:
            assert batch.column_labels is not None
            columns = _vectors(batch, batch.column_chunk(chunk), batch.column_labels[chunk])
        assert Setting.precision is not None
        power = batch.measure.power
        compared = Comparison(self.anchors, columns, own, batch.gallery is None, power, Setting.precision)
        return compared.with_dots() if self.keep else compared

    def extremes(self) -> Tensor:
        """Return minus the smallest similarity of a positive and the largest of a negative, [2, m]; −∞ if none."""
        from nearfar.engine import triton_kernels as kernels

        return _joined([kernels.extremes(each, need_columns=False)[0] for each in self]).amax(dim=0)

    def extreme_columns(self) -> tuple[Tensor, Tensor]:
        """Return the same numbers and their columns, [2, m] each."""
        from nearfar.engine import triton_kernels as kernels

        return self._best([kernels.extremes(each) for each in self])

    def semi_hard(self, bounds: Tensor) -> tuple[Tensor, Tensor]:
        """Return what ``triton_kernels.semi_hard`` finds over all columns, [k + 1, m] each."""
        from nearfar.engine import triton_kernels as kernels

        return self._best([kernels.semi_hard(each, bounds) for each in self])

    def _best(self, found: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """The best scores of all groups of all chunks, [k, m], and their columns."""
        best, group = _joined([scores for scores, _ in found]).max(dim=0)
        pairs = zip(self.chunks, found, strict=True)
        columns = _joined([where + chunk.start if chunk.start else where for chunk, (_, where) in pairs])
        return best, columns.gather(0, group.unsqueeze(0)).squeeze(0).long()

    def sums(
        self, positives: Terms, negatives: Terms, bounds: Tensor | None, shifts: Tensor | None
    ) -> tuple[Sums, Sums]:
        """Return the sums over positives and negatives of all columns."""
        from nearfar.engine import triton_kernels as kernels

        found = _joined([kernels.sums(each, positives, negatives, bounds, shifts) for each in self])
        of_positives, of_negatives = kernels.merge(found)
        return Sums(*of_positives), Sums(*of_negatives)

    def triplets(self, terms: Terms, thresholds: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums over the negatives of all columns, and those of the derivatives, [k, m] each."""
        from nearfar.engine import triton_kernels as kernels

        total, slopes = _joined([kernels.triplets(each, terms, thresholds) for each in self]).sum(dim=0)
        return total, slopes


def _joined(groups: list[Tensor]) -> Tensor:
    """The groups of all chunks; no copy of a single one."""
    return groups[0] if len(groups) == 1 else torch.cat(groups)


def _vectors(batch: TiledBatch, prepared: PreparedVectors, labels: Tensor) -> KernelVectors:
    """What the kernels read of anchors or columns."""
    from nearfar.engine.triton_kernels import KernelVectors, halves
    from nearfar.utils.kernels import interpreted

    points = rest = unit = prepared.points.detach().contiguous()
    squares = points if prepared.squares is None else prepared.squares
    if Setting.precision == "float32":
        points, rest, unit = halves(points, 1.0 if batch.measure.normalize else None)
    if Setting.precision == "bfloat16":
        points = points.to(torch.bfloat16)
        if interpreted():  # its products of bfloat16 are wrong
            points = points.float()
        if prepared.squares is not None:  # of the rounded vectors, so that equal ones have a distance of 0
            squares = points.float().square().sum(dim=1)
    return KernelVectors(points, rest, unit, squares, labels.contiguous())


def _positions(batch: TiledBatch, chunk: slice) -> Tensor | None:
    """The column of each anchor within a chunk, [m]; negative or too large if it is not in it."""
    return batch.positions if batch.positions is None or not chunk.start else batch.positions - chunk.start


def semi_hard_columns(batch: TiledBatch) -> tuple[Tensor, Tensor, Tensor] | None:
    """Find the columns and masks of the pairs that semi-hard mining can select, [m, k]; each column counts once."""
    listed = listed_positives(batch)
    if listed is None:
        return None
    positives, filled, _ = listed
    bounds = masked(batch.listed_similarity(positives), filled, -math.inf)
    scores, found = _Comparisons(batch).semi_hard(bounds.T.contiguous())
    negatives, present = found.T, scores.T.isfinite()
    repeats = (negatives.unsqueeze(2) == negatives.unsqueeze(1)).tril(-1) & present.unsqueeze(1)
    present &= ~repeats.any(dim=2)
    nothing = torch.zeros_like(present)
    masks = torch.cat([filled, nothing], dim=1), torch.cat([torch.zeros_like(filled), present], dim=1)
    return torch.cat([positives, negatives], dim=1), *masks


def listed_positives(batch: TiledBatch) -> tuple[Tensor, Tensor, Tensor] | None:
    """List the positives of each anchor."""
    if batch.embeddings.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    assert batch.labels is not None
    assert batch.column_labels is not None
    members, order = batch.column_labels.sort(stable=True)
    first, last = (torch.searchsorted(members, batch.labels, right=right) for right in (False, True))
    count = int((last - first).max())
    if count > MOST_POSITIVES + 1:  # the anchor may be among them
        return None
    slots = first.unsqueeze(1) + torch.arange(max(1, count), device=first.device)
    positives = order[slots.clamp(max=batch.width - 1)]
    own = torch.arange(batch.height, device=first.device) if batch.gallery is None else batch.positions
    filled = slots < last.unsqueeze(1)
    if own is not None:
        filled &= positives != own.unsqueeze(1)
    return positives, filled, batch.width - (last - first)


def all_triplets(
    program: AllTriplets, batch: TiledBatch, positives: Tile, negatives: Tensor, *, differentiate: bool
) -> tuple[Tensor, FusedGradient | None, Tensor]:
    """Compute the mean over all triplets, its gradient through the negatives, and its derivative by the positives."""
    compared, terms = _Comparisons(batch, keep=differentiate), Terms(total="softplus" if program.soft else "hinge")
    filled = positives.positives
    thresholds = masked(positives.similarity - program.margin, filled, math.inf).T.contiguous()
    total, slopes = compared.triplets(terms, thresholds)
    # The slope of [x]+ is one for each active triplet.
    count = slopes.sum() if program.active and not program.soft else (filled.sum(dim=1) * negatives).sum()
    factor = masked(count, count > 0, 1).to(total.dtype).reciprocal()
    gradient = None
    if differentiate:
        gradient = _gradient(Terms(), terms, batch, compared, thresholds, triplets=True)
        gradient.scale(factor)
    return total.sum() * factor, gradient, slopes.T * (factor if positives.measure.is_distance else -factor)


def _gradient(
    positives: Terms,
    negatives: Terms,
    batch: TiledBatch,
    compared: _Comparisons,
    params: Tensor,
    *,
    bounded: bool = False,
    triplets: bool = False,
) -> FusedGradient:
    from nearfar.engine.triton_kernels import products

    measure = batch.measure

    def gradient(of: Tensor, *, of_columns: bool = False, both: bool = False) -> Tensor:
        total = sums = None
        for each in compared:
            product, row_sums = products(
                each, positives, negatives, params, bounded=bounded, triplets=triplets, of_columns=of_columns,
                both=both, need_sums=measure.has_own_part, budget=batch.loss.memory_budget // 2,
            )  # fmt: skip
            total = product if total is None else total.add_(product)
            sums = row_sums if sums is None else sums.add_(row_sums)
        assert total is not None
        assert sums is not None
        return measure.plus_own(total, of, sums)

    anchors = batch.anchors.points.detach()
    if batch.gallery is None:
        return FusedGradient(gradient(anchors, both=batch.columns_need_grad), None)
    by_columns = gradient(batch.columns.points.detach(), of_columns=True) if batch.columns_need_grad else None
    return FusedGradient(gradient(anchors), by_columns)
