"""Everything below a folder or in archives, listed alike, so that a layout is recognised wherever it lies."""

from __future__ import annotations

import lzma
import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from nearfar.data.datasets import tar
from nearfar.data.store.sources import Files, Ints, Tars, Zips, is_inside, open_tar_stream

PICTURES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".bmp", ".dib", ".gif", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".avif"),
)
TAR_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
ZIP_ENDINGS = (".zip",)
PART_WORDS = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
    "testing": "test",
    "query": "query",
    "gallery": "gallery",
}
_LITTER = frozenset(("thumbs.db", "desktop.ini", "__macosx"))


@dataclass(frozen=True, eq=False)
class Tree:
    """Files of a folder or members of archives, in a fixed order; hidden ones are left out.

    Args:
        root: As the user gave it, for messages.
        files: All of them, pictures and others.
        remarks: What was passed over, and why: one line each.
    """

    root: Path
    files: Files | Zips | Tars
    remarks: tuple[str, ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.files.name(index) for index in range(len(self.files)))

    @cached_property
    def pictures(self) -> tuple[int, ...]:
        """The files that are pictures, going by their endings."""
        return tuple(index for index, name in enumerate(self.names) if is_picture(name))

    def find(self, *ending: str) -> int | None:
        """The file whose path ends with one of these, highest up in the tree; None where there is none."""
        ends = tuple("/" + end for end in ending)
        found = [index for index, name in enumerate(self.names) if ("/" + name).endswith(ends)]
        return min(found, key=lambda index: (self.names[index].count("/"), self.names[index]), default=None)

    def read(self, index: int) -> bytes:
        return self.files.read(index)

    def text(self, index: int) -> str:
        """A list or table that came with the pictures."""
        return self.read(index).decode("utf-8-sig", errors="replace")


def is_picture(name: str) -> bool:
    """Whether a file is a picture, going by its ending.

    >>> is_picture("jay/1.JPG"), is_picture("jay/notes.txt")
    (True, False)
    """
    return name.lower().endswith(PICTURES)


def is_archive(file: Path) -> bool:
    return file.name.lower().endswith((*TAR_ENDINGS, *ZIP_ENDINGS)) and not file.name.startswith(".")


