"""Search with FAISS: flat, inverted lists (IVF), or a graph (HNSW), depending on the number of vectors.

FAISS may compute distances of vectors far from the origin from products, whose difference then has no correct digit, so
it gets vectors relative to their mean. Nothing here depends on which formula it uses. Flat search of distances is
``Exact``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearfar.search.backends.base import NO_ID, Backend, BackendContext, Ids, Scores, Vectors, rows_of
from nearfar.search.backends.exact import Coordinates, Exact, best, distance_scores, frame_for, merged, sum_and_lengths
from nearfar.utils.atomic import read_tensors, whole_file, write_tensors
from nearfar.utils.system import require
from nearfar.utils.tensors import as_vectors
from nearfar.utils.validation import one_of

KINDS = ("flat", "ivf", "hnsw")
FLAT_BELOW, LISTS_BELOW = 10_000, 500_000  # vectors
LINKS, BREADTH = 32, 40  # of a graph: neighbors per vector, and candidates while it is built
KNOBS = {"hnsw": "efSearch", "ivf": "nprobe"}
WANTED = 0.98  # recall@10 that a search should reach
SAMPLE, NEAREST = 200, 10
FEW = 8  # if at most one in so many vectors is allowed, they are searched exactly
DEAD = 0.2  # share of removed vectors above which the index is built again
BROADEST = 2048  # candidates of a search in a graph
SAME = 1e-6  # difference of cosines, or relative difference of distances, that counts as none
FILE, IDS, FRAME = "faiss.index", "faiss-ids.npy", "faiss-frame.safetensors"
BLOCK = 16_384


def kind_for(count: int) -> str:
    """Return the kind of FAISS index for a number of vectors."""
    return "flat" if count < FLAT_BELOW else "ivf" if count < LISTS_BELOW else "hnsw"


class Faiss(Backend):
    """A FAISS index, with exact search among vectors that were added later.

    ``make`` increases the number of candidates of a search until it finds 98 % of the true neighbors of a sample;
    ``save`` reports what it reached as "recall@10". FAISS cannot be searched while vectors are added, and a graph
    cannot remove any: later vectors are searched separately until ``save`` adds them, and removed ones are filtered
    out.
    """

    def __init__(
        self,
        index: Any,
        own: Ids,
        vectors: Vectors,
        ids: Ids,
        context: BackendContext,
        *,
        trained: int,
        frame: Coordinates | None,
    ) -> None:
        self._context = replace(context, progress=None, known=None)
        self.name, self.kind, self.measure, self.trained = context.name, _kind(context), context.measure, trained
        self._index, self._frame = index, frame
        self._own = own  # ids of the rows of the FAISS index; some may have been removed
        self._exact = Exact(vectors, ids, measure=self.measure)  # for filters with few results, and to measure recall
        self._tail: list[tuple[Ids, Vectors]] = []
        self._later = Exact(vectors[:0], ids[:0], measure=self.measure)
        self._lock = threading.Lock()
        gone = ~np.isin(own, ids, assume_unique=True)
        self._alive: NDArray[np.bool_] | None = ~gone if gone.any() else None
        self.recall: float | None = None

    @classmethod
    def make(cls, vectors: Vectors, ids: Ids, context: BackendContext) -> Faiss:
        """Build an index, and tune it on a sample of the vectors."""
        frame, progress = _frame(vectors) if context.measure == "euclidean" else None, context.progress
        index = _trained(vectors, _kind(context), context.measure, frame)
        for start in range(0, len(ids), BLOCK):
            index.add(_placed(vectors[start : start + BLOCK], frame))
            if progress is not None:
                progress(min(start + BLOCK, len(ids)), len(ids))
        made = cls(index, ids, vectors, ids, context, trained=len(ids), frame=frame)
        made._tune(vectors, ids)
        return made

    @classmethod
    def open(cls, vectors: Vectors, ids: Ids, context: BackendContext, folder: Path, facts: Mapping[str, Any]) -> Faiss:
        index = _faiss().read_index(str(folder / FILE))
        own = np.load(folder / IDS, allow_pickle=False)
        sound = own.ndim == 1 and own.dtype == np.int64 and (np.diff(own) > 0).all() and np.isin(ids, own).all()
        if not sound or not index.is_trained or index.ntotal != len(own) or index.d != vectors.shape[1]:
            raise ValueError(f"{FILE} and {IDS} do not match the vectors")
        frame = None
        if (folder / FRAME).exists():
            center, about = read_tensors(folder / FRAME)
            frame = Coordinates(center["center"], float(about["factor"]))
        elif context.measure == "euclidean":
            frame = _frame(vectors)
            if frame.factor != 1 or bool(frame.center.any()):
                raise ValueError(f"{FRAME} is missing")
        trained = int(facts.get("trained", len(ids)))
        backend = cls(index, own, vectors, ids, context, trained=trained, frame=frame)
        backend.recall = facts.get("recall@10")
        if backend.kind in KNOBS:
            backend._turn(int(facts[KNOBS[backend.kind]]))
        return backend

    def add(self, ids: Ids, vectors: Vectors) -> None:
        self._tail.append((ids, vectors))
        self._later.add(ids, vectors)

    def remove(self, ids: Ids) -> None:
        with self._lock:
            rows = rows_of(self._own, ids)
            if len(rows):
                alive = np.ones(len(self._own), dtype=bool) if self._alive is None else self._alive.copy()
                alive[rows] = False
                self._alive = alive
            self._exact.remove(ids)
            self._later.remove(ids)

    def search(self, queries: Vectors, k: int, allowed: Ids | None = None) -> tuple[Scores, Ids]:
        if allowed is not None and len(allowed) * FEW < len(self._own):
            result = self._exact.search(queries, k, allowed)
        else:
            result = self._search(queries, k, allowed)
            if result[1].item(-1) == NO_ID or (len(queries) > 1 and result[1][:, -1].min() == NO_ID):
                self._exact.fill_up(result, queries, allowed)
        if not self._tail:
            return result
        return merged([result, self._later.search(queries, k, allowed)], k)

    def save(self, folder: Path, ids: Ids, vectors: Vectors) -> dict[str, Any]:
        """Add later vectors to a copy of the FAISS index, since this one is still searched, and write it."""
        faiss = _faiss()
        own = np.concatenate([self._own, *(each for each, _ in self._tail)])
        made: Faiss = self
        dead = len(own) - len(ids)
        if dead > DEAD * len(own) or (self.kind == "ivf" and len(ids) > 2 * self.trained):
            made = Faiss.make(vectors, ids, self._context)
        elif self._tail:
            index = faiss.clone_index(self._index)
            for _, rows in self._tail:
                index.add(_placed(rows, self._frame))
            made = Faiss(index, own, vectors, ids, self._context, trained=self.trained, frame=self._frame)
            made.recall = self.recall if self.kind == "flat" else made._measured(vectors, ids)
        with whole_file(folder / FILE) as draft:
            faiss.write_index(made._index, str(draft))
        with whole_file(folder / IDS) as draft, open(draft, "wb") as file:
            np.save(file, made._own)
        if made._frame is not None:
            write_tensors(folder / FRAME, {"center": made._frame.center}, {"factor": made._frame.factor})
        facts = {"trained": made.trained, "recall@10": made.recall}
        return facts if self.kind == "flat" else {**facts, KNOBS[self.kind]: made._knob}

    @property
    def _knob(self) -> int:
        return int(self._index.hnsw.efSearch if self.kind == "hnsw" else self._index.nprobe)

    @property
    def _find(self) -> Any:
        """The search of FAISS itself, even if ``faiss.contrib.torch_utils`` replaced it by one without parameters."""
        return getattr(self._index, "search_numpy", self._index.search)

    def _turn(self, value: int) -> None:
        if self.kind == "hnsw":
            self._index.hnsw.efSearch = value
        elif self.kind == "ivf":
            self._index.nprobe = value

    def _search(self, queries: Vectors, k: int, allowed: Ids | None) -> tuple[Scores, Ids]:
        """Search with FAISS, without vectors that were added later."""
        alive, queries = self._alive, _placed(queries, self._frame)
        if not len(self._own):
            return best(np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64), k)
        if allowed is None and alive is None:
            values, rows = self._find(queries, k)
        else:
            mask = np.zeros(len(self._own), dtype=bool) if allowed is not None else alive
            assert mask is not None
            if allowed is not None:
                mask[rows_of(self._own, allowed)] = True
                mask = mask if alive is None else mask & alive
            values, rows = self._find(queries, k, params=self._parameters(mask))
        ids, scores = self._own[rows], values
        if self._frame is not None:
            scores = distance_scores(values.clip(min=0).astype(np.float64) / self._frame.factor**2)
        if rows.item(-1) < 0 or (len(rows) > 1 and rows[:, -1].min() < 0):  # fewer than k were found
            nothing = rows < 0
            ids[nothing], scores[nothing] = NO_ID, -np.inf
        return scores, ids

    def _parameters(self, mask: NDArray[np.bool_]) -> Any:
        faiss = _faiss()
        chosen = faiss.IDSelectorBitmap(np.packbits(mask, bitorder="little"))
        if self.kind == "flat":
            return faiss.SearchParameters(sel=chosen)
        share = max(int(mask.sum()), 1) / len(mask)
        if self.kind == "ivf":
            lists = self._index.nlist
            return faiss.SearchParametersIVF(sel=chosen, nprobe=min(lists, math.ceil(self._knob / share)))
        # Paths of a graph lead through vectors that are not allowed, so a search must visit more of them.
        return faiss.SearchParametersHNSW(sel=chosen, efSearch=min(BROADEST, math.ceil(self._knob / share)))

    def _tune(self, vectors: Vectors, ids: Ids) -> None:
        """Double the number of candidates until recall is high enough."""
        if self.kind == "flat":  # searches everything
            self.recall = 1.0
            return
        most = BROADEST if self.kind == "hnsw" else int(self._index.nlist)
        value = min({"hnsw": 16, "ivf": 2}[self.kind], most)
        while True:
            self._turn(value)
            self.recall = self._measured(vectors, ids)
            if self.recall is None or self.recall >= WANTED or value >= most:
                return
            value = min(2 * value, most)

    def _measured(self, vectors: Vectors, ids: Ids) -> float | None:
        """Recall@10 for a sample of the vectors, rounded; None for a single vector.

        A vector that is as near as the tenth counts as correct.
        """
        count = min(NEAREST, len(ids) - 1)
        if count < 1:
            return None
        rows = np.unique(np.linspace(0, len(ids) - 1, SAMPLE).astype(np.int64))
        queries, own = vectors[rows], ids[rows, None]
        truth, others = self._exact.search(queries, count + 1)
        scores, seen = self._search(queries, count + 1, None)
        limits = np.sort(np.where(others == own, -np.inf, truth), axis=1)[:, -count]
        limits -= SAME * (1.0 if self.measure == "cosine" else np.abs(limits))
        right = ((scores >= limits[:, None]) & (seen != own) & (seen >= 0)).sum(axis=1).clip(max=count)
        return round(float(right.mean()) / count, 4)


def _kind(context: BackendContext) -> str:
    return one_of("kind", context.name.removeprefix("faiss:"), KINDS)


def _trained(vectors: Vectors, kind: str, measure: str, frame: Coordinates | None) -> Any:
    faiss = _faiss()
    metric = faiss.METRIC_INNER_PRODUCT if measure == "cosine" else faiss.METRIC_L2
    count, dim = vectors.shape
    if kind == "flat":
        return faiss.IndexFlat(dim, metric)
    if kind == "hnsw":
        graph = faiss.IndexHNSWFlat(dim, LINKS, metric)
        graph.hnsw.efConstruction = BREADTH
        return graph
    lists = max(1, min(round(4 * math.sqrt(count)), count // 39))  # FAISS warns of fewer than 39 vectors per list
    index = faiss.IndexIVFFlat(faiss.IndexFlat(dim, metric), dim, lists, metric)
    rows = np.unique(np.linspace(0, count - 1, min(count, 64 * lists)).astype(np.int64))
    index.train(_placed(vectors[rows], frame) if count else np.zeros((1, dim), dtype=np.float32))
    return index


def _frame(vectors: Vectors) -> Coordinates:
    """A frame in which float32 can compute distances of vectors, from products as well."""
    zero = Coordinates(torch.zeros(vectors.shape[1], dtype=torch.float64), 1.0)
    return (frame_for(*sum_and_lengths(as_vectors("vectors", vectors))) if len(vectors) else None) or zero


def _placed(vectors: Vectors, frame: Coordinates | None) -> Vectors:
    """Vectors [n, d] as FAISS gets them."""
    plain = np.ascontiguousarray(vectors, dtype=np.float32)
    return plain if frame is None else frame.place(torch.from_numpy(plain)).numpy()


def _faiss() -> Any:
    return require("the faiss backend", "faiss", "nearfar[faiss]", "faiss-cpu")
