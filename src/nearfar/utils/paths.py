"""Where things lie: names as people write them, and the cache."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(place: str | Path) -> Path:
    """A path with its ~ and $VARIABLES filled in.

    >>> expanded("~/photos") == Path.home() / "photos"
    True
    """
    return Path(os.path.expandvars(place)).expanduser()


def cache_folder() -> Path:
    """Where decoded pictures and weights are kept unless told otherwise: $NEARFAR_CACHE, or ~/.cache/nearfar."""
    return expanded(os.environ.get("NEARFAR_CACHE") or "~/.cache/nearfar")
