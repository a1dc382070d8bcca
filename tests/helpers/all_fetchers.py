"""All fetchers of images, here on a CPU."""

from __future__ import annotations

import torch

from nearfar.data.loader import CPUImages, Fetcher, Normalizer, ResidentImages, StreamedImages
from nearfar.data.store.store import Store
from nearfar.utils.preprocessing import Normalization


def fetchers(store: Store, normalization: Normalization | None) -> dict[str, Fetcher]:
    """Return the fetchers by name."""
    normalizer = Normalizer(normalization, store.channels, torch.device("cpu"))
    return {
        "cpu": CPUImages(store, store.pixels, normalizer),
        "resident": ResidentImages(store, torch.from_numpy(store.pixels), normalizer),
        "streamed": StreamedImages(store, store.pixels, normalizer),
    }
