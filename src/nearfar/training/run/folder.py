"""Run folders: their files, which are checked when they are read, their lock, and the log."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json
from typing_extensions import TypedDict

from nearfar.networks.weights import save as saving
from nearfar.training.recipe.files import NAME, difference, load
from nearfar.training.recipe.schema import Recipe
from nearfar.utils.atomic import naming, no_link
from nearfar.utils.folders import LOCK, Occupied, claim, remove
from nearfar.utils.system import exclusive

# Keys that change no result; they may differ when a run is resumed.
FREE = (
    *("data.mode", "data.root", "evaluation.before", "evaluation.test_every", "training.checkpoint_steps"),
    "training.device",
)
CHANGEABLE = (*FREE, "training.on_nonfinite")
SHARD, SHARDS = "classes.{rank}.{iteration}.safetensors", "classes.*.*.safetensors"  # beside a checkpoint
STRICT = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
PER_QUERY = ("rows", "labels", "recall@1", "map@r")

Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Measured = dict[str, float | None]
Section = dict[str, Any]


class RunError(ValueError):
    """A run folder that cannot be used; the message says why and what to do."""


class RunFolder:
    """The files of a run."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.recipe = self.folder / NAME
        self.manifest = self.folder / "manifest.json"
        self.log = self.folder / "log.jsonl"
        self.metrics = self.folder / "metrics.json"
        self.embeddings = self.folder / "embeddings.safetensors"
        self.queries = self.folder / "queries.safetensors"
        self.before = self.folder / "before.safetensors"  # the same of the network before the training
        self.looks = self.folder / "test_looks.jsonl"
        self.threshold = self.folder / "threshold.json"
        self.seal = self.folder / "digests.json"
        self.nonfinite = self.folder / "nonfinite.json"
        self.checkpoint = self.folder / "checkpoint.safetensors"
        self.model = self.folder / saving.NAME  # the network of the selected epoch, or of the last one so far
        self.card = self.model.with_suffix(".json")

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Create the folder and hold its lock; an error is raised at once if another process holds it."""
        try:
            claim(self.folder, "run")
        except Occupied:
            raise
        except (FileExistsError, NotADirectoryError):
            raise RunError(f"{self.folder} cannot be a run folder: a file is in its place") from None
        file, who = self.folder / LOCK, ""
        with suppress(OSError, ValueError):
            who = f" (PID {int(file.read_text(encoding='utf-8'))})"
        busy = RunError(f"{self.folder} is in use by another process{who}; wait for it, or stop it")
        with exclusive(file, busy):
            file.write_text(f"{os.getpid()}\n", encoding="utf-8")
            yield

    def drop_checkpoints(self) -> None:
        """Remove the checkpoint and the network."""
        for file in (self.checkpoint, self.model, self.card, *self.folder.glob(SHARDS)):
            file.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove the files of the run, and its folder if nothing else is in it."""
        self.drop_checkpoints()
        remove(self.folder, [file.name for file in vars(self).values() if file.parent == self.folder])

    def fingerprints(self) -> tuple[str, str] | None:
        """Fingerprints of the data and of its source that the run began with; None if there is no manifest."""
        try:
            data = parse(self.manifest, self.manifest.read_bytes(), RunTable)["data"]
            return str(data["fingerprint"]), str(data.get("source", ""))
        except FileNotFoundError:
            return None
        except KeyError:
            raise RunError(f"{self.manifest} is damaged: the fingerprint of the data is missing") from None

    def begin(self, recipe: Recipe, *, resume: bool) -> None:
        """Check that a new run has an empty folder, or that a run is resumed with its own recipe."""
        if not resume:
            if self.recipe.exists():
                raise RunError(f"{self.folder} holds a run already; resume it, or name another folder")
            return
        if not self.recipe.exists():
            raise RunError(f"{self.folder} holds no run to resume: {NAME} is missing")
        changed = contradictions(load(self.folder), recipe)
        if changed:
            free = f"only {', '.join(CHANGEABLE)} may change"
            raise RunError(f"the recipe differs from that of the run in {self.folder}: {'; '.join(changed)}; {free}")


def contradictions(began: Recipe, now: Recipe) -> list[str]:
    """Where a recipe differs from the one a run began with, apart from keys that change no result."""
    return [line for line in difference(began, now) if line.partition(":")[0].removesuffix(".0") not in CHANGEABLE]


class Log:
    """log.jsonl: one JSON object per line, appended."""

    def __init__(self, file: Path) -> None:
        self._file = open(file, "ab+", opener=no_link)  # noqa: SIM115
        self._name = file

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line; NaN and infinity are written as null, since JSON has neither."""
        with naming(self._name):
            self._file.write(json.dumps(finite(line), ensure_ascii=False, allow_nan=False).encode() + b"\n")
            self._file.flush()

    def size(self) -> int:
        """Number of bytes on disk; a checkpoint stores it, to cut off what was written after it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def cut(self, size: int) -> None:
        """Remove everything after the first ``size`` bytes, and an incomplete line before that."""
        self._file.seek(0)
        kept = self._file.read(size)
        self._file.truncate(kept.rfind(b"\n") + 1)
        self._file.seek(0, os.SEEK_END)


def read_log(file: Path) -> list[dict[str, Any]]:
    """Read a log, which may be missing; an incomplete last line is left out."""
    return parse_log(file, file.read_bytes() if file.is_file() else b"")


def parse_log(file: Path, content: bytes) -> list[dict[str, Any]]:
    """Parse the content of a log; an incomplete last line is left out."""
    lines = enumerate(content.splitlines(keepends=True), start=1)
    return [parse(f"{file}, line {number},", line, LogLine) for number, line in lines if line.endswith(b"\n")]


def finite(value: Any) -> Any:
    """A copy of a value with None in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value


# --- what files contain ----------------------------------------------------------------------------------------------


class Sections(TypedDict, total=False):
    """The recipe in a manifest."""

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


_adapter = cache(TypeAdapter)


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
