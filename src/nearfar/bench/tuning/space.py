"""Search spaces: the keys of a recipe to tune, and the values that each may take.

Example:
    >>> margin = {"low": 0, "high": 1, "step": 0.25}
    >>> space = from_dict({"loss": {"margin": margin}, "loss.name": {"choices": ["a", "b"]}})
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

from nearfar.training.recipe.files import RecipeError
from nearfar.training.recipe.files import load as load_recipe
from nearfar.training.recipe.schema import Recipe
from nearfar.utils.toml import read
from nearfar.utils.validation import listed, nearest

WORDS = ("low", "high", "step", "log", "choices")
# Keys that define how a model is evaluated. Tuning them would tune the evaluation, not the model.
FIXED = ("data.name", "data.root", "data.settings", "evaluation", "selection", "split", "training.seed")
DIGITS = 12  # that sums of steps are rounded to: 0.30000000000000004 is 0.3


@dataclass(frozen=True)
class Range:
    """Numbers between two bounds.

    Args:
        key: Key of the recipe.
        low: Smallest value.
        high: Largest value.
        step: Distance between two values; None for all numbers.
        log: Whether to search on a logarithmic scale.
    """

    key: str
    low: float
    high: float
    step: float | None = None
    log: bool = False

    @property
    def whole(self) -> bool:
        """Whether all values are integers: ``low``, ``high`` and ``step`` are."""
        return all(isinstance(number, int) for number in (self.low, self.high, self.step))

    def values(self) -> list[Any] | None:
        """Return all values, or None for a continuous range.

        Example:
            >>> Range("loss.margin", 0.0, 0.5, 0.2).values(), Range("sampler.classes", 4, 9, 2).values()
            ([0.0, 0.2, 0.4], [4, 6, 8])
        """
        if self.step is None:
            return None
        count = math.floor((self.high - self.low) / self.step + 1e-9) + 1
        return [self.decode(self.low + place * self.step) for place in range(count)]

    def decode(self, value: float) -> float:
        """Return a value that Optuna stores as the recipe has it: without rounding errors of adding steps."""
        return value if self.whole or self.step is None else round(value, DIGITS)

    def ends(self) -> list[Any]:
        """Return the smallest and the largest value."""
        return [self.low, (self.values() or [self.high])[-1]]

    def suggest(self, trial: Any) -> Any:
        """Let Optuna choose a value for a trial."""
        low, high = self.ends()
        if self.whole:
            return trial.suggest_int(self.key, low, high, step=self.step)
        return self.decode(trial.suggest_float(self.key, low, high, step=self.step, log=self.log))


@dataclass(frozen=True)
class Choices:
    """A list of values.

    Args:
        key: Key of the recipe.
        choices: The values.
    """

    key: str
    choices: tuple[Any, ...]

    def values(self) -> list[Any]:
        """Return all values as Optuna stores them: lists and tables as JSON."""
        plain = (bool, int, float, str)
        return [one if isinstance(one, plain) else json.dumps(one, sort_keys=True) for one in self.choices]

    def ends(self) -> list[Any]:
        """Return all values: each may be invalid in its own way."""
        return list(self.choices)

    def suggest(self, trial: Any) -> Any:
        """Let Optuna choose a value for a trial."""
        return self.decode(trial.suggest_categorical(self.key, self.values()))

    def decode(self, kept: Any) -> Any:
        """Return a value that Optuna stores as the recipe has it."""
        return self.choices[self.values().index(kept)]


Parameter = Range | Choices
Space = tuple[Parameter, ...]


def load(file: str | Path) -> Space:
    """Read a space from a TOML file.

    Args:
        file: A file with one entry for each key of the recipe, such as
            ``"loss.margin" = {low = 0.0, high = 1.0, step = 0.1}``, ``{low = 1e-5, high = 1e-3, log = true}`` or
            ``{choices = ["semi_hard", "hard"]}``.

    Raises:
        ValueError: If an entry is invalid; the message names the file and the key.
    """
    file = Path(file)
    table = read(file, "a space")
    try:
        return from_dict(table)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from None


def from_dict(table: Mapping[str, Any]) -> Space:
    """Create a space from the content of a file.

    Args:
        table: Keys of the recipe with their ranges or choices.

    Raises:
        ValueError: If entries are invalid; the message has a line for each problem.
    """
    space: list[Parameter] = []
    problems: list[str] = []
    for key, content in _entries(table):
        try:
            space.append(_parameter(key, content))
        except (TypeError, ValueError) as error:
            problems.append(str(error))
    if not table:
        problems.append("the space is empty; at least one key of the recipe is required")
    if problems:
        raise ValueError(listed(problems))
    return tuple(space)


def to_dict(space: Space) -> dict[str, dict[str, Any]]:
    """Return a space as nested dictionaries that ``from_dict`` reads."""
    found: dict[str, dict[str, Any]] = {}
    for one in space:
        if isinstance(one, Choices):
            found[one.key] = {"choices": list(one.choices)}
        else:
            entries = {"low": one.low, "high": one.high, "step": one.step, "log": one.log or None}
            found[one.key] = {word: value for word, value in entries.items() if value is not None}
    return found


def check(space: Space, recipe: Recipe) -> None:
    """Check that the recipe accepts the keys and the extreme values of a space.

    Args:
        space: The space.
        recipe: Recipe to tune.

    Raises:
        RecipeError: If the recipe does not accept one of them.
    """
    problems: dict[str, None] = {}
    for one in space:
        for value in one.ends():
            try:
                load_recipe(recipe, overrides={one.key: value})
            except RecipeError as error:
                problems[str(error)] = None
    if problems:
        raise RecipeError(listed(problems))


def finite(space: Space, sampler: str) -> dict[str, list[Any]]:
    """Return all values of each key, for samplers that enumerate them.

    Args:
        space: The space.
        sampler: Name of the sampler, for the error message.

    Raises:
        ValueError: If a range is continuous.
    """
    found: dict[str, list[Any]] = {}
    for one in space:
        values = one.values()
        if values is None:
            raise ValueError(
                f"{one.key} is continuous between {one.ends()[0]} and {one.ends()[1]}, but sampler {sampler!r} "
                "enumerates values; add a step, or use sampler random or tpe"
            )
        found[one.key] = values
    return found


def size(space: Space) -> int | None:
    """Return the number of combinations, or None if a range is continuous."""
    lengths = [values and len(values) for values in (one.values() for one in space)]
    return None if None in lengths else math.prod(length or 0 for length in lengths)


def decode(space: Space, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of an Optuna trial as the recipe has them."""
    kinds = {one.key: one for one in space}
    return {key: kinds[key].decode(value) for key, value in params.items()}


