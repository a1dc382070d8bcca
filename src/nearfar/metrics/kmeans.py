"""k-means in tiles: exact Lloyd iterations on a CPU or a GPU, without a matrix of all vectors by all centres.

A vector whose centre stayed where it was is compared only with the centres that moved, so late iterations are quick.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nearfar.utils.inputs import BLOCK_BYTES, Array, as_vectors, blocks, check_finite
from nearfar.utils.precision import full_precision, unit_rows
from nearfar.utils.progress import Progress
from nearfar.utils.validation import non_negative, whole

MEMORY_BUDGET = 256 * 1024 * 1024
CPU_SIDE, GPU_SIDE = 1024, 8192  # rows and columns of a tile: what fits a cache, what keeps a GPU busy
ROUNDS = 128  # of drawing the first centres


class KMeans(NamedTuple):
    """A clustering of n vectors."""

    assignment: Tensor  # [n], the number of the nearest centre
    centers: Tensor  # [k, d]
    inertia: float  # sum of the squared distances to the nearest centre
    iterations: int  # of the best start


@torch.no_grad()
def kmeans(
    vectors: Array,
    k: int,
    *,
    restarts: int = 5,
    iterations: int = 100,
    tolerance: float = 0.0,
    seed: int = 0,
    normalize: bool = False,
    memory_budget: int = MEMORY_BUDGET,
    progress: Progress | None = None,
) -> KMeans:
    """The k centres with the least sum of squared distances that Lloyd's algorithm finds in a few starts.

    First centres are drawn by greedy k-means++, or several at a time where k is large. A cluster that loses all
    its vectors gets the one that is farthest from its centre. The best start is returned.

    Args:
        vectors: [n, d], floating point; a memory map is read in blocks.
        k: How many clusters, from 1 to n. Fewer have members only where fewer vectors differ.
        restarts, iterations: How many starts, and at most how many iterations of each.
        tolerance: A start ends when an iteration lowers the inertia by no more than this share of it, or no vector
            changes its cluster.
        seed: Of the first centres.
        normalize: Give all vectors length one first.
        memory_budget: Bytes for tiles, and for a copy of the vectors where half of these bytes suffice.
        progress: Called with the number of iterations done and the greatest there can be.

    >>> found = kmeans(torch.tensor([[0.0], [1.0], [10.0], [11.0]]), 2)
    >>> found.inertia, sorted(found.centers.flatten().tolist())
    (1.0, [0.5, 10.5])
    """
    vectors = as_vectors("vectors", vectors)
    whole("k", k, high=len(vectors))
    whole("restarts", restarts)
    whole("iterations", iterations)
    non_negative("tolerance", tolerance)
    whole("memory_budget", memory_budget)
    # On the CPU, so that all devices draw alike.
    generator = torch.Generator("cpu").manual_seed(whole("seed", seed, low=0, high=2**63 - 1))
    check_finite("vectors", vectors)
    points = Points(vectors, unit=normalize, memory_budget=memory_budget)
    best: KMeans | None = None
    for start in range(restarts):
        with full_precision(vectors.device):
            lloyd = Lloyd(points, k, generator)
            for done in range(1, iterations + 1):
                go_on = lloyd.iterate(tolerance)
                if progress is not None:
                    progress(start * iterations + (done if go_on else iterations), restarts * iterations)
                if not go_on:
                    break
        inertia = points.inertia(lloyd.centers, lloyd.assignment)
        if best is None or inertia < best.inertia:
            best = KMeans(lloyd.assignment, lloyd.centers, inertia, done)
    assert best is not None
    centers = best.centers.double() / points.scale + points.mean
    return best._replace(centers=centers.to(torch.promote_types(vectors.dtype, torch.float32)))


class Points:
    """Vectors, some at a time: in float32, of length one where asked for, relative to their mean, times a power of two.

    Distances do not see a common offset, but |x|² − 2xc + |c|² would lose its digits to one. The power of two brings
    distances where their squares can be computed.
    """

    def __init__(self, vectors: Tensor, *, unit: bool, memory_budget: int) -> None:
        self.vectors, self.unit = vectors, unit
        self.count, self.dim = vectors.shape
        self.device = vectors.device
        self.kept: Tensor | None = None
        parts = list(blocks(vectors, min(BLOCK_BYTES, memory_budget // 8)))
        self.mean = torch.stack([self._exact(rows).sum(dim=0) for rows in parts]).sum(dim=0) / self.count  # float64
        largest = max(float((self._exact(rows) - self.mean).abs().max()) for rows in parts)
        self.scale = 2.0 ** -math.frexp(largest)[1]
        self.room = memory_budget // 4  # in numbers
        if self.count * self.dim <= self.room // 2:
            self.kept = torch.cat([self.take(rows) for rows in parts])
            self.room -= self.count * self.dim
        # A tile is side² numbers; its centres, and its points on their way from float64, are 6 · side · dim more.
        side = math.isqrt(self.room + (3 * self.dim) ** 2) - 3 * self.dim
        self.side = max(1, min(side, CPU_SIDE if self.device.type == "cpu" else GPU_SIDE))
        self.squares = torch.cat([self.take(rows).square().sum(dim=1) for rows in self.tiles()])

    def take(self, rows: slice | Tensor) -> Tensor:
        """Some of the points."""
        if self.kept is not None:
            return self.kept[rows]
        return (self._exact(rows) - self.mean).mul_(self.scale).float()

    def _exact(self, rows: slice | Tensor) -> Tensor:
        points = self.vectors[rows].double()
        if not self.unit:
            return points
        return unit_rows(points)

    def tiles(self, rows: Tensor | None = None, columns: int = 1) -> Iterator[slice | Tensor]:
        """All points or those in some rows, as many at a time as go well with this many centres."""
        width = min(columns, self.side)
        height = max(1, min(8 * self.side, self.side**2 // width, self.room // (width + 6 * self.dim)))
        for start in range(0, self.count if rows is None else len(rows), height):
            some = slice(start, start + height)
            # All rows are in order, and a slice spares a copy.
            yield some if rows is None or len(rows) == self.count else rows[some]

    def nearest(self, rows: slice | Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
        """The squared distance to the nearest centre and its place; of equally near ones the first."""
        points, squares = self.take(rows), self.squares[rows]
        best = torch.full_like(squares, math.inf)
        place = torch.zeros_like(squares, dtype=torch.long)
        for start in range(0, len(centers), self.side):
            some = centers[start : start + self.side]
            values = torch.addmm(some.square().sum(dim=1), points, some.T, alpha=-2.0)
            least, where = values.min(dim=1)
            place = torch.where(least < best, where + start, place)
            best = torch.minimum(least, best)
        return (best + squares).clamp_(min=0.0), place

    def inertia(self, centers: Tensor, assignment: Tensor) -> float:
        """Σ |x − c|², without the rounding of :meth:`nearest`."""
        parts = [(self.take(rows) - centers[assignment[rows]]).double().square().sum() for rows in self.tiles()]
        return float(torch.stack(parts).sum()) / self.scale**2


class Lloyd:
    """One start: the centres, each point's nearest centre, and the squared distance to it."""

    def __init__(self, points: Points, k: int, generator: torch.Generator) -> None:
        self.points, self.k = points, k
        self.assignment = torch.zeros(points.count, dtype=torch.long, device=points.device)
        self.distances = torch.full_like(points.squares, math.inf)
        self.centers = self._draw(generator)
        self.members = torch.full_like(self.assignment, -1)  # the clusters whose means the centres are
        self.inertia = math.inf

    def iterate(self, tolerance: float) -> bool:
        """Centres become means, points go to the nearest. Whether there is more to do."""
        self._assign(self._update())
        before, self.inertia = self.inertia, float(self.distances.double().sum())
        return self.inertia < before * (1 - tolerance) and not torch.equal(self.assignment, self.members)

    def _draw(self, generator: torch.Generator) -> Tensor:
        """First centres: different points, drawn by their squared distances to those of earlier rounds."""
        count, device = self.points.count, self.points.device
        taken = torch.zeros(count, dtype=torch.bool, device=device)
        rows = torch.randint(count, (1,), generator=generator, device="cpu").to(device)
        step = math.ceil((self.k - 1) / ROUNDS)
        trials = 2 + int(math.log(self.k))  # as many as scikit-learn tries
        centers, drawn = [], 0
        while True:
            centers.append(self.points.take(rows))
            self._compare(centers[-1], torch.arange(drawn, drawn + len(rows), device=device))
            taken[rows] = True
            drawn += len(rows)
            if drawn == self.k:
                return torch.cat(centers)
            # The least of exponential draws, each over its weight, are a weighted sample without replacement.
            draws = torch.empty(count, dtype=torch.float64, device="cpu").exponential_(generator=generator).to(device)
            keys = (draws / self.distances.double().clamp(min=1e-30)).masked_fill_(taken, math.inf)
            if step > 1:
                rows = keys.topk(min(step, self.k - drawn), largest=False).indices
            else:
                rows = self._best(keys.topk(min(trials, count - drawn), largest=False).indices)

    def _best(self, rows: Tensor) -> Tensor:
        """Of some points the one that would lower the inertia most as one more centre, [1]."""
        centers = self.points.take(rows)
        squares = centers.square().sum(dim=1)
        inertia = self.points.mean.new_zeros(len(rows))
        for some in self.points.tiles(columns=len(rows)):
            distances = torch.addmm(squares, self.points.take(some), centers.T, alpha=-2.0)
            distances += self.points.squares[some].unsqueeze(1)
            inertia += torch.minimum(distances, self.distances[some].unsqueeze(1)).sum(dim=0, dtype=torch.float64)
        return rows[inertia.argmin()].unsqueeze(0)

    def _update(self) -> Tensor:
        """Centres become the means of their points. Which of them may have moved, [k]."""
        members = self._without_empty()
        changed = members != self.members
        moved = torch.zeros(self.k, dtype=torch.bool, device=members.device)
        moved[members[changed]] = True
        moved[self.members[changed & (self.members >= 0)]] = True
        self.members = members
        place = moved.cumsum(0) - 1
        sums = self.points.mean.new_zeros(int(moved.sum()), self.points.dim)
        for rows in self.points.tiles(moved[members].nonzero().squeeze(1)):
            _add_rows(sums, place[members[rows]], self.points.take(rows).double())
        counts = torch.bincount(members, minlength=self.k)[moved]
        filled = counts > 0  # a cluster left empty keeps its centre
        self.centers[moved.nonzero().squeeze(1)[filled]] = (sums[filled] / counts[filled, None]).float()
        return moved

    def _without_empty(self) -> Tensor:
        """The clusters, with each empty one given the point that is farthest from its centre."""
        members = self.assignment.clone()
        empty = (torch.bincount(members, minlength=self.k) == 0).nonzero().squeeze(1)
        if len(empty):
            distances, farthest = self.distances.sort(descending=True, stable=True)
            count = min(len(empty), int((distances > 0).sum()))
            members[farthest[:count]] = empty[:count]
        return members

    def _assign(self, moved: Tensor) -> None:
        """Each point to its nearest centre, knowing which centres are where they were."""
        self.assignment = self.members.clone()
        astray = moved[self.members]
        self.distances.masked_fill_(astray, math.inf)
        self._compare(self.centers, torch.arange(self.k, device=moved.device), astray.nonzero().squeeze(1))
        which = moved.nonzero().squeeze(1)
        self._compare(self.centers[which], which, (~astray).nonzero().squeeze(1))

    def _compare(self, centers: Tensor, numbers: Tensor, rows: Tensor | None = None) -> None:
        """Give points to those of these centres that are nearer than their own."""
        if not len(centers):
            return
        for some in self.points.tiles(rows, columns=len(centers)):
            distances, place = self.points.nearest(some, centers)
            nearer = distances < self.distances[some]
            self.assignment[some] = torch.where(nearer, numbers[place], self.assignment[some])
            self.distances[some] = torch.minimum(distances, self.distances[some])


def _add_rows(sums: Tensor, places: Tensor, rows: Tensor) -> None:
    """Add each row to the sum at its place, always in the same order."""
    if sums.device.type == "cpu":
        sums.index_add_(0, places, rows)
    else:
        sums.index_put_((places,), rows, accumulate=True)  # sorts the places; index_add_ would race
