"""The user's own pictures in class folders."""

from __future__ import annotations

from nearfar.data.datasets.base import Dataset, left_out
from nearfar.data.datasets.layouts import Roots, assemble, class_folders, refuse
from nearfar.data.datasets.registry import register
from nearfar.data.datasets.tree import open_tree


@register
def folder(root: Roots, *, name: str = "folder") -> Dataset:
    """Your own pictures: one folder for each class.

    Classes are in the order of their names, or of their numbers where all names are numbers. Pictures are
    known by their endings; what else there is gets noted.

    Layouts
        A folder of class folders, also below train/ and test/ (or train/, query/ and gallery/; validation/ as well).
        A zip file, a tar file, a list of such files, or a folder of them without pictures, with class folders inside.
        Files named train.tar and test.tar are parts.

    Args:
        name: What the data set is called in results.
    """
    tree = open_tree(root)
    grouped = class_folders(tree)
    if not grouped.rows:
        refuse(name, tree, "class folders with pictures, or zip or tar files of class folders")
    groups = {row.group for row in grouped.rows}
    numbered = all(group.isdecimal() and group.isascii() for group in groups)
    ordered = sorted(groups, key=lambda group: (int(group) if numbered else 0, group))
    place = {group: at for at, group in enumerate(ordered)}
    others = sorted(set(range(len(tree.names))) - set(tree.pictures))
    notes = [*tree.remarks, *grouped.notes]
    notes += [left_out(tree.names[index], "no picture, going by its ending") for index in others]
    return assemble(
        name,
        tree,
        [row.file for row in grouped.rows],
        [place[row.group] for row in grouped.rows],
        [row.part or "all" for row in grouped.rows],
        classes={label: group for group, label in place.items()},
        notes=notes,
    )
