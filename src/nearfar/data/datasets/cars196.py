"""Stanford Cars, 196 classes."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from nearfar.data.datasets.archives import Tree, open_tree
from nearfar.data.datasets.base import Dataset, register
from nearfar.data.datasets.frames import box_columns, cut_to_boxes
from nearfar.data.datasets.layouts import ClassFolders, Published, Roots, class_folders, from_folders, from_list, refuse

TRAINED = 98  # classes 1 to 98 are training classes
PUBLISHED = Published({"train": (8054, 98), "test": (8131, 98)})
IMAGES = 16185  # numbered from 1
LOOKED_FOR = (
    "cars_annos.mat with car_ims/, or cars_train_annos.mat and cars_test_annos_withlabels.mat with cars_train/ and "
    "cars_test/, or class folders with images named like 000001.jpg (also below train/ and test/), or zip or tar "
    "files of these"
)


@register
def cars196(root: Roots, *, boxes: bool = False) -> Dataset:
    """Cars-196: 16,185 photographs of 196 car models.

    Classes 1 to 98 are the training classes (8,054 images), classes 99 to 196 the test classes (8,131 images). Project
    page: https://ai.stanford.edu/~jkrause/cars/car_dataset.html

    Layouts:
        cars_annos.mat with car_ims/, or the later archives with cars_train/, cars_test/ and a devkit. Their own split
        into train and test images, in which both have the same classes, is the column "official".
        One folder per class, optionally below train/ and test/, also in a zip file or in one or several tar files. The
        images must keep their numbers (000001.jpg): classes are sorted by their smallest image number, as the order of
        their names is another one.

    Args:
        root: Path of the folder or archive, or a list of archives.
        boxes: Whether to cut images to their bounding boxes, which the .mat files contain.
    """
    found = _open(open_tree(root))
    return cut_to_boxes(found) if boxes else found


def _open(tree: Tree) -> Dataset:
    one = tree.find("cars_annos.mat")
    if one is not None:
        return _annotated(tree, {one: ""})
    train, test = tree.find("cars_train_annos.mat"), tree.find("cars_test_annos_withlabels.mat")
    if train is not None and test is not None:
        return _annotated(tree, {train: "cars_train/", test: "cars_test/"})
    return _folders(tree)


def _part(label: int) -> str:
    return "train" if label <= TRAINED else "test"


def _annotated(tree: Tree, files: dict[int, str]) -> Dataset:
    paths: list[str] = []
    labels: list[int] = []
    official: list[str] = []
    names: list[str] = []
    corners: list[list[float]] = []
    for index, folder in files.items():
        content = _load(tree, index)
        corners += _corners(content)
        names = names or _class_names(content)
        for path, label, tested in _annotations(tree, index, content):
            paths.append(path if "/" in path else folder + path)
            labels.append(label)
            official.append("test" if tested or folder == "cars_test/" else "train")
    meta = tree.find("cars_meta.mat")
    if not names and meta is not None:
        names = _class_names(_load(tree, meta))
    return from_list(
        "cars196",
        tree,
        " and ".join(tree.names[index].rpartition("/")[2] for index in files),
        paths,
        labels,
        [_part(label) for label in labels],
        classes={label: names[label - 1] if label <= len(names) else str(label) for label in labels},
        columns={"official": official, **(box_columns(np.array(corners)) if len(corners) == len(paths) else {})},
        published=PUBLISHED,
    )


def _load(tree: Tree, index: int) -> dict[str, Any]:
    from scipy.io import loadmat

    try:
        content: dict[str, Any] = loadmat(io.BytesIO(tree.read(index)), squeeze_me=True)
    except Exception as error:  # scipy raises various errors for files that are no .mat files
        raise ValueError(f"{tree.names[index]} in {tree.root} cannot be read as a .mat file: {error}") from error
    return content


def _class_names(content: dict[str, Any]) -> list[str]:
    names = [str(name) for name in np.atleast_1d(content.get("class_names", []))]
    return names if len(set(names)) == len(names) else []


def _annotations(tree: Tree, index: int, content: dict[str, Any]) -> Iterator[tuple[str, int, bool]]:
    table = np.atleast_1d(content.get("annotations", np.zeros(0)))
    fields = table.dtype.names or ()
    path = next((name for name in ("relative_im_path", "fname") if name in fields), None)
    if path is None or "class" not in fields:
        raise ValueError(
            f"{tree.names[index]} in {tree.root} has no annotations with class and relative_im_path or fname; "
            f"it has {', '.join(fields) or 'none'}"
        )
    tested = table["test"] if "test" in fields else np.zeros(len(table))
    for where, label, test in zip(table[path], table["class"], tested, strict=True):
        yield str(where), int(label), bool(test)


def _corners(content: dict[str, Any]) -> list[list[float]]:
    """Left, top, right and bottom of each box; empty if there are none."""
    table = np.atleast_1d(content.get("annotations", np.zeros(0)))
    fields = [f"bbox_{edge}" for edge in ("x1", "y1", "x2", "y2")]
    if not set(fields) <= set(table.dtype.names or ()):
        return []
    return np.stack([table[field].astype(float) for field in fields], axis=1).tolist()  # type: ignore[no-any-return]


def _folders(tree: Tree) -> Dataset:
    grouped = class_folders(tree)
    if not grouped.rows:
        refuse("cars196", tree, LOOKED_FOR)
    numbers = {row.file: _image_number(tree, row.file) for row in grouped.rows}
    first: dict[str, int] = {}
    for row in grouped.rows:
        first[row.group] = min(first.get(row.group, numbers[row.file]), numbers[row.file])
    if len(set(first.values())) < len(first):
        twice = sorted(group for group, number in first.items() if list(first.values()).count(number) > 1)
        raise ValueError(
            f"cars196 in {tree.root}: the smallest image numbers of {', '.join(twice[:4])} are the same, so the "
            f"order of classes is unknown; images must have the numbers they have in car_ims/ (1 to {IMAGES})"
        )
    ordered = sorted(first, key=first.__getitem__)
    place = {group: at for at, group in enumerate(ordered, start=1)}
    part = _folder_parts(grouped) or {group: _part(label) for group, label in place.items()}
    notes = [
        f"class {group} is below {part[group]}/, but by its image numbers it belongs to {_part(label)}"
        for group, label in place.items()
        if len(place) == 2 * TRAINED and part[group] != _part(label)
    ]
    seen = sorted(numbers.values())
    there = set(seen)
    notes += [f"{number:06d}: missing" for number in range(1, IMAGES + 1) if number not in there]
    notes += [f"{number:06d}: occurs twice" for number, after in pairwise(seen) if number == after]
    return from_folders("cars196", tree, grouped, place, lambda row: part[row.group], published=PUBLISHED, notes=notes)


def _image_number(tree: Tree, index: int) -> int:
    digits = re.findall(r"\d+", tree.names[index].rpartition("/")[2].rpartition(".")[0])
    if not digits:
        refuse("cars196", tree, f"{LOOKED_FOR}; {tree.names[index]} has no number, so the order of classes is unknown")
    return int(digits[-1])


def _folder_parts(grouped: ClassFolders) -> dict[str, str] | None:
    """Return the part of each class by train/ and test/, or None unless each class is in exactly one of them."""
    found: dict[str, str] = {}
    for row in grouped.rows:
        if row.part not in ("train", "test") or found.setdefault(row.group, row.part) != row.part:
            return None
    return found
