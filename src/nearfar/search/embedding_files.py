"""Embeddings of images, and writing them to files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nearfar.networks.weights import save as saving
from nearfar.search.encoder import Encoder, Model
from nearfar.search.engines import ENGINES, Embed, embed_batches, ray_engine
from nearfar.search.images import FOLDER, Images, Labels, list_images
from nearfar.search.storage import Vectors
from nearfar.utils.atomic import whole_file
from nearfar.utils.folders import claim, claim_file
from nearfar.utils.progress import Watch, begin
from nearfar.utils.validation import one_of, whole

EXTENSIONS = (".npz", ".npy", ".safetensors")


@dataclass(frozen=True)
class EmbeddedImages:
    """Embeddings of images with their names and classes."""

    vectors: Vectors  # [n, d]
    names: tuple[str, ...]
    labels: tuple[str | None, ...]
    skipped: tuple[tuple[str, str], ...]  # files that are not images, and why
    fingerprint: str  # of the model

    def write(self, file: str | Path, *, force: bool = False) -> None:
        """Write .npz or .safetensors with "embeddings" and "labels", or .npy with the embeddings only.

        Labels are class numbers, −1 for none. Names, classes and the model's fingerprint are arrays of an .npz file,
        and metadata of a .safetensors file.
        """
        file = check_file(Path(file), force=force)
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


def check_file(file: Path, inputs: Sequence[Any] = (), *, force: bool = False) -> Path:
    """Return the path, or raise if embeddings cannot be written to it."""
    if file.suffix not in EXTENSIONS:
        raise ValueError(f"out is {str(file)!r}; its name must end in {', '.join(EXTENSIONS)}")
    return claim_file(file, "embeddings", inputs, force=force)


def embed(
    model: str | Path | Model,
    images: Images,
    *,
    labels: Labels = FOLDER,
    device: str = "auto",
    batch_size: int = 64,
    engine: str = "local",
    jobs: int | None = None,
    ray_address: str | None = None,
    parts: str | Path | None = None,
    watch: Watch | None = None,
) -> EmbeddedImages:
    """Compute the embeddings of images."""
    whole("batch_size", batch_size)
    kept = None if parts is None or one_of("engine", engine, ENGINES) == "local" else Path(parts)
    if kept is not None:
        claim(kept, "embedding", [model, images])
    listed = list_images(images, labels)
    loaded = saving.load(model) if isinstance(model, (str, Path)) else model
    progress = begin(watch, "embedding")
    vectors: list[Vectors] = []
    names: list[str] = []
    classes: list[str | None] = []
    skipped: list[tuple[str, str]] = []
    workers: AbstractContextManager[Embed]
    if one_of("engine", engine, ENGINES) == "ray":
        workers = ray_engine(
            model, images, device=device, batch_size=batch_size, jobs=jobs, address=ray_address, parts=kept
        )
    else:
        workers = nullcontext(partial(embed_batches, encoder=Encoder(loaded, device=device), size=batch_size))
    with workers as embed_all:
        for batch in embed_all(listed):
            for image, outcome in batch:
                if isinstance(outcome, str):
                    skipped.append((image.name, outcome))
                    continue
                vectors.append(outcome.vector)
                names.append(image.name)
                classes.append(image.label)
            progress(len(names) + len(skipped), len(listed))
    if not names:
        raise ValueError(f"none of the images can be read; the first reason: {': '.join(skipped[0])}")
    embeddings = np.stack(vectors)
    broken = np.flatnonzero(~np.isfinite(embeddings).all(1))
    if len(broken):
        raise ValueError(
            f"{len(broken):,} of {len(embeddings):,} embeddings have NaN or infinity; the first is that of "
            f"{names[broken[0]]!r}: check the input, or the weights of the model"
        )
    fingerprint = saving.fingerprint(loaded)
    return EmbeddedImages(embeddings, tuple(names), tuple(classes), tuple(skipped), fingerprint)
