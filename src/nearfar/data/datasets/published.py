"""Published datasets: CUB, Cars-196, Stanford Online Products, In-Shop and Market-1501."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from nearfar.data.datasets.archives import Tree, open_tree
from nearfar.data.datasets.base import Dataset, Note, left_out, register
from nearfar.data.datasets.frames import box_columns, cut_to_boxes
from nearfar.data.datasets.layouts import (
    ClassFile,
    ClassFolders,
    Roots,
    Spec,
    assemble,
    class_folders,
    from_folders,
    from_list,
    lines,
    number,
    refuse,
)

CUB = Spec(
    "cub",
    looked_for="images.txt with image_class_labels.txt and images/, or class folders named like "
    "001.Black_footed_Albatross (also below train/ and test/), or zip or tar files of these",
    parts={"train": (5864, 100), "test": (5924, 100)},
    trained=100,
)
CARS = Spec(
    "cars196",
    looked_for="cars_annos.mat with car_ims/, or cars_train_annos.mat and cars_test_annos_withlabels.mat with "
    "cars_train/ and cars_test/, or class folders with images named like 000001.jpg (also below train/ and test/), or "
    "zip or tar files of these",
    parts={"train": (8054, 98), "test": (8131, 98)},
    trained=98,
)
CARS_IMAGES = 16185  # numbered from 1
CARS_CORNERS = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")  # left, top, right and bottom of a box
SOP = Spec(
    "sop",
    looked_for="Ebay_train.txt and Ebay_test.txt, or class folders below train/ and test/, or class folders named by "
    "their numbers 1 to 22634, or zip or tar files of these",
    parts={"train": (59551, 11318), "test": (60502, 11316)},
    trained=11318,
)
INSHOP = Spec(
    "inshop",
    looked_for="list_eval_partition.txt (also below Eval/ or Anno/) with img/, or class folders below train/, query/ "
    "and gallery/, or zip or tar files of these",
    parts={"train": (25882, 3997), "query": (14218, 3985), "gallery": (12612, 3985)},
)
MARKET = Spec(
    "market1501",
    looked_for="bounding_box_train/, query/ and bounding_box_test/ with images such as 0002_c1s1_000451_03.jpg",
    parts={"train": (12936, 751), "query": (3368, 750), "gallery": (15913, 751)},
)
MARKET_FOLDERS = {"bounding_box_train": "train", "query": "query", "bounding_box_test": "gallery"}
MARKET_NAME = re.compile(r"(-?\d+)_c(\d+)")  # identity and camera
JUNK = -1  # identity of images that show parts of persons; they are neither right nor wrong


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
    dataset = _cub_folders(tree) if images is None or labels is None else _cub_lists(tree, images, labels)
    return cut_to_boxes(dataset) if boxes else dataset


def _cub_lists(tree: Tree, images: int, labels: int) -> Dataset:
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
    items = [(path, groups[key], path.split("/")[0], CUB.part(groups[key])) for key, path in paths.items()]
    return from_list(CUB, tree, "images.txt", items, columns=columns, folder="images/")


def _cub_folders(tree: Tree) -> Dataset:
    grouped = class_folders(tree)
    if not grouped.rows:
        refuse(CUB, tree)
    prefixes = {row.group: re.match(r"(\d+)", row.group) for row in grouped.rows}
    nameless = sorted(group for group, prefix in prefixes.items() if prefix is None)
    if nameless:
        refuse(CUB, tree, f"; there is no number at the start of {', '.join(nameless[:5])}")
    labels = {group: int(prefix[1]) for group, prefix in prefixes.items() if prefix}
    first = {label: group for group, label in sorted(labels.items(), reverse=True)}
    if len(first) < len(labels):
        twice = sorted(group for group, label in labels.items() if first[label] != group)
        raise ValueError(f"cub in {tree.root}: several class folders have the same number: {', '.join(twice[:5])}")
    part = {group: CUB.part(label) for group, label in labels.items()}
    notes = [
        f"{tree.names[row.file]}: below {row.part}/, but its class belongs to {part[row.group]}"
        for row in grouped.rows
        if row.part and row.part != part[row.group]
    ]
    return from_folders(CUB, tree, grouped, labels, lambda row: part[row.group], notes=notes)


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
    tree = open_tree(root)
    listing = tree.find("cars_annos.mat")
    train, test = tree.find("cars_train_annos.mat"), tree.find("cars_test_annos_withlabels.mat")
    if listing is not None:
        dataset = _cars_lists(tree, {listing: ""})
    elif train is not None and test is not None:
        dataset = _cars_lists(tree, {train: "cars_train/", test: "cars_test/"})
    else:
        dataset = _cars_folders(tree)
    return cut_to_boxes(dataset) if boxes else dataset


def _cars_lists(tree: Tree, files: dict[int, str]) -> Dataset:
    listed: list[tuple[str, int]] = []
    official: list[str] = []
    names: list[str] = []
    corners: list[list[float]] = []
    for index, folder in files.items():
        content = _load_mat(tree, index)
        names = names or _class_names(content)
        annotations = np.atleast_1d(content.get("annotations", np.zeros(0)))
        fields = annotations.dtype.names or ()
        path_field = next((name for name in ("relative_im_path", "fname") if name in fields), None)
        if path_field is None or "class" not in fields:
            raise ValueError(
                f"{tree.names[index]} in {tree.root} has no annotations with class and relative_im_path or fname; "
                f"it has {', '.join(fields) or 'none'}"
            )
        for path, label in zip(annotations[path_field].astype(str).tolist(), annotations["class"], strict=True):
            listed.append((path if "/" in path else folder + path, int(label)))
        tested = annotations["test"] if "test" in fields else np.zeros(len(annotations))
        official += ["test" if test or folder == "cars_test/" else "train" for test in tested]
        if set(CARS_CORNERS) <= set(fields):
            corners += np.stack([annotations[name].astype(float) for name in CARS_CORNERS], axis=1).tolist()
    meta = tree.find("cars_meta.mat")
    if not names and meta is not None:
        names = _class_names(_load_mat(tree, meta))
    return from_list(
        CARS,
        tree,
        " and ".join(tree.names[index].rpartition("/")[2] for index in files),
        [
            (path, label, names[label - 1] if label <= len(names) else str(label), CARS.part(label))
            for path, label in listed
        ],
        columns={"official": official, **(box_columns(np.array(corners)) if len(corners) == len(listed) else {})},
    )


def _load_mat(tree: Tree, index: int) -> dict[str, Any]:
    from scipy.io import loadmat

    try:
        content: dict[str, Any] = loadmat(io.BytesIO(tree.read(index)), squeeze_me=True)
    except Exception as error:  # scipy raises various errors for files that are no .mat files
        raise ValueError(f"{tree.names[index]} in {tree.root} cannot be read as a .mat file: {error}") from error
    return content


def _class_names(content: dict[str, Any]) -> list[str]:
    names = [str(name) for name in np.atleast_1d(content.get("class_names", []))]
    return names if len(set(names)) == len(names) else []


def _cars_folders(tree: Tree) -> Dataset:
    grouped = class_folders(tree)
    if not grouped.rows:
        refuse(CARS, tree)
    numbers = {row.file: _image_number(tree, row.file) for row in grouped.rows}
    first: dict[str, int] = {}
    for row in grouped.rows:
        first[row.group] = min(first.get(row.group, numbers[row.file]), numbers[row.file])
    if len(set(first.values())) < len(first):
        twice = sorted(group for group, number in first.items() if list(first.values()).count(number) > 1)
        raise ValueError(
            f"cars196 in {tree.root}: the smallest image numbers of {', '.join(twice[:4])} are the same, so the "
            f"order of classes is unknown; images must have the numbers they have in car_ims/ (1 to {CARS_IMAGES})"
        )
    ordered = sorted(first, key=first.__getitem__)
    place = {group: at for at, group in enumerate(ordered, start=1)}
    part = _folder_parts(grouped) or {group: CARS.part(label) for group, label in place.items()}
    notes = [
        f"class {group} is below {part[group]}/, but by its image numbers it belongs to {CARS.part(label)}"
        for group, label in place.items()
        if len(place) == 2 * CARS.trained and part[group] != CARS.part(label)
    ]
    seen = sorted(numbers.values())
    there = set(seen)
    notes += [f"{number:06d}: missing" for number in range(1, CARS_IMAGES + 1) if number not in there]
    notes += [f"{number:06d}: occurs twice" for number, after in pairwise(seen) if number == after]
    return from_folders(CARS, tree, grouped, place, lambda row: part[row.group], notes=notes)


def _image_number(tree: Tree, index: int) -> int:
    digits = re.findall(r"\d+", tree.names[index].rpartition("/")[2].rpartition(".")[0])
    if not digits:
        refuse(CARS, tree, f"; {tree.names[index]} has no number, so the order of classes is unknown")
    return int(digits[-1])


def _folder_parts(grouped: ClassFolders) -> dict[str, str] | None:
    """Return the part of each class by train/ and test/, or None unless each class is in exactly one of them."""
    parts: dict[str, str] = {}
    for row in grouped.rows:
        if row.part not in ("train", "test") or parts.setdefault(row.group, row.part) != row.part:
            return None
    return parts


@register
def sop(root: Roots) -> Dataset:
    """Stanford Online Products: 120,053 photographs of 22,634 products.

    59,551 images of 11,318 classes are for training, 60,502 images of 11,316 other classes for testing. Download:
    https://cvgl.stanford.edu/projects/lifted_struct/

    Layouts:
        The official archive, extracted or not: Ebay_train.txt, Ebay_test.txt and folders like bicycle_final/. The
        twelve categories are the column "super_class".
        One folder per class below train/ and test/, or folders named by class numbers, also in zip or tar files.

    Args:
        root: Path of the folder or archive, or a list of archives.
    """
    tree = open_tree(root)
    train, test = tree.find("Ebay_train.txt"), tree.find("Ebay_test.txt")
    if train is None or test is None:
        return _sop_folders(tree)
    items = [
        (path, number(tree, index, label), label, part)
        for part, index in (("train", train), ("test", test))
        for _, label, _, path in lines(tree, index, 4, skip=1)
    ]
    categories = [path.split("/")[0].removesuffix("_final") for path, *_ in items]
    return from_list(SOP, tree, "Ebay_train.txt or Ebay_test.txt", items, columns={"super_class": categories})


def _sop_folders(tree: Tree) -> Dataset:
    grouped = class_folders(tree)
    names = sorted({row.group for row in grouped.rows}, key=lambda name: (int(name) if name.isdecimal() else 0, name))
    numbered = all(name.isdecimal() for name in names)
    if not names or (grouped.parts != {"train", "test"} and not numbered):
        refuse(SOP, tree)
    place = {name: int(name) if numbered else at for at, name in enumerate(names, start=1)}

    def part(row: ClassFile) -> str:
        return row.part or SOP.part(place[row.group])

    return from_folders(SOP, tree, grouped, place, part)


@register
def inshop(root: Roots) -> Dataset:
    """In-Shop Clothes Retrieval (DeepFashion): photographs of 7,982 clothing items, with queries and a gallery.

    25,882 images of 3,997 classes are for training. 14,218 queries search a gallery of 12,612 images; both have the
    same 3,985 other classes. Download: https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html

    Layouts:
        The official files: list_eval_partition.txt, here or below Eval/ or Anno/, and img/.
        One folder per class below train/, query/ and gallery/, also in a zip file or in tar files.

    Args:
        root: Path of the folder or archive, or a list of archives.
    """
    tree = open_tree(root)
    listing = tree.find("list_eval_partition.txt")
    if listing is None:
        grouped = class_folders(tree)
        if grouped.parts != set(INSHOP.parts):
            refuse(INSHOP, tree)
        numbers = _training_first((row.group, row.part or "") for row in grouped.rows)
        return from_folders(INSHOP, tree, grouped, numbers, lambda row: row.part or "")
    rows = lines(tree, listing, 3, skip=2)
    unknown = sorted({part for _, _, part in rows} - set(INSHOP.parts))
    if unknown:
        raise ValueError(
            f"{tree.names[listing]} in {tree.root} has the part {unknown[0]!r}; allowed are {', '.join(INSHOP.parts)}"
        )
    numbers = _training_first((group, part) for _, group, part in rows)
    items = [(path, numbers[group], group, part) for path, group, part in rows]
    return from_list(INSHOP, tree, "list_eval_partition.txt", items)


def _training_first(classes: Iterable[tuple[str, str]], key: Callable[[str], Any] = str) -> dict[str, int]:
    """Number classes, given with the parts of their images, from 1: training classes first."""
    given = set(classes)
    trained = {name for name, part in given if part == "train"}
    ordered = sorted({name for name, _ in given}, key=lambda name: (name not in trained, key(name)))
    return {name: number for number, name in enumerate(ordered, start=1)}


@register
def market1501(root: Roots) -> Dataset:
    """Market-1501: 32,217 images of 1,501 persons from six cameras, with queries and a gallery.

    12,936 images of 751 persons are for training. 3,368 queries search a gallery of 15,913 images: 750 other persons
    and 2,798 distractors, the class 0000. The 3,819 junk images of the gallery (identity −1) are left out. The column
    "camera" is for ``evaluation.groups``: images of the query's person and camera are ignored in the protocol.
    Download: https://zheng-lab.cecs.anu.edu.au/Project/project_reid.html

    Layouts:
        The official folders bounding_box_train/, query/ and bounding_box_test/, also in a zip or tar file. Names of
        images begin with identity and camera: 0002_c1s1_000451_03.jpg. DukeMTMC-reID has the same layout.

    Args:
        root: Path of the folder or archive, or a list of archives.
    """
    tree = open_tree(root)
    images: list[tuple[int, str, str]] = []  # file, identity and part
    cameras = []
    notes, junk = list(tree.remarks), 0
    for file in tree.images:
        *folders, name = tree.names[file].split("/")
        part = MARKET_FOLDERS.get(folders[-1]) if folders else None
        if part is None:
            continue
        written = MARKET_NAME.match(name)
        if written is None:
            notes.append(left_out(tree.names[file], "its name does not begin with identity and camera"))
        elif int(written[1]) == JUNK:
            junk += 1
        else:
            images.append((file, written[1], part))
            cameras.append(int(written[2]))
    if {part for *_, part in images} != set(MARKET.parts):
        refuse(MARKET, tree)
    if junk:
        notes.append(Note(f"{junk:,} junk images (identity {JUNK}) are left out, as in the protocol", left_out=True))
    numbers = _training_first(((identity, part) for _, identity, part in images), key=int)
    items = [(file, numbers[identity], identity, part) for file, identity, part in images]
    return assemble(MARKET, tree, items, columns={"camera": np.array(cameras)}, notes=notes)
