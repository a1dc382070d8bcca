"""Decode a data set once, into a store that opens in milliseconds ever after."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearfar.data.datasets.base import Dataset
from nearfar.data.store.decode import ASPECTS, BadImage, decode, shrink
from nearfar.data.store.sources import Arrays, Source
from nearfar.data.store.store import FORMAT, Bad, Store, seal
from nearfar.data.store.writer import JOURNAL, Draft, Result, finished
from nearfar.utils.paths import cache_folder
from nearfar.utils.progress import Progress
from nearfar.utils.system import locked, processors
from nearfar.utils.validation import one_of, whole

ON_ERROR = ("fail", "skip")
BLOCK = 64  # pictures between two lines of the journal: what a kill can cost
SHOWN = 20  # bad files that an error names

Pixels = NDArray[np.uint8]


class BadFiles(ValueError):
    """Files of a data set that gave no picture: ``bad`` has all of them, the message the first twenty."""

    def __init__(self, bad: tuple[Bad, ...], count: int) -> None:
        names = "; ".join(f"{one.name} ({one.reason})" for one in bad[:SHOWN])
        more = f"; and {len(bad) - SHOWN:,} more" if len(bad) > SHOWN else ""
        if len(bad) < count:
            more += '. on_error="skip" goes on without them'
        super().__init__(f"{len(bad):,} of {count:,} files gave no picture: {names}{more}")
        self.bad, self.count = bad, count


def store_folder(
    dataset: Dataset,
    *,
    cache: str | Path | None = None,
    side: int = 256,
    aspect: str = "keep",
    channels: int | None = None,
) -> Path:
    """Where :func:`prepare` keeps a data set's pictures, whether they are there yet or not."""
    settings = {"source": dataset.source.stamp(), **_settings(side, aspect, channels)}
    return _folder(dataset.name, cache, settings)


def stores_of(dataset: Dataset, cache: str | Path | None = None) -> list[Store]:
    """All stores of these very files in a cache, whatever the settings."""
    folder, stamp = Path(cache or cache_folder()), dataset.source.stamp()
    stores = []
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if entry.name.startswith("."):  # drafts and locks
            continue
        try:
            store = Store.open(entry)
        except ValueError:
            continue
        if store.about.get("source") == stamp:
            stores.append(store)
    return stores


def damaged(dataset: Dataset, *, workers: int | None = None, progress: Progress | None = None) -> list[Bad]:
    """The files of a data set that are no pictures. All are decoded, nothing is kept."""
    if not dataset.is_encoded:
        return []
    threads = whole("workers", workers) if workers is not None else processors()
    found = []
    with _quiet(), closing(_decoded(dataset.source, range(len(dataset)), {}, threads)) as results:
        for done, result in enumerate(results, start=1):
            if isinstance(result, Bad):
                found.append(result)
            if progress is not None:
                progress(done, len(dataset))
    return found


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
    """The pictures of a data set as a store: decoded now, or found where an earlier call left them.

    It can be stopped at any time, even by force, and goes on from there when called again. Where two processes
    prepare the same, one works and the other waits for it. Pictures that already are in an array stay in memory, and
    nothing is written.

    Args:
        cache: Folder of stores, see ``nearfar.utils.paths.cache_folder``. A store's own folder is named by a stamp
            of the files and these settings, so a change of either makes a new one.
        side: The shorter side becomes this long; smaller pictures stay as they are.
        aspect: "keep", or "squash" to side × side.
        channels: 3 or 1; by default 3 for files, and what it has for an array.
        on_error: "fail": files that are no pictures are an error that lists them. "skip": the store goes without
            them, and lists them.
        workers: Threads that decode; as many as there are processors.
        progress: Told how many pictures are done, of how many.

    >>> from nearfar.data.store.sources import Arrays
    >>> images = np.zeros((4, 8, 8), dtype=np.uint8)
    >>> data = Dataset("four", Arrays(images), np.array([0, 0, 1, 1]), ("jay", "wren"), {"all": np.arange(4)})
    >>> len(prepare(data))
    4
    """
    settings = _settings(side, aspect, channels)
    one_of("on_error", on_error, ON_ERROR)
    threads = whole("workers", workers) if workers is not None else processors()
    if dataset.is_vectors:
        raise ValueError(f"data set {dataset.name} holds vectors; only pictures are prepared")
    if not len(dataset):
        raise ValueError(f"data set {dataset.name} is empty; there is nothing to prepare")
    if isinstance(dataset.source, Arrays):
        return _of_array(dataset.source.array, side, aspect, channels)
    about = {"source": dataset.source.stamp(), **settings}
    folder = _folder(dataset.name, cache, about)
    store = _finished_store(folder, dataset.source)
    if store is None:
        store = _make(folder, dataset.source, settings, {"dataset": dataset.name, **about}, threads, progress)
    if store.bad and (on_error == "fail" or not len(store)):
        raise BadFiles(store.bad, len(dataset))
    return store


