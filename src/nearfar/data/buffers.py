"""Memory that is used again."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Buffers:
    """Arrays in memory that earlier ones have left.

    New memory costs about as much as filling it with pixels: the system clears it first. An array's memory is
    given out again only when nothing refers to the array any more, be it a tensor, or a view of one.

    >>> buffers = Buffers(keep=1)
    >>> first = buffers.take((2, 3), np.float32)
    >>> second = buffers.take((2, 3), np.float32)
    >>> place = first.ctypes.data
    >>> del first
    >>> buffers.take((3, 2), np.int32).ctypes.data == place
    True
    """

    def __init__(self, keep: int) -> None:
        self._free: deque[NDArray[np.uint8]] = deque(maxlen=keep)

    def take(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """An array with anything in it."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        try:
            memory = self._free.pop()
        except IndexError:
            memory = None
        if memory is None or memory.size != size:
            memory = np.empty(size, dtype=np.uint8)
        array: NDArray[Any] = memory.view(dtype).reshape(shape)
        weakref.finalize(array, self._free.append, memory).atexit = False
        return array