def open_tree(root: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Tree:
    """A folder, an archive, several archives, or a folder that holds nothing but archives (and texts)."""
    if not isinstance(root, (str, os.PathLike)):
        paths = [Path(path) for path in root]
        if not paths:
            raise ValueError("root is empty; a folder or archives are needed")
        return _open_archives(paths[0].parent, paths)
    root = Path(root)
    if not root.exists():
        raise FileNotFoundError(f"root is {root}; there is nothing")
    if not root.is_dir():
        return _open_archives(root, [root])
    tree = _walk(root)
    if tree.pictures:
        return tree
    archives = [file for file in sorted(root.iterdir()) if is_archive(file) and file.is_file()]
    return _open_archives(root, archives) if archives else tree


def _walk(root: Path) -> Tree:
    """Links to folders are followed, as it is the user's own disk; a loop is walked once."""
    paths: list[str] = []
    remarks: list[str] = []
    seen: set[tuple[int, int]] = set()
    pending = [""]
    while pending:
        folder = pending.pop()
        try:
            stat = os.stat(root / folder)
            if (stat.st_dev, stat.st_ino) in seen:
                remarks.append(f"{folder}: a folder met before under another name; passed over")
                continue
            seen.add((stat.st_dev, stat.st_ino))
            with os.scandir(root / folder) as entries:
                for entry in entries:
                    path = f"{folder}/{entry.name}" if folder else entry.name
                    if is_hidden(path):
                        continue
                    if entry.is_dir():
                        pending.append(path)
                    elif entry.is_file():
                        paths.append(path)
                    else:
                        remarks.append(f"{path}: {'a broken link' if entry.is_symlink() else 'no file'}; passed over")
        except OSError as error:
            remarks.append(f"{folder or root}: {error.strerror or error}; passed over")
    return Tree(root, Files(root, sorted(paths)), tuple(sorted(remarks)))


def is_hidden(path: str) -> bool:
    """Whether a part of a path is hidden or litter of a file manager."""
    return any(part.startswith(".") or part.lower() in _LITTER for part in path.split("/"))


def _open_archives(root: Path, archives: Sequence[Path]) -> Tree:
    for archive in archives:
        if archive.is_dir() and len(archives) > 1:
            raise ValueError(f"root has the folder {archive}; several places must all be archives")
        if not archive.is_file():
            raise FileNotFoundError(f"root is {archive}; there is no such file")
    zips = [zipfile.is_zipfile(archive) for archive in archives]
    if any(zips) and not all(zips):
        raise ValueError(f"{root} has both zip and tar files; give those that belong together as a list")
    # train.tar and test.tar: the names of the archives say the part.
    stems = [archive.name.split(".")[0] for archive in archives]
    named = len(archives) > 1 and all(stem.lower() in PART_WORDS for stem in stems)
    prefixes = [f"{stem}/" if named else "" for stem in stems]
    return (_scan_zips if zips and zips[0] else _scan_tars)(root, archives, prefixes)


class _Members:
    """Names of members as they come, checked; of two with the same name the later counts."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}  # name → row
        self.remarks: list[str] = []
        self.rows = 0

    def add(self, archive: Path, prefix: str, name: str, odd: str | None) -> bool:
        """Whether the member is kept, as the next row."""
        while name.startswith("./"):
            name = name[2:]
        path = name if prefix and name.lower().startswith(prefix.lower()) else prefix + name
        if not is_inside(name):
            odd = "leads out of the archive"
        elif is_hidden(name.replace("\\", "/")):
            return False
        if odd:
            self.remarks.append(f"{name} in {archive.name}: {odd}; passed over")
            return False
        if path in self.places:
            self.remarks.append(f"{path} in {archive.name}: there twice; the later one counts")
        self.places[path] = self.rows
        self.rows += 1
        return True

    @property
    def kept(self) -> Ints:
        return np.fromiter(self.places.values(), dtype=np.int64, count=len(self.places))


def _scan_zips(root: Path, archives: Sequence[Path], prefixes: Sequence[str]) -> Tree:
    members = _Members()
    infos: list[zipfile.ZipInfo] = []
    where: list[int] = []
    for number, (archive, prefix) in enumerate(zip(archives, prefixes, strict=True)):
        try:
            with zipfile.ZipFile(archive) as file:
                listed = file.infolist()
        except (zipfile.BadZipFile, OSError, NotImplementedError) as error:
            raise ValueError(f"{archive} cannot be read as a zip file: {error}") from error
        for info in listed:
            if info.is_dir():
                continue
            odd = "encrypted" if info.flag_bits & 1 else None
            if (info.external_attr >> 28) == 0o12:
                odd = "a link"
            if members.add(archive, prefix, info.filename, odd):
                infos.append(info)
                where.append(number)
    kept = members.kept
    source = Zips(archives, list(members.places), np.array(where, dtype=np.int64)[kept], [infos[row] for row in kept])
    return _sorted(root, source, members.remarks)


def _scan_tars(root: Path, archives: Sequence[Path], prefixes: Sequence[str]) -> Tree:
    members = _Members()
    rows: list[tuple[int, int, int, int]] = []
    for number, (archive, prefix) in enumerate(zip(archives, prefixes, strict=True)):
        seen: dict[str, tuple[int, int, int, int]] = {}
        try:
            with open_tar_stream(archive) as stream:
                for member in tar.members(stream):
                    if member.kind == "folder":
                        continue
                    row, kind = (number, member.offset, member.size, member.time), member.kind
                    if kind == "hard link" and member.link in seen:
                        row, kind = seen[member.link], "file"  # a second name for a member of this archive
                    elif kind == "file":
                        seen[member.name] = row
                    odd = None if kind == "file" else "no plain file" if kind == "other" else "a link"
                    if members.add(archive, prefix, member.name, odd):
                        rows.append(row)
        except (OSError, EOFError, zlib.error, lzma.LZMAError, tar.DamagedTar) as error:
            raise ValueError(f"{archive} cannot be read as a zip or tar file: {error}") from error
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)[members.kept]
    source = Tars(archives, list(members.places), *(np.ascontiguousarray(column) for column in table.T))
    return _sorted(root, source, members.remarks)


def _sorted(root: Path, source: Zips | Tars, remarks: Sequence[str]) -> Tree:
    order = sorted(range(len(source)), key=lambda index: source.names[index])
    return Tree(root, source.take(order), tuple(remarks))
