"""How pictures and vectors get from where they are kept to where a network is.

The work of a feed is done in two parts: ``load`` on the host, in any thread, and ``finish`` where the batch is wanted.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearfar.data.buffers import Buffers
from nearfar.data.store.store import Store
from nearfar.data.transforms.cpu import planar, window
from nearfar.data.transforms.effects import ROWS, Effects
from nearfar.data.transforms.gpu import Layout
from nearfar.data.transforms.view import Plan
from nearfar.utils.normalization import Normalization

Indices = NDArray[np.int64]
BLOCK = 1 << 28  # bytes that go to a device together


class Feed(Protocol):
    """Gives the images of indices."""

    instant: bool  # whether loading is too little work for threads

    def load(self, indices: Indices, plan: Plan | None, labels: Indices, effects: Effects | None = None) -> Any:
        """What the host has to do."""

    def finish(self, loaded: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Images, labels and indices on the device."""


class Finish:
    """From pixels to what the network reads; without a normalization they stay pixels, uint8.

    Args:
        normalization: What the network wants, or None.
        dtype: Of what is normalised.
        channels: Of the pictures.
        device: Where it is done.
    """

    def __init__(
        self, normalization: Normalization | None, dtype: torch.dtype, channels: int, device: torch.device
    ) -> None:
        if normalization is not None and channels not in (1, normalization.channels):
            raise ValueError(f"pictures have {channels} channels; this normalization reads {normalization.channels}")
        self.normalization, self.dtype, self.channels, self.device = normalization, dtype, channels, device
        # Once and not for every batch: constants that come from the host would make it wait for the device.
        given = normalization or Normalization(mean=(0.0,), std=(1.0,), range=255.0)
        self.factor, self.shift = given.constants(device)

    @property
    def reverse(self) -> bool:
        """Whether the network reads blue first."""
        return self.normalization is not None and self.normalization.order == "BGR" and self.channels == 3

    @property
    def out_channels(self) -> int:
        return self.channels if self.normalization is None else len(self.normalization.mean)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Of float32 pixels whose channels are in the network's order."""
        if self.normalization is None:
            return pixels.round().to(torch.uint8, memory_format=torch.contiguous_format)
        out = torch.empty(len(pixels), self.out_channels, *pixels.shape[2:], dtype=torch.float32, device=pixels.device)
        torch.mul(pixels, self.factor, out=out)
        return out.sub_(self.shift).to(self.dtype)


