"""Decodes a dataset once into a store that opens in milliseconds."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from nearfar.data import splits
from nearfar.data.datasets.base import Dataset, UnreadableError
from nearfar.data.store import duplicates
from nearfar.data.store.decode import ASPECTS, BadImage, shared_decoder, shrink
from nearfar.data.store.sources import Arrays, Source
from nearfar.data.store.store import ABOUT, FORMAT, INDEX, PIXELS, BadFile, Store, finalize
from nearfar.utils.folders import claim, is_ours, remove, set_aside
from nearfar.utils.progress import Progress
from nearfar.utils.system import cache_folder, prefetch, processors
from nearfar.utils.validation import one_of, whole

ON_ERROR = ("fail", "skip")
BLOCK = 64  # images per line of the journal, the most that a kill can lose
SHOWN = 20  # bad files that an error lists

JOURNAL = "journal.jsonl"

Pixels = NDArray[np.uint8]
Result = Pixels | BadFile


class BadFilesError(ValueError):
    """Files of a dataset could not be decoded."""

    def __init__(self, bad: tuple[BadFile, ...], count: int) -> None:
        self.bad, self.count = bad, count
        super().__init__(self.message('on_error="skip"'))

    def message(self, remedy: str) -> str:
        """Name the files, and what continues without them."""
        bad = self.bad
        names = "; ".join(f"{file.name} ({file.reason})" for file in bad[:SHOWN])
        more = f"; and {len(bad) - SHOWN:,} more" if len(bad) > SHOWN else ""
        if len(bad) < self.count:
            more += f". {remedy} continues without them"
        return f"{len(bad):,} of {self.count:,} files could not be decoded: {names}{more}"


def store_folder(dataset: Dataset, *, cache: str | Path | None = None, side: int = 256) -> Path:
    """Return the folder in which :func:`prepare` stores a dataset, whether it exists or not."""
    settings = {"source": dataset.source.fingerprint(), **_settings(side, "keep", None)}
    return _folder(dataset.name, cache, settings)


def stores_of(dataset: Dataset, cache: str | Path | None = None) -> list[Store]:
    """Return all stores of a dataset's present files, with any settings."""
    folder, present = Path(cache or cache_folder()), dataset.source.fingerprint()
    stores = []
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if entry.name.startswith("."):  # drafts and locks
            continue
        try:
            store = Store.open(entry)
        except ValueError:
            continue
        if store.about.get("source") == present:
            stores.append(store)
    return stores


def check_images(
    dataset: Dataset, *, workers: int | None = None, progress: Progress | None = None
) -> tuple[Sequence[BadFile], list[str]]:
    """Decode all images; return files that fail, and a line for each test item that is in a training class as well."""
    bad: list[BadFile] = []
    if dataset.is_encoded:
        every = np.zeros(len(dataset), dtype=duplicates.KIND)
        every["pixels"] = -1 - np.arange(len(dataset), dtype=np.int64)  # files that fail are no duplicates
        threads = whole("workers", workers) if workers is not None else processors()
        with closing(decoded(dataset.source, range(len(dataset)), {}, threads)) as results:
            for row, result in enumerate(results):
                if isinstance(result, BadFile):
                    bad.append(result)
                else:
                    every[row] = duplicates.signature(result)
                if progress is not None:
                    progress(row + 1, len(dataset))
    else:
        store = dataset.source.array if dataset.is_vectors else prepare(dataset)  # type: ignore[attr-defined]
        every = duplicates.signatures(store, progress=progress)
    try:
        split = splits.standard(dataset)
    except ValueError:  # a single class is neither for training nor for the test
        return bad, []
    shared = duplicates.between(every, split.train, np.concatenate([*split.test.values()]))
    return bad, duplicates.told(shared, [dataset.source.name(row) for row in range(len(dataset))])


