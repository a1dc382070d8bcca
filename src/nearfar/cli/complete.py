"""What tab completion offers: names that come with nearfar, and runs and indexes below the current folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import nearfar
from nearfar.utils import shipped

MOST = 1000  # runs and indexes to look at


def starting(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Complete a word to names; without any, the shell offers files."""

    def complete(incomplete: str) -> list[str]:
        return sorted(name for name in names() if name.startswith(incomplete))

    return complete


def folders(file: str) -> Iterator[str]:
    """The folders that have a file, up to two folders below this one, or in runs and bench."""
    for pattern in (f"*/{file}", f"*/*/{file}", f"bench/*/cells/*/{file}"):
        yield from (found.parent.as_posix() for found in islice(Path().glob(pattern), MOST))


def _losses() -> list[str]:
    """The keys of losses, read without importing them."""
    files = (Path(nearfar.__file__).parent / "losses").rglob("*.py")
    return [key for file in files for key in re.findall(r'^@register\("(\w+)"', file.read_text("utf-8"), re.MULTILINE)]


recipes = starting(lambda: [*shipped.names("recipe"), *folders("recipe.toml")])
grids = starting(lambda: [*shipped.names("grid"), *folders("grid.toml")])
spaces = starting(lambda: shipped.names("space"))
losses = starting(_losses)
runs = starting(lambda: folders("recipe.toml"))
results = starting(lambda: [*folders("recipe.toml"), *folders("grid.toml")])
indexes = starting(lambda: folders("index.sqlite"))
