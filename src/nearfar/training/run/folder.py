"""Run folders: their files, their lock, and the log."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nearfar.networks.weights import save as saving
from nearfar.training.recipe.files import NAME, difference, load
from nearfar.training.recipe.schema import Recipe
from nearfar.training.run.tables import LogLine, RunTable, parse
from nearfar.training.run.tables import RunError as RunError
from nearfar.utils.atomic import naming, no_link
from nearfar.utils.folders import LOCK, MARKER, Occupied, claim, is_ours, remove

# Keys that change no result; they may differ when a run is resumed.
FREE = (
    *("data.mode", "data.root", "evaluation.before", "evaluation.test_every", "training.checkpoint_steps"),
    "training.device",
)
SHARD, SHARDS = "classes.{rank}.{iteration}.safetensors", "classes.*.*.safetensors"  # beside a checkpoint
CHANGEABLE = (*FREE, "training.on_nonfinite")
PATIENCE = 0.2  # seconds, in which another process that removes its lock has done so
TRIES = 100  # attempts to lock a folder that other processes create and remove


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
        self.looks = self.folder / "test_looks.jsonl"
        self.threshold = self.folder / "threshold.json"
        self.seal = self.folder / "digests.json"
        self.nonfinite = self.folder / "nonfinite.json"
        self.checkpoint = self.folder / "checkpoint.safetensors"
        self.model = self.folder / saving.NAME  # the network of the selected epoch, or of the last one so far
        self.card = self.model.with_suffix(".json")

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Hold the lock of the folder; an error is raised at once if another process holds it."""
        new = not self.folder.exists()
        lock = self.folder / LOCK
        with self._locked(lock):
            try:
                lock.write_text(f"{os.getpid()}\n", encoding="utf-8")
                yield
            finally:
                # If nothing was written, remove what was created, while the lock is held.
                with suppress(OSError):  # another process may be about to lock it
                    if {entry.name for entry in self.folder.iterdir()} == {LOCK, MARKER}:
                        (self.folder / MARKER).unlink()
                        lock.unlink()
                        if new:
                            self.folder.rmdir()

    def drop_checkpoints(self) -> None:
        """Remove the checkpoint and the network."""
        for file in (self.checkpoint, self.model, self.card, *self.folder.glob(SHARDS)):
            file.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove the files of the run, and its folder if nothing else is in it."""
        self.drop_checkpoints()
        remove(self.folder, [file.name for file in vars(self).values() if file.parent == self.folder])

    def _locked(self, file: Path) -> AbstractContextManager[object]:
        """Create the folder, and lock a file in it; again if another process removes it meanwhile."""
        for _ in range(TRIES):
            try:
                claim(self.folder, "run")
                lock = FileLock(file, timeout=PATIENCE).acquire()
                if is_ours(self.folder, "run"):
                    return lock
                file.unlink()  # another process has removed the marker meanwhile
                lock.lock.release()
            except Occupied:
                raise
            except Timeout:
                busy = f"{self.folder} is in use by another process{_who(file)}; wait for it, or stop it"
                raise RunError(busy) from None
            except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
                if isinstance(error, NotADirectoryError) or self.folder.is_file():
                    raise RunError(f"{self.folder} cannot be a run folder: a file is in its place") from None
        raise RunError(f"{self.folder} cannot be a run folder: other processes keep removing it")

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


def _who(lock: Path) -> str:
    try:
        return f" (PID {int(lock.read_text(encoding='utf-8'))})"
    except (OSError, ValueError):
        return ""
