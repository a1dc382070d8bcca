"""Batches of images or vectors, ready for a network."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearfar.data.feeds import (
    Feed,
    Finish,
    HostPictures,
    ResidentPictures,
    ResidentVectors,
    StreamedPictures,
    StreamedVectors,
    to_device,
)
from nearfar.data.sampling.base import Indices, Labels, Sampler
from nearfar.data.store.store import Store
from nearfar.data.transforms.random_streams import stream
from nearfar.data.transforms.view import View
from nearfar.utils.normalization import Normalization
from nearfar.utils.validation import one_of, whole

MODES = ("auto", "resident", "streaming")
FREE_SHARE = 0.5  # of a GPU's free memory that "auto" lets the pixels take


@dataclass(frozen=True)
class Batch:
    """What a step sees.

    Args:
        images: [b, channels, height, width], or vectors [b, d].
        labels: [b], int64.
        indices: [b], int64: which pictures of the store these are.
    """

    images: Tensor
    labels: Tensor
    indices: Tensor

    def __len__(self) -> int:
        return len(self.labels)


Batches = Generator[Batch, None, None]


class Loader:
    """Feeds a network from a store of pictures, or from vectors.

    Two modes give the same batches. ``resident``: all pixels lie on the device, a batch is a table of numbers, and
    views are taken there. ``streaming``: pixels stay where they are, in memory or in a file, and threads send what the
    next batches need ahead. On a CPU the modes differ only in whether a file is read into memory first.

    Args:
        store: A :class:`~nearfar.data.store.store.Store`, or vectors [n, d].
        labels: [n], whole numbers, one for each picture or vector.
        view: How pictures are looked at; none for vectors.
        normalization: What the network wants; without one, images are uint8 pixels.
        device: Where batches are wanted.
        mode: "auto" is resident on a GPU where pixels take at most ``memory_limit``, else streaming.
        memory_limit: In bytes, half of the GPU's free memory unless told.
        workers: Threads; 0 does the work where the batch is asked for.
        prefetch: Batches that are prepared ahead.
        seed: Of crops, flips and what else a view draws.
        dtype: Of normalised images and of vectors.

    >>> store = Store.of_arrays(np.zeros((6, 8, 8), dtype=np.uint8))
    >>> loader = Loader(store, np.arange(6), view=View(size=8, crop="none", flip=False), workers=0)
    >>> [batch.labels.tolist() for batch in loader.all(batch_size=4)]
    [[0, 1, 2, 3], [4, 5]]
    """

    def __init__(
        self,
        store: Store | NDArray[Any],
        labels: Labels,
        *,
        view: View | None = None,
        normalization: Normalization | None = None,
        device: str | torch.device = "cpu",
        mode: str = "auto",
        memory_limit: int | None = None,
        workers: int = 2,
        prefetch: int = 2,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        labels = labels.cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
        if labels.shape != (len(store),) or labels.dtype.kind not in "iu":
            raise ValueError(
                f"labels is {labels.dtype} of shape {labels.shape}; needed are {len(store)} whole numbers, "
                "one for each picture of the store"
            )
        if not dtype.is_floating_point:
            raise ValueError(f"dtype is {dtype}; floating point is needed")
        self.labels = labels.astype(np.int64)
        self.device = torch.device(device)
        self.workers, self.prefetch = whole("workers", workers, low=0), whole("prefetch", prefetch)
        self.seed, self.dtype = whole("seed", seed, low=0), dtype
        self.store = store
        self.mode = self._chosen(one_of("mode", mode, MODES), memory_limit)
        self._kept = self._placed()
        self._look(view, normalization)

    def _chosen(self, mode: str, limit: int | None) -> str:
        if mode != "auto":
            return mode
        if self.device.type != "cuda":
            return "streaming"
        free = int(FREE_SHARE * torch.cuda.mem_get_info(self.device)[0])
        return "resident" if self.store.nbytes <= (free if limit is None else limit) else "streaming"

    def _placed(self) -> Any:
        """Pixels or vectors where this mode wants them."""
        array = self.store.pixels if isinstance(self.store, Store) else self.store
        if self.mode == "streaming":
            return array
        if isinstance(self.store, Store):
            return np.array(array) if self.device.type == "cpu" else to_device(array, self.device, torch.uint8)
        return to_device(array, self.device, self.dtype)

    def _look(self, view: View | None, normalization: Normalization | None) -> None:
        self.view, self.normalization = view, normalization
        self._feed: Feed
        if isinstance(self.store, Store):
            if view is None:
                raise ValueError("view is None; pictures need a View")
            finish = Finish(normalization, self.dtype, self.store.channels, self.device)
            if self.device.type == "cpu":
                self._feed = HostPictures(self.store, self._kept, finish)
            elif self.mode == "resident":
                self._feed = ResidentPictures(self.store, self._kept, finish)
            else:
                self._feed = StreamedPictures(self.store, self._kept, finish)
            return
        if view is not None or normalization is not None:
            raise ValueError("view and normalization are for pictures; the store holds vectors")
        resident = self.mode == "resident"
        self._feed = ResidentVectors(self._kept) if resident else StreamedVectors(self._kept, self.dtype, self.device)

    def viewed(self, view: View | None, normalization: Normalization | None = None) -> Loader:
        """The same pictures, not copied, in another view; the normalization stays unless another is given."""
        other = copy.copy(self)
        other._look(view, self.normalization if normalization is None else normalization)
        return other

    def epoch(self, sampler: Sampler, epoch: int, *, rows: NDArray[Any] | None = None, start: int = 0) -> Batches:
        """The batches of an epoch, from step ``start`` on.

        ``rows`` says which pictures of the store the sampler's positions stand for; without them, position i is
        picture i. Crops and flips depend on seed, epoch, step and rank alone; what else a view draws, on seed, epoch,
        step and the place in the batch of all ranks.
        """
        whole("start", start, low=0, high=len(sampler))
        places = self._places(rows)
        if len(places) != len(sampler.labels):
            raise ValueError(f"the sampler draws from {len(sampler.labels)} pictures and there are {len(places)}")
        draw = sampler.drawing(epoch)

        def load(step: int) -> Any:
            return self._load(places[draw(step)], "views", epoch, step, sampler.rank, sampler.ranks)

        return self._run(load, range(start, len(sampler)))

    def all(self, indices: NDArray[Any] | None = None, *, batch_size: int = 256) -> Batches:
        """Pictures in this order, all of the store unless told; the last batch may be smaller."""
        places, size = self._places(indices), whole("batch_size", batch_size)

        def load(step: int) -> Any:
            return self._load(places[step * size : (step + 1) * size], "evaluation", 0, step)

        return self._run(load, range(-(-len(places) // size)))

    def _places(self, indices: NDArray[Any] | None) -> Indices:
        if indices is None:
            return np.arange(len(self.store), dtype=np.int64)
        indices = np.asarray(indices)
        if indices.ndim != 1 or (indices.dtype.kind not in "iu" and len(indices)):
            raise ValueError(f"indices is {indices.dtype} of shape {indices.shape}; needed are whole numbers [n]")
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self.store):
            wrong = indices[(indices < 0) | (indices >= len(self.store))][0]
            raise ValueError(f"indices contains {wrong}; the store holds {len(self.store)} pictures")
        return indices.astype(np.int64)

    def _load(self, indices: Indices, purpose: str, epoch: int, step: int, rank: int = 0, ranks: int = 1) -> Any:
        def draw(effect: str) -> np.random.Generator:
            return stream(self.seed, f"{purpose} {effect}", epoch, step)

        plan, effects = None, None
        if self.view is not None and isinstance(self.store, Store):
            plan = self.view.plan(self.store.sizes[indices], stream(self.seed, purpose, epoch, step, rank))
            effects = self.view.effects(len(indices), draw, rank=rank, ranks=ranks)
        return self._feed.load(indices, plan, self.labels[indices], effects)

    def _run(self, load: Callable[[int], Any], steps: range) -> Batches:
        """Batches in order, loaded by threads that end with the iterator, however it ends."""
        feed = self._feed
        if self.workers == 0 or feed.instant:
            for step in steps:
                yield Batch(*feed.finish(load(step)))
            return
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="nearfar-loader")
        ahead: deque[Future[Any]] = deque()
        try:
            for step in steps:
                ahead.append(pool.submit(load, step))
                if len(ahead) > self.prefetch:
                    yield Batch(*feed.finish(ahead.popleft().result()))
            while ahead:
                yield Batch(*feed.finish(ahead.popleft().result()))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
