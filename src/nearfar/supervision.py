"""Supervision: who is a positive and who a negative of whom, where this does not follow from one class per item.

Every pair-based loss takes one of these in the place of labels. Pairs that are neither positive nor negative are
unknown: no loss, mining or metric uses them.

>>> import torch, nearfar as nf
>>> embeddings = torch.eye(4, requires_grad=True)
>>> pairs = nf.supervision.Pairs(torch.tensor([0, 0]), torch.tensor([1, 2]), same=torch.tensor([True, False]))
>>> nf.losses.Contrastive()(embeddings, pairs)
tensor(0., grad_fn=<_GradientInForwardBackward>)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from nearfar.utils.tensors import ArrayInput, as_array, as_label_pair, as_labels, check_values, is_integer, readable
from nearfar.utils.validation import non_negative, one_of

__all__ = ["Hierarchy", "Masks", "MultiLabel", "Pairs", "Supervision", "Triplets"]


class Supervision(ABC):
    """Who is a positive and who a negative of whom.

    A loss or metric asks ``of_batch`` first; what that returns answers for one block of rows, which are anchors or
    queries, and columns after another. Tensors are moved to the device of the embeddings. Values are checked if they
    are on a CPU, since reading them from a GPU would make the host wait.
    """

    shape: tuple[int, int]  # rows and columns of the batch

    @abstractmethod
    def of_batch(self, rows: int, columns: int | None, device: torch.device) -> Supervision:
        """Check the supervision against the size of a batch, and return that of the batch on a device.

        Args:
            rows: Number of embeddings.
            columns: Number of gallery embeddings; None: the embeddings are compared with each other.
            device: Device of the embeddings.
        """

    @abstractmethod
    def masks(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """Return the masks of the positives and of the negatives of a block of the batch, [a, c] each, as new tensors.

        Args:
            rows: The rows of the block, with a start and a stop.
            columns: Its columns, likewise.
        """

    def relevance(self, rows: slice, columns: slice) -> Tensor:
        """Return how relevant the columns are to the rows, from 0 to 1, [a, c], float64: 1 for every positive."""
        return self.masks(rows, columns)[0].double()

    def triplets(self, rows: slice) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return columns of the given positives and negatives of rows, and which are valid, [a, k]; None: not given."""
        return None

    def pairs(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return all pairs that are not unknown: rows, columns and whether they are positive, [p] each.

        They are ordered by row and column. None if there is no such list.
        """
        return None

    def split(self) -> list[tuple[float, Tensor, Tensor]] | None:
        """Return the weight of each level of a hierarchy, and its labels of the rows and of the columns."""
        return None

    def transposed(self) -> Supervision:
        """Return that of the batch with columns as rows."""
        return _Transposed(self)

    def _bound(self, rows: int, columns: int, **values: Any) -> Self:
        """Return a copy for a batch, with other values."""
        bound = copy(self)
        vars(bound).update(values, shape=(rows, columns))
        return bound


class _Transposed(Supervision):
    def __init__(self, original: Supervision) -> None:
        self.original, self.shape = original, (original.shape[1], original.shape[0])

    def of_batch(self, rows: int, columns: int | None, device: torch.device) -> Supervision:
        return self

    def masks(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        positives, negatives = self.original.masks(columns, rows)
        return positives.T, negatives.T

    def relevance(self, rows: slice, columns: slice) -> Tensor:
        return self.original.relevance(columns, rows).T


class _ListedPairs(Supervision):
    """Becomes pairs of a row and a column; if they are ``listed``, they are in order and have no duplicates."""

    row: Tensor
    column: Tensor
    same: Tensor
    others = "unknown"
    listed = False

    def masks(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        height, width = rows.stop - rows.start, columns.stop - columns.start
        place, spare = _places(self.row, self.column, rows, columns), height * width

        def mask(chosen: Tensor) -> Tensor:
            flat = torch.zeros(spare + 1, dtype=torch.bool, device=place.device)
            return flat.index_fill_(0, torch.where(chosen, place, spare), True)[:spare].view(height, width)

        positives = mask(self.same)
        return positives, ~positives if self.others == "negative" else mask(~self.same) & ~positives


class Pairs(_ListedPairs):
    """Given pairs, with or without grades. All other pairs are unknown, or negative.

    Without a gallery a pair has no direction: each member is a positive or negative of the other. With a gallery, a
    pair is a row of the embeddings and a row of the gallery.

    Args:
        left: Row of the first member of each pair in the embeddings, [p].
        right: Row of the second member, [p]: in the gallery if there is one, otherwise in the embeddings.
        same: Whether each pair is positive, [p]: booleans, or 0 and 1. None: all are, or those with a grade above 0.
        others: What the pairs are that are not given: "unknown" or "negative".
        grades: How relevant the members of each pair are to each other, [p], from 0 to 1, for metrics and losses of
            graded relevance. None: 1 for positive pairs, otherwise 0. A pair that is given several times has the mean
            of its grades, and is positive if it is once.

    Example:
        >>> pairs = Pairs(torch.tensor([0, 1]), torch.tensor([1, 2]), torch.tensor([1, 0]))
        >>> positives, negatives = pairs.of_batch(3, None, torch.device("cpu")).masks(slice(0, 3), slice(0, 3))
        >>> positives.int().tolist(), negatives.int().tolist()
        ([[0, 1, 0], [1, 0, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 1], [0, 1, 0]])
        >>> import nearfar as nf
        >>> graded = Pairs(torch.tensor([0, 0]), torch.tensor([1, 2]), grades=torch.tensor([0.9, 0.4]))
        >>> nf.losses.CoSENT(graded=True)(torch.eye(3), graded)  # each pair in both directions: log(1 + 2 · 2)
        tensor(1.6094)
    """

    def __init__(
        self,
        left: ArrayInput,
        right: ArrayInput,
        same: ArrayInput | None = None,
        *,
        others: str = "unknown",
        grades: ArrayInput | None = None,
    ) -> None:
        self.left = _indices("left", left)
        self.right = _indices("right", right, len(self.left))
        self.grades = None if grades is None else _grades("grades", grades, len(self.left)).to(self.left.device)
        self.same = torch.ones_like(self.left, dtype=torch.bool) if self.grades is None else self.grades > 0
        if same is not None:
            self.same = _flags("same", same, (len(self.left),)).to(self.left.device)
        self.others = one_of("others", others, ("unknown", "negative"))
        self.graded: tuple[Tensor, Tensor, Tensor] | None = None  # rows, columns and grades of a batch, in any order

    def __len__(self) -> int:
        return len(self.left)

    def of_batch(self, rows: int, columns: int | None, device: torch.device) -> Supervision:
        width = rows if columns is None else columns
        _check_range("left", self.left, rows, "embeddings")
        _check_range("right", self.right, width, "embeddings" if columns is None else "gallery")
        row, column, same = self.left, self.right, self.same
        if columns is None:
            _check_different("left", row, "right", column)
            row, column, same = torch.cat([row, column]), torch.cat([column, row]), torch.cat([same, same])
        graded = None
        if self.grades is not None:
            grades = self.grades if columns is not None else torch.cat([self.grades, self.grades])
            graded = row.to(device), column.to(device), grades.to(device)
        listed = readable(row)
        if listed:
            row, column, same = _without_duplicates(row, column, same, width, conflicts=graded is not None)
        row, column, same = (part.to(device) for part in (row, column, same))
        return self._bound(rows, width, row=row, column=column, same=same, listed=listed, graded=graded)

    def relevance(self, rows: slice, columns: slice) -> Tensor:
        if self.graded is None:
            return super().relevance(rows, columns)
        row, column, grades = self.graded
        place = _places(row, column, rows, columns)
        height, width = rows.stop - rows.start, columns.stop - columns.start
        empty = grades.new_zeros(height * width + 1)
        times = empty.index_add(0, place, torch.ones_like(grades)).clamp_(min=1.0)
        return (empty.index_add(0, place, grades) / times)[:-1].view(height, width)

    def pairs(self) -> tuple[Tensor, Tensor, Tensor] | None:
        is_list = self.listed and self.others == "unknown"
        return (self.row, self.column, self.same) if is_list else None


class Triplets(_ListedPairs):
    """Given triplets. The triplet loss with ``mining="all"`` uses exactly these.

    For losses of sets, and for minings, the positives and negatives of an anchor are those of its triplets; all other
    pairs are unknown. Members of a triplet are not anchors by themselves.

    Args:
        anchor: Row of the anchor of each triplet in the embeddings, [t].
        positive: Row of the positive, [t]: in the gallery if there is one, otherwise in the embeddings.
        negative: Row of the negative, [t], likewise.

    Example:
        >>> import nearfar as nf
        >>> triplets = Triplets(torch.tensor([0, 2]), torch.tensor([1, 3]), torch.tensor([2, 1]))
        >>> nf.losses.Triplet(mining="all")(torch.eye(4), triplets)
        tensor(0.1000)
    """

    def __init__(self, anchor: ArrayInput, positive: ArrayInput, negative: ArrayInput) -> None:
        self.anchor = _indices("anchor", anchor)
        self.positive = _indices("positive", positive, len(self.anchor))
        self.negative = _indices("negative", negative, len(self.anchor))
        self.slots: list[Tensor] = []  # columns of positives and negatives of a batch, and which are valid, [m, k] each

    def __len__(self) -> int:
        return len(self.anchor)

    def of_batch(self, rows: int, columns: int | None, device: torch.device) -> Supervision:
        width, place = (rows, "embeddings") if columns is None else (columns, "gallery")
        _check_range("anchor", self.anchor, rows, "embeddings")
        for name, index in (("positive", self.positive), ("negative", self.negative)):
            _check_range(name, index, width, place)
            if columns is None:
                _check_different("anchor", self.anchor, name, index)
        parts = self.anchor, self.positive, self.negative
        order = self.anchor.argsort(stable=True)
        filled, *slots = _by_row(rows, *(part[order] for part in parts))
        same = torch.ones_like(self.anchor, dtype=torch.bool)
        row, column, same = torch.cat([parts[0], parts[0]]), torch.cat(parts[1:]), torch.cat([same, ~same])
        if readable(row):
            row, column, same = _without_duplicates(row, column, same, width, conflicts=False)
        row, column, same, *slots = (part.to(device) for part in (row, column, same, *slots, filled))
        return self._bound(rows, width, row=row, column=column, same=same, slots=slots)

    def triplets(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        positive, negative, valid = self.slots
        return positive[rows], negative[rows], valid[rows]


class Masks(Supervision):
    """Positives and negatives as matrices.

    Args:
        positives: Whether each column is a positive of each row, [m, n], booleans. Without a gallery n = m.
        negatives: Whether it is a negative, [m, n]. What is neither is unknown. None: all that is not positive.

    Example:
        >>> import nearfar as nf
        >>> positives = torch.tensor([[False, True, False], [True, False, False], [False, False, False]])
        >>> nf.losses.Contrastive()(torch.eye(3), Masks(positives)) == nf.losses.Contrastive()(
        ...     torch.eye(3), torch.tensor([0, 0, 1])
        ... )
        tensor(True)
    """

    def __init__(self, positives: ArrayInput, negatives: ArrayInput | None = None) -> None:
        self.positives = _flags("positives", positives, (None, None))
        self.negatives = ~self.positives
        if negatives is not None:
            self.negatives = _flags("negatives", negatives, tuple(self.positives.shape)).to(self.positives.device)
        if negatives is not None and readable(self.positives):
            both = (self.positives & self.negatives).nonzero()
            if len(both):
                raise ValueError(f"positives and negatives are both true at {tuple(both[0].tolist())}; one is allowed")

    def of_batch(self, rows: int, columns: int | None, device: torch.device) -> Supervision:
        needed = rows, rows if columns is None else columns
        if tuple(self.positives.shape) != needed:
            raise ValueError(f"positives has shape {tuple(self.positives.shape)}; needed is {list(needed)}")
        return self._bound(*needed, positives=self.positives.to(device), negatives=self.negatives.to(device))

    def masks(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        return self.positives[rows, columns].clone(), self.negatives[rows, columns].clone()


class MultiLabel(Supervision):
    """Any number of labels for each item: positives have a label in common, negatives have none.

    Metrics and losses of graded relevance use the overlap |A ∩ B| / |A ∪ B| of the labels of two items.

    Args:
        matrix: Which labels each embedding has, [m, L]: booleans, or 0 and 1.
        gallery_matrix: The same for the gallery, [n, L], if there is one.

    Example:
        >>> labels = MultiLabel(torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 0]])).of_batch(3, None, torch.device("cpu"))
        >>> labels.masks(slice(0, 1), slice(0, 3))[1].int().tolist()
        [[0, 0, 0]]
        >>> labels.relevance(slice(0, 1), slice(0, 3))
        tensor([[1.0000, 0.3333, 0.5000]], dtype=torch.float64)
    """

    def __init__(self, matrix: ArrayInput, gallery_matrix: ArrayInput | None = None) -> None:
        self.matrix = _flags("matrix", matrix, (None, None))
        self.gallery_matrix: Tensor | None = None
        if gallery_matrix is not None:
            self.gallery_matrix = _flags("gallery_matrix", gallery_matrix, (None, self.matrix.shape[1]))

    def of_batch(self, rows: int, columns: int | None, device: torch.device) -> Supervision:
        _check_sides("matrix", self.matrix, rows, self.gallery_matrix, columns)
        matrix = self.matrix.to(device).float()
        others = matrix if self.gallery_matrix is None else self.gallery_matrix.to(device).float()
        return self._bound(rows, len(others), matrix=matrix, gallery_matrix=others)

    def masks(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        assert self.gallery_matrix is not None
        positives = self.matrix[rows] @ self.gallery_matrix[columns].T > 0
        return positives, ~positives

    def relevance(self, rows: slice, columns: slice) -> Tensor:
        assert self.gallery_matrix is not None
        matrix, others = self.matrix[rows].double(), self.gallery_matrix[columns].double()
        shared = matrix @ others.T
        return shared / (matrix.sum(dim=1, keepdim=True) + others.sum(dim=1) - shared).clamp_(min=1.0)


class Hierarchy(Supervision):
    """Labels of several levels, from coarse to fine, such as family, genus and species.

    A loss is computed for each level, with the labels of that level. Metrics call items of the same finest class
    positives; metrics and losses of graded relevance use the share of the levels, by weight, at which two items agree.

    Args:
        levels: Labels of each level, [m] each, coarsest first; or one matrix or table, [m, levels].
        gallery_levels: The same for the gallery, [n] each, if there is one.
        weights: Weight of each level in the sum of the losses. None: 1 / number of levels, so that it is the mean.

    Example:
        >>> import nearfar as nf
        >>> family, species = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, 2])
        >>> loss, embeddings = nf.losses.Contrastive(), torch.eye(4)
        >>> loss(embeddings, Hierarchy([family, species], weights=(1.0, 2.0))) == (
        ...     loss(embeddings, family) + 2 * loss(embeddings, species)
        ... )
        tensor(True)
    """

    def __init__(
        self,
        levels: Sequence[ArrayInput] | ArrayInput,
        gallery_levels: Sequence[ArrayInput] | ArrayInput | None = None,
        *,
        weights: Sequence[float] | None = None,
    ) -> None:
        given = _columns(levels)
        if not given:
            raise ValueError("levels is empty; at least one level is needed")
        self.gallery_levels: list[Tensor] | None = None
        if gallery_levels is None:
            self.levels = [as_labels(f"levels[{place}]", level, len(given[0])) for place, level in enumerate(given)]
        else:
            others = _columns(gallery_levels)
            if len(others) != len(given):
                raise ValueError(f"gallery_levels has {len(others)} levels and levels {len(given)}; as many are needed")
            pairs = [
                as_label_pair(f"levels[{i}]", level, len(given[0]), f"gallery_levels[{i}]", other, len(others[0]))
                for i, (level, other) in enumerate(zip(given, others, strict=True))
            ]
            self.levels, self.gallery_levels = (list(side) for side in zip(*pairs, strict=True))
        if weights is not None and len(weights) != len(given):
            raise ValueError(f"weights has {len(weights)} numbers for {len(given)} levels; one for each is needed")
        self.weights = tuple(non_negative("weights", weight) for weight in weights or [1.0 / len(given)] * len(given))

    def of_batch(self, rows: int, columns: int | None, device: torch.device) -> Supervision:
        gallery_levels = self.gallery_levels or self.levels
        _check_sides("levels", self.levels[0], rows, gallery_levels[0] if self.gallery_levels else None, columns)
        levels, others = ([level.to(device) for level in side] for side in (self.levels, gallery_levels))
        return self._bound(rows, len(others[0]), levels=levels, gallery_levels=others)

    def split(self) -> list[tuple[float, Tensor, Tensor]]:
        assert self.gallery_levels is not None
        return list(zip(self.weights, self.levels, self.gallery_levels, strict=True))

    def masks(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        _, level, others = self.split()[-1]
        positives = level[rows].unsqueeze(1) == others[columns]
        return positives, ~positives

    def relevance(self, rows: slice, columns: slice) -> Tensor:
        agreed = [
            weight * (level[rows].unsqueeze(1) == others[columns]).double() for weight, level, others in self.split()
        ]
        return torch.stack(agreed).sum(dim=0) / sum(self.weights)


def _indices(name: str, array: ArrayInput, count: int | None = None) -> Tensor:
    array = as_array(name, array)
    if isinstance(array, np.ndarray) and array.dtype.kind not in "iu":
        raise TypeError(f"{name} is of {array.dtype}; whole numbers are needed, rows of the embeddings")
    return as_labels(name, array, count)


def _numbers(name: str, array: ArrayInput, needed: str) -> Tensor:
    """Convert an array to a tensor without gradient, a copy of what is no tensor."""
    array = as_array(name, array)
    if not isinstance(array, (Tensor, np.ndarray)):
        raise TypeError(f"{name} is a {type(array).__name__}; a torch.Tensor, NumPy array or column is needed")
    check_values(name, array)
    if isinstance(array, np.ndarray) and array.dtype.kind not in "biuf":
        raise TypeError(f"{name} is of {array.dtype}; {needed} are needed")
    return torch.tensor(array) if isinstance(array, np.ndarray) else array.detach()


def _flags(name: str, array: ArrayInput, shape: tuple[int | None, ...]) -> Tensor:
    """Convert booleans, or 0 and 1, to a tensor of booleans; None stands for any size but 0."""
    flags = _numbers(name, array, "booleans, or 0 and 1,")
    fits = [
        size == wanted if wanted is not None else size > 0 for size, wanted in zip(flags.shape, shape, strict=False)
    ]
    if flags.ndim != len(shape) or not all(fits):
        needed = ", ".join("n" if wanted is None else str(wanted) for wanted in shape)
        raise ValueError(f"{name} has shape {tuple(flags.shape)}; needed is [{needed}]")
    if flags.dtype != torch.bool and not (is_integer(flags) or flags.is_floating_point()):
        raise TypeError(f"{name} is of {flags.dtype}; booleans, or 0 and 1, are needed")
    chosen = flags.bool()
    if flags.dtype != torch.bool and readable(flags) and bool((chosen != flags).any()):
        wrong = flags[chosen != flags][0].item()
        raise ValueError(f"{name} contains {wrong}; allowed are booleans, or 0 and 1")
    return chosen


def _columns(levels: Any) -> list[Any]:
    """Levels as a list of arrays, given a sequence, a matrix [m, levels] or a table with a column for each."""
    if isinstance(levels, (Tensor, np.ndarray)):
        if levels.ndim != 2:
            raise ValueError(f"levels has shape {tuple(levels.shape)}; a matrix [m, levels] or a list is needed")
        return list(levels.T)
    columns = [levels[name] for name in levels.columns] if hasattr(levels, "columns") else levels
    return [as_array("levels", column) for column in columns]


def _check_range(name: str, index: Tensor, count: int, place: str) -> None:
    if readable(index):
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= count:
            raise ValueError(f"{name} ranges from {low} to {high}; allowed are the rows of {place}, 0 to {count - 1}")


def _check_different(name: str, index: Tensor, other_name: str, other: Tensor) -> None:
    if readable(index):
        equal = (index == other.to(index.device)).nonzero()
        if len(equal):
            place = int(equal[0])
            raise ValueError(f"{name} and {other_name} are both {int(index[place])} at {place}; two rows are needed")


def _check_sides(name: str, given: Tensor, rows: int, other: Tensor | None, columns: int | None) -> None:
    """Check that there is an entry for each embedding, and for each gallery embedding if there is a gallery."""
    if (other is None) != (columns is None):
        present = "no gallery was given" if columns is None else "the loss has a gallery"
        raise ValueError(f"gallery_{name} is {'missing' if other is None else 'given'}, but {present}")
    for side, part, count in ((name, given, rows), (f"gallery_{name}", other, columns)):
        if part is not None and len(part) != count:
            raise ValueError(f"{side} has {len(part)} rows for {count} embeddings; one for each is needed")


def _grades(name: str, array: ArrayInput, count: int) -> Tensor:
    """Convert numbers from 0 to 1 to a tensor of float64."""
    grades = _numbers(name, array, "numbers from 0 to 1").double()
    if tuple(grades.shape) != (count,):
        raise ValueError(f"{name} has shape {tuple(grades.shape)}; needed is [{count}]")
    outside = ~((grades >= 0) & (grades <= 1))
    if readable(grades) and bool(outside.any()):
        raise ValueError(f"{name} contains {grades[outside][0].item()}; allowed are numbers from 0 to 1")
    return grades


def _without_duplicates(
    row: Tensor, column: Tensor, same: Tensor, width: int, *, conflicts: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs in order, without duplicates.

    A pair that is given as same and as different is same if ``conflicts`` are allowed, and otherwise an error.
    """
    codes = (2 * (row * width + column) + ~same).sort().values  # a pair as same before the pair as different
    pairs, kinds = codes // 2, codes % 2 == 0
    first = torch.ones_like(same)
    first[1:] = pairs.diff() != 0
    conflict = (~first[1:] & (kinds[1:] != kinds[:-1])).nonzero()
    if len(conflict) and not conflicts:
        pair = int(pairs[conflict[0]])
        raise ValueError(f"the pair of {pair // width} and {pair % width} is given as same and as different")
    pairs = pairs[first]
    return pairs // width, pairs % width, kinds[first]


def _places(row: Tensor, column: Tensor, rows: slice, columns: slice) -> Tensor:
    """Return the place of each pair in a flat block; all pairs outside get the one behind its last."""
    height, width = rows.stop - rows.start, columns.stop - columns.start
    row, column = row - rows.start, column - columns.start
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    return torch.where(inside, row * width + column, height * width)


def _by_row(count: int, row: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """Arrange values, given in the order of their rows, as tables [count, k]; first which places are filled."""
    sizes = torch.bincount(row, minlength=count)
    slot = torch.arange(len(row), device=row.device) - (sizes.cumsum(0) - sizes)[row]
    shape = count, max(1, int(sizes.max()))
    tables = []
    for value in (torch.ones_like(row, dtype=torch.bool), *values):
        table = value.new_zeros(shape)
        table[row, slot] = value
        tables.append(table)
    return tuple(tables)
