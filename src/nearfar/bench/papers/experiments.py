"""The experiments of the papers: for each table or figure, the commands that make it and our result.

Example:
    >>> found = experiment("group:table2")
    >>> found.datasets
    ('cub', 'cars196', 'sop')
    >>> found.commands(out="runs", data={"cub": "CUB"})[0][:2]
    ('train', 'cub/group_ensemble_2')
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from nearfar.utils.validation import known

_DATA = re.compile(r"{data:(\w+)}")


@dataclass(frozen=True)
class PaperExperiment:
    """A table or figure of a paper, and how it is made.

    Args:
        id: Paper and number, such as "group:table2".
        title: What it shows.
        lines: Commands of nearfar, with {out} and {data:NAME} in them.
        result: Where our result is; None if there is none yet.
        reason: Why there is no command; None if there is one.
    """

    id: str
    title: str
    lines: tuple[str, ...]
    result: str | None = None
    reason: str | None = None

    @property
    def datasets(self) -> tuple[str, ...]:
        """The datasets that the commands need."""
        return tuple(dict.fromkeys(name for line in self.lines for name in _DATA.findall(line)))

    def commands(self, *, out: str, data: Mapping[str, str]) -> list[tuple[str, ...]]:
        """Return the words of the commands that need no other datasets than the given ones.

        Args:
            out: Folder of the results.
            data: Location of each dataset, by name.

        Raises:
            ValueError: If a dataset is given that the experiment does not use, or if no command is left.
        """
        if self.reason is not None:
            raise ValueError(f"{self.id} has no command: it {self.reason}")
        for name in data:
            if name not in self.datasets:
                raise ValueError(f"data has {name!r}; {self.id} uses {', '.join(self.datasets) or 'no data'}")
        found = [line for line in self.lines if all(name in data for name in _DATA.findall(line))]
        if not any(_DATA.search(line) for line in found) and self.datasets:
            raise ValueError(f"{self.id} needs data: {', '.join(f'{name}=ROOT' for name in self.datasets)}")
        values = {"{out}": out} | {f"{{data:{name}}}": root for name, root in data.items()}
        return [tuple(_filled(word, values) for word in shlex.split(line)) for line in found]


@cache
def experiments() -> tuple[PaperExperiment, ...]:
    """Return all experiments, in the order of the papers."""
    table = tomllib.loads(files(__package__).joinpath("experiments.toml").read_text(encoding="utf-8"))
    return tuple(
        PaperExperiment(one["id"], one["title"], _lines(one), one.get("result"), one.get("reason"))
        for one in table["experiments"]
    )


def experiment(id: str) -> PaperExperiment:
    """Return an experiment.

    Args:
        id: Paper and number, such as "group:table2".
    """
    by_id = {one.id: one for one in experiments()}
    return known("experiment", id, by_id)


def _lines(one: Mapping[str, object]) -> tuple[str, ...]:
    """The commands as given, or one for each dataset and name."""
    if "each" not in one:
        return tuple(one.get("commands", ()))  # type: ignore[arg-type]
    each, data, names = str(one["each"]), one["data"], one["names"]
    assert isinstance(data, list)
    assert isinstance(names, list)
    return tuple(
        each.replace("{data:root}", f"{{data:{place}}}").replace("{data}", place).replace("{name}", name)
        for place in data
        for name in names
    )


def _filled(word: str, values: Mapping[str, str]) -> str:
    for key, value in values.items():
        word = word.replace(key, value)
    return word
