"""The experiments of the papers: for each table or figure, the commands that make it and our result.

Example:
    >>> found = experiment("group:table2")
    >>> found.datasets
    ('cub', 'cars196', 'sop')
    >>> found.commands(out="runs", data={"cub": "CUB"})[0][:2]
    ('train', 'cub/group_ensemble_2')
"""

from __future__ import annotations

import itertools
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from nearfar.utils.validation import nearest

_DATA = re.compile(r"{data:(\w+)}")


@dataclass(frozen=True)
class PaperCommand:
    """A command of an experiment."""

    text: str  # the command without "nearfar", with {out} and {data:NAME} in it
    datasets: tuple[str, ...]  # the datasets that must be given for it to run


@dataclass(frozen=True)
class PaperExperiment:
    """Tables and figures of a paper, and how they are made."""

    id: str  # paper and number, such as "group:table2"
    title: str  # what it shows
    lines: tuple[PaperCommand, ...]  # the commands
    also: tuple[str, ...] = ()  # ids of other tables and figures of the paper that the same commands make
    result: str | None = None  # where our result is; None if there is none yet
    reason: str | None = None  # why there is no command; None if there is one

    @property
    def document(self) -> str:
        """Key of the paper."""
        return self.id.partition(":")[0]

    @property
    def datasets(self) -> tuple[str, ...]:
        """The datasets that the commands need."""
        return tuple(dict.fromkeys(name for line in self.lines for name in line.datasets))

    def commands(self, *, out: str, data: Mapping[str, str]) -> list[tuple[str, ...]]:
        """Return the words of the commands that need no other datasets than the given ones."""
        if self.reason is not None:
            raise ValueError(f"{self.id} has no command: it {self.reason}")
        for name in data:
            if name not in self.datasets:
                raise ValueError(f"data has {name!r}; {self.id} uses {', '.join(self.datasets) or 'no data'}")
        lines = [line for line in self.lines if all(name in data for name in line.datasets)]
        if self.datasets and not any(line.datasets for line in lines):
            raise ValueError(f"{self.id} needs data: {', '.join(f'{name}=ROOT' for name in self.datasets)}")
        values = {"{out}": out} | {f"{{data:{name}}}": root for name, root in data.items()}
        return [tuple(_filled(word, values) for word in shlex.split(line.text)) for line in lines]


@cache
def experiments() -> tuple[PaperExperiment, ...]:
    """Return all experiments, in the order of the papers."""
    table = tomllib.loads(files(__package__).joinpath("experiments.toml").read_text(encoding="utf-8"))
    return tuple(
        PaperExperiment(
            id=entry["id"],
            title=entry["title"],
            lines=_lines(entry),
            also=tuple(f"{entry['id'].partition(':')[0]}:{number}" for number in entry.get("also", ())),
            result=entry.get("result"),
            reason=entry.get("reason"),
        )
        for entry in table["experiments"]
    )


def experiment(id: str) -> PaperExperiment:
    """Return the experiment that makes a table or figure."""
    by_id = {name: made for made in experiments() for name in (made.id, *made.also)}
    if id not in by_id:
        raise ValueError(f"experiment is {id!r}{nearest(id, by_id)}; nearfar papers lists all")
    return by_id[id]


def _lines(entry: Mapping[str, Any]) -> tuple[PaperCommand, ...]:
    """The commands as given, or some for each dataset and name."""
    if "each" not in entry:
        return tuple(PaperCommand(text, tuple(_DATA.findall(text))) for text in entry.get("commands", ()))
    texts = entry["each"] if isinstance(entry["each"], list) else [entry["each"]]
    lines = []
    for data, name, text in itertools.product(entry["data"], entry["names"], texts):
        values = {"{data:root}": f"{{data:{data}}}", "{data}": data, "{name}": name}
        lines.append(PaperCommand(_filled(text, values), (data,)))
    return tuple(dict.fromkeys(lines))


def _filled(text: str, values: Mapping[str, str]) -> str:
    for key, value in values.items():
        text = text.replace(key, value)
    return text
