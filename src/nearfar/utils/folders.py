"""Folders and files of outputs: nothing that was there before is overwritten or removed.

A folder of outputs carries a marker, which names its kind. It is written before anything else, and only to a folder
that is new or empty. A folder of an earlier version is known by one of its JSON files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from nearfar.utils.atomic import no_link

MARKER, LOCK = ".nearfar", ".lock"
DAMAGED = ".damaged-"  # in the names of what was set aside
TEXT = "This folder was created by nearfar: {}\n"
EARLIER = {  # a file of each kind, and a key of its JSON object
    "grid": {"status.json": "cells"},
    "run": {"manifest.json": "versions", "cell.json": "cell"},
    "store": {"store.json": "pictures"},
    "study": {"trials.json": "study"},
}


class Occupied(FileExistsError):
    """A folder or file of outputs holds something else."""


def claim(folder: Path, kind: str, inputs: Iterable[Any] = ()) -> None:
    """Create a folder of outputs; one that exists must be empty or of this kind."""
    keep_apart(folder, inputs)
    folder.mkdir(parents=True, exist_ok=True)
    if is_ours(folder, kind):
        return
    marker = folder / MARKER
    # A process that was killed may have left an empty marker, and another may have claimed the folder meanwhile.
    foreign = [entry.name for entry in folder.iterdir() if entry != marker or entry.lstat().st_size]
    if not foreign:
        with open(marker, "w", encoding="utf-8", opener=no_link) as file:
            file.write(TEXT.format(kind))
    elif not is_ours(folder, kind):
        raise Occupied(
            f"{folder} contains {min(foreign)!r} and was not created as the folder of this {kind}; choose a new folder"
        )


def is_ours(folder: Path, kind: str) -> bool:
    """Return whether a folder was created for outputs of a kind."""
    with suppress(OSError, ValueError):
        if not (folder / MARKER).is_symlink() and (folder / MARKER).read_text(encoding="utf-8") == TEXT.format(kind):
            return True
    return any(key in read_table(folder / name) for name, key in EARLIER.get(kind, {}).items())


def claim_file(
    file: str | Path, is_ours: Callable[[Path], bool] | None = None, inputs: Iterable[Any] = (), *, force: bool = False
) -> Path:
    """Return the path to write a file of output to; links are followed."""
    place = Path(file).resolve()
    if place in _paths(inputs):
        raise ValueError(f"{file} is an input as well; choose another file to write to")
    if place.is_file() and place.stat().st_size and not force:
        with suppress(Exception):  # parsers of damaged files raise errors of many kinds
            if is_ours is not None and is_ours(place):
                return place
        raise Occupied(f"{file} exists and was not written by this command; name another file, or use --force")
    return place


def keep_apart(folder: Path, inputs: Iterable[Any]) -> None:
    """Raise ValueError if a folder of outputs is, contains or lies in an input."""
    place = folder.resolve()
    for path in _paths(inputs):
        if path.exists() and (path == place or path in place.parents or place in path.parents):
            raise ValueError(f"{folder} overlaps with the input {path}; choose a folder outside of it")


def remove(folder: Path, names: Iterable[str], rescue: Path | None = None) -> None:
    """Remove files by name, and the folder unless others remain; ``rescue`` is where these are moved."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for name in names:
        with suppress(OSError):
            (folder / name).unlink()
    rest = [entry for entry in folder.iterdir() if entry.name not in (MARKER, LOCK)]
    with suppress(OSError):
        if rescue is not None:
            for entry in rest:
                os.rename(entry, rescue / entry.name)
        if rescue is not None or not rest:
            for name in (LOCK, MARKER):
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()


def set_aside(path: Path) -> Path:
    """Rename a damaged file or folder to NAME.damaged-1, or the next free number, and return its new path."""
    places = (path.with_name(f"{path.name}{DAMAGED}{number}") for number in count(1))
    aside = next(place for place in places if not os.path.lexists(place))
    os.rename(path, aside)
    return aside


def read_table(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one where there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _paths(inputs: Iterable[Any]) -> set[Path]:
    """Return the paths among inputs, which may be in tuples."""
    flat = [given for each in inputs for given in (each if isinstance(each, tuple) else (each,))]
    return {Path(given).resolve() for given in flat if isinstance(given, (str, os.PathLike))}
