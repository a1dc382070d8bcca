"""What is searched: which keys of a recipe, and which values each may take.

>>> space = from_dict({"loss": {"margin": {"low": 0, "high": 1, "step": 0.25}}, "loss.name": {"choices": ["a", "b"]}})
>>> [parameter.key for parameter in space], size(space)
(['loss.margin', 'loss.name'], 10)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearfar.training.recipe.files import load as load_recipe
from nearfar.training.recipe.schema import Recipe
from nearfar.utils.toml import read
from nearfar.utils.validation import nearest

WORDS = ("low", "high", "step", "log", "choices")
# What says how a model is judged. Choosing it would be choosing the judge, or luck.
UNTOUCHED = ("data.name", "data.root", "data.settings", "evaluation", "selection", "split", "training.seed")
DIGITS = 12  # of values that are sums of steps: 0.30000000000000004 is 0.3


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``: all of them, or those ``step`` apart; on a logarithmic scale with ``log``."""

    key: str
    low: float
    high: float
    step: float | None = None
    log: bool = False

    @property
    def whole(self) -> bool:
        """Whether all values are whole numbers: the file writes none with a point."""
        return all(isinstance(number, int) for number in (self.low, self.high, self.step))

    def values(self) -> list[Any] | None:
        """All values; None where there is no end of them.

        >>> Range("loss.margin", 0.0, 0.5, 0.2).values(), Range("sampler.classes", 4, 9, 2).values()
        ([0.0, 0.2, 0.4], [4, 6, 8])
        """
        if self.step is None:
            return None
        count = math.floor((self.high - self.low) / self.step + 1e-9) + 1
        return [self.meant(self.low + place * self.step) for place in range(count)]

    def meant(self, value: float) -> float:
        """A value without what adding up steps leaves behind."""
        return value if self.whole or self.step is None else round(value, DIGITS)

    def ends(self) -> list[Any]:
        """The values to try first: whether they are allowed at all."""
        return [self.low, (self.values() or [self.high])[-1]]

    def suggested(self, trial: Any) -> Any:
        """What a trial takes."""
        low, high = self.ends()
        if self.whole:
            return trial.suggest_int(self.key, low, high, step=self.step)
        return self.meant(trial.suggest_float(self.key, low, high, step=self.step, log=self.log))


@dataclass(frozen=True)
class Choices:
    """Some values."""

    key: str
    choices: tuple[Any, ...]

    def values(self) -> list[Any]:
        """As a study keeps them: lists and tables as text."""
        plain = (bool, int, float, str)
        return [one if isinstance(one, plain) else json.dumps(one, sort_keys=True) for one in self.choices]

    def ends(self) -> list[Any]:
        """All of them: each may be wrong in its own way."""
        return list(self.choices)

    def suggested(self, trial: Any) -> Any:
        """What a trial takes."""
        return self.meant(trial.suggest_categorical(self.key, self.values()))

    def meant(self, kept: Any) -> Any:
        """The value that a study keeps in this form."""
        return self.choices[self.values().index(kept)]


Parameter = Range | Choices
Space = tuple[Parameter, ...]


def load(file: str | Path) -> Space:
    """A space from a TOML file.

    Args:
        file: A line for each key of the recipe: "loss.margin" = {low = 0, high = 1, step = 0.1}, or
            {low = 1e-5, high = 1e-3, log = true}, or {choices = ["semi_hard", "hard"]}.
    """
    file = Path(file)
    table = read(file, "a space")
    try:
        return from_dict(table)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from None


def from_dict(table: Mapping[str, Any]) -> Space:
    """A space from what a file holds."""
    space = tuple(_parameter(key, content) for key, content in _entries(table))
    if not space:
        raise ValueError("the space is empty; at least one key of the recipe is needed")
    return space


def to_dict(space: Space) -> dict[str, dict[str, Any]]:
    """The same as tables: what ``from_dict`` reads."""
    found: dict[str, dict[str, Any]] = {}
    for one in space:
        if isinstance(one, Choices):
            found[one.key] = {"choices": list(one.choices)}
        else:
            entries = {"low": one.low, "high": one.high, "step": one.step, "log": one.log or None}
            found[one.key] = {word: value for word, value in entries.items() if value is not None}
    return found


