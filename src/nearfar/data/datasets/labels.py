"""Labels and parts from words, for data sets of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nearfar.data.datasets.tree import PART_WORDS
from nearfar.data.store.sources import Ints

Array = np.ndarray[Any, np.dtype[Any]]


def places(values: Array) -> tuple[tuple[str, ...], Ints]:
    """The classes, in the order of numbers or else of names, and the place of each value among them.

    >>> places(np.array(["10", "9", "10"]))
    (('9', '10'), array([1, 0, 1]))
    """
    found, codes = np.unique(values if values.dtype.kind in "iu" else values.astype(str), return_inverse=True)
    names = [str(name) for name in found]
    order = list(range(len(names)))
    if all(is_whole(name) for name in names):
        order.sort(key=lambda at: int(names[at]))
    place = np.empty(len(names), dtype=np.int64)
    place[order] = np.arange(len(names))
    return tuple(names[at] for at in order), place[codes.reshape(-1)]


def parts_from(words: Sequence[str] | Array | None, count: int) -> dict[str, Ints]:
    """Rows by the words for parts; all together where there are none. An empty word is no part."""
    if words is None:
        return {"all": np.arange(count)}
    if len(words) != count:
        raise ValueError(f"split has {len(words)} rows; needed are {count}")
    rows: dict[str, list[int]] = {}
    for row, word in enumerate(words):
        word = str(word).strip().lower()
        if word and word not in PART_WORDS:
            raise ValueError(f"split has {word!r} in row {row}; allowed are {', '.join(PART_WORDS)}")
        if word:
            rows.setdefault(PART_WORDS[word], []).append(row)
    if not rows:
        return {"all": np.arange(count)}
    order = [part for part in dict.fromkeys(PART_WORDS.values()) if part in rows]
    return {part: np.array(rows[part], dtype=np.int64) for part in order}


def is_whole(word: str) -> bool:
    """Whether a word is a whole number as it is usually written.

    >>> is_whole("-3"), is_whole("007"), is_whole("3.0")
    (True, True, False)
    """
    digits = word.removeprefix("-")
    return digits.isascii() and digits.isdecimal()
