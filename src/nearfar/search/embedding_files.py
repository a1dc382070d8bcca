"""Embeddings of pictures in a file, for whoever wants to go on with them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nearfar.networks.weights import save as saving
from nearfar.search.encoder import Encoder, Model
from nearfar.search.pictures import FOLDER, Labels, Pictures, gather
from nearfar.search.storage.table import Vectors
from nearfar.search.update import batches
from nearfar.utils.atomic import whole_file
from nearfar.utils.progress import Watch
from nearfar.utils.validation import whole

ENDINGS = (".npz", ".npy", ".safetensors")


@dataclass(frozen=True)
class Embedded:
    """What a model makes of pictures.

    Args:
        vectors: [n, d], as the model gives them.
        names: [n].
        labels: [n]; None where a picture has no class.
        skipped: Name and reason of what is no picture.
        fingerprint: Of the model.
    """

    vectors: Vectors
    names: tuple[str, ...]
    labels: tuple[str | None, ...]
    skipped: tuple[tuple[str, str], ...]
    fingerprint: str

    def write(self, file: str | Path) -> None:
        """As .npz or .safetensors with "embeddings" and "labels" (class numbers, −1 for none); .npy has only vectors.

        Names, classes and the model's fingerprint are arrays of an .npz file, and metadata of a .safetensors file.
        """
        file = check_file(Path(file))
        classes = sorted({label for label in self.labels if label is not None})
        places = {label: place for place, label in enumerate(classes)}
        codes = np.array([-1 if label is None else places[label] for label in self.labels], dtype=np.int64)
        with whole_file(file) as draft, open(draft, "wb") as out:
            if file.suffix == ".npy":
                np.save(out, self.vectors)
            elif file.suffix == ".npz":
                words = [np.array(self.names), np.array(classes), np.array(self.fingerprint)]
                np.savez(out, embeddings=self.vectors, labels=codes, names=words[0], classes=words[1], model=words[2])
            else:
                from safetensors.numpy import save

                about = {"names": json.dumps(self.names), "classes": json.dumps(classes), "model": self.fingerprint}
                out.write(save({"embeddings": self.vectors, "labels": codes}, metadata=about))


def check_file(file: Path) -> Path:
    """That embeddings can be written there, before anything is computed."""
    if file.suffix not in ENDINGS:
        raise ValueError(f"out is {str(file)!r}; its name must end in {', '.join(ENDINGS)}")
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ValueError(f"out is {str(file)!r}; needed is a file in a folder that exists")
    return file


def embed(
    model: str | Path | Model,
    pictures: Pictures,
    *,
    labels: Labels = FOLDER,
    device: str = "auto",
    batch_size: int = 64,
    watch: Watch | None = None,
) -> Embedded:
    """What a model makes of pictures; parameters as those of ``Index.build``."""
    whole("batch_size", batch_size)
    listed = gather(pictures, labels)
    encoder = Encoder(saving.load(model) if isinstance(model, (str, Path)) else model, device=device)
    progress = None if watch is None else watch("embedding")
    parts, names, classes, skipped, done = [], [], [], [], 0
    for batch in batches(listed, encoder, batch_size):
        good = []
        for each, seen in batch:
            if isinstance(seen, Exception):
                skipped.append((each.name, " ".join(str(seen).split())))
            else:
                good.append(seen[0])
                names.append(each.name)
                classes.append(each.label)
        parts.append(encoder.vectors(good))
        done += len(batch)
        if progress is not None:
            progress(done, len(listed))
    if not names:
        raise ValueError(f"none of the pictures can be read; the first reason: {': '.join(skipped[0])}")
    return Embedded(np.concatenate(parts), tuple(names), tuple(classes), tuple(skipped), encoder.fingerprint)
