"""Files in folders, zip archives and tar archives, listed alike, so that layouts are recognized in all of them."""

from __future__ import annotations

import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nearfar.data.datasets.base import PART_WORDS, UnreadableError, left_out
from nearfar.data.store.sources import Files, Tars, Zips, is_inside, open_tar_stream

IMAGES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".bmp", ".dib", ".gif", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".avif"),
)
TAR_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
ZIP_ENDINGS = (".zip",)
_LITTER = frozenset(("thumbs.db", "desktop.ini", "__macosx"))


@dataclass(frozen=True, eq=False)
class Tree:
    """Files of a folder or members of archives, sorted by path; hidden ones are left out."""

    root: Path  # the path that was opened, for messages
    files: Files | Zips | Tars  # all files, images and others
    remarks: tuple[str, ...] = ()  # entries that were skipped and why, one line each
    # Paths of files and folders that could not be looked at, each with the reason.
    unreadable: tuple[tuple[str, str], ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Paths of all files."""
        return tuple(self.files.name(index) for index in range(len(self.files)))

    @cached_property
    def images(self) -> tuple[int, ...]:
        """Indices of the image files, recognized by their file extensions."""
        return tuple(index for index, name in enumerate(self.names) if is_image(name))

    def find(self, *ending: str) -> int | None:
        """Return the index of the file whose path ends with one of these, the topmost if there are several, or None."""
        ends = tuple("/" + end for end in ending)
        found = [index for index, name in enumerate(self.names) if ("/" + name).endswith(ends)]
        return min(found, key=lambda index: (self.names[index].count("/"), self.names[index]), default=None)

    def check_readable(self) -> None:
        """Raise UnreadableError if there are files or folders that could not be looked at."""
        if self.unreadable:
            raise UnreadableError(str(self.root), self.unreadable)

    def read(self, index: int) -> bytes:
        """Return the contents of a file."""
        return self.files.read(index)

    def text(self, index: int) -> str:
        """Return the contents of a file as text."""
        return self.read(index).decode("utf-8-sig", errors="replace")


def is_image(name: str) -> bool:
    """Return whether a file has the extension of an image."""
    return name.lower().endswith(IMAGES)


def is_archive(file: Path) -> bool:
    """Return whether a file has the extension of a zip or tar archive."""
    return file.name.lower().endswith((*TAR_ENDINGS, *ZIP_ENDINGS)) and not file.name.startswith(".")


def open_tree(root: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Tree:
    """Open a folder, an archive, several archives, or a folder without images that contains archives."""
    if not isinstance(root, (str, os.PathLike)):
        paths = [Path(path) for path in root]
        if not paths:
            raise ValueError("root is empty; a folder or archives are needed")
        return _open_archives(paths[0].parent, paths)
    root = Path(root)
    if not root.exists():
        raise FileNotFoundError(f"{root} does not exist; a folder or an archive is needed")
    if not root.is_dir():
        return _open_archives(root, [root])
    tree = _walk(root)
    if tree.images:
        return tree
    archives = [file for file in sorted(root.iterdir()) if is_archive(file) and file.is_file()]
    return _open_archives(root, archives) if archives else tree


def find_listed(root: Path, paths: Sequence[str]) -> tuple[Files | Zips | Tars, list[int]]:
    """Return those of some files that are below a folder or in an archive, and their positions in the list."""
    if root.is_dir():
        there = [at for at, path in enumerate(paths) if os.path.isfile(root / path)]
        return Files(root, [paths[at] for at in there]), there
    tree = open_tree(root)
    members = {name: index for index, name in enumerate(tree.names)}
    there = [at for at, path in enumerate(paths) if path in members]
    return tree.files.take([members[paths[at]] for at in there]), there


def _walk(root: Path) -> Tree:
    """List a folder. Symbolic links to folders are followed; loops are visited once."""
    paths: list[str] = []
    remarks: list[str] = []
    unreadable: list[tuple[str, str]] = []
    seen: set[tuple[int, int]] = set()
    pending = [""]
    while pending:
        folder = pending.pop()
        try:
            stat = os.stat(root / folder)
            if (stat.st_dev, stat.st_ino) in seen:
                remarks.append(f"{folder}: the same folder as one visited before; skipped")
                continue
            seen.add((stat.st_dev, stat.st_ino))
            with os.scandir(root / folder) as listing:
                entries = sorted(listing, key=lambda entry: entry.name, reverse=True)
        except OSError as error:
            if not folder:
                raise
            unreadable.append((folder, error.strerror or str(error)))
            continue
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if is_hidden(path):
                continue
            try:
                if entry.is_dir():
                    pending.append(path)
                elif entry.is_file():
                    paths.append(path)
                elif entry.is_symlink():
                    unreadable.append((path, "a broken link"))
                else:
                    remarks.append(f"{path}: not a regular file; skipped")
            except OSError as error:
                unreadable.append((path, error.strerror or str(error)))
    remarks += [left_out(path, reason) for path, reason in unreadable]
    return Tree(root, Files(root, sorted(paths)), tuple(sorted(remarks)), tuple(sorted(unreadable)))


def is_hidden(path: str) -> bool:
    """Return whether a component of a path is hidden or created by a file manager."""
    return any(part.startswith(".") or part.lower() in _LITTER for part in path.split("/"))


def _open_archives(root: Path, archives: Sequence[Path]) -> Tree:
    for archive in archives:
        if archive.is_dir() and len(archives) > 1:
            raise ValueError(f"root has the folder {archive}; a list must contain archives only")
        if not archive.is_file():
            raise FileNotFoundError(f"{archive} does not exist; an archive is needed")
    zips = [zipfile.is_zipfile(archive) for archive in archives]
    if any(zips) and not all(zips):
        raise ValueError(f"{root} contains both zip and tar files; pass the ones that belong together as a list")
    # train.tar and test.tar: the archives are named after the parts.
    stems = [archive.name.split(".")[0] for archive in archives]
    named = len(archives) > 1 and all(stem.lower() in PART_WORDS for stem in stems)
    prefixes = [f"{stem}/" if named else "" for stem in stems]
    return (_scan_zips if zips and zips[0] else _scan_tars)(root, archives, prefixes)


class _Members:
    """Collects and checks the names of members; of two members of one name the later one counts."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}  # path → row
        self.remarks: list[str] = []
        self.rows = 0

    def add(self, archive: Path, prefix: str, name: str, odd: str | None) -> bool:
        """Return whether the member is kept, as the next row."""
        while name.startswith("./"):
            name = name[2:]
        path = name if prefix and name.lower().startswith(prefix.lower()) else prefix + name
        if not is_inside(name):
            odd = "path outside of the archive"
        elif is_hidden(name.replace("\\", "/")):
            return False
        if odd:
            self.remarks.append(f"{name} in {archive.name}: {odd}; skipped")
            return False
        if path in self.places:
            self.remarks.append(f"{path} in {archive.name}: occurs twice; the later one counts")
        self.places[path] = self.rows
        self.rows += 1
        return True

    def tree(self, root: Path, source: Zips | Tars) -> Tree:
        """Return the tree of the members, sorted by path."""
        order = sorted(range(len(source)), key=lambda index: source.names[index])
        return Tree(root, source.take(order), tuple(self.remarks))


def _scan_zips(root: Path, archives: Sequence[Path], prefixes: Sequence[str]) -> Tree:
    members = _Members()
    rows: list[tuple[int, zipfile.ZipInfo]] = []
    for number, (archive, prefix) in enumerate(zip(archives, prefixes, strict=True)):
        try:
            with zipfile.ZipFile(archive) as file:
                listed = file.infolist()
        except (zipfile.BadZipFile, OSError, NotImplementedError) as error:
            raise ValueError(f"{archive} cannot be read as a zip file: {error}") from error
        for info in listed:
            if info.filename.endswith("/"):
                continue
            odd = "encrypted" if info.flag_bits & 1 else None
            if (info.external_attr >> 28) == 0o12:
                odd = "a link"
            if members.add(archive, prefix, info.filename, odd):
                rows.append((number, info))
    return members.tree(root, Zips(archives, list(members.places), [rows[row] for row in members.places.values()]))


def _scan_tars(root: Path, archives: Sequence[Path], prefixes: Sequence[str]) -> Tree:
    members = _Members()
    rows: list[tuple[int, tuple[int, int]]] = []
    for number, (archive, prefix) in enumerate(zip(archives, prefixes, strict=True)):
        seen: dict[str, tuple[int, int]] = {}
        try:
            with (
                open_tar_stream(archive) as stream,
                tarfile.open(fileobj=stream, mode="r:", encoding="utf-8", errors="surrogateescape") as tar,
            ):
                while (info := tar.next()) is not None:
                    tar.members.clear()  # type: ignore[attr-defined]  # which only take memory
                    if info.size < 0:
                        raise ValueError(f"{info.name} has {info.size} bytes")
                    if info.isdir():
                        continue
                    place, odd = (info.offset_data, info.size), None
                    if info.islnk() and info.linkname in seen:
                        place = seen[info.linkname]  # a second name for a member of this archive
                    elif info.isreg() and not info.issparse():
                        seen[info.name] = place
                    else:
                        odd = "a link" if info.islnk() or info.issym() else "not a regular file"
                    if members.add(archive, prefix, info.name, odd):
                        rows.append((number, place))
                stream.seek(tar.offset)
                if any(stream.read(tarfile.BLOCKSIZE)):
                    raise ValueError(f"no tar header at byte {tar.offset}")
        except (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, ValueError, RecursionError) as error:
            raise ValueError(f"{archive} cannot be read as a zip or tar file: {error}") from error
    return members.tree(root, Tars(archives, list(members.places), [rows[row] for row in members.places.values()]))