def _entries(table: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys with their content, for both spellings: "loss.margin" and [loss] margin."""
    for key, content in table.items():
        path = f"{where}.{key}" if where else key
        nested = isinstance(content, Mapping) and content and all(isinstance(one, Mapping) for one in content.values())
        if nested:
            yield from _entries(content, path)
        else:
            yield path, content


def _parameter(key: str, content: Any) -> Parameter:
    if not isinstance(content, Mapping):
        raise TypeError(f"{key} is {content!r}; it must be a table with low and high, or with choices")
    if "." not in key and not content:
        raise ValueError(f"[{key}] is empty; it must contain keys of a recipe")
    for word in content:
        if word not in WORDS:
            raise ValueError(f"{key} has {word!r}{nearest(word, WORDS)}; allowed are {', '.join(WORDS)}")
    if any(key == place or key.startswith(f"{place}.") for place in FIXED):
        raise ValueError(f"{key} defines the evaluation and cannot be tuned; set it in the recipe")
    for place in FIXED:
        if place.startswith(f"{key}."):
            raise ValueError(
                f"{key} contains {place}, which defines the evaluation and cannot be tuned; list the other keys of "
                f"{key} one by one"
            )
    if "choices" in content:
        return _choices(key, content)
    for word in ("low", "high"):
        if word not in content:
            raise ValueError(f"{key} has no {word}; low and high, or choices, are required")
    return _range(key, content)


def _choices(key: str, content: Mapping[str, Any]) -> Choices:
    choices = content["choices"]
    if len(content) > 1:
        others = ", ".join(word for word in content if word != "choices")
        raise ValueError(f"{key} has choices and {others}; choices cannot be combined with others")
    if not isinstance(choices, Sequence) or isinstance(choices, str) or not choices:
        raise ValueError(f"{key}.choices is {choices!r}; it must be a list with at least one value")
    found = Choices(key, tuple(choices))
    if len(set(map(repr, found.values()))) < len(choices):
        raise ValueError(f"{key}.choices is {choices!r}; values must be different")
    return found


def _range(key: str, content: Mapping[str, Any]) -> Range:
    for word in ("low", "high", "step"):
        value = content.get(word, 1)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise TypeError(f"{key}.{word} is {value!r}; it must be a number")
    low, high, step, log = content["low"], content["high"], content.get("step"), content.get("log", False)
    if not isinstance(log, bool):
        raise TypeError(f"{key}.log is {log!r}; it must be true or false")
    if high <= low:
        raise ValueError(f"{key} has low {low} and high {high}; high must be > low")
    if step is not None and not 0 < step <= high - low:
        raise ValueError(f"{key}.step is {step}; it must be > 0 and ≤ {high - low} (high − low)")
    if log and (step is not None or low <= 0):
        raise ValueError(f"{key}.log is true; this requires low > 0 and no step")
    if step is None and isinstance(low, int) and isinstance(high, int):
        raise ValueError(
            f"{key} has integer bounds {low} and {high} and no step; write {low}.0 and {high}.0 for all numbers "
            "between them, or add step = 1 for integers"
        )
    return Range(key, low, high, step, log)
