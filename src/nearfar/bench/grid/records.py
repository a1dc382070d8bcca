"""How each cell of a grid stands, on disk and in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nearfar.bench.grid.cells import Cell
from nearfar.training.run.folder import RunFolder, finite
from nearfar.utils.atomic import write_json

STATUS = "status.json"
CELLS, OUTPUT = "cells", "output"  # folders of a grid: its runs, and what their processes said
TAIL = 4096  # bytes of a log that are looked at to see how far a run is


@dataclass
class Record:
    """A cell and what became of it.

    Args:
        cell: What it is.
        folder: Its run folder.
        output: The file with all that its process said.
        state: "new", "begun" (by an earlier call), "running", "finished", "stopped" or "failed".
        error: Why it failed, in one line.
        said: The last lines before it failed.
    """

    cell: Cell
    folder: Path
    output: Path
    state: str = "new"
    error: str | None = None
    said: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Of the cell."""
        return self.cell.name

    def metrics(self) -> dict[str, Any]:
        """What came out; empty before it is finished."""
        found = read_json(RunFolder(self.folder).metrics)
        return found if self.state == "finished" else {}

    def score(self, metric: str = "recall@1") -> float | None:
        """A number of the test, None where there is none."""
        value = self.metrics().get("test", {}).get(metric)
        return None if value is None else float(value)

    def told(self, metric: str = "recall@1") -> str | None:
        """A number in percent, and of which classes where the test was left out; None where there is none."""
        metrics = self.metrics()
        for part, words in (("test", ""), ("validation", " of validation")):
            if (score := metrics.get(part, {}).get(metric)) is not None:
                return f"{100 * score:.2f}{words}"
        return None

    def steps(self) -> tuple[int, int] | None:
        """How many steps are done, and of how many; None while that is not known."""
        run = RunFolder(self.folder)
        total = read_json(run.manifest).get("length", {}).get("steps")
        lines = _tail(run.log)
        return (int(lines[-1].get("step", 0)), int(total)) if total and lines else None


def records(cells: Sequence[Cell], place: Path) -> list[Record]:
    """The cells of a grid as they stand in its folder."""
    found = []
    for cell in cells:
        record = Record(cell, place / CELLS / cell.folder, place / OUTPUT / f"{cell.folder}.txt")
        run = RunFolder(record.folder)
        if run.metrics.is_file():
            record.state = "finished"
        elif run.recipe.is_file():
            record.state = "begun"
        found.append(record)
    return found


def write_status(file: Path, grid: str, every: Sequence[Record]) -> None:
    """All of it as JSON, for whoever wants to look."""
    cells: dict[str, dict[str, Any]] = {}
    for record in every:
        cell, metrics = record.cell, record.metrics()
        about: dict[str, Any] = {"key": cell.key, "labels": dict(cell.labels), "what": cell.what, "state": record.state}
        about |= {key: metrics[key] for key in ("seconds", "memory") if key in metrics}
        if metrics:
            about["recall@1"] = record.score()
        if record.error:
            about |= {"error": record.error, "said": record.said}
        cells[cell.folder] = about
    states = [record.state for record in every]
    counts = {state: states.count(state) for state in dict.fromkeys(states)}
    write_json(file, finite({"format": 1, "grid": grid, "states": counts, "cells": cells}))


def read_json(file: Path) -> dict[str, Any]:
    """The table in a file; an empty one where there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _tail(file: Path) -> list[dict[str, Any]]:
    """The last whole lines of a log."""
    try:
        with open(file, "rb") as content:
            content.seek(max(0, os.path.getsize(file) - TAIL))
            lines = content.read().splitlines(keepends=True)
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line) if line.endswith(b"\n") else None)
        except ValueError:  # the first may be cut
            continue
    return [line for line in found if isinstance(line, dict)]
