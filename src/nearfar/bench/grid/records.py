"""State of the cells of a grid on disk, and reuse of cells that are finished already."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nearfar.bench.executors.job import LABELS
from nearfar.bench.grid.cells import Cell
from nearfar.bench.grid.grid import FROZEN
from nearfar.data import Dataset
from nearfar.data.store.fingerprint import KIND
from nearfar.training.recipe.schema import Recipe
from nearfar.training.run.folder import RunError, RunFolder, finite
from nearfar.training.run.provenance import CELLS, can_measure_again, code, is_finished, relevant_code
from nearfar.training.run.tables import LogLine, RunTable, parse
from nearfar.utils.atomic import draft_of, write_json
from nearfar.utils.folders import claim, read_table, remove, set_aside
from nearfar.utils.validation import few

STATUS = "status.json"
OUTPUT = "output"  # folder of a grid with the output of the processes of its runs, which are in CELLS
TAIL = 4096  # bytes read from the end of a log to find the current step
WEIGHTS = ("checkpoint", "embeddings.safetensors")  # what lean runs do not keep

OpenDatasets = list[tuple[Recipe, Dataset]]


@dataclass
class CellRecord:
    """A cell and its state."""

    cell: Cell
    folder: Path  # its run folder
    output: Path  # file with the output of its process
    state: str = "new"  # "new", "begun" (by an earlier call), "running", "finished", "stopped" or "failed"
    error: str | None = None  # why it failed, in one line
    last_lines: list[str] = field(default_factory=list)  # last lines of its output before it failed

    @property
    def name(self) -> str:
        """Name of the cell."""
        return self.cell.name

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of a finished cell; an empty dictionary otherwise."""
        return read_table(RunFolder(self.folder).metrics) if self.state == "finished" else {}

    def score(self, metric: str = "recall@1") -> float | None:
        """Return a metric of the test classes, or None if it was not measured."""
        value = self.metrics().get("test", {}).get(metric)
        return None if value is None else float(value)

    def score_text(self, metric: str = "recall@1") -> str | None:
        """Return a metric in percent: of the test classes, else of the validation classes, else None."""
        metrics = self.metrics()
        for part, suffix in (("test", ""), ("validation", " (validation)")):
            if (score := metrics.get(part, {}).get(metric)) is not None:
                return f"{100 * score:.2f}{suffix}"
        return None

    def steps(self) -> tuple[int, int] | None:
        """Return the steps done and the steps in all, or None while they are unknown."""
        run = RunFolder(self.folder)
        try:
            total = parse(run.manifest, run.manifest.read_bytes(), RunTable).get("length", {}).get("steps")
        except (OSError, RunError):
            return None
        lines = _tail(run.log)
        return (int(lines[-1].get("step", 0)), int(total)) if total and lines else None


def records(cells: Sequence[Cell], place: Path) -> list[CellRecord]:
    """Return the state of cells in the folder of their grid."""
    found = []
    for cell in cells:
        record = CellRecord(cell, place / CELLS / cell.folder, place / OUTPUT / f"{cell.folder}.txt")
        run = RunFolder(record.folder)
        if is_finished(run):
            record.state = "finished"
        elif run.recipe.is_file() or run.metrics.exists():
            record.state = "begun"
        found.append(record)
    return found


def write_status(file: Path, grid: str, every: Sequence[CellRecord]) -> None:
    """Write the state of all cells as JSON."""
    cells: dict[str, dict[str, Any]] = {}
    for record in every:
        cell, metrics = record.cell, record.metrics()
        about: dict[str, Any] = {"key": cell.key, "labels": dict(cell.labels), "what": cell.what, "state": record.state}
        about |= {key: metrics[key] for key in ("seconds", "memory") if key in metrics}
        if metrics:
            about["recall@1"] = record.score()
        if record.error:
            about |= {"error": record.error, "said": record.last_lines}
        cells[cell.folder] = about
    states = [record.state for record in every]
    counts = {state: states.count(state) for state in dict.fromkeys(states)}
    write_json(file, finite({"format": 1, "grid": grid, "states": counts, "cells": cells}))


def open_datasets(cells: Sequence[Cell]) -> OpenDatasets:
    """Open the datasets of some cells, each once, and return them with a recipe that names them."""
    from nearfar.training.loop.builder import open_dataset

    found: OpenDatasets = []
    for cell in cells:
        if all(recipe.data != cell.recipe.data for recipe, _ in found):
            found.append((cell.recipe, open_dataset(cell.recipe)))
    return found


