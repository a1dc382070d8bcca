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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from nearfar.training.recipe import checks
from nearfar.training.recipe.files import RecipeError
from nearfar.training.recipe.files import load as load_recipe
from nearfar.training.recipe.schema import Recipe, Section, file_schema
from nearfar.utils import shipped
from nearfar.utils.shipped import read
from nearfar.utils.validation import listed

Number = Annotated[int | float, WithJsonSchema({"type": "number"})]  # an integer stays one
# Keys that define how a model is evaluated. Tuning them would tune the evaluation, not the model.
FIXED = ("data.name", "data.root", "data.settings", "evaluation", "selection", "split", "training.seed", "tuning")
DIGITS = 12  # that sums of steps are rounded to: 0.30000000000000004 is 0.3


class SpaceError(RecipeError):
    """A space with problems; the message names the file and has a line for each problem."""


class _Parameter(Section):
    """What is common to all parameters."""

    key: SkipJsonSchema[str]
    """Key of the recipe."""

    def conflicts(self) -> Iterator[str]:
        for place in FIXED:
            if self.key == place or self.key.startswith(f"{place}."):
                yield f"{self.key} defines the evaluation and cannot be tuned; set it in the recipe"
            elif place.startswith(f"{self.key}."):
                yield (
                    f"{self.key} contains {place}, which defines the evaluation and cannot be tuned; list the other "
                    f"keys of {self.key} one by one"
                )
                break


class Range(_Parameter):
    """Numbers between two bounds."""

    section = "range"
    low: Number
    """Smallest value."""
    high: Number
    """Largest value."""
    step: Number | None = None
    """Distance between two values; without it all numbers are possible."""
    log: bool = False
    """Whether to search on a logarithmic scale."""

    @property
    def whole(self) -> bool:
        """Whether all values are integers: ``low``, ``high`` and ``step`` are."""
        return all(isinstance(number, int) for number in (self.low, self.high, self.step))

    def values(self) -> list[Any] | None:
        """Return all values, or None for a continuous range."""
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

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        key, low, high, step = self.key, self.low, self.high, self.step
        if high <= low:
            yield f"{key}.high is {high}; it must be > {key}.low, {low}"
        elif step is not None and not 0 < step <= high - low:
            yield f"{key}.step is {step}; it must be > 0 and ≤ {high - low} (high − low)"
        elif step is None and isinstance(low, int) and isinstance(high, int):
            yield (
                f"{key} has integer bounds {low} and {high} and no step; write {low}.0 and {high}.0 for all numbers "
                "between them, or add step = 1 for integers"
            )
        if self.log and (step is not None or low <= 0):
            yield f"{key}.log is true; this requires low > 0 and no step"


class Choices(_Parameter):
    """A list of values."""

    section = "choices"
    choices: Annotated[tuple[Any, ...], Field(min_length=1)]
    """The values."""

    def values(self) -> list[Any]:
        """Return all values as Optuna stores them: lists and tables as JSON."""
        plain = (bool, int, float, str)
        return [value if isinstance(value, plain) else json.dumps(value, sort_keys=True) for value in self.choices]

    def ends(self) -> list[Any]:
        """Return all values: each may be invalid in its own way."""
        return list(self.choices)

    def suggest(self, trial: Any) -> Any:
        """Let Optuna choose a value for a trial."""
        return self.decode(trial.suggest_categorical(self.key, self.values()))

    def decode(self, kept: Any) -> Any:
        """Return a value that Optuna stores as the recipe has it."""
        return self.choices[self.values().index(kept)]

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if len(set(map(repr, self.values()))) < len(self.choices):
            yield f"{self.key}.choices is {list(self.choices)}; values must be different"


Parameter = Range | Choices
Space = tuple[Parameter, ...]