def prepare(
    dataset: Dataset,
    *,
    cache: str | Path | None = None,
    side: int = 256,
    aspect: str = "keep",
    channels: int | None = None,
    on_error: str = "fail",
    workers: int | None = None,
    progress: Progress | None = None,
) -> Store:
    """Decode the images of a dataset into a store, or open the store of an earlier call.

    It can be interrupted at any time and continues when called again. If two processes prepare the same dataset, one
    works and the other waits for it. Images that are already in an array stay in memory and nothing is written.

    Args:
        dataset: The dataset.
        cache: Folder of stores; by default $NEARFAR_CACHE or ~/.cache/nearfar. The name of a store's folder contains
            a hash of the files and of these settings, so a change of either creates a new store.
        side: Length of the shorter side; smaller images are not enlarged.
        aspect: "keep", or "squash" to side × side.
        channels: 3 for color, 1 for grayscale; by default 3 for files, and the channels of an array.
        on_error: What to do with files that cannot be decoded. "fail": raise an error that lists them. "skip": leave
            them out; the store lists them.
        workers: Files to read and decode at once, by default and at most the number of processors.
        progress: Called with the number of files done and the number of all files.

    Raises:
        BadFilesError: If files cannot be decoded and ``on_error`` is "fail", or if none can be decoded.
        UnreadableError: If files or folders could not be looked at and ``on_error`` is "fail".

    Example:
        >>> from nearfar.data.store.sources import Arrays
        >>> images = np.zeros((4, 8, 8), dtype=np.uint8)
        >>> data = Dataset("four", Arrays(images), np.array([0, 0, 1, 1]), ("jay", "wren"), {"all": np.arange(4)})
        >>> len(prepare(data))
        4
    """
    settings = _settings(side, aspect, channels)
    one_of("on_error", on_error, ON_ERROR)
    if workers is not None:
        whole("workers", workers)
    if dataset.is_vectors:
        raise ValueError(f"dataset {dataset.name} holds vectors; only images are prepared")
    if not len(dataset):
        raise ValueError(f"dataset {dataset.name} is empty; there is nothing to prepare")
    if dataset.unreadable and on_error == "fail":
        raise UnreadableError(dataset.name, dataset.unreadable, '; on_error="skip" continues without them')
    if isinstance(dataset.source, Arrays):
        return _of_array(dataset.source.array, side, aspect, channels)
    about = {"source": dataset.source.fingerprint(), **settings}
    folder = _folder(dataset.name, cache, about)
    store = _finished_store(folder, dataset.source)
    if store is None:
        threads = workers or processors()
        store = _make(folder, dataset.source, settings, {"dataset": dataset.name, **about}, threads, progress)
    if store.bad and (on_error == "fail" or not len(store)):
        raise BadFilesError(store.bad, len(dataset))
    return store


def _settings(side: int, aspect: str, channels: int | None) -> dict[str, Any]:
    if channels not in (None, 1, 3):
        raise ValueError(f"channels is {channels!r}; allowed are 1 and 3")
    return {"side": whole("side", side), "aspect": one_of("aspect", aspect, ASPECTS), "channels": channels or 3}


def _folder(name: str, cache: str | Path | None, settings: dict[str, Any]) -> Path:
    text = json.dumps({"format": FORMAT, **settings}, sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:20]
    safe = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in name)[:40]
    return Path(cache or cache_folder()) / f"{safe}-{key}"


def _finished_store(folder: Path, source: Source) -> Store | None:
    """Open the store of a folder; None if it is missing or damaged, or if a file that it skipped is readable now."""
    with suppress(ValueError):
        store = Store.open(folder)
        for bad in store.bad:
            if bad.unreadable:
                with suppress(OSError):
                    source.read(bad.index)
                    return None
        return store
    return None


def _make(
    folder: Path,
    source: Source,
    settings: dict[str, Any],
    about: dict[str, Any],
    threads: int,
    progress: Progress | None,
) -> Store:
    """Decode the missing images, and move the finished folder to its place."""
    drafted = folder.with_name(f".{folder.name}.draft")
    count = len(source)

    def report(now: int) -> None:
        if progress is not None:
            progress(now, count)

    def keep_waiting() -> bool:
        report(files_done(drafted))  # by the process that holds the lock
        return False

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")).acquire(cancel_check=keep_waiting, poll_interval=0.2):
            store = _finished_store(folder, source)  # made by the previous holder of the lock
            if store is not None:
                return store
            claim(drafted, "store")
            with closing(Draft(drafted, settings["channels"])) as draft:
                report(draft.done)
                _fill(draft, source, settings, threads, report)
            sizes = np.array(draft.sizes, dtype=np.int32).reshape(-1, 2)
            bad = [vars(file) for file in draft.bad]
            finalize(drafted, np.array(draft.rows, dtype=np.int64), sizes, settings["channels"], {**about, "bad": bad})
            if is_ours(folder, "store"):  # damaged or outdated
                remove(folder, (ABOUT, INDEX, PIXELS, duplicates.SIGNATURES, JOURNAL))
            if folder.exists():  # it has other files
                set_aside(folder)
            os.replace(drafted, folder)
            (folder / JOURNAL).unlink(missing_ok=True)  # last: a draft without a journal starts again
            return Store.open(folder)
    except OSError as error:
        done = files_done(drafted)
        kept = f" {done:,} of {count:,} images are done and kept: run it again to continue." if done else ""
        raise OSError(f"cannot write to {folder.parent}: {error.strerror or error}.{kept}") from error


