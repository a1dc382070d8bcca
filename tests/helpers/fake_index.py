"""An index with colors as vectors, so that tests of the server need no network."""

from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from nearfar.metrics import Threshold
from nearfar.search import Index
from nearfar.search.encoder import thumbnail
from nearfar.search.storage import IndexStorage

SIDE = 4
DIM = 3 * SIDE * SIDE
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # where folders do not wait for a disk


class Colors:
    """Encodes images as tiny images, centered and of unit length."""

    def preprocess_with_thumbnail(self, image):
        return image, thumbnail(image)

    def vectors(self, images):
        images = [Image.fromarray(image) if isinstance(image, np.ndarray) else image for image in images]
        small = [np.asarray(image.convert("RGB").resize((SIDE, SIDE)), dtype=np.float32) for image in images]
        vectors = np.stack(small).reshape(len(images), -1) - 127.5
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)


class FakeIndex(Index):
    """An index in a folder of its own that counts the images of each batch."""

    def __init__(self, count=0, classes=4, *, model="fake"):
        self.batches, self._place = [], TemporaryDirectory(dir=MEMORY)
        known = None if model is None else {"name": model, "fingerprint": model}
        settings = {"dim": DIM, "measure": "cosine", "backend": "exact", "model": known}
        storage = IndexStorage.create(Path(self._place.name) / "i", settings, np.empty((0, DIM), np.float32), [])
        super().__init__(storage, encoder=Colors())
        self.add_images(
            [(f"{n % classes}/{n}.png", picture(n, classes), f"class {n % classes}", {}) for n in range(count)]
        )

    def embed(self, images):
        self.batches.append(len(images))
        return self.encoder.vectors(images)

    def map_with_ids(self, method="pca"):
        ids, vectors = self.storage.table.everything()
        return ids, vectors[:, :2]

    def refreshed(self):
        return self  # no other process changes it


def picture(number, classes=4, side=32):
    """Images of one class are similar."""
    base = np.random.default_rng(number % classes).integers(0, 256, (SIDE, SIDE, 3))
    noise = np.random.default_rng(1000 + number).integers(-40, 40, (SIDE, SIDE, 3))
    small = np.clip(base + noise, 0, 255).astype(np.uint8)
    return Image.fromarray(small).resize((side, side), Image.Resampling.NEAREST)


def encoded(image, kind="PNG", **settings):
    file = BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def threshold(similarity):
    """A threshold with made-up error rates."""
    rates = {"false_accept": 0.001, "false_reject": 0.0425, "f1": 0.9, "accuracy": 0.99}
    return Threshold(similarity=similarity, measure="cosine", criterion="f1", positives=80, negatives=1000, **rates)
