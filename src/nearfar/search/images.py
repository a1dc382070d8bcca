"""Images or vectors to be indexed: where they are, their names, and their classes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from nearfar.data import Dataset
from nearfar.data.datasets.archives import is_archive, open_tree
from nearfar.data.datasets.arrays import read_arrays
from nearfar.data.preview import part_rows
from nearfar.search.encoder import ImageInput
from nearfar.utils.vector_files import ENDINGS

Labels = str | Mapping[str, str] | None

FOLDER = "folder"


@dataclass(frozen=True)
class ImageSource:
    """An image, or a vector, that can be read."""

    name: str  # unique in its list
    label: str | None
    read: Callable[[], ImageInput]  # raises OSError if the image cannot be read
    explicit: bool = True  # the label was not taken from the name of the folder


Images = str | Path | Sequence[str | Path | ImageSource] | Dataset


def list_images(images: Images, labels: Labels = FOLDER) -> list[ImageSource]:
    """List the images of a folder or archive, a list of files, or a dataset, in a fixed order.

    Names of files in a folder are paths relative to it; those of a list, or of a single file, are paths as given. An
    .npy, .npz, .safetensors or .parquet file holds vectors, or images of one size; their names are those in the file,
    or their row numbers.
    Files and folders that could not be looked at are listed too; they fail to read.
    """
    if isinstance(images, Dataset):
        return dataset_images(images)
    if isinstance(images, (str, Path)):
        path = Path(images)
        if path.suffix in ENDINGS and path.is_file():
            return _rows(path, labels)
        if path.is_file() and not is_archive(path):
            return list_images([path], labels)
        tree = open_tree(path)
        if not tree.images:
            tree.check_readable()
            raise ValueError(f"images is {str(path)!r}; it contains no files with the extension of an image")
        sources = [_source(tree.names[place], labels, partial(tree.read, place)) for place in tree.images]
        return [*sources, *_unreadable(tree.unreadable)]
    if not len(images):
        raise ValueError("images is empty; it must be a folder or at least one file")
    listed: dict[str, ImageSource] = {}
    for image in images:
        if not isinstance(image, ImageSource):
            path = Path(os.fspath(image))
            if not path.is_file():
                raise FileNotFoundError(f"{path} does not exist, or is not a file")
            image = _source(path.as_posix(), labels, path.read_bytes)
        listed[image.name] = image
    return list(listed.values())


def dataset_images(dataset: Dataset, part: str | None = None) -> list[ImageSource]:
    """List the images or vectors of a dataset."""
    rows = range(len(dataset)) if part is None else part_rows(dataset, part).tolist()
    array = getattr(dataset.source, "array", None)
    read = dataset.source.read if array is None else partial(_row, array)
    names, labels = dataset.source.name, dataset.labels
    sources = [_encodable(ImageSource(names(row), dataset.classes[labels[row]], partial(read, row))) for row in rows]
    return [*sources, *_unreadable(dataset.unreadable)]


def digest(image: ImageInput) -> str:
    """Return the SHA-256 of an image file, or of the pixels of a decoded image."""
    if isinstance(image, (str, Path)):
        image = Path(image).read_bytes()
    if isinstance(image, bytes):
        return hashlib.sha256(image).hexdigest()
    pixels = np.ascontiguousarray(np.asarray(image))
    return hashlib.sha256(f"{pixels.dtype} {pixels.shape} ".encode() + pixels.tobytes()).hexdigest()


def check_labels(labels: Labels) -> None:
    """Raise ValueError unless labels are "folder", a mapping, or None."""
    if not (labels is None or labels == FOLDER or isinstance(labels, Mapping)):
        raise ValueError(f"labels is {labels!r}; allowed are 'folder', a mapping from names to classes, and None")


def folder_label(name: str) -> str | None:
    """Return the class of an image according to its folder."""
    return PurePosixPath(name).parent.name or None


def _source(name: str, labels: Labels, read: Callable[[], ImageInput]) -> ImageSource:
    check_labels(labels)
    if isinstance(labels, Mapping):
        return _encodable(ImageSource(name, labels.get(name), read))
    return _encodable(ImageSource(name, None if labels is None else folder_label(name), read, explicit=False))


def _rows(file: Path, labels: Labels) -> list[ImageSource]:
    """The rows of a file of arrays."""
    content = read_arrays(file)
    names = [str(row) for row in range(len(content.values))] if content.names is None else content.names.tolist()
    known = content.labels if labels == FOLDER and content.labels is not None else [None] * len(names)
    if isinstance(labels, Mapping):
        known = [labels.get(name) for name in names]
    return [
        _encodable(ImageSource(name, label, partial(_row, content.values, row)))
        for row, (name, label) in enumerate(zip(names, known, strict=True))
    ]


def _row(array: Any, row: int) -> ImageInput:
    return np.ascontiguousarray(array[row])


def _encodable(source: ImageSource) -> ImageSource:
    """The same image; if its name is not valid Unicode and cannot be stored, one that fails to read."""
    try:
        source.name.encode()
    except UnicodeEncodeError:
        name = os.fsencode(source.name).decode(errors="backslashreplace")
        return ImageSource(name, None, partial(_refuse, "its name is not UTF-8; rename the file"))
    return source


def _unreadable(entries: Sequence[tuple[str, str]]) -> list[ImageSource]:
    return [ImageSource(path, None, partial(_refuse, reason)) for path, reason in entries]


def _refuse(reason: str) -> ImageInput:
    raise OSError(reason)
