"""Tiled k-means: exact Lloyd iterations on a CPU or a GPU, without a matrix of all vectors by all centers.

A vector whose center did not move is compared only with the centers that moved, so late iterations are fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nearfar.utils.progress import Progress
from nearfar.utils.tensors import BLOCK_BYTES, ArrayInput, as_vectors, blocks, check_finite, full_precision, unit_rows
from nearfar.utils.validation import non_negative, whole

MEMORY_BUDGET = 256 * 1024 * 1024
CPU_SIDE, GPU_SIDE = 1024, 8192  # rows and columns of a tile: small enough for the cache, large enough for a GPU
ROUNDS = 128  # of drawing initial centers


class KMeans(NamedTuple):
    """A clustering of n vectors.

    Attributes:
        assignment: [n], the number of the nearest center.
        centers: [k, d].
        inertia: Sum of the squared distances to the nearest center.
        iterations: Number of iterations of the best run.
    """

    assignment: Tensor
    centers: Tensor
    inertia: float
    iterations: int


@torch.no_grad()
def kmeans(
    vectors: ArrayInput,
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
    """Cluster vectors with Lloyd's algorithm and return the best of several runs.

    Initial centers are drawn by greedy k-means++, several at a time for large k. A cluster that becomes empty gets the
    vector that is farthest from its center.

    Args:
        vectors: [n, d], floating point; a memory map is read in blocks.
        k: Number of clusters, from 1 to n. Some are empty if there are fewer than k distinct vectors.
        restarts: Number of runs.
        iterations: Largest number of iterations of each run.
        tolerance: A run ends when an iteration reduces the inertia by no more than this fraction, or no vector changes
            its cluster.
        seed: Seed of the initial centers.
        normalize: Scale the vectors to unit length first.
        memory_budget: Memory for tiles in bytes, and for a copy of the vectors if it fits into half of it.
        progress: Called with the number of iterations done and their largest total.

    Returns:
        The clustering with the lowest inertia.

    Example:
        >>> clusters = kmeans(torch.tensor([[0.0], [1.0], [10.0], [11.0]]), 2)
        >>> clusters.inertia, sorted(clusters.centers.flatten().tolist())
        (1.0, [0.5, 10.5])
    """
    vectors = as_vectors("vectors", vectors)
    whole("k", k, high=len(vectors))
    whole("restarts", restarts)
    whole("iterations", iterations)
    non_negative("tolerance", tolerance)
    whole("memory_budget", memory_budget)
    # On the CPU, so that all devices draw the same centers.
    generator = torch.Generator("cpu").manual_seed(whole("seed", seed, low=0, high=2**63 - 1))
    check_finite("vectors", vectors)
    points = TiledVectors(vectors, unit=normalize, memory_budget=memory_budget)
    best: KMeans | None = None
    for start in range(restarts):
        with full_precision(vectors.device):
            lloyd = Lloyd(points, k, generator)
            for done in range(1, iterations + 1):
                unfinished = lloyd.iterate(tolerance)
                if progress is not None:
                    progress(start * iterations + (done if unfinished else iterations), restarts * iterations)
                if not unfinished:
                    break
        inertia = points.inertia(lloyd.centers, lloyd.assignment)
        if best is None or inertia < best.inertia:
            best = KMeans(lloyd.assignment, lloyd.centers, inertia, done)
    assert best is not None
    centers = best.centers.double() / points.scale + points.mean
    return best._replace(centers=centers.to(torch.promote_types(vectors.dtype, torch.float32)))


class TiledVectors:
    """Vectors in float32, relative to their mean and scaled by a power of two, read a tile at a time.

    Without the mean |x|² − 2xc + |c|² would lose digits to a common offset. The power of two keeps squared distances
    within the range of floating point.
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
        self.room = memory_budget // 4  # in float32 numbers
        if self.count * self.dim <= self.room // 2:
            self.kept = torch.cat([self.take(rows) for rows in parts])
            self.room -= self.count * self.dim
        # A tile is side² numbers; its centers, and its points converted from float64, are 6 · side · dim more.
        side = math.isqrt(self.room + (3 * self.dim) ** 2) - 3 * self.dim
        self.side = max(1, min(side, CPU_SIDE if self.device.type == "cpu" else GPU_SIDE))
        self.squares = torch.cat([self.take(rows).square().sum(dim=1) for rows in self.tiles()])

    def take(self, rows: slice | Tensor) -> Tensor:
        """Return some of the vectors."""
        if self.kept is not None:
            return self.kept[rows]
        return (self._exact(rows) - self.mean).mul_(self.scale).float()

    def _exact(self, rows: slice | Tensor) -> Tensor:
        points = self.vectors[rows].double()
        if not self.unit:
            return points
        return unit_rows(points)

    def tiles(self, rows: Tensor | None = None, columns: int = 1) -> Iterator[slice | Tensor]:
        """Yield all or some rows in tiles, of a height that suits this number of centers."""
        width = min(columns, self.side)
        height = max(1, min(8 * self.side, self.side**2 // width, self.room // (width + 6 * self.dim)))
        for start in range(0, self.count if rows is None else len(rows), height):
            tile = slice(start, start + height)
            # A slice of all rows needs no copy.
            yield tile if rows is None or len(rows) == self.count else rows[tile]

    def nearest(self, rows: slice | Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the squared distance to the nearest center and its index; of equally near ones the first."""
        points, squares = self.take(rows), self.squares[rows]
        best = torch.full_like(squares, math.inf)
        place = torch.zeros_like(squares, dtype=torch.long)
        for start in range(0, len(centers), self.side):
            part = centers[start : start + self.side]
            values = torch.addmm(part.square().sum(dim=1), points, part.T, alpha=-2.0)
            least, where = values.min(dim=1)
            place = torch.where(least < best, where + start, place)
            best = torch.minimum(least, best)
        return (best + squares).clamp_(min=0.0), place

    def inertia(self, centers: Tensor, assignment: Tensor) -> float:
        """Return Σ |x − c|², without the rounding errors of :meth:`nearest`."""
        parts = [(self.take(rows) - centers[assignment[rows]]).double().square().sum() for rows in self.tiles()]
        return float(torch.stack(parts).sum()) / self.scale**2


class Lloyd:
    """One run: the centers, the nearest center of each vector, and the squared distance to it."""

    def __init__(self, points: TiledVectors, k: int, generator: torch.Generator) -> None:
        self.points, self.k = points, k
        self.assignment = torch.zeros(points.count, dtype=torch.long, device=points.device)
        self.distances = torch.full_like(points.squares, math.inf)
        self.centers = self._draw(generator)
        self.members = torch.full_like(self.assignment, -1)  # the clusters whose means are the centers
        self.inertia = math.inf

    def iterate(self, tolerance: float) -> bool:
        """Move centers to the means and reassign the vectors. Return whether the run has not converged."""
        self._assign(self._update())
        before, self.inertia = self.inertia, float(self.distances.double().sum())
        return self.inertia < before * (1 - tolerance) and not torch.equal(self.assignment, self.members)

    def _draw(self, generator: torch.Generator) -> Tensor:
        """Draw distinct vectors as initial centers, weighted by squared distance to those of earlier rounds."""
        count, device = self.points.count, self.points.device
        taken = torch.zeros(count, dtype=torch.bool, device=device)
        rows = torch.randint(count, (1,), generator=generator, device="cpu").to(device)
        step = math.ceil((self.k - 1) / ROUNDS)
        trials = 2 + int(math.log(self.k))  # as in scikit-learn
        centers, drawn = [], 0
        while True:
            centers.append(self.points.take(rows))
            self._compare(centers[-1], torch.arange(drawn, drawn + len(rows), device=device))
            taken[rows] = True
            drawn += len(rows)
            if drawn == self.k:
                return torch.cat(centers)
            # The smallest of exponential variables divided by weights are a weighted sample without replacement.
            draws = torch.empty(count, dtype=torch.float64, device="cpu").exponential_(generator=generator).to(device)
            keys = (draws / self.distances.double().clamp(min=1e-30)).masked_fill_(taken, math.inf)
            if step > 1:
                rows = keys.topk(min(step, self.k - drawn), largest=False).indices
            else:
                rows = self._best(keys.topk(min(trials, count - drawn), largest=False).indices)

    def _best(self, rows: Tensor) -> Tensor:
        """Return the vector that would lower the inertia most as an additional center, [1]."""
        centers = self.points.take(rows)
        squares = centers.square().sum(dim=1)
        inertia = self.points.mean.new_zeros(len(rows))
        for tile in self.points.tiles(columns=len(rows)):
            distances = torch.addmm(squares, self.points.take(tile), centers.T, alpha=-2.0)
            distances += self.points.squares[tile].unsqueeze(1)
            inertia += torch.minimum(distances, self.distances[tile].unsqueeze(1)).sum(dim=0, dtype=torch.float64)
        return rows[inertia.argmin()].unsqueeze(0)

    def _update(self) -> Tensor:
        """Move centers to the means of their vectors. Return which of them may have moved, [k]."""
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
        filled = counts > 0  # an empty cluster keeps its center
        self.centers[moved.nonzero().squeeze(1)[filled]] = (sums[filled] / counts[filled, None]).float()
        return moved

    def _without_empty(self) -> Tensor:
        """Return the assignment, where each empty cluster gets the vector that is farthest from its center."""
        members = self.assignment.clone()
        empty = (torch.bincount(members, minlength=self.k) == 0).nonzero().squeeze(1)
        if len(empty):
            distances, farthest = self.distances.sort(descending=True, stable=True)
            count = min(len(empty), int((distances > 0).sum()))
            members[farthest[:count]] = empty[:count]
        return members

    def _assign(self, moved: Tensor) -> None:
        """Assign each vector to its nearest center, given which centers have moved."""
        self.assignment = self.members.clone()
        affected = moved[self.members]
        self.distances.masked_fill_(affected, math.inf)
        self._compare(self.centers, torch.arange(self.k, device=moved.device), affected.nonzero().squeeze(1))
        which = moved.nonzero().squeeze(1)
        self._compare(self.centers[which], which, (~affected).nonzero().squeeze(1))

    def _compare(self, centers: Tensor, numbers: Tensor, rows: Tensor | None = None) -> None:
        """Reassign vectors to those of the given centers that are nearer than their own."""
        if not len(centers):
            return
        for tile in self.points.tiles(rows, columns=len(centers)):
            distances, place = self.points.nearest(tile, centers)
            nearer = distances < self.distances[tile]
            self.assignment[tile] = torch.where(nearer, numbers[place], self.assignment[tile])
            self.distances[tile] = torch.minimum(distances, self.distances[tile])


def _add_rows(sums: Tensor, places: Tensor, rows: Tensor) -> None:
    """Add each row to the sum at its place, in a deterministic order."""
    if sums.device.type == "cpu":
        sums.index_add_(0, places, rows)
    else:
        sums.index_put_((places,), rows, accumulate=True)  # index_add_ is not deterministic on a GPU
