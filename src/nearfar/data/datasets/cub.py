"""Caltech-UCSD Birds-200-2011."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from nearfar.data.datasets.archives import Tree, open_tree
from nearfar.data.datasets.base import Dataset, register
from nearfar.data.datasets.frames import box_columns, cut_to_boxes
from nearfar.data.datasets.layouts import (
    Published,
    Roots,
    class_folders,
    from_folders,
    from_list,
    lines,
    number,
    refuse,
)

TRAINED = 100  # classes 1 to 100 are training classes
LOOKED_FOR = (
    "images.txt with image_class_labels.txt and images/, or class folders named like 001.Black_footed_Albatross "
    "(also below train/ and test/), or zip or tar files of these"
)
_EXCEPTIONS = {
    **{5: 44, 6: 41, 7: 53, 8: 48, 18: 45, 24: 52, 32: 53, 65: 50, 84: 53, 101: 50, 105: 49, 113: 50, 151: 51, 187: 50},
    **dict.fromkeys((12, 22, 178), 56),
    **dict.fromkeys((17, 75), 57),
    **dict.fromkeys((3, 15, 16, 58, 141, 190), 58),
    **dict.fromkeys((9, 19, 20, 23, 28, 33, 34, 37, 39, 43, 60, 78, 97, 107, 115, 117, 119, 124, 125, 126), 59),
    **dict.fromkeys((135, 149, 153, 157, 160, 166, 168, 169, 179, 181, 196), 59),
}
PUBLISHED = Published(
    {"train": (5864, 100), "test": (5924, 100)}, {label: _EXCEPTIONS.get(label, 60) for label in range(1, 201)}
)


@register
def cub(root: Roots, *, boxes: bool = False) -> Dataset:
    """CUB-200-2011: 11,788 photographs of 200 bird species.

    Classes 1 to 100 are the training classes (5,864 images), classes 101 to 200 the test classes (5,924 images). The
    number of a class is the prefix of its folder: 001.Black_footed_Albatross. Download:
    https://www.vision.caltech.edu/datasets/cub_200_2011/

    Layouts:
        The official archive, extracted or not: images.txt, image_class_labels.txt and images/. Its own split into train
        and test images, in which both have the same classes, is the column "official".
        One folder per class, optionally below train/ and test/, also in a zip file or in one or several tar files.

    Args:
        root: Path of the folder or archive, or a list of archives.
        boxes: Whether to cut images to their bounding boxes, which the official archive contains.
    """
    tree = open_tree(root)
    images, labels = tree.find("images.txt"), tree.find("image_class_labels.txt")
    found = _folders(tree) if images is None or labels is None else _official(tree, images, labels)
    return cut_to_boxes(found) if boxes else found


def _part(label: int) -> str:
    return "train" if label <= TRAINED else "test"


def _official(tree: Tree, images: int, labels: int) -> Dataset:
    paths = dict(lines(tree, images, 2))
    groups = {key: number(tree, labels, word) for key, word in lines(tree, labels, 2)}
    unlabeled = [key for key in paths if key not in groups]
    if unlabeled:
        raise ValueError(
            f"{tree.names[labels]} in {tree.root} has no class for {len(unlabeled)} images; "
            f"the first is {paths[unlabeled[0]]}"
        )
    split = tree.find("train_test_split.txt")
    official = {} if split is None else dict(lines(tree, split, 2))
    columns: dict[str, Sequence[object]] = {}
    if official:
        columns["official"] = ["train" if official.get(key) == "1" else "test" for key in paths]
    listed = tree.find("bounding_boxes.txt")
    boxes = {} if listed is None else {key: [float(word) for word in words] for key, *words in lines(tree, listed, 5)}
    if boxes and all(key in boxes for key in paths):
        left, top, width, height = np.array([boxes[key] for key in paths]).T
        columns |= box_columns(np.stack([left, top, left + width, top + height], axis=1))
    classes = {groups[key]: path.split("/")[0] for key, path in paths.items()}
    numbers = [groups[key] for key in paths]
    return from_list(
        "cub",
        tree,
        "images.txt",
        list(paths.values()),
        numbers,
        [_part(label) for label in numbers],
        classes=classes,
        columns=columns,
        published=PUBLISHED,
        folder="images/",
    )


def _folders(tree: Tree) -> Dataset:
    grouped = class_folders(tree)
    if not grouped.rows:
        refuse("cub", tree, LOOKED_FOR)
    prefixes = {row.group: re.match(r"(\d+)", row.group) for row in grouped.rows}
    nameless = sorted(group for group, prefix in prefixes.items() if prefix is None)
    if nameless:
        refuse("cub", tree, f"{LOOKED_FOR}; there is no number at the start of {', '.join(nameless[:5])}")
    labels = {group: int(prefix[1]) for group, prefix in prefixes.items() if prefix}
    first = {label: group for group, label in sorted(labels.items(), reverse=True)}
    if len(first) < len(labels):
        twice = sorted(group for group, label in labels.items() if first[label] != group)
        raise ValueError(f"cub in {tree.root}: several class folders have the same number: {', '.join(twice[:5])}")
    part = {group: _part(label) for group, label in labels.items()}
    notes = [
        f"{tree.names[row.file]}: below {row.part}/, but its class belongs to {part[row.group]}"
        for row in grouped.rows
        if row.part and row.part != part[row.group]
    ]
    return from_folders("cub", tree, grouped, labels, lambda row: part[row.group], published=PUBLISHED, notes=notes)