def check(space: Space, recipe: Recipe) -> None:
    """Refuse a space with keys or values that the recipe cannot have, before anything is trained."""
    for one in space:
        for value in one.ends():
            load_recipe(recipe, overrides={one.key: value})


def finite(space: Space, sampler: str) -> dict[str, list[Any]]:
    """All values of each key, for samplers that go through them."""
    found: dict[str, list[Any]] = {}
    for one in space:
        values = one.values()
        if values is None:
            raise ValueError(
                f"{one.key} is any number between {one.ends()[0]} and {one.ends()[1]}; sampler {sampler!r} goes "
                "through values one by one: give it a step, or take random or tpe"
            )
        found[one.key] = values
    return found


def size(space: Space) -> int | None:
    """How many combinations there are; None where there is no end of them."""
    lengths = [values and len(values) for values in (one.values() for one in space)]
    return None if None in lengths else math.prod(length or 0 for length in lengths)


def meant(space: Space, params: Mapping[str, Any]) -> dict[str, Any]:
    """What a study keeps of a trial, as a recipe has it."""
    kinds = {one.key: one for one in space}
    return {key: kinds[key].meant(value) for key, value in params.items()}


def _entries(table: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Keys with their tables, whether they are written "loss.margin" or loss.margin."""
    for key, content in table.items():
        path = f"{where}.{key}" if where else key
        if not isinstance(content, Mapping):
            raise TypeError(f"{path} is {content!r}; needed is a table with low and high, or with choices")
        if not where and "." not in key and not content:
            raise ValueError(f"[{key}] is empty; needed are keys of a recipe")
        if content and all(isinstance(inner, Mapping) for inner in content.values()):
            yield from _entries(content, path)
        else:
            yield path, content


def _parameter(key: str, content: Mapping[str, Any]) -> Parameter:
    for word in content:
        if word not in WORDS:
            raise ValueError(f"{key} has {word!r}{nearest(word, WORDS)}; allowed are {', '.join(WORDS)}")
    if any(key == place or key.startswith(f"{place}.") for place in UNTOUCHED):
        raise ValueError(f"{key} is how a model is judged, and not to be searched; set it in the recipe")
    for place in UNTOUCHED:
        if place.startswith(f"{key}."):
            raise ValueError(f"{key} holds {place}, which is how a model is judged; name the keys in {key} one by one")
    if "choices" in content:
        return _choices(key, content)
    for word in ("low", "high"):
        if word not in content:
            raise ValueError(f"{key} has no {word}; needed are low and high, or choices")
    return _range(key, content)


def _choices(key: str, content: Mapping[str, Any]) -> Choices:
    choices = content["choices"]
    if len(content) > 1:
        others = ", ".join(word for word in content if word != "choices")
        raise ValueError(f"{key} has choices and {others}; choices stand alone")
    if not isinstance(choices, Sequence) or isinstance(choices, str) or not choices:
        raise ValueError(f"{key}.choices is {choices!r}; needed is a list with at least one value")
    found = Choices(key, tuple(choices))
    if len(set(map(repr, found.values()))) < len(choices):
        raise ValueError(f"{key}.choices is {choices!r}; each value once is enough")
    return found


def _range(key: str, content: Mapping[str, Any]) -> Range:
    for word in ("low", "high", "step"):
        value = content.get(word, 1)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise TypeError(f"{key}.{word} is {value!r}; a number is needed")
    low, high, step, log = content["low"], content["high"], content.get("step"), content.get("log", False)
    if not isinstance(log, bool):
        raise TypeError(f"{key}.log is {log!r}; needed is true or false")
    if high <= low:
        raise ValueError(f"{key} goes from {low} to {high}; high must be > low")
    if step is not None and not 0 < step <= high - low:
        raise ValueError(f"{key}.step is {step}; it must be > 0 and ≤ {high - low}, which is high − low")
    if log and (step is not None or low <= 0):
        raise ValueError(f"{key} is logarithmic; that goes with low > 0 and without a step")
    if step is None and isinstance(low, int) and isinstance(high, int):
        raise ValueError(
            f"{key} goes from {low} to {high}: for all numbers between write {low}.0 and {high}.0, for whole ones add "
            "step = 1"
        )
    return Range(key, low, high, step, log)
