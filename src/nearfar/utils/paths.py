"""Paths: expansion of ~ and variables, and the folders of caches and of settings."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(place: str | Path) -> Path:
    """Expand ~ and $VARIABLES in a path."""
    return Path(os.path.expandvars(place)).expanduser()


def cache_folder() -> Path:
    """Return the default folder of decoded images and weights: $NEARFAR_CACHE, or ~/.cache/nearfar."""
    return expanded(os.environ.get("NEARFAR_CACHE") or "~/.cache/nearfar")


def config_folder() -> Path:
    """Return the folder of this user's settings: $NEARFAR_CONFIG, or ~/.config/nearfar."""
    return expanded(os.environ.get("NEARFAR_CONFIG") or "~/.config/nearfar")
