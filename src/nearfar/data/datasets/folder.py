"""Images of the user in class folders, or with classes in their names."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import numpy as np

from nearfar.data.datasets.archives import Tree, open_tree
from nearfar.data.datasets.base import PART_WORDS, Dataset, encode_labels, left_out, register
from nearfar.data.datasets.layouts import (
    Array,
    ClassFile,
    ClassFolders,
    Roots,
    Spec,
    class_folders,
    from_folders,
    refuse,
)
from nearfar.data.datasets.table import TABLES, table
from nearfar.utils.validation import one_of


@register
def folder(root: Roots, *, classes: str | None = None, pattern: str | None = None, name: str = "folder") -> Dataset:
    """Your own images: one folder per class.

    Classes are sorted by name, or by number if all names are numbers. Images are recognized by their file extensions;
    other files are noted.

    Layouts:
        A folder of class folders, optionally below train/ and test/ (or train/, query/ and gallery/; also validation/).
        Folders of class folders: the folders above the classes become the columns group_1, group_2, …
        A folder of images with their classes in the names, see pattern.
        A zip or tar file of class folders, a list of such files, or a folder that contains such files and no images.
        Files named train.tar and test.tar are parts.
        A table of images, as of the dataset "table".

    Args:
        root: Path of the folder or archive, or a list of archives.
        classes: "top" if the topmost folders are the classes and others are parts of them, "leaves" if the folders that
            contain the images are; None to guess it: the latter if all are equally deep and no two have the same name.
        pattern: Names of the images, such as "{class}_*.jpg", or paths if it has a slash. {class} takes as much as it
            can; {split} is the part, and other words in braces are columns. Or a regular expression with the group
            (?P<class>…), which is searched in the path.
        name: Name of the dataset in results.
    """
    if isinstance(root, str | os.PathLike) and Path(root).is_file() and Path(root).suffix.lower() in TABLES:
        return table(root, name=name)
    looked_for = "class folders with images, zip or tar files of class folders, or names by --pattern {class}_*.jpg"
    spec = Spec(name, looked_for if pattern is None else f"images with names as {pattern}")
    tree = open_tree(root)
    one_of("classes", classes or "top", ("top", "leaves"))
    columns: dict[str, Array] = {}
    if pattern is not None:
        grouped, columns = _by_pattern(tree, pattern)
    elif (grouped := class_folders(tree)) and classes != "top":
        grouped, columns = _by_leaves(grouped, sure=classes == "leaves")
    guessed = {"classes": "leaves"} if columns and classes is None and pattern is None else {}
    if not grouped.rows:
        refuse(spec, tree)
    names, _ = encode_labels(np.array([row.group for row in grouped.rows]))
    place = {group: at for at, group in enumerate(names)}
    others = sorted(set(range(len(tree.names))) - set(tree.images))
    notes = [left_out(tree.names[index], "no image by its file extension") for index in others]
    dataset = from_folders(spec, tree, grouped, place, lambda row: row.part or "all", columns=columns, notes=notes)
    return replace(dataset, guessed=guessed)


def _by_leaves(grouped: ClassFolders, *, sure: bool) -> tuple[ClassFolders, dict[str, Array]]:
    """Return images by the folder that contains them, and the folders above it; as they are unless sure or likely."""
    leaves = {row.folders for row in grouped.rows}
    groups, depths = {leaf[:-1] for leaf in leaves}, {len(leaf) for leaf in leaves}
    unique = len({leaf[-1] for leaf in leaves}) == len(leaves)
    likely = unique and len(depths) == 1 and len(groups) < len(leaves) <= len(grouped.rows) / 2
    if not (sure or (likely and depths != {1})):
        return grouped, {}
    rows = [row._replace(group=row.folders[-1] if unique else "/".join(row.folders)) for row in grouped.rows]
    levels = zip_longest(*(row.folders[:-1] for row in rows), fillvalue="")
    columns = {f"group_{level}": np.array(folders) for level, folders in enumerate(levels, start=1)}
    return ClassFolders(tuple(rows), grouped.notes), columns


def _by_pattern(tree: Tree, pattern: str) -> tuple[ClassFolders, dict[str, Array]]:
    """Return images by the class in their names, and the columns of other fields."""
    text = pattern
    if "{class}" in pattern:
        text = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^/]+)", re.escape(pattern))
        text = f"^{'' if '/' in pattern else '(?:.*/)?'}{text}$".replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
    try:
        expression = re.compile(text)
    except re.error as error:
        raise ValueError(f"pattern is {pattern!r}, which is no regular expression: {error}") from error
    if "class" not in expression.groupindex:
        raise ValueError(f'pattern is {pattern!r}; it needs the class, as in "{{class}}_*.jpg" or "(?P<class>[a-z]+)_"')
    rows, fields, notes = [], [], []
    for index in tree.images:
        match = expression.search(tree.names[index])
        values = match.groupdict("") if match else {}
        part = PART_WORDS.get(values.get("split", "").lower())
        if not values.get("class") or (part is None and "split" in values):
            notes.append(left_out(tree.names[index], f"its name is not {pattern}"))
        else:
            rows.append(ClassFile(index, values["class"], part))
            fields.append(values)
    others = [key for key in expression.groupindex if key not in ("class", "split")]
    return ClassFolders(tuple(rows), tuple(notes)), {key: np.array([row[key] for row in fields]) for key in others}
