"""All fetchers of images, here on a CPU."""

import torch

from nearfar.data.loader import CPUImages, Normalizer, ResidentImages, StreamedImages


def fetchers(store, normalization):
    """Return the fetchers by name."""
    normalizer = Normalizer(normalization, store.channels, torch.device("cpu"))
    return {
        "cpu": CPUImages(store, store.pixels, normalizer),
        "resident": ResidentImages(store, torch.from_numpy(store.pixels), normalizer),
        "streamed": StreamedImages(store, store.pixels, normalizer),
    }