class Draft:
    """The folder of an unfinished store. Only the holder of its lock may open it.

    Pixels are appended to one file. When those of a block of images are on the disk, a line of a journal records their
    sizes. To continue, pixels after the last complete block are cut off.
    """

    def __init__(self, folder: Path, channels: int) -> None:
        self.folder, self.channels = folder, channels
        folder.mkdir(parents=True, exist_ok=True)
        self.done = 0  # files of the dataset, good and bad
        self.rows: list[int] = []
        self.sizes: list[tuple[int, int]] = []
        self.bad: list[BadFile] = []
        self._pixels = open(folder / PIXELS, "ab+", buffering=0)  # noqa: SIM115
        self._journal = open(folder / JOURNAL, "ab+", buffering=0)  # noqa: SIM115
        self._resume()

    def add(self, results: Sequence[Result]) -> None:
        """Append a block of images."""
        sizes: list[tuple[int, ...] | None] = []
        for result in results:
            if isinstance(result, BadFile):
                sizes.append(None)
                continue
            _write(self._pixels, result.reshape(-1).data)
            sizes.append(result.shape[:2])
        bad = [result for result in results if isinstance(result, BadFile)]
        block = {"first": self.done, "sizes": sizes, "bad": [asdict(file) for file in bad]}
        os.fsync(self._pixels.fileno())
        _write(self._journal, json.dumps(block).encode() + b"\n")
        self._count(block)

    def close(self) -> None:
        """Close the files."""
        self._pixels.close()
        self._journal.close()

    def _resume(self) -> None:
        """Keep the complete blocks and cut off the rest."""
        self._journal.seek(0)
        kept_lines, kept_pixels, size = 0, 0, os.fstat(self._pixels.fileno()).st_size
        for line in self._journal.read().splitlines(keepends=True):
            block = _block(line)
            if block is None or block["first"] != self.done:
                break
            length = self.channels * sum(size[0] * size[1] for size in block["sizes"] if size is not None)
            if kept_pixels + length > size:
                break
            self._count(block)
            kept_lines, kept_pixels = kept_lines + len(line), kept_pixels + length
        self._journal.truncate(kept_lines)
        self._pixels.truncate(kept_pixels)

    def _count(self, block: dict[str, Any]) -> None:
        for index, size in enumerate(block["sizes"], start=block["first"]):
            if size is not None:
                self.rows.append(index)
                self.sizes.append((size[0], size[1]))
        self.bad += [BadFile(**file) for file in block["bad"]]
        self.done = block["first"] + len(block["sizes"])


def files_done(folder: Path) -> int:
    """Return the number of files that are done in a draft, possibly of another process."""
    try:
        lines = (folder / JOURNAL).read_bytes().splitlines(keepends=True)
    except OSError:
        return 0
    block = next((block for block in map(_block, reversed(lines)) if block is not None), None)
    return 0 if block is None else int(block["first"]) + len(block["sizes"])


def _block(line: bytes) -> dict[str, Any] | None:
    """Parse a line of the journal; None if it is incomplete."""
    try:
        block: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return block if line.endswith(b"\n") and block.keys() == {"first", "sizes", "bad"} else None


def _write(file: IO[bytes], data: bytes | memoryview) -> None:
    """Write all data: an unbuffered write may stop early, for example on a full disk."""
    view = memoryview(data)
    while len(view):
        view = view[file.write(view) :]


def _fill(draft: Draft, source: Source, settings: dict[str, Any], threads: int, report: Callable[[int], None]) -> None:
    """Decode the remaining images, in order."""
    block: list[Result] = []
    rest = range(draft.done, len(source))
    with closing(decoded(source, rest, settings, threads)) as results:
        for result in results:
            block.append(result)
            if len(block) == BLOCK:
                draft.add(block)
                block = []
            report(draft.done + len(block))
        if block:
            draft.add(block)


def decoded(
    source: Source, indices: Iterable[int], settings: dict[str, Any], threads: int
) -> Generator[Result, None, None]:
    """Decode images, in order. Threads read the files and wait for the worker processes that decode them."""
    decoder = shared_decoder()

    def work(index: int) -> Result:
        try:
            return source.pixels(index, decoder.decode, **settings)
        except BadImage as error:
            return BadFile(index, source.name(index), error.reason)
        except OSError as error:
            return BadFile(index, source.name(index), f"cannot be read: {error.strerror or error}", unreadable=True)

    return prefetch(work, indices, workers=threads, ahead=4 * threads, name="decode")


def _of_array(array: Pixels, side: int, aspect: str, channels: int | None) -> Store:
    """Return a store of images that need no decoding; not copied unless they have to be resized or converted."""
    height, width = array.shape[1:3]
    has = array.shape[3] if array.ndim == 4 else 1
    fits = min(height, width) <= side if aspect == "keep" else height == width == side
    if fits and channels in (None, has):
        return Store.of_arrays(array)
    images = [shrink(image, side, aspect) for image in array.reshape(*array.shape[:3], has)]
    if channels == 3 and has == 1:
        images = [image.repeat(3, axis=2) for image in images]
    elif channels == 1 and has == 3:
        weights = np.array([299, 587, 114])  # as Pillow converts to grayscale
        images = [((image @ weights + 500) // 1000).astype(np.uint8)[:, :, None] for image in images]
    return Store.of_arrays(images)
