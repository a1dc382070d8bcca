"""Pictures to be indexed: where they lie, what they are called, and to which class they belong."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from nearfar.data import Dataset
from nearfar.data.datasets.tree import is_archive, open_tree
from nearfar.data.preview import part_rows
from nearfar.search.encoder import Picture

Labels = str | Mapping[str, str] | None

FOLDER = "folder"


@dataclass(frozen=True)
class Listed:
    """A picture that can be read.

    Args:
        name: Unique among those that are listed together.
        label: Its class.
        read: Gives the content of its file, or pixels; OSError where it cannot be read.
        told: Whether somebody said that this is its class; otherwise it is just the folder it lies in.
    """

    name: str
    label: str | None
    read: Callable[[], Picture]
    told: bool = True


Pictures = str | Path | Sequence[str | Path | Listed] | Dataset


def gather(pictures: Pictures, labels: Labels = FOLDER) -> list[Listed]:
    """The pictures of a folder or archive, of a list of files, or of a data set, in a fixed order.

    Names of files in a folder are their paths below it; those of a list, or of a single file, are paths as given.
    """
    if isinstance(pictures, Dataset):
        return of_dataset(pictures)
    if isinstance(pictures, (str, Path)):
        path = Path(pictures)
        if path.is_file() and not is_archive(path):
            return gather([path], labels)
        tree = open_tree(path)
        if not tree.pictures:
            raise ValueError(f"pictures is {str(path)!r}; there are no pictures in it, going by the endings of files")
        return [_listed(tree.names[place], labels, _reader(tree.read, place)) for place in tree.pictures]
    if not len(pictures):
        raise ValueError("pictures is empty; needed are a folder or at least one file")
    listed: dict[str, Listed] = {}
    for each in pictures:
        if not isinstance(each, Listed):
            path = Path(os.fspath(each))
            if not path.is_file():
                raise FileNotFoundError(f"{path} is not there, or no file")
            each = _listed(path.as_posix(), labels, path.read_bytes)
        listed[each.name] = each
    return list(listed.values())


def digest(picture: Picture) -> str:
    """SHA-256 of a picture's file, or of its pixels where it has none.

    >>> digest(b"")[:8]
    'e3b0c442'
    """
    if isinstance(picture, (str, Path)):
        picture = Path(picture).read_bytes()
    if isinstance(picture, bytes):
        return hashlib.sha256(picture).hexdigest()
    pixels = np.ascontiguousarray(np.asarray(picture))
    return hashlib.sha256(f"{pixels.dtype} {pixels.shape} ".encode() + pixels.tobytes()).hexdigest()


def check_labels(labels: Labels) -> None:
    if not (labels is None or labels == FOLDER or isinstance(labels, Mapping)):
        raise ValueError(f"labels is {labels!r}; allowed are 'folder', a mapping from names to classes, and None")


def folder_label(name: str) -> str | None:
    """The class of a picture, going by the folder it lies in.

    >>> folder_label("birds/jay/1.jpg"), folder_label("1.jpg")
    ('jay', None)
    """
    return PurePosixPath(name).parent.name or None


def _listed(name: str, labels: Labels, read: Callable[[], Picture]) -> Listed:
    check_labels(labels)
    if isinstance(labels, Mapping):
        return _writable(Listed(name, labels.get(name), read))
    return _writable(Listed(name, None if labels is None else folder_label(name), read, told=False))


def _writable(each: Listed) -> Listed:
    """The same, or, where its name is no text and an index could not hold it, one that cannot be read."""
    try:
        each.name.encode()
    except UnicodeEncodeError:
        return Listed(os.fsencode(each.name).decode(errors="backslashreplace"), None, _refuse)
    return each


def _refuse() -> bytes:
    raise OSError("its name is not UTF-8; rename the file")


def _reader(read: Callable[[int], Picture], place: int) -> Callable[[], Picture]:
    return lambda: read(place)


def of_dataset(dataset: Dataset, part: str | None = None) -> list[Listed]:
    """The pictures of a data set, or of one of its parts, such as "test".

    >>> from nearfar import data
    >>> of_dataset(data.open("digits"))[0].label
    '0'
    """
    if dataset.is_vectors:
        raise ValueError(f"{dataset.name} holds vectors; an index of pictures needs pictures")
    rows = range(len(dataset)) if part is None else part_rows(dataset, part).tolist()
    array = getattr(dataset.source, "array", None)
    read = dataset.source.read if array is None else (lambda row: np.ascontiguousarray(array[row]))
    names, labels = dataset.source.name, dataset.labels
    return [_writable(Listed(names(row), dataset.classes[labels[row]], _reader(read, row))) for row in rows]
