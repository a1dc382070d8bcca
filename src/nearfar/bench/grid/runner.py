"""Runs a grid: trains all cells that are not finished yet, and can be interrupted and resumed at any time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearfar.bench.executors.job import Executor, Job, failure_reason, last_lines
from nearfar.bench.executors.local import LocalExecutor, slots
from nearfar.bench.grid import grid as grids
from nearfar.bench.grid.cells import Cell, expand
from nearfar.bench.grid.console import GridDisplay
from nearfar.bench.grid.grid import Grid, Tables
from nearfar.bench.grid.records import (
    STATUS,
    CellRecord,
    OpenDatasets,
    copy_finished,
    fingerprints,
    open_datasets,
    records,
    refuse_other_code,
    refuse_other_data,
    set_damaged_aside,
    write_status,
)
from nearfar.training.loop.trainer import StopRequest, catch_signals
from nearfar.training.recipe.files import Overrides, to_dict
from nearfar.training.run.folder import RunError, RunFolder
from nearfar.training.run.provenance import check_waivers, is_finished
from nearfar.utils import plugins
from nearfar.utils.atomic import write_text
from nearfar.utils.folders import Occupied, claim
from nearfar.utils.progress import Watch
from nearfar.utils.system import exclusive
from nearfar.utils.validation import one_of

OUT = Path("bench")
ENGINES = ("local", "inline", "ray")
STOPPED = (130, 143, -2, -15)  # exit codes after SIGINT and SIGTERM
IMPORTS = {"digits": "sklearn.datasets"}  # slow imports of datasets
POLL_SECONDS, SHOW_SECONDS = 0.1, 1.0  # between two checks for ended cells, and two updates of the display


@dataclass(frozen=True)
class GridResult:
    """Cells of a grid and their state after a call of ``run``."""

    folder: Path  # folder of the grid, below out
    records: list[CellRecord]  # one record for each cell, in order

    def in_state(self, *states: str) -> list[CellRecord]:
        """Return the records in some states, such as "finished" or "failed"."""
        return [record for record in self.records if record.state in states]

    @property
    def complete(self) -> bool:
        """Whether all cells are finished."""
        return len(self.in_state("finished")) == len(self.records)


def plan(
    grid: str | Path | Tables | Grid,
    out: str | Path = OUT,
    *,
    roots: Sequence[str] = (),
    only: Sequence[str] = (),
    overrides: Overrides = (),
) -> GridResult:
    """Return all cells that ``run`` would train and their current state, without writing anything.

    Args:
        grid: TOML file of the grid, or its content.
        out: Folder that the folder of the grid is in.
        roots: Locations of the data, see ``run``.
        only: Labels of the cells to train; by default all of them.
        overrides: Changes to the recipe of every cell.
    """
    found = grids.load(grid)
    cells = expand(found, overrides=overrides, roots=roots, only=only)
    place = Path(out) / found.name
    return GridResult(place, records(cells, place))


def run(
    grid: str | Path | Tables | Grid,
    out: str | Path = OUT,
    *,
    engine: str = "local",
    jobs: int | None = None,
    per_gpu: int = 1,
    device: str | None = None,
    cache: str | Path | None = None,
    roots: Sequence[str] = (),
    only: Sequence[str] = (),
    overrides: Overrides = (),
    ray_address: str | None = None,
    lean: bool = False,
    waive: Mapping[str, str] | None = None,
    display: GridDisplay | None = None,
) -> GridResult:
    """Train all cells of a grid that are not finished yet, each in a process of its own.

    Cells that another grid in ``out`` has finished are copied from there. A cell that fails is recorded, and the others
    continue. On Ctrl-C or SIGTERM all running cells save their state and stop; the next call resumes them.

    A script that calls this needs the guard ``if __name__ == "__main__":``, as for ``multiprocessing``.

    Args:
        grid: TOML file of the grid, or its content.
        out: Folder that the folder of the grid is created in.
        engine: "local": processes on this machine; "inline": one cell at a time in this process; "ray": a Ray cluster.
        jobs: Maximum number of cells at a time; by default 1 on the CPU and as many as fit on GPUs.
        per_gpu: Cells that share a GPU.
        device: Device that replaces the one in the recipes.
        cache: Folder of decoded images.
        roots: Locations of the data: "ROOT", or "LABEL=ROOT" for one dataset.
        only: Labels of the cells to train; by default all of them.
        overrides: Changes to the recipe of every cell, as for ``nearfar.training.load_recipe``.
        ray_address: Address of a Ray cluster; by default a local one is started.
        lean: Delete weights and embeddings of a cell once its metrics are written.
        waive: {"code": reason} keeps finished cells of other code; a comparison needs its own waiver.
        display: Receives the progress, see ``nearfar.bench.grid.console``.

    Raises:
        GridError: If the grid cannot be read.
        RunError: If another process runs this grid, or finished cells used other data or other code.
    """
    one_of("engine", engine, ENGINES)
    waive = check_waivers(waive)
    found, display = grids.load(grid), display or GridDisplay()
    result = plan(found, out, roots=roots, only=only, overrides=overrides)
    if device is None:
        devices = {record.cell.recipe.training.device for record in result.records}
        device = devices.pop() if len(devices) == 1 else None
    with _exclusive(result.folder, [record.cell.recipe.data.root for record in result.records]):
        write_text(result.folder / "grid.toml", grids.to_toml(found))
        cells = [record.cell for record in result.records]
        opened = open_datasets(cells)
        data = fingerprints(cells, opened)
        if "code" in waive:
            display.say(f"cells that were finished with other code are kept: {waive['code']}")
        else:
            refuse_other_code(result.records)
        refuse_other_data(result.records, data)
        for line in set_damaged_aside(result.records):
            display.say(line)
        copied = copy_finished(result.records, result.folder, data, lean=lean)
        if copied:
            names = ", ".join(record.name for record in copied)
            display.say(f"{names}: copied from other grids in {result.folder.parent}")
        rest = [record for record in result.records if record.state != "finished"]
        prepare([record.cell for record in rest], opened, cache=cache, watch=display.watch)
        absolute = None if cache is None else str(Path(cache).absolute())
        tasks = [(record, _job(record, cache=absolute, lean=lean)) for record in rest]
        with ExitStack() as stack:
            asked = stack.enter_context(catch_signals())
            executor: Executor
            if engine == "ray":
                from nearfar.bench.executors.ray import RayExecutor

                executor = RayExecutor(result.folder, address=ray_address, jobs=jobs, per_gpu=per_gpu, device=device)
            elif engine == "inline":
                from nearfar.bench.executors.inline import InlineExecutor

                executor = InlineExecutor(slots(device=device))
            else:
                names_of_data = {record.cell.recipe.data.name for record in rest}
                imports = [module for name, module in IMPORTS.items() if name in names_of_data]
                executor = LocalExecutor(slots(device=device, jobs=jobs, per_gpu=per_gpu), imports)
            stack.callback(executor.close)
            _run(result, tasks, executor, asked, display, found.name)
    return result


def prepare(
    cells: Sequence[Cell], opened: OpenDatasets, *, cache: str | Path | None = None, watch: Watch | None = None
) -> None:
    """Decode images and download weights once, before several processes need them at the same time."""
    from nearfar.networks.weights import published
    from nearfar.training.loop.builder import open_store

    for name in dict.fromkeys(cell.recipe.network.name for cell in cells if cell.recipe.network.pretrained is True):
        known = published.find(name)
        if known is not None:
            published.fetch(known)
    for recipe, dataset in opened:
        if any(cell.recipe.data == recipe.data for cell in cells):
            open_store(recipe, dataset, cache, watch)


def _run(
    result: GridResult,
    tasks: Sequence[tuple[CellRecord, Job]],
    executor: Executor,
    asked: StopRequest,
    display: GridDisplay,
    name: str,
) -> None:
    """Start and collect jobs until all have ended."""
    waiting, running = deque(tasks), dict[str, CellRecord]()
    stopping, shown = False, 0.0
    display.begin(len(result.in_state("finished")), len(result.records))
    write_status(result.folder / STATUS, name, result.records)
    while waiting or running:
        changed = False
        if asked and not stopping:
            stopping = True
            waiting.clear()
            display.say(f"stopping: {len(running)} cells save their state; press Ctrl-C again to end them at once")
            executor.stop()
        while waiting and executor.room:
            record, job = waiting.popleft()
            display.started(record)
            record.state, running[job.name], changed = "running", record, True
            executor.start(job)
        for ended, code in executor.ended():
            record = running.pop(ended)
            _set_state(record, code)
            display.ended(record)
            changed = True
        if changed:
            write_status(result.folder / STATUS, name, result.records)
        elif running:
            time.sleep(POLL_SECONDS)
        if time.monotonic() - shown > SHOW_SECONDS:
            shown = time.monotonic()
            display.show(list(running.values()))


def _job(record: CellRecord, *, cache: str | None, lean: bool) -> Job:
    cell = record.cell
    return Job(
        name=cell.folder,
        key=cell.key,
        labels=dict(cell.labels),
        what=cell.what,
        recipe=to_dict(cell.recipe),
        folder=str(record.folder.absolute()),
        output=str(record.output.absolute()),
        cache=cache,
        lean=lean,
        plugins=[str(file) for file in plugins.used()],
    )


def _set_state(record: CellRecord, code: int) -> None:
    """Set the state of a cell whose process has ended."""
    if is_finished(RunFolder(record.folder)):
        record.state = "finished"
    elif code in STOPPED:
        record.state = "stopped"
    else:
        record.state = "failed"
        record.last_lines = last_lines(record.output)
        record.error = failure_reason(code, record.last_lines)


def _exclusive(folder: Path, inputs: Sequence[Any] = ()) -> AbstractContextManager[None]:
    """Lock a grid: two processes would train the same cells."""
    try:
        claim(folder, "grid", inputs)
    except Occupied:
        raise
    except (FileExistsError, NotADirectoryError):
        raise RunError(f"{folder} cannot be the folder of a grid: a file of this name exists") from None
    busy = f"{folder} is in use: another process runs this grid; wait for it or stop it"
    return exclusive(folder / ".lock", RunError(busy))
