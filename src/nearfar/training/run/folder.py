"""A run folder: what a training leaves behind, and who may write to it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from nearfar.training.recipe.files import NAME, difference, load
from nearfar.training.recipe.schema import Recipe
from nearfar.training.run import checkpoints
from nearfar.utils.atomic import naming
from nearfar.utils.system import locked

# What changes no number. It may change between two sittings of one run, and so may what to do where there is none.
FREE = ("data.mode", "data.root", "training.checkpoint_steps", "training.device")
CHANGEABLE = (*FREE, "training.on_nonfinite")
TRIES = 100  # at a folder that others make and remove at the same time


class RunError(ValueError):
    """A folder that cannot be used as asked; the message says why and what to do."""


class RunFolder:
    """The places of a run's files.

    Args:
        folder: Such as runs/one; made when the run begins.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.recipe = self.folder / NAME
        self.manifest = self.folder / "manifest.json"
        self.log = self.folder / "log.jsonl"
        self.metrics = self.folder / "metrics.json"
        self.embeddings = self.folder / "embeddings.safetensors"
        self.queries = self.folder / "queries.safetensors"
        self.nonfinite = self.folder / "nonfinite.json"
        self.last = self.folder / "checkpoint" / "last"
        self.best = self.folder / "checkpoint" / "best"

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Alone among all processes; a folder that another one writes to is refused at once."""
        new = not self.folder.exists()
        with self._locked() as lock:
            try:
                lock.write_text(f"{os.getpid()}\n", encoding="utf-8")
                yield
            finally:
                # Where nothing came of it, what was made for it goes again, while nobody else can be at it.
                with suppress(OSError):  # but for one who is just coming
                    if [entry.name for entry in self.folder.iterdir()] == [lock.name]:
                        lock.unlink()
                        if new:
                            self.folder.rmdir()

    @contextmanager
    def _locked(self) -> Iterator[Path]:
        """Make the folder, and lock a file in it."""
        lock = self.folder / ".lock"
        for _ in range(TRIES):
            with ExitStack() as held:
                if self._lock(lock, held):
                    yield lock
                    return
        raise RunError(f"{self.folder} cannot be a run folder: it is removed as often as it is made")

    def _lock(self, lock: Path, held: ExitStack) -> bool:
        """Lock a file for as long as something is ``held``; False where another process was removing it."""

        def refuse() -> None:
            raise RunError(f"{self.folder} is in use by another process{_who(lock)}; wait for it, or stop it")

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock.touch()
            found = lock.stat().st_ino
            held.enter_context(locked(lock, waiting=refuse))
            return lock.stat().st_ino == found  # a file without a name can be locked, and keeps nobody away
        except FileNotFoundError:
            return False
        except (FileExistsError, NotADirectoryError) as error:
            if isinstance(error, FileExistsError) and not self.folder.is_file():
                return False
            raise RunError(f"{self.folder} cannot be a run folder: a file is in its place") from None

    def fingerprint(self) -> str | None:
        """Of the data that the run began with; None where no manifest says it."""
        try:
            return str(json.loads(self.manifest.read_text(encoding="utf-8"))["data"]["fingerprint"])
        except FileNotFoundError:
            return None
        except (KeyError, TypeError, ValueError):
            raise RunError(f"{self.manifest} is damaged: it does not say which data the run is of") from None

    def begin(self, recipe: Recipe, *, resume: bool) -> None:
        """See that a new run has the folder for itself, or that a run goes on as it began."""
        if not resume:
            if self.recipe.exists():
                raise RunError(f"{self.folder} holds a run already; resume it, or name another folder")
            return
        if not self.recipe.exists():
            raise RunError(f"{self.folder} holds no run to resume: {NAME} is not there")
        changed = contradictions(load(self.folder), recipe)
        if changed:
            raise RunError(
                f"the recipe contradicts the run in {self.folder}, which began with another: {'; '.join(changed)}"
            )
        for place in (self.last, self.best):
            checkpoints.recover(place)


def contradictions(began: Recipe, now: Recipe) -> list[str]:
    """Where a recipe differs from the one a run began with, but for what changes no number."""
    return [line for line in difference(began, now) if line.partition(":")[0].removesuffix(".0") not in CHANGEABLE]


class Log:
    """log.jsonl: a JSON object a line, appended.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, Log(Path(folder) / "log.jsonl") as log:
    ...     log.write({"step": 1})
    ...     kept = log.size()
    ...     log.write({"step": 2})
    ...     log.cut(kept)
    ...     [line["step"] for line in read_log(Path(folder) / "log.jsonl")]
    [1]
    """

    def __init__(self, file: Path) -> None:
        self._file = open(file, "ab+")  # noqa: SIM115
        self._name = file

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line; NaN and infinity are written as null, as JSON has neither."""
        with naming(self._name):
            self._file.write(json.dumps(finite(line), ensure_ascii=False, allow_nan=False).encode() + b"\n")
            self._file.flush()

    def size(self) -> int:
        """Bytes up to now, seen on disk: for a checkpoint, to cut what comes after it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def cut(self, size: int) -> None:
        """Forget everything after the first ``size`` bytes; of a log that got shorter since, what is no whole line."""
        self._file.seek(0)
        kept = self._file.read(size)
        self._file.truncate(kept.rfind(b"\n") + 1)
        self._file.seek(0, os.SEEK_END)


def read_log(file: Traversable) -> list[dict[str, Any]]:
    """The lines of a log; the last one is left out where its writing was cut short."""
    lines = file.read_bytes().splitlines(keepends=True) if file.is_file() else []
    found = []
    for number, line in enumerate(lines, start=1):
        if line.endswith(b"\n"):
            try:
                found.append(json.loads(line))
            except ValueError:
                raise RunError(f"{file} is damaged: line {number} is no JSON") from None
    return found


def finite(value: Any) -> Any:
    """The same value with None for numbers that JSON does not have.

    >>> finite({"loss": float("nan"), "ks": (1, 2)})
    {'loss': None, 'ks': [1, 2]}
    """
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value


def _who(lock: Path) -> str:
    try:
        return f" (number {int(lock.read_text(encoding='utf-8'))})"
    except (OSError, ValueError):
        return ""
