"""JSON tables and arrays of run folders, checked when they are read."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json
from typing_extensions import TypedDict

STRICT = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
PER_QUERY = ("rows", "labels", "recall@1", "map@r")

Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Measured = dict[str, float | None]
Section = dict[str, Any]


class RunError(ValueError):
    """A run folder that cannot be used; the message says why and what to do."""


class Sections(TypedDict, total=False):
    """The recipe in a manifest, of this or an earlier version."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    network: RunTable
    split: RunTable
    training: RunTable
    loss: Section
    data: Section
    optimizer: Section
    evaluation: Section
    selection: Section
    tuning: Section


class RunTable(TypedDict, total=False):
    """A manifest, a cell.json, or a table in one: keys that are computed with have a type, others hold anything."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    recipe: Sections
    network: RunTable
    model: RunTable
    ensemble: list[RunTable]
    data: Section
    code: RunTable | None
    loss: RunTable
    labels: dict[str, str]
    length: dict[str, Whole | None]
    package: dict[str, str]
    used: dict[str, str]
    files: list[str]
    resumed: list[RunTable]
    dim: Whole | str | None
    levels: list[Any] | None
    members: Whole
    fold: Whole
    seed: Whole
    test_looks: Whole


class LogLine(TypedDict, total=False):
    """A line of log.jsonl."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    step: Whole
    epoch: Whole
    metrics: dict[str, Measured]


class Metrics(TypedDict, total=False):
    """metrics.json."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    test: Measured
    train: Measured
    validation: Measured
    before: Measured
    seconds: Annotated[float, Field(ge=0)]
    memory: Annotated[float, Field(ge=0)] | None
    epoch: Whole
    steps: Whole
    skipped: Whole


def parse(file: Path | str, content: bytes, kind: Any = Section) -> dict[str, Any]:
    """Parse the content of a file, and raise a ``RunError`` that names it unless it is a table of this kind."""
    try:
        table: dict[str, Any] = from_json(content)
        _adapter(kind).validate_python(table)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "content"
        needed = first["msg"].replace("Input should be", "needed:")
        raise RunError(f"{file} has {where} {reprlib.repr(first['input'])}; {needed}") from None
    except ValueError as error:
        raise RunError(f"{file} is not valid JSON: {error}") from None
    return table


def parse_queries(file: Path, content: bytes) -> dict[str, NDArray[Any]]:
    """Parse the metrics of each query, and raise a ``RunError`` that names the file unless all are there."""
    from safetensors.numpy import load

    try:
        arrays: dict[str, NDArray[Any]] = load(content)
    except Exception as error:  # also types that NumPy does not have
        raise RunError(f"{file} cannot be read: {error}") from None
    shapes = {name: arrays[name].shape for name in PER_QUERY if name in arrays}
    if len(shapes) < len(PER_QUERY) or len(set(shapes.values())) > 1 or len(shapes["rows"]) != 1:
        raise RunError(f"{file} has the shapes {shapes}; needed is a number for each query of {', '.join(PER_QUERY)}")
    return arrays


_adapter = cache(TypeAdapter)


def flat(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a manifest to dotted keys. Lists of tables are numbered.

    >>> flat({"network": {"dim": 512}, "stages": [{"epochs": 2}], "ks": [1, 2]})
    {'network.dim': 512, 'stages.0.epochs': 2, 'ks': [1, 2]}
    """
    found: dict[str, Any] = {}
    for key, value in manifest.items():
        if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            value = {str(position): each for position, each in enumerate(value)}
        if isinstance(value, Mapping):
            found |= {f"{key}.{inner}": each for inner, each in flat(value).items()}
        else:
            found[key] = value
    return found
