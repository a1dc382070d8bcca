"""The engine: a loss of rows, computed and differentiated one tile of anchors at a time.

A pair-based loss is a function of each anchor's row of similarities. Its derivative by those
similarities is the matrix of pair weights W (theorem 3.1 of the unified view), and two matrix products
carry W to the embeddings. So a tile of rows is all that ever has to exist: the forward pass computes the
tile, its loss, its W and W's share of the gradient, and drops the tile. The backward pass only scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from nearfar.engine import cuda_graphs
from nearfar.engine.autograd import differentiable, uncompiled
from nearfar.engine.batch import Batch, Mean, Problem, Tile, Totals
from nearfar.engine.cuda_graphs import Step
from nearfar.engine.masks import masked
from nearfar.engine.measures import show_nan
from nearfar.engine.rows import Row
from nearfar.engine.sinks import KeptGradient, Sink, StreamedGradient, Weights

S = TypeVar("S", bound=Sink)
Leaves = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass
class Part(Generic[S]):
    """One of the means that add up to the loss, or their sum, and the weights of the pairs."""

    loss: Tensor
    sink: S | None
    by_anchor_values: Tensor | None = None  # [m]

    def add(self, other: Part[S]) -> None:
        """Add another mean."""
        self.loss = self.loss + other.loss
        if self.sink is not None and other.sink is not None:
            self.sink.merge(other.sink)
        if self.by_anchor_values is not None and other.by_anchor_values is not None:
            self.by_anchor_values += other.by_anchor_values


def sweep(problem: Problem, slices: Sequence[slice], sink: type[S] | None) -> Part[S]:
    """The loss of a problem and, given a kind of sink, the weights of its pairs."""
    with torch.set_grad_enabled(sink is not None and not problem.loss.closed_form):
        if problem.loss.sums_up:
            return _through_totals(problem, slices, sink)
        if len(slices) == 1:
            return _one_tile(problem, slices[0], sink)
        return _many_tiles(problem, slices, sink)


def _one_tile(problem: Problem, rows: slice, sink: type[S] | None) -> Part[S]:
    """All rows at once: denominators and survey are at hand, and W comes out finished."""
    tile = problem.tile(rows)
    leaves = _leaves(tile)
    if problem.loss.surveys:
        tile.survey = problem.loss.survey(tile.transposed())
    result = problem.loss.on_tile(tile)
    if isinstance(result, (Tensor, Row)):
        loss = result * (1.0 / problem.height)
    else:
        loss = _plus([mean.total * _at_least_one(mean.count.sum()).reciprocal_() for mean in result])
    value, derivatives = _derive(loss, leaves, wanted=sink is not None)
    part = Part(value, None if sink is None else sink(problem))
    if part.sink is not None:
        weights, part.by_anchor_values, _ = derivatives
        if weights is not None:
            part.sink.add(weights, tile)
    return part


class _Running(Generic[S]):
    """A mean that is still being summed up over tiles."""

    def __init__(self, problem: Problem, sink: type[S] | None) -> None:
        zeros = problem.embeddings.new_zeros
        self.total, self.count = zeros(()), zeros(())
        self.sink = None if sink is None else sink(problem)
        self.by_anchor_values = None if problem.anchor_values is None else zeros(problem.height)
        self.by_survey = zeros(problem.width if problem.loss.surveys else 0)

    def add(self, mean: Mean, tile: Tile, leaves: Leaves, *, last: bool) -> None:
        value, derivatives = _derive(mean.total, leaves, wanted=self.sink is not None, keep_graph=not last)
        self.total += value
        self.count += mean.count.sum()
        weights, by_anchor_values, by_survey = derivatives
        if weights is not None and self.sink is not None:
            self.sink.add(weights, tile)
        if by_anchor_values is not None and self.by_anchor_values is not None:
            self.by_anchor_values[tile.rows] = by_anchor_values
        if by_survey is not None:
            self.by_survey += by_survey

    def finish(self) -> Part[S]:
        factor = _at_least_one(self.count).reciprocal_()
        if self.sink is not None:
            self.sink.scale(factor)
        by_anchor_values = None if self.by_anchor_values is None else self.by_anchor_values * factor
        return Part(self.total * factor, self.sink, by_anchor_values)


def _many_tiles(problem: Problem, slices: Sequence[slice], sink: type[S] | None) -> Part[S]:
    """Tile after tile: the survey first, then the rows, then what the survey passes on to the columns."""
    survey = None
    columns = problem.slices(problem.width, problem.height) if problem.loss.surveys else []
    if problem.loss.surveys:
        with torch.no_grad():
            survey = torch.cat([problem.loss.survey(problem.column_tile(some)) for some in columns])
    running: list[_Running[S]] = []
    for rows in slices:
        tile = problem.tile(rows)
        tile.survey = survey
        leaves = _leaves(tile)
        result = problem.loss.on_tile(tile)
        if isinstance(result, (Tensor, Row)):
            result = [Mean(result, tile.values.new_ones(tile.values.shape[0]))]
        running = running or [_Running(problem, sink) for _ in result]
        for number, (sum_up, mean) in enumerate(zip(running, result, strict=True), start=1):
            sum_up.add(mean, tile, leaves, last=number == len(result))
    if sink is not None:
        for some in columns:
            _through_survey(problem, problem.column_tile(some), running)
    total, *others = (sum_up.finish() for sum_up in running)
    for part in others:
        total.add(part)
    return total


def _through_survey(problem: Problem, tile: Tile, running: Sequence[_Running[S]]) -> None:
    leaves = _leaves(tile)
    found = problem.loss.survey(tile)
    for number, sum_up in enumerate(running, start=1):
        last = number == len(running)
        _, (weights, _, _) = _derive(found * sum_up.by_survey[tile.rows], leaves, wanted=True, keep_graph=not last)
        if weights is not None and sum_up.sink is not None:
            sum_up.sink.add_columns(weights, tile)


@dataclass
class _FoundByAutograd:
    """Totals of a loss without a closed form."""

    found: Tensor
    values: Tensor

    def sums(self) -> Tensor:
        return self.found

    def weights(self, slopes: Tensor) -> Tensor:
        (weights,) = torch.autograd.grad(self.found, self.values, slopes)
        return weights


def _totals(problem: Problem, rows: slice) -> tuple[Totals, Tile]:
    tile = problem.tile(rows)
    _leaves(tile)
    found = problem.loss.totals(tile)
    return (_FoundByAutograd(found, tile.values) if isinstance(found, Tensor) else found), tile


def _through_totals(problem: Problem, slices: Sequence[slice], sink: type[S] | None) -> Part[S]:
    """Sum up the totals, then compute each tile once more (a single one is kept) and find its weights."""
    only = _totals(problem, slices[0]) if len(slices) == 1 else None
    if only is not None:
        total = only[0].sums()
    else:
        with torch.no_grad():
            total = torch.stack([_totals(problem, rows)[0].sums() for rows in slices]).sum(dim=0)
    with torch.set_grad_enabled(sink is not None):
        total = total.detach().requires_grad_(sink is not None)
        value = problem.loss.of_totals(total)
    part = Part(value.detach(), None if sink is None else sink(problem))
    if part.sink is not None:
        (slopes,) = torch.autograd.grad(value, total)
        for rows in slices:
            found, tile = _totals(problem, rows) if only is None else only
            part.sink.add(found.weights(slopes), tile)
    return part


def _plus(terms: Sequence[Tensor | Row]) -> Tensor | Row:
    total: Any = terms[0]
    for term in terms[1:]:
        total = total + term
    return total  # type: ignore[no-any-return]


def _at_least_one(count: Tensor) -> Tensor:
    """The count; 1 where nothing was counted, and the total over it is 0."""
    return masked(count, count > 0, 1.0)


def _leaves(tile: Tile) -> Leaves:
    """What the loss of a tile is differentiated by: values, anchor values, survey."""
    if torch.is_grad_enabled():
        tile.values.requires_grad_()
        if tile.anchor_values is not None:
            tile.anchor_values = tile.anchor_values.detach().requires_grad_()
        if tile.survey is not None:
            tile.survey = tile.survey.detach().requires_grad_()
    return tile.values, tile.anchor_values, tile.survey


def _derive(total: Tensor | Row, leaves: Leaves, *, wanted: bool, keep_graph: bool = False) -> tuple[Tensor, Leaves]:
    """The sum over the anchors and its derivatives by the leaves; None where it does not depend on one."""
    if isinstance(total, Row):
        return total.value.sum(), (total.weights(), total.by_anchor_values, None) if wanted else (None, None, None)
    value = total.sum()
    if not (wanted and value.requires_grad):
        return value.detach(), (None, None, None)
    present = [leaf for leaf in leaves if leaf is not None]
    found = iter(torch.autograd.grad(value, present, retain_graph=keep_graph, allow_unused=True))
    by_values, by_anchor_values, by_survey = (None if leaf is None else next(found) for leaf in leaves)
    return value.detach(), (by_values, by_anchor_values, by_survey)


def _compute(
    batch: Batch, embeddings: Tensor, gallery: Tensor | None, anchor_values: Tensor | None, needed: tuple[bool, ...]
) -> tuple[Tensor, cuda_graphs.Gradients]:
    """The loss and the needed gradients by embeddings, gallery and anchor values."""
    problem = Problem(batch, embeddings, gallery, anchor_values, columns_move=needed[1] or gallery is None)
    height, width = problem.height, problem.width
    slices = problem.slices(height, width)
    if not any(needed):
        part: Part[Any] = sweep(problem, slices, None)
    elif len(slices) == 1:
        part = sweep(problem, slices, KeptGradient)
    elif 4 * height * width * embeddings.element_size() <= batch.loss.memory_budget:
        # W and its transpose take half of the budget, the tiles the other half.
        part = sweep(problem, problem.slices(height, width, share=0.5), KeptGradient)
    else:
        part = sweep(problem, slices, StreamedGradient)
    loss = show_nan(part.loss, problem.anchors, problem.columns)
    if part.sink is None:
        return loss, [None, None, None]
    by_anchors, by_columns = part.sink.gradients()
    back = problem.loss.comparison.to_embeddings
    by_embeddings = back(by_anchors, problem.anchors) if needed[0] else None
    by_gallery = back(by_columns, problem.columns) if needed[1] and by_columns is not None else None
    return loss, [by_embeddings, by_gallery, part.by_anchor_values if needed[2] else None]


def row_loss(batch: Batch, embeddings: Tensor, gallery: Tensor | None, anchor_values: Tensor | None) -> Tensor:
    """The loss of a batch, differentiable once by embeddings, gallery and anchor values."""
    gallery_labels = None if gallery is None else batch.gallery_labels

    def compute(
        inputs: cuda_graphs.Tensors, constants: cuda_graphs.Tensors, needed: cuda_graphs.Needed
    ) -> tuple[Tensor, cuda_graphs.Gradients]:
        anchors, columns, values = inputs
        labels, column_labels, positions, noise = constants
        assert anchors is not None
        assert labels is not None
        column_labels = labels if column_labels is None else column_labels
        return _compute(Batch(batch.loss, labels, column_labels, positions, noise), anchors, columns, values, needed)

    constants = (batch.labels, gallery_labels, batch.positions, batch.noise)
    pairs = batch.labels.shape[0] * batch.gallery_labels.shape[0]
    owner = batch.loss if batch.owner is None else batch.owner
    step = Step(compute, constants, owner, batch.loss.recordable, pairs)
    loss: Tensor = differentiable(step, (embeddings, gallery, anchor_values))
    return loss


@uncompiled
@torch.no_grad()
def pair_weights(batch: Batch, embeddings: Tensor, gallery: Tensor | None, anchor_values: Tensor | None) -> Tensor:
    """W = ∂loss/∂values of every pair, [m, n]."""
    problem = Problem(batch, embeddings, gallery, anchor_values)
    part = sweep(problem, problem.slices(problem.height, problem.width), Weights)
    assert part.sink is not None
    return part.sink.matrix
