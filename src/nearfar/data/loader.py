"""Batches of images or vectors, ready for a network.

A :class:`Loader` draws indices, plans crops and effects, and passes them to a :class:`Fetcher`: one for vectors, one
for images on a CPU, and one for images on another device.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearfar.data.sampling.base import Indices, Labels, Sampler
from nearfar.data.store.store import Store
from nearfar.data.transforms.effects import ROWS, Effects
from nearfar.data.transforms.gpu import Layout
from nearfar.data.transforms.random_streams import stream
from nearfar.data.transforms.view import Plan, View, planar, window
from nearfar.utils.preprocessing import Normalization
from nearfar.utils.system import prefetch
from nearfar.utils.validation import one_of, whole

MODES = ("auto", "resident", "streaming")
FREE_SHARE = 0.5  # share of a GPU's free memory that "auto" allows the pixels to take
AHEAD = 2  # batches that are prepared ahead, or as many as there are threads
BLOCK = 1 << 28  # bytes per copy of a large array to a device


@dataclass(frozen=True)
class Batch:
    """One batch.

    Args:
        images: Images [b, channels, height, width] or vectors [b, d].
        labels: Labels [b], int64.
        indices: Positions of the items in the store [b], int64.

    Example:
        >>> len(Batch(torch.zeros(2, 8), torch.tensor([0, 1]), torch.tensor([4, 7])))
        2
    """

    images: Tensor
    labels: Tensor
    indices: Tensor

    def __len__(self) -> int:
        return len(self.labels)


Batches = Generator[Batch, None, None]


class Loader:
    """Loads batches from a store of images or from an array of vectors.

    Both modes return the same batches. "resident" keeps all pixels on the device: only a table of numbers is sent per
    batch, and crops are taken on the device. "streaming" leaves the pixels in memory or in a file; threads send the
    pixels of the next batches ahead of their use. On a CPU the modes differ only in whether a file is read into memory
    first.

    Args:
        store: A :class:`~nearfar.data.store.store.Store`, or vectors [n, d].
        labels: Integer labels [n], one per image or vector.
        view: Crops and effects for images; None for vectors.
        normalization: Normalization that the network expects; None returns uint8 pixels.
        device: Device of the batches.
        mode: "resident", "streaming" or "auto", which is resident on a GPU if the pixels fit into half of its free
            memory.
        workers: Threads; 0 loads in the calling thread.
        seed: Seed of crops, flips and effects.

    Example:
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
        workers: int = 2,
        seed: int = 0,
    ) -> None:
        labels = labels.cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
        if labels.shape != (len(store),) or labels.dtype.kind not in "iu":
            raise ValueError(
                f"labels is {labels.dtype} of shape {labels.shape}; needed are {len(store)} whole numbers, "
                "one for each item of the store"
            )
        self.labels = labels.astype(np.int64)
        self.device = torch.device(device)
        self.workers, self.seed = whole("workers", workers, low=0), whole("seed", seed, low=0)
        self.store = store
        self.mode, kind = one_of("mode", mode, MODES), self.device.type
        if mode == "auto":
            fits = kind == "cuda" and store.nbytes <= FREE_SHARE * torch.cuda.mem_get_info(self.device)[0]
            self.mode = "resident" if fits else "streaming"
        self._data: Any = store.pixels if isinstance(store, Store) else store
        if self.mode == "resident" and isinstance(store, Store) and kind == "cpu":
            self._data = np.array(self._data)
        elif self.mode == "resident":
            self._data = to_device(self._data, self.device, torch.uint8 if isinstance(store, Store) else torch.float32)
        self._set_view(view, normalization)

    def _set_view(self, view: View | None, normalization: Normalization | None) -> None:
        self.view, self.normalization = view, normalization
        self._fetcher: Fetcher
        if isinstance(self.store, Store):
            if view is None:
                raise ValueError("view is None; images need a View")
            normalizer = Normalizer(normalization, self.store.channels, self.device)
            kind = CPUImages if self.device.type == "cpu" else DeviceImages
            self._fetcher = kind(self.store, self._data, normalizer)
            return
        if view is not None or normalization is not None:
            raise ValueError("view and normalization are for images; the store holds vectors")
        self._fetcher = VectorFetcher(self._data, self.device)

    def viewed(self, view: View) -> Loader:
        """Return a loader of the same data, not copied, with another view."""
        other = copy.copy(self)
        other._set_view(view, self.normalization)
        return other

    def epoch(
        self,
        sampler: Sampler,
        epoch: int,
        *,
        rows: NDArray[Any] | None = None,
        start: int = 0,
        rank: int = 0,
        ranks: int = 1,
    ) -> Batches:
        """Iterate over the batches of an epoch.

        Crops and flips depend on seed, epoch, step and rank only; effects on seed, epoch, step and the position in the
        whole batch.

        Args:
            sampler: Sampler of the batches.
            epoch: Epoch, from 0.
            rows: Items of the store that the sampler's positions refer to; None if position i is item i.
            start: First step.
            rank: Number of this process, from 0.
            ranks: Number of processes, each of which gets its share of the batches.
        """
        whole("start", start, low=0, high=len(sampler))
        sampler.check_ranks(ranks)
        places = self._checked_indices(rows)
        if len(places) != len(sampler.labels):
            raise ValueError(f"the sampler draws from {len(sampler.labels)} items, but there are {len(places)}")
        batch_at = sampler.batch_function(epoch)

        def load(step: int) -> Any:
            share = sampler.share(batch_at(step), rank, ranks)
            return self._load(places[share], "views", epoch, step, rank, ranks)

        return self._run(load, range(start, len(sampler)))

    def all(
        self,
        indices: NDArray[Any] | None = None,
        *,
        batch_size: int = 256,
        draw: int = 0,
        steps: range | None = None,
    ) -> Batches:
        """Iterate over items in the given order; the last batch may be smaller.

        Args:
            indices: Items of the store; None for all.
            batch_size: Items per batch.
            draw: Which draw of random crops, of any number of independent ones.
            steps: Which of the batches; None for all.
        """
        places, size = self._checked_indices(indices), whole("batch_size", batch_size)

        def load(step: int) -> Any:
            return self._load(places[step * size : (step + 1) * size], "evaluation", draw, step)

        return self._run(load, range(-(-len(places) // size)) if steps is None else steps)

    def _checked_indices(self, indices: NDArray[Any] | None) -> Indices:
        if indices is None:
            return np.arange(len(self.store), dtype=np.int64)
        indices = np.asarray(indices)
        if indices.ndim != 1 or (indices.dtype.kind not in "iu" and len(indices)):
            raise ValueError(f"indices is {indices.dtype} of shape {indices.shape}; needed are whole numbers [n]")
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self.store):
            wrong = indices[(indices < 0) | (indices >= len(self.store))][0]
            raise ValueError(f"indices contains {wrong}; the store holds {len(self.store)} items")
        return indices.astype(np.int64)

    def _load(self, indices: Indices, purpose: str, epoch: int, step: int, rank: int = 0, ranks: int = 1) -> Any:
        def draw(effect: str) -> np.random.Generator:
            return stream(self.seed, f"{purpose} {effect}", epoch, step)

        plan, effects = None, None
        if self.view is not None and isinstance(self.store, Store):
            plan = self.view.plan(self.store.sizes[indices], stream(self.seed, purpose, epoch, step, rank))
            effects = self.view.effects(len(indices), draw, rank=rank, ranks=ranks)
        return self._fetcher.load(indices, plan, self.labels[indices], effects)

    def _run(self, load: Callable[[int], Any], steps: range) -> Batches:
        """Yield batches in order; worker threads end with the iterator, however it ends."""
        fetcher = self._fetcher
        if self.workers == 0 or not fetcher.uses_threads:
            for step in steps:
                yield Batch(*fetcher.finish(load(step)))
            return
        ahead = max(AHEAD, self.workers)
        with closing(prefetch(load, steps, workers=self.workers, ahead=ahead, name="nearfar-loader")) as loads:
            for loaded in loads:
                yield Batch(*fetcher.finish(loaded))


class Normalizer:
    """Converts pixels to the input of a network."""

    def __init__(self, normalization: Normalization | None, channels: int, device: torch.device) -> None:
        if normalization is not None and channels not in (1, normalization.channels):
            raise ValueError(f"images have {channels} channels; this normalization reads {normalization.channels}")
        self.normalization, self.device = normalization, device
        self.out_channels = channels if normalization is None else len(normalization.mean)
        # Whether the network reads channels in the order BGR.
        self.reverse = normalization is not None and normalization.order == "BGR" and channels == 3
        # Computed once: constants copied from the host for each batch would make it wait for the device.
        given = normalization or Normalization(mean=(0.0,), std=(1.0,), range=255.0)
        self.factor, self.shift = given.constants(device)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Normalize float32 pixels whose channels are in the order of the network."""
        if self.normalization is None:
            return pixels.round().to(torch.uint8, memory_format=torch.contiguous_format)
        out = torch.empty(len(pixels), self.out_channels, *pixels.shape[2:], dtype=torch.float32, device=pixels.device)
        torch.mul(pixels, self.factor, out=out)
        return out.sub_(self.shift)


Fetched = tuple[Tensor, Tensor, Tensor]  # images, labels and indices


class Fetcher:
    """Fetches batches in two steps: one on the host, and one on the device that receives them."""

    uses_threads = True  # whether the first step is enough work for threads

    def load(self, indices: Indices, plan: Plan | None, labels: Indices, effects: Effects | None) -> Any:
        """Do what the host does for a batch, in any thread."""
        raise NotImplementedError

    def finish(self, loaded: Any) -> Fetched:
        """Do the rest on the device; there is none on a CPU."""
        fetched: Fetched = loaded
        return fetched


class CPUImages(Fetcher):
    """Fetches images for a CPU: each is cropped and normalized while it is in the processor's cache."""

    def __init__(self, store: Store, pixels: NDArray[np.uint8], normalizer: Normalizer) -> None:
        self.store, self.pixels, self.normalizer = store, pixels, normalizer
        self._factor, self._shift = normalizer.factor.numpy(), normalizer.shift.numpy()

    def load(self, indices: Indices, plan: Plan | None, labels: Indices, effects: Effects | None) -> Fetched:
        assert plan is not None
        plain = self.normalizer.normalization is None
        shape = (len(indices), self.normalizer.out_channels, *plan.size)
        images: NDArray[Any] = np.empty(shape, dtype=np.uint8 if plain else np.float32)
        step = -1 if self.normalizer.reverse else 1
        for i, image in enumerate(stored_images(self.store, self.pixels, indices)):
            shown: NDArray[Any] = planar(window(image, plan, i)[..., ::step])
            if effects is not None:
                shown = effects.recolor_one(shown, i, reverse=self.normalizer.reverse)
            if plain:
                images[i] = shown if effects is None else shown.round()
            else:
                np.multiply(shown, self._factor, out=images[i])
                np.subtract(images[i], self._shift, out=images[i])
            if effects is not None:
                effects.erase_one(images[i], i)
        return torch.from_numpy(images), torch.from_numpy(labels), torch.from_numpy(indices)


@dataclass(frozen=True)
class _DeviceBatch:
    """A batch on its way to a device."""

    layout: Layout
    table: Tensor  # rows of the layout, then of the effects if there are any, then labels and indices
    effects: Effects | None
    pixels: Tensor
    copied: Any = None  # CUDA event after the copy


class DeviceImages(Fetcher):
    """Fetches images that are on a device, or sends it the pixels that a batch needs, ahead of their use."""

    def __init__(self, store: Store, pixels: Tensor | NDArray[np.uint8], normalizer: Normalizer) -> None:
        self.store, self.pixels, self.normalizer = store, pixels, normalizer
        self.device = normalizer.device
        self.uses_threads = not isinstance(pixels, Tensor)
        streams = self.uses_threads and self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if streams else None  # type: ignore[no-untyped-call]

    def load(self, indices: Indices, plan: Plan | None, labels: Indices, effects: Effects | None) -> _DeviceBatch:
        assert plan is not None
        touched, channels = plan.touched(), self.store.channels
        if isinstance(self.pixels, Tensor):
            pixels, pitch = self.pixels, self.store.sizes[indices, 1].astype(np.int64) * channels
            starts = self.store.offsets[indices] + touched[:, 0] * pitch + touched[:, 1] * channels
        else:
            pixels, starts = self._packed(self.pixels, indices, touched)
            pitch = touched[:, 3] * channels
        layout = Layout.of(plan, touched, starts, pitch, channels)
        # All numbers of a batch are one table for one copy; floats of effects are stored as their bits.
        effect_rows = [] if effects is None else [effects.table(len(indices)).view(np.int64)]
        table = torch.from_numpy(np.vstack([layout.table, *effect_rows, labels, indices]))
        if self.device.type == "cuda":
            table = table.pin_memory()
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            if self.uses_threads:
                pixels = pixels.to(self.device, non_blocking=True)
            table = table.to(pixels.device, non_blocking=True)
            copied = None if self.stream is None else self.stream.record_event()
        return _DeviceBatch(layout, table, effects, pixels, copied)

    def _packed(self, pixels: NDArray[np.uint8], indices: Indices, touched: Indices) -> tuple[Tensor, Indices]:
        """Return the pixels that a batch needs in one tensor, and where those of each image begin."""
        lengths = touched[:, 2] * touched[:, 3] * self.store.channels
        ends = lengths.cumsum()
        packed = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=self.stream is not None)
        target = packed.numpy()
        for i, image in enumerate(stored_images(self.store, pixels, indices)):
            top, left, height, width = touched[i].tolist()
            block = target[ends[i] - lengths[i] : ends[i]].reshape(height, width, -1)
            block[:] = image[top : top + height, left : left + width]
        return packed, ends - lengths

    def finish(self, loaded: _DeviceBatch) -> Fetched:
        if loaded.copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(loaded.copied)
            for tensor in (loaded.pixels, loaded.table):
                tensor.record_stream(current)  # its memory must not be reused before this stream is done with it
        layout, table, normalizer = loaded.layout, loaded.table, self.normalizer
        rows = len(layout.table)
        images = layout.render(loaded.pixels, table[:rows], reverse=normalizer.reverse)
        if loaded.effects is None:
            images = normalizer(images)
        else:
            numbers = table[rows : rows + ROWS].view(torch.float64).float()
            images = loaded.effects.recolor(images, numbers, reverse=normalizer.reverse)
            images = loaded.effects.erase(normalizer(images), numbers)
        return images, table[-2], table[-1]


class VectorFetcher(Fetcher):
    """Fetches vectors, which are on the device or are sent to it."""

    def __init__(self, vectors: Tensor | NDArray[Any], device: torch.device) -> None:
        self.vectors, self.device = vectors, device
        self.uses_threads = not isinstance(vectors, Tensor)

    def load(self, indices: Indices, plan: Plan | None, labels: Indices, effects: Effects | None) -> Any:
        tensors = [torch.from_numpy(np.stack([labels, indices]))]
        if not isinstance(self.vectors, Tensor):
            tensors.append(torch.from_numpy(self.vectors[indices]).float())
        return [tensor.pin_memory() for tensor in tensors] if self.device.type == "cuda" else tensors

    def finish(self, loaded: list[Tensor]) -> Fetched:
        (labels, indices), *rows = (tensor.to(self.device, non_blocking=True) for tensor in loaded)
        vectors = self.vectors.index_select(0, indices) if isinstance(self.vectors, Tensor) else rows[0]
        return vectors, labels, indices


def stored_images(store: Store, pixels: NDArray[np.uint8], indices: Indices) -> list[NDArray[np.uint8]]:
    """Return images of a store, each [height, width, channels], as views of ``pixels``."""
    starts, sizes = store.offsets[indices].tolist(), store.sizes[indices].tolist()
    shapes = [(height, width, store.channels) for height, width in sizes]
    return [
        pixels[start : start + shape[0] * shape[1] * shape[2]].reshape(shape)
        for start, shape in zip(starts, shapes, strict=True)
    ]


def to_device(array: NDArray[Any], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Copy a large array to a device block by block, so that a memory map need not fit into memory."""
    out = torch.empty(array.shape, dtype=dtype, device=device)
    step = max(1, BLOCK // max(1, array[:1].nbytes))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)  # it is only read
        for start in range(0, len(array), step):
            out[start : start + step] = torch.from_numpy(array[start : start + step])
    return out