def fingerprints(cells: Sequence[Cell], opened: OpenDatasets) -> dict[str, str]:
    """Return the fingerprint of the data of each cell by its key."""
    prints = [(recipe.data, dataset.source.fingerprint()) for recipe, dataset in opened]
    return {cell.key: next(known for data, known in prints if data == cell.recipe.data) for cell in cells}


def refuse_other_data(every: Sequence[CellRecord], data: Mapping[str, str]) -> None:
    """Refuse finished cells that were trained on other data: the key of a cell does not contain its data."""
    other = [each for each in every if each.state == "finished" and not _same_data(each.folder, data[each.cell.key])]
    if other:
        names = few([record.name for record in other], 4)
        raise RunError(
            f"{names}: finished in {other[0].folder.parent} with other data than given now; choose another --out, or "
            "remove these folders"
        )


def refuse_other_code(every: Sequence[CellRecord]) -> None:
    """Refuse finished cells that were trained with other code: the key of a cell does not contain its code."""
    other = [each for each in every if each.state == "finished" and not _same_code(each.folder, each.cell)]
    if other:
        raise RunError(
            f"{few([record.name for record in other], 4)}: finished in {other[0].folder.parent} with other code than "
            "the present one; choose another --out, remove these folders, or keep them with --waive code=REASON"
        )


def set_damaged_aside(every: Sequence[CellRecord]) -> list[str]:
    """Move what is damaged of cells that were finished aside; their ledgers are kept."""
    lines = []
    for record in every:
        run = RunFolder(record.folder)
        if record.state != "begun" or not run.metrics.exists():
            continue
        if can_measure_again(run):
            aside, again = set_aside(run.metrics), "measured again"
        else:
            aside, again = set_aside(record.folder), "trained again"
            record.state = "new"
            if (aside / run.looks.name).is_file():
                claim(record.folder, "run")
                shutil.copyfile(aside / run.looks.name, run.looks)
        lines.append(f"{record.name}: damaged; moved to {aside} and {again}")
    return lines


def copy_finished(
    every: Sequence[CellRecord], place: Path, data: Mapping[str, str], *, lean: bool = False
) -> list[CellRecord]:
    """Copy cells that other grids beside this one have finished, and return their records."""
    wanted = {record.cell.key: record for record in every if record.state == "new"}
    copied = []
    for labels in sorted(place.parent.glob(f"*/{CELLS}/[!.]*/{LABELS}")) if wanted else ():
        key, run = str(read_table(labels).get("key")), RunFolder(labels.parent)
        record = wanted.get(key)
        if record is None or record.state != "new" or not is_finished(run):
            continue
        whole = record.cell.what == FROZEN or run.last.exists()
        if (lean or whole) and _same_data(run.folder, data[key]) and _same_code(run.folder, record.cell):
            _copy(run.folder, record, leave=WEIGHTS if lean else ())
            record.state = "finished"
            copied.append(record)
    return copied


def _same_data(folder: Path, fingerprint: str) -> bool:
    """Whether a run used this data; one without a fingerprint of this kind has been refused for its code."""
    known = str(read_table(RunFolder(folder).manifest).get("data", {}).get("source", fingerprint))
    return known == fingerprint or (fingerprint.startswith(KIND) and not known.startswith(KIND))


def _same_code(folder: Path, cell: Cell) -> bool:
    """Whether a run was trained with the present code."""
    known, present = read_table(RunFolder(folder).manifest).get("code", {}), code(cell.recipe)
    own = cell.what == FROZEN or known.get("loss") == present["loss"]
    return own and relevant_code(known) == relevant_code(present)


def _copy(source: Path, record: CellRecord, *, leave: Sequence[str]) -> None:
    """Copy a run under the name that this grid gives it, all of it or nothing."""
    folder, cell = record.folder, record.cell
    draft = draft_of(folder)
    try:
        claim(draft, "run")
        shutil.copytree(source, draft, ignore=shutil.ignore_patterns(".*", *leave), dirs_exist_ok=True)
        write_json(draft / LABELS, {"cell": cell.folder, "key": cell.key, "labels": dict(cell.labels)})
        RunFolder(folder).discard()  # left by a cell that ended before its first step
        remove(folder, (LABELS,))
        if folder.exists():
            set_aside(folder)
        os.replace(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _tail(file: Path) -> list[dict[str, Any]]:
    """Return the last complete lines of a log."""
    try:
        with open(file, "rb") as content:
            content.seek(max(0, os.path.getsize(file) - TAIL))
            lines = content.read().splitlines(keepends=True)
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found += [parse(file, line, LogLine)] if line.endswith(b"\n") else []
        except RunError:  # the first line may be cut
            continue
    return found
