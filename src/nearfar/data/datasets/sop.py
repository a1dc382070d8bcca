"""Stanford Online Products."""

from __future__ import annotations

from nearfar.data.datasets.archives import Tree, open_tree
from nearfar.data.datasets.base import Dataset, register
from nearfar.data.datasets.layouts import (
    ClassFile,
    Published,
    Roots,
    class_folders,
    from_folders,
    from_list,
    lines,
    number,
    refuse,
)

TRAINED = 11318  # classes 1 to 11,318 are training classes
PUBLISHED = Published({"train": (59551, 11318), "test": (60502, 11316)})
LOOKED_FOR = (
    "Ebay_train.txt and Ebay_test.txt, or class folders below train/ and test/, or class folders named by their "
    "numbers 1 to 22634, or zip or tar files of these"
)


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
    return _folders(tree) if train is None or test is None else _official(tree, {"train": train, "test": test})


def _official(tree: Tree, files: dict[str, int]) -> Dataset:
    rows = [
        (part, number(tree, index, label), path)
        for part, index in files.items()
        for _, label, _, path in lines(tree, index, 4, skip=1)
    ]
    return from_list(
        "sop",
        tree,
        "Ebay_train.txt or Ebay_test.txt",
        [path for _, _, path in rows],
        [label for _, label, _ in rows],
        [part for part, _, _ in rows],
        classes={label: str(label) for _, label, _ in rows},
        columns={"super_class": [path.split("/")[0].removesuffix("_final") for _, _, path in rows]},
        published=PUBLISHED,
    )


def _folders(tree: Tree) -> Dataset:
    grouped = class_folders(tree)
    names = sorted({row.group for row in grouped.rows}, key=lambda name: (int(name) if name.isdecimal() else 0, name))
    numbered = all(name.isdecimal() for name in names)
    if not names or (grouped.parts != {"train", "test"} and not numbered):
        refuse("sop", tree, LOOKED_FOR)
    place = {name: int(name) if numbered else at for at, name in enumerate(names, start=1)}

    def part(row: ClassFile) -> str:
        return row.part or ("train" if place[row.group] <= TRAINED else "test")

    return from_folders("sop", tree, grouped, place, part, published=PUBLISHED)
