"""All ways from a store to a batch, here on a CPU."""

from __future__ import annotations

import torch

from nearfar.data.feeds import Feed, Finish, HostPictures, ResidentPictures, StreamedPictures
from nearfar.data.store.store import Store
from nearfar.utils import normalization as pixels


def feeds(store: Store, normalization: pixels.Normalization | None) -> dict[str, Feed]:
    """By name."""
    finish = Finish(normalization, torch.float32, store.channels, torch.device("cpu"))
    return {
        "host": HostPictures(store, store.pixels, finish),
        "resident": ResidentPictures(store, torch.from_numpy(store.pixels), finish),
        "streamed": StreamedPictures(store, store.pixels, finish),
    }