class HostPictures:
    """Pictures for a CPU: each is rendered and normalised while it is in the cache."""

    instant = False

    def __init__(self, store: Store, pixels: NDArray[np.uint8], finish: Finish) -> None:
        self.store, self.pixels, self.normalize = store, pixels, finish
        self._factor, self._shift = finish.factor.numpy(), finish.shift.numpy()
        self._buffers = Buffers(keep=4)

    def load(
        self, indices: Indices, plan: Plan | None, labels: Indices, effects: Effects | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert plan is not None
        plain = self.normalize.normalization is None
        kind = np.uint8 if plain else np.float32
        images = self._buffers.take((len(indices), self.normalize.out_channels, *plan.size), kind)
        step = -1 if self.normalize.reverse else 1
        for i, picture in enumerate(pictures(self.store, self.pixels, indices)):
            shown: NDArray[Any] = planar(window(picture, plan, i)[..., ::step])
            if effects is not None:
                shown = effects.recoloured_one(shown, i, reverse=self.normalize.reverse)
            if plain:
                images[i] = shown if effects is None else shown.round()
            else:
                np.multiply(shown, self._factor, out=images[i])
                np.subtract(images[i], self._shift, out=images[i])
            if effects is not None:
                effects.wipe_one(images[i], i)
        tensor = torch.from_numpy(images)
        return tensor if plain else tensor.to(self.normalize.dtype), torch.from_numpy(labels), torch.from_numpy(indices)

    def finish(self, loaded: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        return loaded


@dataclass(frozen=True)
class _Order:
    """A batch on its way to a device."""

    layout: Layout
    table: Tensor  # the layout's, that of effects where there are any, and two more rows: labels and indices
    effects: Effects | None = None
    pixels: Tensor | None = None
    ready: Any = None  # the event of a copy under way


class ResidentPictures:
    """Pictures that lie on the device; only a table of numbers travels."""

    instant = True

    def __init__(self, store: Store, packed: Tensor, finish: Finish) -> None:
        self.store, self.packed, self.normalize = store, packed, finish

    def load(self, indices: Indices, plan: Plan | None, labels: Indices, effects: Effects | None = None) -> _Order:
        assert plan is not None
        touched, channels = plan.touched(), self.store.channels
        pitch = self.store.sizes[indices, 1].astype(np.int64) * channels
        starts = self.store.offsets[indices] + touched[:, 0] * pitch + touched[:, 1] * channels
        layout = Layout.of(plan, touched, starts, pitch, channels)
        table = _table(layout, effects, labels, indices)
        return _Order(layout, _travelling(table, self.packed.device), effects)

    def finish(self, loaded: _Order) -> tuple[Tensor, Tensor, Tensor]:
        return _finished(loaded, self.packed, self.normalize)


class StreamedPictures:
    """Pictures that stay on the host; of each batch the pixels that are needed travel, ahead of their use."""

    instant = False

    def __init__(self, store: Store, pixels: NDArray[np.uint8], finish: Finish) -> None:
        self.store, self.pixels, self.normalize = store, pixels, finish
        self.device = finish.device
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def load(self, indices: Indices, plan: Plan | None, labels: Indices, effects: Effects | None = None) -> _Order:
        assert plan is not None
        touched, channels = plan.touched(), self.store.channels
        lengths = touched[:, 2] * touched[:, 3] * channels
        ends = lengths.cumsum()
        packed = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=self.stream is not None)
        target = packed.numpy()
        for i, picture in enumerate(pictures(self.store, self.pixels, indices)):
            top, left, height, width = touched[i].tolist()
            place = target[ends[i] - lengths[i] : ends[i]].reshape(height, width, channels)
            place[:] = picture[top : top + height, left : left + width]
        layout = Layout.of(plan, touched, ends - lengths, touched[:, 3] * channels, channels)
        table = _table(layout, effects, labels, indices)
        if self.stream is None:
            return _Order(layout, _travelling(table, self.device), effects, packed)
        with torch.cuda.stream(self.stream):
            sent = packed.to(self.device, non_blocking=True)
            return _Order(layout, _travelling(table, self.device), effects, sent, self.stream.record_event())

    def finish(self, loaded: _Order) -> tuple[Tensor, Tensor, Tensor]:
        assert loaded.pixels is not None
        if loaded.ready is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(loaded.ready)
            for tensor in (loaded.pixels, loaded.table):
                tensor.record_stream(current)  # its memory is not to be used again before this is done
        return _finished(loaded, loaded.pixels, self.normalize)


class ResidentVectors:
    """Vectors that lie on the device."""

    instant = True

    def __init__(self, vectors: Tensor) -> None:
        self.vectors = vectors

    def load(self, indices: Indices, plan: Plan | None, labels: Indices, effects: Effects | None = None) -> Tensor:
        return _travelling(np.stack([labels, indices]), self.vectors.device)

    def finish(self, loaded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.vectors.index_select(0, loaded[1]), loaded[0], loaded[1]


class StreamedVectors:
    """Vectors that stay on the host."""

    instant = False

    def __init__(self, vectors: NDArray[Any], dtype: torch.dtype, device: torch.device) -> None:
        self.vectors, self.dtype, self.device = vectors, dtype, device

    def load(
        self, indices: Indices, plan: Plan | None, labels: Indices, effects: Effects | None = None
    ) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(self.vectors[indices]).to(self.dtype)
        pair = torch.from_numpy(np.stack([labels, indices]))
        return (rows.pin_memory(), pair.pin_memory()) if self.device.type == "cuda" else (rows, pair)

    def finish(self, loaded: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        rows, pair = (part.to(self.device, non_blocking=True) for part in loaded)
        return rows, pair[0], pair[1]


def pictures(store: Store, pixels: NDArray[np.uint8], indices: Indices) -> list[NDArray[np.uint8]]:
    """Pictures of a store, [height, width, channels] each, out of ``pixels``: its own or a copy of them."""
    starts, sizes = store.offsets[indices].tolist(), store.sizes[indices].tolist()
    shapes = [(height, width, store.channels) for height, width in sizes]
    return [
        pixels[start : start + shape[0] * shape[1] * shape[2]].reshape(shape)
        for start, shape in zip(starts, shapes, strict=True)
    ]


def to_device(array: NDArray[Any], device: torch.device, dtype: torch.dtype) -> Tensor:
    """A large array, block by block, so that a memory map need not fit the host's memory."""
    out = torch.empty(array.shape, dtype=dtype, device=device)
    step = max(1, BLOCK // max(1, array[:1].nbytes))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)  # nobody here writes
        for start in range(0, len(array), step):
            out[start : start + step] = torch.from_numpy(array[start : start + step])
    return out


def _travelling(table: NDArray[np.int64], device: torch.device) -> Tensor:
    """Numbers on their way to the device; the host does not wait for them."""
    tensor = torch.from_numpy(table)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _table(layout: Layout, effects: Effects | None, labels: Indices, indices: Indices) -> NDArray[np.int64]:
    """All numbers of a batch in one table, which travels once; those of effects go by their bits."""
    own = [] if effects is None else [effects.table(len(indices)).view(np.int64)]
    return np.vstack([layout.table, *own, labels, indices])


def _finished(order: _Order, packed: Tensor, finish: Finish) -> tuple[Tensor, Tensor, Tensor]:
    layout, effects, rows = order.layout, order.effects, len(order.layout.table)
    pixels = layout.render(packed, order.table[:rows], reverse=finish.reverse)
    if effects is None:
        images = finish(pixels)
    else:
        numbers = order.table[rows : rows + ROWS].view(torch.float64).float()
        images = effects.wiped(finish(effects.recoloured(pixels, numbers, reverse=finish.reverse)), numbers)
    return images, order.table[-2], order.table[-1]
