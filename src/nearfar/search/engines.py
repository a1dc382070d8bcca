"""Embeds images in batches: in this process, or by the workers of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nearfar.data.store.decode import shared_decoder
from nearfar.networks.weights import save
from nearfar.search.encoder import Encoder, Model, Pixels
from nearfar.search.images import Images, ImageSource, digest, list_images
from nearfar.search.storage import Vectors
from nearfar.utils.atomic import whole_file
from nearfar.utils.system import connect_ray, prefetch
from nearfar.utils.validation import whole

ENGINES = ("local", "ray")
BATCHES = 16  # in the share of images that a worker gets at a time
RESTARTS = 3  # of a worker whose process or machine was lost


class Embedded(NamedTuple):
    """What is known about an image that was embedded."""

    vector: Vectors
    thumbnail: bytes
    hash: str


Outcome = Embedded | str  # of an image; text: why it cannot be read
Outcomes = Iterator[list[tuple[ImageSource, Outcome]]]
Embed = Callable[[Sequence[ImageSource]], Outcomes]


def embed_batches(images: Sequence[ImageSource], encoder: Encoder, size: int = 64) -> Outcomes:
    """Embed images in this process; files are decoded by worker processes."""
    decoder = shared_decoder()

    def work(source: ImageSource) -> tuple[Pixels, bytes, str] | str:
        try:
            image = source.read()
            return (*encoder.preprocess_with_thumbnail(image, decoder.decode), digest(image))
        except (OSError, ValueError) as error:  # not an image, or not readable
            return " ".join(str(error).split()) or type(error).__name__

    batch: list[tuple[ImageSource, tuple[Pixels, bytes, str] | str]] = []
    for number, pair in enumerate(zip(images, prefetch(work, images, ahead=2 * size), strict=True), start=1):
        batch.append(pair)
        if len(batch) == size or number == len(images):
            vectors = iter(encoder.vectors([ready[0] for _, ready in batch if not isinstance(ready, str)]))
            yield [
                (source, ready if isinstance(ready, str) else Embedded(next(vectors), *ready[1:]))
                for source, ready in batch
            ]
            batch = []


@contextmanager
def ray_engine(
    model: str | Path | Model,
    images: Images,
    *,
    device: str,
    batch_size: int,
    jobs: int | None,
    address: str | None,
    parts: Path | None = None,
) -> Iterator[Embed]:
    """Embed by the workers of a Ray cluster, which have the model and the images on shared storage.

    Each worker gets shares of the images and computes the same batches as a single process would.
    """
    if not isinstance(model, (str, Path)):
        raise ValueError("engine 'ray' needs the folder of a model that all machines can read, not a model")
    if not isinstance(images, (str, Path)):
        raise ValueError("engine 'ray' needs a folder or archive of images that all machines can read")
    size = BATCHES * whole("batch_size", batch_size)
    ray, started_here = connect_ray(address)
    from ray.util import ActorPool

    has = ray.cluster_resources()
    gpus = int(has.get("GPU", 0)) if device != "cpu" else 0
    count = (gpus or max(1, int(has.get("CPU", 1)))) if jobs is None else whole("jobs", jobs)
    wants = {"num_cpus": 1, "num_gpus": 1 if gpus else 0, "max_restarts": RESTARTS, "max_task_retries": RESTARTS}
    create = ray.remote(**wants)(_Worker).remote
    places = [Path(place).absolute() for place in (model, images)]
    kept = None if parts is None else parts.absolute()
    workers = [create(*places, "cuda" if gpus else "cpu", batch_size, kept) for _ in range(count)]

    def embed(images: Sequence[ImageSource]) -> Outcomes:
        shares = [images[start : start + size] for start in range(0, len(images), size)]
        asked = [(number, [image.name for image in share]) for number, share in enumerate(shares)]
        answers = ActorPool(workers).map(lambda worker, share: worker.embed.remote(*share), asked)
        for share, outcomes in zip(shares, answers, strict=True):
            yield list(zip(share, outcomes, strict=True))

    try:
        yield embed
    finally:
        for worker in workers:
            ray.kill(worker)
        if started_here:
            ray.shutdown()


def part_names(count: int, batch_size: int) -> list[str]:
    """Return the names of the files in which workers keep the shares of so many images."""
    return [f"{number:06}.npz" for number in range(-(-count // (BATCHES * batch_size)))]


class _Worker:
    """Embeds shares of images in a process of a Ray cluster."""

    def __init__(self, model: Path, images: Path, device: str, batch_size: int, parts: Path | None) -> None:
        self._encoder = Encoder(save.load(model), device=device)
        self._sources = {source.name: source for source in list_images(images, None)}
        self._batch_size, self._parts = batch_size, parts

    def embed(self, number: int, names: list[str]) -> list[Outcome]:
        """Embed the images of a share, or read its embeddings if they are there."""
        images = [self._sources.get(name, ImageSource(name, None, _gone)) for name in names]
        file = None if self._parts is None else self._parts / f"{number:06}.npz"
        if file is not None and file.is_file() and (kept := self._read(file, images)) is not None:
            return kept
        batches = embed_batches(images, self._encoder, self._batch_size)
        outcomes = [outcome for batch in batches for _, outcome in batch]
        if file is not None:
            self._write(file, names, outcomes)
            outcomes = [kept if isinstance(kept, str) else kept._replace(thumbnail=b"") for kept in outcomes]
        return outcomes

    def _read(self, file: Path, images: Sequence[ImageSource]) -> list[Outcome] | None:
        """The kept outcomes of a share; None if they are of another model or of other images."""
        with np.load(file, allow_pickle=False) as kept:
            about = {name: kept[name] for name in kept.files}
        if str(about["model"]) != self._encoder.fingerprint or about["names"].tolist() != [i.name for i in images]:
            return None
        if about["hashes"].tolist() != [_content(image) for image in images]:
            return None
        vectors = iter(about["vectors"])
        rows = zip(about["hashes"].tolist(), about["reasons"].tolist(), strict=True)
        return [reason or Embedded(next(vectors), b"", hash) for hash, reason in rows]

    def _write(self, file: Path, names: list[str], outcomes: Sequence[Outcome]) -> None:
        vectors = [outcome.vector for outcome in outcomes if isinstance(outcome, Embedded)]
        hashes = [
            outcome.hash if isinstance(outcome, Embedded) else _content(self._sources.get(name))
            for name, outcome in zip(names, outcomes, strict=True)
        ]
        with whole_file(file) as draft, open(draft, "wb") as out:
            np.savez(
                out,
                model=np.array(self._encoder.fingerprint),
                names=np.array(names),
                hashes=np.array(hashes),
                reasons=np.array([outcome if isinstance(outcome, str) else "" for outcome in outcomes]),
                vectors=np.stack(vectors) if vectors else np.empty((0, self._encoder.dim), dtype=np.float32),
            )


def _content(image: ImageSource | None) -> str:
    """The hash of an image; empty if it cannot be read."""
    try:
        return "" if image is None else digest(image.read())
    except OSError:
        return ""


def _gone() -> bytes:
    raise FileNotFoundError("it was removed meanwhile")
