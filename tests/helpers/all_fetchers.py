"""All fetchers of images, here on a CPU."""

import torch

from nearfar.data.loader import CPUImages, DeviceImages, Normalizer


def fetchers(store, normalization):
    """Return the fetchers by name."""
    normalizer = Normalizer(normalization, store.channels, torch.device("cpu"))
    return {
        "cpu": CPUImages(store, store.pixels, normalizer),
        "resident": DeviceImages(store, torch.from_numpy(store.pixels), normalizer),
        "streamed": DeviceImages(store, store.pixels, normalizer),
    }
