"""Small indexes: digits as picture files, a network that was never trained, and vectors in groups."""

import numpy as np
import torch
from PIL import Image

from nearfar import data, networks
from nearfar.networks import Embedder
from nearfar.networks.weights import save


def model(seed=0, dim=8):
    """A network for digits; the same for the same seed."""
    torch.manual_seed(seed)
    made = networks.create("small_cnn", dim=dim, size=8)
    assert isinstance(made, Embedder)
    return made.eval()


def model_folder(folder, seed=0):
    return save.save(model(seed), folder).parent


def digit(number):
    """A picture of 8 × 8."""
    return np.asarray(data.open("digits").source.array[number])


def photos(folder, count=20):
    """Digits in class folders, as PNG files."""
    digits = data.open("digits")
    for number in range(count):
        file = folder / f"digit {digits.labels[number]}" / f"{number:03}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digit(number)).save(file)
    return folder


def vectors(count=300, dim=16, seed=0):
    """Noisy groups of ten."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((count // 10 + 1, dim))
    return (centres[np.arange(count) // 10] + 0.6 * rng.standard_normal((count, dim))).astype(np.float32)


def scores_by_hand(points, queries, measure):
    """One pair at a time: cosines, or minus the distances, [q, n]."""
    found = np.empty((len(queries), len(points)))
    for i, query in enumerate(queries.astype(np.float64)):
        for j, point in enumerate(points.astype(np.float64)):
            if measure == "cosine":
                found[i, j] = query @ point / np.linalg.norm(query) / np.linalg.norm(point)
            else:
                found[i, j] = -np.linalg.norm(query - point)
    return found
