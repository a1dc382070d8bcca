"""Stored images, and the batches that all fetchers make of them, here on a CPU."""

import numpy as np
import torch

from nearfar.data.loader import CPUImages, DeviceImages, Normalizer
from nearfar.data.store.store import Store
from nearfar.data.transforms.view import planar, window

LABELS = np.arange(40) // 4


def store_of(channels=3):
    """40 images of several sizes."""
    rng = np.random.default_rng(0)
    sizes = [(20 + 3 * (i % 7), 24 + 5 * (i % 4)) for i in range(40)]
    return Store.of_arrays([rng.integers(0, 256, (*size, channels), dtype=np.uint8) for size in sizes])


def render(images, plan):
    """The windows of a plan, one after the other: uint8 [b, channels, *size]."""
    return torch.stack([torch.from_numpy(planar(window(image, plan, i))) for i, image in enumerate(images)])


def fetched(store, normalization, plan, indices=None, effects=None):
    """Images, labels and indices of a batch, by the name of the fetcher."""
    indices = np.arange(len(store)) if indices is None else indices
    normalizer = Normalizer(normalization, store.channels, torch.device("cpu"))
    fetchers = {
        "cpu": CPUImages(store, store.pixels, normalizer),
        "resident": DeviceImages(store, torch.from_numpy(store.pixels), normalizer),
        "streamed": DeviceImages(store, store.pixels, normalizer),
    }
    return {
        name: fetcher.finish(fetcher.load(indices, plan, LABELS[indices], effects))
        for name, fetcher in fetchers.items()
    }


def assert_same(batches, expected):
    """The batches are the same in all that they hold."""
    for batch, other in zip(batches, expected, strict=True):
        for name in ("images", "labels", "indices"):
            assert torch.equal(getattr(batch, name), getattr(other, name))
