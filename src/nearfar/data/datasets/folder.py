"""Images of the user in class folders."""

from __future__ import annotations

import os
from pathlib import Path

from nearfar.data.datasets.archives import open_tree
from nearfar.data.datasets.base import Dataset, left_out, register
from nearfar.data.datasets.layouts import Roots, Spec, class_folders, from_folders, refuse
from nearfar.data.datasets.table import TABLES, table


@register
def folder(root: Roots, *, name: str = "folder") -> Dataset:
    """Your own images: one folder per class.

    Classes are sorted by name, or by number if all names are numbers. Images are recognized by their file extensions;
    other files are noted.

    Layouts:
        A folder of class folders, optionally below train/ and test/ (or train/, query/ and gallery/; also validation/).
        A zip or tar file of class folders, a list of such files, or a folder that contains such files and no images.
        Files named train.tar and test.tar are parts.
        A table of images, as of the dataset "table".

    Args:
        root: Path of the folder or archive, or a list of archives.
        name: Name of the dataset in results.
    """
    if isinstance(root, str | os.PathLike) and Path(root).is_file() and Path(root).suffix.lower() in TABLES:
        return table(root, name=name)
    spec = Spec(name, "class folders with images, or zip or tar files of class folders")
    tree = open_tree(root)
    grouped = class_folders(tree)
    if not grouped.rows:
        refuse(spec, tree)
    groups = {row.group for row in grouped.rows}
    numbered = all(group.isdecimal() and group.isascii() for group in groups)
    ordered = sorted(groups, key=lambda group: (int(group) if numbered else 0, group))
    place = {group: at for at, group in enumerate(ordered)}
    others = sorted(set(range(len(tree.names))) - set(tree.images))
    notes = [left_out(tree.names[index], "no image by its file extension") for index in others]
    return from_folders(spec, tree, grouped, place, lambda row: row.part or "all", notes=notes)
