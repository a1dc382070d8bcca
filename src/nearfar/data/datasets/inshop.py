"""DeepFashion In-Shop Clothes Retrieval."""

from __future__ import annotations

from nearfar.data.datasets.archives import Tree, open_tree
from nearfar.data.datasets.base import Dataset, register
from nearfar.data.datasets.layouts import Published, Roots, class_folders, from_folders, from_list, lines, refuse

PARTS = ("train", "query", "gallery")
PUBLISHED = Published({"train": (25882, 3997), "query": (14218, 3985), "gallery": (12612, 3985)})
LOOKED_FOR = (
    "list_eval_partition.txt (also below Eval/ or Anno/) with img/, or class folders below train/, query/ and "
    "gallery/, or zip or tar files of these"
)


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
    return _folders(tree) if listing is None else _official(tree, listing)


def _official(tree: Tree, listing: int) -> Dataset:
    rows = lines(tree, listing, 3, skip=2)
    strange = sorted({part for _, _, part in rows} - set(PARTS))
    if strange:
        raise ValueError(
            f"{tree.names[listing]} in {tree.root} has the part {strange[0]!r}; allowed are {', '.join(PARTS)}"
        )
    place = _class_numbers([(group, part) for _, group, part in rows])
    return from_list(
        "inshop",
        tree,
        "list_eval_partition.txt",
        [path for path, _, _ in rows],
        [place[group] for _, group, _ in rows],
        [part for _, _, part in rows],
        classes={label: group for group, label in place.items()},
        columns={},
        published=PUBLISHED,
    )


def _folders(tree: Tree) -> Dataset:
    grouped = class_folders(tree)
    if grouped.parts != set(PARTS):
        refuse("inshop", tree, LOOKED_FOR)
    place = _class_numbers([(row.group, row.part or "") for row in grouped.rows])
    return from_folders("inshop", tree, grouped, place, lambda row: row.part or "", published=PUBLISHED)


def _class_numbers(rows: list[tuple[str, str]]) -> dict[str, int]:
    """Number the classes, training classes first."""
    trained = {group for group, part in rows if part == "train"}
    ordered = sorted({group for group, _ in rows}, key=lambda group: (group not in trained, group))
    return {group: at for at, group in enumerate(ordered, start=1)}