def _settings(side: int, aspect: str, channels: int | None) -> dict[str, Any]:
    if channels not in (None, 1, 3):
        raise ValueError(f"channels is {channels!r}; allowed are 1 and 3")
    return {"side": whole("side", side), "aspect": one_of("aspect", aspect, ASPECTS), "channels": channels or 3}


def _folder(name: str, cache: str | Path | None, settings: dict[str, Any]) -> Path:
    said = json.dumps({"format": FORMAT, **settings}, sort_keys=True)
    key = hashlib.sha256(said.encode()).hexdigest()[:20]
    safe = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in name)[:40]
    return Path(cache or cache_folder()) / f"{safe}-{key}"


def _finished_store(folder: Path, source: Source) -> Store | None:
    """The store of a folder; None where there is none, or none that is whole and still right."""
    if not folder.exists():
        return None
    try:
        store = Store.open(folder)
    except ValueError:
        return None
    # A file that could not be read then may be readable now: the disk is back, or the permission.
    return None if any(one.unreadable and _is_readable(source, one.index) for one in store.bad) else store


def _is_readable(source: Source, index: int) -> bool:
    try:
        source.read(index)
    except OSError:
        return False
    return True


def _make(
    folder: Path,
    source: Source,
    settings: dict[str, Any],
    about: dict[str, Any],
    threads: int,
    progress: Progress | None,
) -> Store:
    """Decode what is not decoded yet, and put the finished folder in its place."""
    drafted = folder.with_name(f".{folder.name}.draft")
    count, done = len(source), 0

    def tell(now: int) -> None:
        if progress is not None:
            progress(now, count)

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f".{folder.name}.lock"), waiting=lambda: tell(finished(drafted))):
            store = _finished_store(folder, source)  # of who held the lock before
            if store is not None:
                return store
            draft = Draft(drafted, settings["channels"])
            try:
                done = draft.done
                tell(done)
                _fill(draft, source, settings, threads, tell)
                done = draft.done
            finally:
                draft.close()
            sizes = np.array(draft.sizes, dtype=np.int32).reshape(-1, 2)
            bad = [vars(one) for one in draft.bad]
            seal(drafted, np.array(draft.rows, dtype=np.int64), sizes, settings["channels"], {**about, "bad": bad})
            if folder.exists():  # damaged, or out of date
                shutil.rmtree(folder)
            os.replace(drafted, folder)
            (folder / JOURNAL).unlink(missing_ok=True)  # last: without it a draft would begin anew
            return Store.open(folder)
    except OSError as error:
        done = max(done, finished(drafted))
        kept = f" What is done, {done:,} of {count:,} pictures, is kept: run it again to go on." if done else ""
        raise OSError(f"cannot write to {folder.parent}: {error.strerror or error}.{kept}") from error


def _fill(draft: Draft, source: Source, settings: dict[str, Any], threads: int, tell: Callable[[int], None]) -> None:
    """Decode the rest of the pictures, in order."""
    block: list[Result] = []
    rest = range(draft.done, len(source))
    with _quiet(), closing(_decoded(source, rest, settings, threads)) as results:
        for result in results:
            block.append(result)
            if len(block) == BLOCK:
                draft.add(block)
                block = []
            tell(draft.done + len(block))
        if block:
            draft.add(block)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Pillow's warnings of odd metadata and the like: what matters is whether a picture came out."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        yield


def _decoded(source: Source, indices: range, settings: dict[str, Any], threads: int) -> Generator[Result, None, None]:
    """Pictures in order, decoded by threads: Pillow lets go of the interpreter while it decodes and shrinks.

    (Measured with 2 threads against 2 processes: as fast or faster, and nothing has to be copied between them.)
    """

    def work(index: int) -> Result:
        try:
            return decode(source.read(index), **settings)
        except BadImage as error:
            return Bad(index, source.name(index), error.reason)
        except OSError as error:
            return Bad(index, source.name(index), f"cannot be read: {error.strerror or error}", unreadable=True)

    ahead: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
    try:
        for index in indices:
            ahead.append(pool.submit(work, index))
            if len(ahead) > 4 * threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _of_array(array: Pixels, side: int, aspect: str, channels: int | None) -> Store:
    """Pictures that need no decoding: as they are where they may stay so."""
    height, width = array.shape[1:3]
    has = array.shape[3] if array.ndim == 4 else 1
    fits = min(height, width) <= side if aspect == "keep" else height == width == side
    if fits and channels in (None, has):
        return Store.of_arrays(array)
    images = [shrink(image, side, aspect) for image in array.reshape(*array.shape[:3], has)]
    if channels == 3 and has == 1:
        images = [image.repeat(3, axis=2) for image in images]
    elif channels == 1 and has == 3:
        weights = np.array([299, 587, 114])  # as Pillow turns colours into grey
        images = [((image @ weights + 500) // 1000).astype(np.uint8)[:, :, None] for image in images]
    return Store.of_arrays(images)
