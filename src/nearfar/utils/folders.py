"""Folders and files of outputs: nothing that was there before is overwritten or removed.

A folder of outputs carries a marker, which names its kind. It is written before anything else, and only to a folder
that is new or empty.
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
SEARCHED = 1 << 16  # bytes at the beginning and at the end of a file
TEXT = "This folder was created by nearfar: {}\n"


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
    marker = folder / MARKER
    with suppress(OSError, ValueError):
        return not marker.is_symlink() and marker.read_text(encoding="utf-8") == TEXT.format(kind)
    return False


def claim_file(
    file: str | Path, kind: str | None = None, inputs: Iterable[Any] = (), *, force: bool | None = False
) -> Path:
    """Return the path to write a file of output to; an existing one must be of this kind of ``FILES``, or forced.

    Without a kind an existing file is never replaced; ``force`` is None where it does not help.
    """
    given, place = Path(file), Path(file).resolve()
    if given.is_dir() or not place.parent.is_dir():
        raise ValueError(f"{file} cannot be written; needed is a file in a folder that exists")
    paths = _paths(inputs)
    if place in paths:
        raise ValueError(f"{file} is an input as well; choose another file to write to")
    if given.exists() and not place.is_file():
        return given  # a pipe, /dev/null, or an open file without a name
    if given.is_file() and given.stat().st_size:
        ours = False
        with suppress(Exception):  # parsers of damaged files raise errors of many kinds
            ours = kind is not None and FILES[kind](place)
        if not ours and not paths.isdisjoint(place.parents):
            raise ValueError(f"{file} lies in an input; choose another file to write to")
        if not ours and not force:
            other = "name another file" + ("" if force is None else ", or use --force")
            raise Occupied(f"{file} exists and was not written by this command; {other}")
    return place if given.is_symlink() else given


def keep_apart(folder: Path, inputs: Iterable[Any]) -> None:
    """Raise ValueError if a folder of outputs is, contains or lies in an input."""
    place = folder.resolve()
    for path in _paths(inputs):
        if path.exists() and (path == place or path in place.parents or place in path.parents):
            raise ValueError(f"{folder} overlaps with the input {path}; choose a folder outside of it")


def remove(folder: Path, names: Iterable[str]) -> None:
    """Remove files by name, and the folder unless others remain."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for name in names:
        with suppress(OSError):
            (folder / name).unlink()
    if all(entry.name in (MARKER, LOCK) for entry in folder.iterdir()):
        with suppress(OSError):
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
        table = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}


def _says(text: str) -> Callable[[Path], bool]:
    """Recognize a file by words near its beginning or its end."""

    def recognize(file: Path) -> bool:
        with open(file, "rb") as opened:
            head = opened.read(SEARCHED)
            opened.seek(max(0, file.stat().st_size - SEARCHED))
            return text.encode() in head or text.encode() in opened.read()

    return recognize


def _has(*keys: str) -> Callable[[Path], bool]:
    """Recognize JSON by keys of its object, or of the first object of its list."""

    def recognize(file: Path) -> bool:
        value = json.loads(file.read_text(encoding="utf-8"))
        return set(keys) <= set(value[0] if isinstance(value, list) else value)

    return recognize


def _is_embeddings(file: Path) -> bool:
    """Recognize what ``nearfar embed`` wrote; an .npy file says nothing of its origin."""
    if file.suffix == ".npz":
        import numpy as np

        with np.load(file, allow_pickle=False) as arrays:
            return {"embeddings", "labels", "names", "classes", "model"} == set(arrays.files)
    from safetensors import safe_open

    with safe_open(file, framework="np") as content:
        return {"names", "classes", "model"} == set(content.metadata())


FILES: dict[str, Callable[[Path], bool]] = {  # how a file that we wrote is recognized; what has no kind here never is
    **{
        page: _says(f'<meta name="generator" content="nearfar {page}">')
        for page in ("audit", "clusters", "leaderboard", "run_report", "search_results", "table")
    },
    "chart": _says("<!-- nearfar chart -->"),
    "image": _says("nearfar image"),
    "plot": _says("nearfar plot"),
    "packed grid": _says("nearfar packed grid"),
    "onnx": _says("nearfar.preprocessing"),
    "model": _says("nearfar model"),
    "embeddings": _is_embeddings,
    "access log": _says(' HTTP/1.1" '),
    "audit results": _has("suspects", "duplicates"),
    "duplicates": _has("threshold", "groups"),
    "evaluation": _has("nearfar", "settings", "queries"),
    "index info": _has("backend", "built", "changed"),
    "schema": _says('"title": "nearfar '),
    "search": _has("query", "neighbors"),
    "threshold": _has("similarity", "false_accept", "false_reject"),
    "verification": _has("match", "similarity", "threshold"),
}


def _paths(inputs: Iterable[Any]) -> set[Path]:
    """Return the paths among inputs, which may be in tuples."""
    flat = [given for each in inputs for given in (each if isinstance(each, tuple) else (each,))]
    return {Path(given).resolve() for given in flat if isinstance(given, (str, os.PathLike))}