def load(file: str | Path) -> Space:
    """Read a space from a TOML file, or by name.

    Args:
        file: The name of a space that comes with nearfar, or a file with one entry for each key of the recipe, such as
            ``"loss.margin" = {low = 0.0, high = 1.0, step = 0.1}``, ``{low = 1e-5, high = 1e-3, log = true}`` or
            ``{choices = ["semi_hard", "hard"]}``.

    Raises:
        SpaceError: If entries are invalid.
    """
    file = shipped.find(file, "space")
    table = read(file, "a space", SpaceError)
    try:
        return from_dict(table)
    except SpaceError as error:
        raise SpaceError(f"{file}: {error}", error.problems) from None


def from_dict(table: Mapping[str, Any]) -> Space:
    """Create a space from the content of a file."""
    space: list[Parameter] = []
    problems = [] if table else ["the space is empty; at least one key of the recipe is required"]
    for key, content in _entries(table):
        if not isinstance(content, Mapping) or not content:
            problems.append(f"{key} is {content!r}; allowed: a table with low and high, or with choices")
            continue
        kind: type[Parameter] = Choices if "choices" in content else Range
        parameter, lines = checks.read(kind, {**content, "key": key}, where=key, owner=key)
        problems += lines
        if parameter is not None:
            space.append(parameter)
    if problems:
        raise SpaceError(listed(problems), tuple(problems))
    return tuple(space)


def is_space(table: Mapping[str, Any]) -> bool:
    """Return whether the content of a file is that of a space: some entry has a range or choices."""
    words = {"choices", "low", "high"}
    return any(isinstance(content, Mapping) and words & content.keys() for _, content in _entries(table))


def to_dict(space: Space) -> dict[str, dict[str, Any]]:
    """Return a space as nested dictionaries that ``from_dict`` reads."""
    return {
        parameter.key: parameter.model_dump(mode="json", exclude={"key"}, exclude_defaults=True) for parameter in space
    }


def json_schema() -> dict[str, Any]:
    """Return a JSON schema of spaces, for editors."""
    kinds = [Range.model_json_schema(), Choices.model_json_schema()]
    entries = {"type": "object", "additionalProperties": {"anyOf": [*kinds, {"$ref": "#"}]}, "minProperties": 1}
    return file_schema(entries, "nearfar space")


def check(space: Space, recipe: Recipe) -> None:
    """Check that the recipe accepts the keys and the extreme values of a space."""
    problems: dict[str, None] = {}
    for parameter in space:
        for value in parameter.ends():
            try:
                load_recipe(recipe, overrides={parameter.key: value})
            except RecipeError as error:
                problems[str(error)] = None
    if problems:
        raise RecipeError(listed(problems))


def finite(space: Space, sampler: str) -> dict[str, list[Any]]:
    """Return all values of each key, for samplers that enumerate them."""
    by_key: dict[str, list[Any]] = {}
    for parameter in space:
        values = parameter.values()
        if values is None:
            low, high = parameter.ends()
            raise ValueError(
                f"{parameter.key} is continuous between {low} and {high}, but sampler {sampler!r} enumerates values; "
                "add a step, or use sampler random or tpe"
            )
        by_key[parameter.key] = values
    return by_key


def size(space: Space) -> int | None:
    """Return the number of combinations, or None if a range is continuous."""
    lengths = [values and len(values) for values in (parameter.values() for parameter in space)]
    return None if None in lengths else math.prod(length or 0 for length in lengths)


def decode(space: Space, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of an Optuna trial as the recipe has them."""
    parameters = {parameter.key: parameter for parameter in space}
    return {key: parameters[key].decode(value) for key, value in params.items()}


def _entries(table: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys with their content, for both spellings: "loss.margin" and [loss] margin."""
    for key, content in table.items():
        path = f"{where}.{key}" if where else key
        nested = (
            isinstance(content, Mapping) and content and all(isinstance(inner, Mapping) for inner in content.values())
        )
        if nested:
            yield from _entries(content, path)
        else:
            yield path, content
