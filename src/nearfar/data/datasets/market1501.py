"""Market-1501, and other datasets of its layout."""

from __future__ import annotations

import re

import numpy as np

from nearfar.data.datasets.archives import open_tree
from nearfar.data.datasets.base import Dataset, Note, left_out, register
from nearfar.data.datasets.layouts import Published, Roots, assemble, refuse

FOLDERS = {"bounding_box_train": "train", "query": "query", "bounding_box_test": "gallery"}
NAME = re.compile(r"(-?\d+)_c(\d+)")  # identity and camera
JUNK = -1  # identity of images that show parts of persons; they are neither right nor wrong
PUBLISHED = Published({"train": (12936, 751), "query": (3368, 750), "gallery": (15913, 751)})
LOOKED_FOR = "bounding_box_train/, query/ and bounding_box_test/ with images such as 0002_c1s1_000451_03.jpg"


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
    places, identities, cameras, parts = [], [], [], []
    notes, junk = list(tree.remarks), 0
    for place in tree.images:
        *folders, name = tree.names[place].split("/")
        part = FOLDERS.get(folders[-1]) if folders else None
        if part is None:
            continue
        found = NAME.match(name)
        if found is None:
            notes.append(left_out(tree.names[place], "its name does not begin with identity and camera"))
        elif int(found[1]) == JUNK:
            junk += 1
        else:
            places.append(place)
            identities.append(found[1])
            cameras.append(int(found[2]))
            parts.append(part)
    if set(parts) != set(FOLDERS.values()):
        refuse("market1501", tree, LOOKED_FOR)
    if junk:
        notes.append(Note(f"{junk:,} junk images (identity {JUNK}) are left out, as in the protocol", left_out=True))
    trained = {identity for identity, part in zip(identities, parts, strict=True) if part == "train"}
    ordered = sorted(set(identities), key=lambda identity: (identity not in trained, int(identity)))
    numbers = {identity: number for number, identity in enumerate(ordered)}
    return assemble(
        "market1501",
        tree,
        places,
        [numbers[identity] for identity in identities],
        parts,
        classes={number: identity for identity, number in numbers.items()},
        columns={"camera": np.array(cameras)},
        published=PUBLISHED,
        notes=notes,
    )
