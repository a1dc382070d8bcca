"""Cells that another grid in the same place has trained: they are known by their content and not trained again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from nearfar.bench.job import LABELS
from nearfar.bench.records import CELLS, Record, read_json
from nearfar.training.run import RunFolder
from nearfar.writing import write_json


def take_over(every: Sequence[Record], place: Path) -> list[Record]:
    """Copy what other grids have finished of these cells, and say which; ``place`` is this grid's folder."""
    wanted = {record.cell.key: record for record in every if record.state == "new"}
    taken = []
    for labels in sorted(place.parent.glob(f"*/{CELLS}/*/{LABELS}")) if wanted else ():
        record = wanted.get(str(read_json(labels).get("key")))
        if record is None or record.state != "new" or not RunFolder(labels.parent).metrics.is_file():
            continue
        _copy(labels.parent, record)
        record.state = "finished"
        taken.append(record)
    return taken


def _copy(source: Path, record: Record) -> None:
    """The run under the name that this grid gives it; it is there as a whole or not at all."""
    folder, cell = record.folder, record.cell
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        shutil.copytree(source, draft, ignore=shutil.ignore_patterns(".*"))
        write_json(draft / LABELS, {"cell": cell.folder, "key": cell.key, "labels": dict(cell.labels)})
        shutil.rmtree(folder, ignore_errors=True)  # where a cell ended before it began
        os.replace(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
