"""Writes a store so that an interrupted preparation can be continued.

Pixels are appended to one file. After each block of images, a line of a journal records their sizes and the checksum of
their pixels. To continue, the journal is read, pixels after the last complete block are cut off, and new ones are
appended. An interrupted store is therefore byte for byte the same as an uninterrupted one.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from nearfar.data.store.store import PIXELS, BadFile

JOURNAL = "journal.jsonl"
Result = NDArray[np.uint8] | BadFile


class Draft:
    """The folder of an unfinished store. Only the holder of its lock may open it."""

    def __init__(self, folder: Path, channels: int) -> None:
        self.folder, self.channels = folder, channels
        folder.mkdir(parents=True, exist_ok=True)
        self.done = 0  # files of the dataset, good and bad
        self.rows: list[int] = []
        self.sizes: list[tuple[int, int]] = []
        self.bad: list[BadFile] = []
        self._pixels = open(folder / PIXELS, "ab+", buffering=0)  # noqa: SIM115
        self._journal = open(folder / JOURNAL, "ab+", buffering=0)  # noqa: SIM115
        self._resume()

    def add(self, results: Sequence[Result]) -> None:
        """Append a block of images."""
        crc = 0
        sizes: list[tuple[int, ...] | None] = []
        for result in results:
            if isinstance(result, BadFile):
                sizes.append(None)
                continue
            pixels = result.reshape(-1).data
            _write(self._pixels, pixels)
            crc = zlib.crc32(pixels, crc)
            sizes.append(result.shape[:2])
        bad = [result for result in results if isinstance(result, BadFile)]
        block = {"first": self.done, "sizes": sizes, "bad": [asdict(one) for one in bad], "crc": crc}
        _write(self._journal, json.dumps(block).encode() + b"\n")
        self._count(block)

    def close(self) -> None:
        """Close the files."""
        self._pixels.close()
        self._journal.close()

    def _resume(self) -> None:
        """Keep the complete blocks and cut off the rest."""
        self._journal.seek(0)
        self._pixels.seek(0)
        kept_lines = kept_pixels = 0
        for line in self._journal.read().splitlines(keepends=True):
            block = _block(line)
            if block is None or block["first"] != self.done:
                break
            length = self.channels * sum(size[0] * size[1] for size in block["sizes"] if size is not None)
            if _checksum(self._pixels, length) != block["crc"]:
                break
            self._count(block)
            kept_lines, kept_pixels = kept_lines + len(line), kept_pixels + length
        self._journal.truncate(kept_lines)
        self._pixels.truncate(kept_pixels)

    def _count(self, block: dict[str, Any]) -> None:
        for index, size in enumerate(block["sizes"], start=block["first"]):
            if size is not None:
                self.rows.append(index)
                self.sizes.append((size[0], size[1]))
        self.bad += [BadFile(**one) for one in block["bad"]]
        self.done = block["first"] + len(block["sizes"])


def files_done(folder: Path) -> int:
    """Return the number of files that are done in a draft, possibly of another process."""
    try:
        lines = (folder / JOURNAL).read_bytes().splitlines(keepends=True)
    except OSError:
        return 0
    block = next((block for block in map(_block, reversed(lines)) if block is not None), None)
    return 0 if block is None else int(block["first"]) + len(block["sizes"])


def _block(line: bytes) -> dict[str, Any] | None:
    """Parse a line of the journal; None if it is incomplete."""
    try:
        block: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return block if line.endswith(b"\n") and block.keys() == {"first", "sizes", "bad", "crc"} else None


def _checksum(file: IO[bytes], length: int) -> int | None:
    """Return the checksum of the next ``length`` bytes; None if there are fewer."""
    crc = 0
    while length:
        piece = file.read(min(length, 1 << 24))
        if not piece:
            return None
        crc, length = zlib.crc32(piece, crc), length - len(piece)
    return crc


def _write(file: IO[bytes], data: bytes | memoryview) -> None:
    """Write all data: an unbuffered write may stop early, for example on a full disk."""
    view = memoryview(data)
    while len(view):
        view = view[file.write(view) :]
