"""Packed results: the run folders of a grid in one zip file.

A packed grid holds the files of its runs under the paths that they have in the folder of the grid::

    grid.toml
    cells/nra-seed0-1f0a…/cell.json          labels that the grid gives to the run
    cells/nra-seed0-1f0a…/recipe.toml
    cells/nra-seed0-1f0a…/manifest.json
    cells/nra-seed0-1f0a…/metrics.json
    cells/nra-seed0-1f0a…/log.jsonl
    cells/nra-seed0-1f0a…/queries.safetensors    metrics of each query, for intervals and p-values
    cells/nra-seed0-1f0a…/test_looks.jsonl   evaluations on test classes
    cells/nra-seed0-1f0a…/digests.json       hashes of these files

Weights and embeddings are not packed. Comparisons read the file directly. A run folder in it is addressed as if the
file were a folder (``results/cub.zip/cells/nra-seed0-1f0a…``). The same files always give the same bytes.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from functools import lru_cache
from importlib.resources.abc import Traversable
from pathlib import Path

from nearfar.training.run.folder import RunError, RunFolder
from nearfar.training.run.provenance import LABELS
from nearfar.utils.atomic import whole_file
from nearfar.utils.deadline import check
from nearfar.utils.folders import DAMAGED, claim_file

SUFFIX = ".zip"
OF_GRID = ("grid.toml", "test_looks.jsonl")
GROWTH = 16  # times the size of the file at most; published grids have 4
DEPTH = 32  # of folders in a packed file
PIECE = 1 << 16  # bytes
EPOCH = (1980, 1, 1, 0, 0, 0)  # the date of every packed file


def pack(folder: str | Path, out: str | Path, *, force: bool = False) -> int:
    """Write the run folders below a folder to one packed file.

    Args:
        folder: The folder of a grid, or any folder that holds run folders.
        out: The file to write; its name ends in .zip.
        force: Replace a file that is no packed grid.

    Returns:
        The number of runs in the file.

    Raises:
        ValueError: If the folder holds no run, or the name of the file does not end in .zip.
    """
    folder, out = Path(folder), Path(out)
    if out.suffix != SUFFIX:
        raise ValueError(f"out is {str(out)!r}; the name of a packed file ends in {SUFFIX}")
    runs = list(run_folders(folder))
    if not runs:
        raise RunError(f"{folder} holds no run")
    out = claim_file(out, "packed grid", [folder], force=force)
    files = [folder / name for name in OF_GRID if (folder / name).is_file()]
    for run in map(RunFolder, runs):
        kept = [run.recipe, run.manifest, run.metrics, run.log, run.queries, run.looks, run.seal, run.folder / LABELS]
        files += [file for file in kept if file.is_file()]
    with whole_file(out) as draft, zipfile.ZipFile(draft, "w") as archive:
        for file in sorted(files):
            entry = zipfile.ZipInfo(file.relative_to(folder).as_posix(), EPOCH)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, file.read_bytes(), compresslevel=9)
        archive.comment = b"nearfar packed grid"
    return len(runs)


def locate(path: str | Path) -> Traversable:
    """A file or folder by its path, which may lead into a packed file."""
    check()
    path = Path(path)
    for outer in (path, *path.parents):
        if outer.suffix == SUFFIX and outer.is_file():
            inner = path.relative_to(outer).as_posix()
            root = _opened(outer, outer.stat().st_mtime_ns)
            return root if inner == "." else root.joinpath(inner)
    return path


def run_folders(place: str | Path) -> Iterator[Path]:
    """The paths of all run folders at a place or below it, sorted. Folders inside a run folder are not searched."""
    place = Path(place)
    entry = locate(place)
    if not entry.is_dir():
        problem = "is a file" if entry.is_file() else "does not exist"
        raise FileNotFoundError(
            f"{place} {problem}; needed is a run folder, a folder that holds some, or a packed grid ({SUFFIX})"
        )
    pending = [(place, entry)]
    while pending:
        place, entry = pending.pop()
        if any(entry.joinpath(name).is_file() for name in (RunFolder(place).recipe.name, LABELS)):
            yield place
            continue
        for below in sorted(entry.iterdir(), key=lambda inner: inner.name, reverse=True):
            if below.is_dir() and not below.name.startswith(".") and DAMAGED not in below.name:
                pending.append((place / below.name, below))


def content(file: Path) -> bytes | None:
    """The bytes of a file, which may lie in a packed file; None if there is no such file."""
    entry = locate(file)
    if not entry.is_file():
        return None
    try:
        with entry.open("rb") as opened:  # in pieces: at once, a member may grow beyond the size that it declares
            return b"".join(iter(lambda: opened.read(PIECE), b""))
    except Exception as error:  # a damaged archive raises many kinds
        raise RunError(f"{file} cannot be read: {error}") from None


@lru_cache(maxsize=8)
def _opened(file: Path, changed: int) -> zipfile.Path:
    """The root of a packed file; read again after the file has changed."""
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise RunError(f"{file} is damaged: {error}") from None
    size, most = sum(entry.file_size for entry in archive.infolist()), 2**20 + GROWTH * file.stat().st_size
    if size > most:
        raise RunError(f"{file} holds {size:,} bytes, and a packed file of its size at most {most:,}")
    if any(name.count("/") > DEPTH for name in archive.namelist()):
        raise RunError(f"{file} holds folders that are nested more than {DEPTH} deep")
    return zipfile.Path(archive)
