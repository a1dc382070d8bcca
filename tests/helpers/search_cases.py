"""Small indexes: digits as picture files, a network that was never trained, and vectors in groups."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

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
    """One query at a time in float64: cosines, products, or minus the distances, [q, n]."""
    points, queries = points.astype(np.float64), queries.astype(np.float64)
    if measure == "euclidean":
        distances = np.stack([np.sqrt(((query - points) ** 2).sum(1)) for query in queries])
        return -np.minimum(distances, np.finfo(np.float32).max)
    if measure == "cosine":
        points, queries = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (points, queries))
    return np.stack([(query * points).sum(1) for query in queries])


def ranked_by_hand(points, queries, k, measure):
    """Rows and scores of the best; of scores that are the same in float32, the lower row is first."""
    scores = scores_by_hand(points, queries, measure)
    order = np.argsort(-scores.astype(np.float32), axis=1, kind="stable")[:, :k]
    return order, np.take_along_axis(scores, order, 1)


def unit(points):
    """Vectors of length one, or of zero."""
    lengths = np.linalg.norm(points.astype(np.float64), axis=1, keepdims=True)
    return (points / np.where(lengths == 0, 1, lengths)).astype(np.float32)


@contextmanager
def repeated(check, threads=3):
    """Repeat a check in threads until the block ends; raises what one of them raised."""
    done = threading.Event()

    def repeat():
        while not done.is_set():
            check()

    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(repeat) for _ in range(threads)]
        try:
            yield
        finally:
            done.set()
        for thread in running:
            thread.result()
