"""Cells that are finished already, here or in another grid: they are known by their content and their data."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from nearfar.bench.executors.job import LABELS
from nearfar.bench.grid.cells import Cell
from nearfar.bench.grid.grid import FROZEN
from nearfar.bench.grid.records import CELLS, Record, read_json
from nearfar.data import Dataset
from nearfar.training.recipe.schema import Recipe
from nearfar.training.run.folder import RunError, RunFolder
from nearfar.utils.atomic import write_json
from nearfar.utils.validation import few

Sources = Mapping[str, str]
Opened = list[tuple[Recipe, Dataset]]
WEIGHTS = ("checkpoint", "embeddings.safetensors")  # what lean cells do without


def open_all(cells: Sequence[Cell]) -> Opened:
    """The data sets of some cells, each once, with a recipe that names it."""
    from nearfar.training.loop.examples import open_data

    found: Opened = []
    for cell in cells:
        if all(recipe.data != cell.recipe.data for recipe, _ in found):
            found.append((cell.recipe, open_data(cell.recipe)))
    return found


def sources_of(cells: Sequence[Cell], opened: Opened) -> dict[str, str]:
    """By key of a cell, the fingerprint of the data that lies where its recipe says now."""
    prints = [(recipe.data, dataset.source.fingerprint()) for recipe, dataset in opened]
    return {cell.key: next(known for data, known in prints if data == cell.recipe.data) for cell in cells}


def refuse_other_data(every: Sequence[Record], sources: Sources) -> None:
    """What is finished must have been trained on the data at hand: a key does not tell where pictures lie."""
    other = [each for each in every if each.state == "finished" and not _same_data(each.folder, sources[each.cell.key])]
    if other:
        names = few([record.name for record in other], 4)
        raise RunError(
            f"{names}: finished in {other[0].folder.parent}, but on other data than is given now; name another "
            "--out, or remove their folders"
        )


def take_over(every: Sequence[Record], place: Path, sources: Sources, *, lean: bool = False) -> list[Record]:
    """Copy what other grids have finished of these cells, and say which.

    Args:
        every: The cells of a grid, which is run by nobody else meanwhile.
        place: Its folder.
        sources: As ``sources_of`` finds them.
        lean: Leave weights and embeddings behind; otherwise only runs that have kept theirs are copied.
    """
    wanted = {record.cell.key: record for record in every if record.state == "new"}
    taken = []
    for labels in sorted(place.parent.glob(f"*/{CELLS}/[!.]*/{LABELS}")) if wanted else ():
        key, run = str(read_json(labels).get("key")), RunFolder(labels.parent)
        record = wanted.get(key)
        if record is None or record.state != "new" or not (run.metrics.is_file() and run.manifest.is_file()):
            continue
        whole = record.cell.what == FROZEN or run.last.exists()
        if (lean or whole) and _same_data(run.folder, sources[key]):
            _copy(run.folder, record, leave=WEIGHTS if lean else ())
            record.state = "finished"
            taken.append(record)
    return taken


def _same_data(folder: Path, source: str) -> bool:
    """Whether a run is of this data; of one that does not say, it is believed."""
    return bool(read_json(RunFolder(folder).manifest).get("data", {}).get("source", source) == source)


def _copy(source: Path, record: Record, *, leave: Sequence[str]) -> None:
    """The run under the name that this grid gives it; it is there as a whole or not at all."""
    folder, cell = record.folder, record.cell
    draft = folder.with_name(f".{folder.name}.draft")  # whoever copies has the grid for himself
    try:
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(source, draft, ignore=shutil.ignore_patterns(".*", *leave))
        write_json(draft / LABELS, {"cell": cell.folder, "key": cell.key, "labels": dict(cell.labels)})
        shutil.rmtree(folder, ignore_errors=True)  # where a cell ended before it began
        os.replace(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
