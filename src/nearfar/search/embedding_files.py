"""Embeddings of images, and writing them to files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nearfar.networks.weights import save as saving
from nearfar.search.encoder import Encoder, Model
from nearfar.search.images import FOLDER, Images, Labels, list_images
from nearfar.search.storage import Vectors
from nearfar.search.update import preprocessed_batches
from nearfar.utils.atomic import whole_file
from nearfar.utils.progress import Watch
from nearfar.utils.validation import whole

EXTENSIONS = (".npz", ".npy", ".safetensors")


@dataclass(frozen=True)
class EmbeddedImages:
    """Embeddings of images with their names and classes.

    Args:
        vectors: Embeddings [n, d].
        names: Names [n] of the images.
        labels: Classes [n]; None for an image without a class.
        skipped: Names of files that are not images, each with the reason.
        fingerprint: Fingerprint of the model.
    """

    vectors: Vectors
    names: tuple[str, ...]
    labels: tuple[str | None, ...]
    skipped: tuple[tuple[str, str], ...]
    fingerprint: str

    def write(self, file: str | Path) -> None:
        """Write .npz or .safetensors with "embeddings" and "labels", or .npy with the embeddings only.

        Labels are class numbers, −1 for none. Names, classes and the model's fingerprint are arrays of an .npz file,
        and metadata of a .safetensors file.

        Args:
            file: The file; its extension selects the format.
        """
        file = check_file(Path(file))
        classes = sorted({label for label in self.labels if label is not None})
        numbers = {label: number for number, label in enumerate(classes)}
        codes = np.array([-1 if label is None else numbers[label] for label in self.labels], dtype=np.int64)
        with whole_file(file) as draft, open(draft, "wb") as out:
            if file.suffix == ".npy":
                np.save(out, self.vectors)
            elif file.suffix == ".npz":
                words = [np.array(self.names), np.array(classes), np.array(self.fingerprint)]
                np.savez(out, embeddings=self.vectors, labels=codes, names=words[0], classes=words[1], model=words[2])
            else:
                from safetensors.numpy import save

                details = {"names": json.dumps(self.names), "classes": json.dumps(classes), "model": self.fingerprint}
                out.write(save({"embeddings": self.vectors, "labels": codes}, metadata=details))


def check_file(file: Path) -> Path:
    """Raise ValueError unless embeddings can be written to a file.

    Args:
        file: The file.

    Returns:
        The same file.
    """
    if file.suffix not in EXTENSIONS:
        raise ValueError(f"out is {str(file)!r}; its name must end in {', '.join(EXTENSIONS)}")
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ValueError(f"out is {str(file)!r}; it must be a file in an existing folder")
    return file


def embed(
    model: str | Path | Model,
    images: Images,
    *,
    labels: Labels = FOLDER,
    device: str = "auto",
    batch_size: int = 64,
    watch: Watch | None = None,
) -> EmbeddedImages:
    """Compute the embeddings of images.

    Args:
        model: A folder with model.safetensors and model.json, the name of a network, or a model.
        images: A folder or archive of images, a list of files, or a dataset.
        labels: "folder", a mapping from names to classes, or None.
        device: Device for the model: "auto", "cpu", "cuda", …
        batch_size: Number of images per forward pass.
        watch: Receives the progress.

    Returns:
        The embeddings of all images that can be read.
    """
    whole("batch_size", batch_size)
    listed = list_images(images, labels)
    encoder = Encoder(saving.load(model) if isinstance(model, (str, Path)) else model, device=device)
    progress = None if watch is None else watch("embedding")
    parts, names, classes, skipped, done = [], [], [], [], 0
    for batch in preprocessed_batches(listed, encoder, batch_size):
        good = []
        for each, outcome in batch:
            if isinstance(outcome, Exception):
                skipped.append((each.name, " ".join(str(outcome).split())))
            else:
                good.append(outcome[0])
                names.append(each.name)
                classes.append(each.label)
        parts.append(encoder.vectors(good))
        done += len(batch)
        if progress is not None:
            progress(done, len(listed))
    if not names:
        raise ValueError(f"none of the images can be read; the first reason: {': '.join(skipped[0])}")
    return EmbeddedImages(np.concatenate(parts), tuple(names), tuple(classes), tuple(skipped), encoder.fingerprint)
