"""Runs a grid: trains all cells that are not finished yet, and can be interrupted and resumed at any time."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from nearfar.bench import grid as grids
from nearfar.bench.comparison.fairness import reason
from nearfar.bench.executors import Executor, Processes, Ray, execute, slots
from nearfar.bench.grid import OUT, Cell, Grid, Tables, expand, tail
from nearfar.data import Dataset
from nearfar.training.recipe.files import Overrides
from nearfar.training.recipe.schema import Recipe
from nearfar.training.run.folder import RunError, RunFolder
from nearfar.training.run.provenance import CELLS, LABELS, can_measure_again, code, is_finished, relevant_code
from nearfar.training.trainer import catch_signals
from nearfar.utils import plugins
from nearfar.utils.atomic import draft_of, write_json, write_text
from nearfar.utils.folders import Occupied, claim, read_table, remove, set_aside
from nearfar.utils.progress import Display, Watch
from nearfar.utils.system import exclusive
from nearfar.utils.validation import few, one_of

ENGINES = ("local", "inline", "ray")
STOPPED = (130, 143, -2, -15)  # exit codes after SIGINT and SIGTERM
WEIGHTS = ("checkpoint.safetensors", "classes.*", "model.*", "embeddings.safetensors")  # what lean runs do not keep
IMPORTS = {"digits": "sklearn.datasets"}  # slow imports of datasets
POLL_SECONDS, SHOW_SECONDS = 0.1, 1.0  # between two checks for ended cells, and two updates of the display

OpenDatasets = list[tuple[Recipe, Dataset]]


def plan(
    grid: str | Path | Tables | Grid,
    out: str | Path = OUT,
    *,
    roots: Sequence[str] = (),
    only: Sequence[str] = (),
    overrides: Overrides = (),
) -> list[Cell]:
    """Return all cells that ``run`` would train with their current state, without writing anything.

    Args:
        grid: TOML file of the grid, or its content.
        out: Folder that the folder of the grid is in.
        roots: Locations of the data, see ``run``.
        only: Labels of the cells to train; by default all of them.
        overrides: Changes to the recipe of every cell.

    Returns:
        The cells: baselines first, then seed by seed.
    """
    cells = expand(grids.load(grid), overrides=overrides, roots=roots, only=only, out=out)
    for cell in cells:
        run = RunFolder(cell.folder)
        begun = run.recipe.is_file() or run.metrics.exists()
        cell.state = "finished" if is_finished(run) else "begun" if begun else "new"
    return cells


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
    other_code: str | None = None,
    display: Display | None = None,
) -> list[Cell]:
    """Train all cells of a grid that are not finished yet, each in a process of its own.

    Cells that another grid in ``out`` has finished are copied from there. A cell that fails is recorded, and the others
    continue. On Ctrl-C or SIGTERM all running cells save their state and stop; the next call resumes them.

    A script that calls this needs the guard ``if __name__ == "__main__":``, as for ``multiprocessing``.

    Args:
        grid: A TOML file, a name of ``nearfar recipe list grid``, or the content of a file.
        out: Folder that the folder of the grid is created in.
        engine: "local": processes on this machine; "inline": one cell at a time in this process, which is the fastest
            for small cells; "ray": a Ray cluster.
        jobs: Maximum number of cells at a time; by default 1 on the CPU and as many as fit on GPUs.
        per_gpu: Cells that share a GPU.
        device: Device instead of the recipe's: "auto", "cpu", "cuda", "cuda:1", …
        cache: Folder of decoded images; by default $NEARFAR_CACHE or ~/.cache/nearfar.
        roots: Locations of the data: "ROOT", or "LABEL=ROOT" for one dataset.
        only: Labels of the cells to train; by default all of them.
        overrides: Changes to the recipe of every cell, as for ``nearfar.training.load_recipe``.
        ray_address: Address of a Ray cluster; by default a local one is started.
        lean: Delete weights and embeddings of a cell once its metrics are written.
        other_code: Why finished cells of other code are kept; a comparison needs its own reason.
        display: Receives the progress.

    Returns:
        The cells, finished or with the reason why not.

    Raises:
        GridError: If the grid cannot be read.
        RunError: If another process runs this grid, or finished cells used other data or other code.
    """
    one_of("engine", engine, ENGINES)
    other_code = reason(other_code)
    grid, display = grids.load(grid), display or Display()
    cells = plan(grid, out, roots=roots, only=only, overrides=overrides)
    place = Path(out) / grid.name
    if device is None:
        devices = {cell.recipe.training.device for cell in cells}
        device = devices.pop() if len(devices) == 1 else None
    with _exclusive(place, [cell.recipe.data.root for cell in cells]):
        write_text(place / "grid.toml", grids.to_toml(grid))
        opened = open_datasets(cells)
        reuse(cells, opened, lean=lean, other_code=other_code, display=display)
        rest = [cell for cell in cells if cell.state != "finished"]
        prepare(rest, opened, cache=cache, watch=display.watch)
        absolute = None if cache is None else str(Path(cache).absolute())
        work = partial(execute, cache=absolute, lean=lean, files=[Path(file).absolute() for file in plugins.used()])
        with ExitStack() as stack:
            asked = stack.enter_context(catch_signals())
            executor: Executor
            if engine == "ray":
                executor = Ray(work, address=ray_address, jobs=jobs, per_gpu=per_gpu, device=device)
            elif engine == "inline":
                executor = Executor(work, slots(device=device)[0].device)
            else:
                names = {cell.recipe.data.name for cell in rest}
                imports = [module for name, module in IMPORTS.items() if name in names]
                executor = Processes(work, slots(device=device, jobs=jobs, per_gpu=per_gpu), imports)
            stack.callback(executor.close)
            _train(rest, executor, asked, display, total=len(cells))
    return cells


def open_datasets(cells: Sequence[Cell]) -> OpenDatasets:
    """Open the datasets of some cells, each once, and return them with a recipe that names them."""
    from nearfar.training.setup import open_dataset

    opened: OpenDatasets = []
    for cell in cells:
        if all(recipe.data != cell.recipe.data for recipe, _ in opened):
            opened.append((cell.recipe, open_dataset(cell.recipe)))
    return opened


def reuse(cells: Sequence[Cell], opened: OpenDatasets, *, lean: bool, other_code: str, display: Display) -> None:
    """Refuse finished cells of other code or data, move what is damaged aside, and copy cells of other grids."""
    prints = [(recipe.data, dataset.source.fingerprint()) for recipe, dataset in opened]
    data = {cell.key: next(known for section, known in prints if section == cell.recipe.data) for cell in cells}
    finished = [cell for cell in cells if cell.state == "finished"]
    if other_code:
        display.say(f"cells that were finished with other code are kept: {other_code}")
    elif other := [cell for cell in finished if not _same_code(cell.folder, cell)]:
        raise RunError(
            f"{few([cell.name for cell in other], 4)}: finished in {other[0].folder.parent} with other code than the "
            "present one; choose another --out, remove these folders, or keep them with --other-code REASON"
        )
    if other := [cell for cell in finished if not _same_data(cell.folder, data[cell.key])]:
        raise RunError(
            f"{few([cell.name for cell in other], 4)}: finished in {other[0].folder.parent} with other data than given "
            "now; choose another --out, or remove these folders"
        )
    for cell in cells:
        if cell.state == "begun" and RunFolder(cell.folder).metrics.exists():
            _set_damaged_aside(cell, display)
    copied = [cell.name for cell in _copy_finished(cells, data, lean=lean)]
    if copied:
        display.say(f"{', '.join(copied)}: copied from other grids in {cells[0].grid.parent}")


def _same_data(folder: Path, fingerprint: str) -> bool:
    """Whether a run used this data; the key of a cell does not contain it."""
    return bool(read_table(RunFolder(folder).manifest).get("data", {}).get("source", fingerprint) == fingerprint)


def _same_code(folder: Path, cell: Cell) -> bool:
    """Whether a run was trained with the present code; the key of a cell does not contain it."""
    known, present = read_table(RunFolder(folder).manifest).get("code", {}), code(cell.recipe)
    same_loss = cell.is_baseline or known.get("loss") == present["loss"]
    return same_loss and relevant_code(known) == relevant_code(present)


def _set_damaged_aside(cell: Cell, display: Display) -> None:
    """Move what is damaged of a cell that was finished aside; its ledger is kept."""
    run = RunFolder(cell.folder)
    if can_measure_again(run):
        aside, again = set_aside(run.metrics), "measured again"
    else:
        aside, again = set_aside(cell.folder), "trained again"
        cell.state = "new"
        if (aside / run.looks.name).is_file():
            claim(cell.folder, "run")
            shutil.copyfile(aside / run.looks.name, run.looks)
    display.say(f"{cell.name}: damaged; moved to {aside} and {again}")


def _copy_finished(cells: Sequence[Cell], data: Mapping[str, str], *, lean: bool) -> list[Cell]:
    """Copy cells that other grids beside this one have finished, and return them."""
    wanted = {cell.key: cell for cell in cells if cell.state == "new"}
    copied = []
    for labels in sorted(cells[0].grid.parent.glob(f"*/{CELLS}/[!.]*/{LABELS}")) if wanted else ():
        run = RunFolder(labels.parent)
        cell = wanted.get(str(read_table(labels).get("key")))
        if cell is None or cell.state != "new" or not is_finished(run):
            continue
        whole = cell.is_baseline or run.checkpoint.exists()
        if (lean or whole) and _same_data(run.folder, data[cell.key]) and _same_code(run.folder, cell):
            _copy(run.folder, cell, leave=WEIGHTS if lean else ())
            cell.state = "finished"
            copied.append(cell)
    return copied


def _copy(source: Path, cell: Cell, *, leave: Sequence[str]) -> None:
    """Copy a run under the name that this grid gives it, all of it or nothing."""
    draft = draft_of(cell.folder)
    try:
        claim(draft, "run")
        shutil.copytree(source, draft, ignore=shutil.ignore_patterns(".*", *leave), dirs_exist_ok=True)
        write_json(draft / LABELS, {"cell": cell.folder.name, "key": cell.key, "labels": dict(cell.labels)})
        RunFolder(cell.folder).discard()  # left by a cell that ended before its first step
        remove(cell.folder, (LABELS,))
        if cell.folder.exists():
            set_aside(cell.folder)
        os.replace(draft, cell.folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def prepare(
    cells: Sequence[Cell], opened: OpenDatasets, *, cache: str | Path | None = None, watch: Watch = lambda work: None
) -> None:
    """Decode images and download weights once, before several processes need them at the same time."""
    from nearfar.networks.weights import published
    from nearfar.training.setup import open_store

    for name in dict.fromkeys(cell.recipe.network.name for cell in cells if cell.recipe.network.pretrained is True):
        known = published.find(name)
        if known is not None:
            published.fetch(known)
    for recipe, dataset in opened:
        if any(cell.recipe.data == recipe.data for cell in cells):
            open_store(dataset, cache, watch, **recipe.data.decoding)


def _train(cells: Sequence[Cell], executor: Executor, asked: Sequence[int], display: Display, total: int) -> None:
    """Start and collect cells until all have ended."""
    waiting, running = deque(cells), list[Cell]()
    stopping, shown, finished = False, 0.0, total - len(cells)
    if finished:
        display.say(f"{finished} of {total} cells are already finished")
    while waiting or running:
        if asked and not stopping:
            stopping = True
            waiting.clear()
            display.say(f"stopping: {len(running)} cells save their state; press Ctrl-C again to end them at once")
            executor.stop()
        while waiting and executor.room:
            cell = waiting.popleft()
            display.say(f"{'resumed' if cell.state == 'begun' else 'started'}: {cell.name}")
            cell.state = "running"
            running.append(cell)
            executor.start(cell)
        ended = executor.ended()
        for cell, exit_code in ended:
            running.remove(cell)
            if is_finished(RunFolder(cell.folder)):
                cell.state = "finished"
                finished += 1
            elif exit_code in STOPPED:
                cell.state = "stopped"
            else:
                cell.state, cell.error = "failed", _failure_reason(exit_code, cell.output)
            display.show(cell.name, 1, 1, "")
            display.say(f"[{finished}/{total}] {_summary(cell)}")
        if running and not ended:
            time.sleep(POLL_SECONDS)
        if time.monotonic() - shown > SHOW_SECONDS:
            shown = time.monotonic()
            display.show("cells", finished, total, f"{finished} of {total}")
            for cell in running:
                if steps := cell.steps():
                    display.show(cell.name, *steps, "step {:,} of {:,}".format(*steps))


def _summary(cell: Cell) -> str:
    """Return in one line how a cell ended."""
    if cell.state != "finished":
        return f"{cell.state}: {cell.name}" + (f": {cell.error}" if cell.error else "")
    score = cell.score_text()
    words = [f"finished: {cell.name}", *([] if score is None else [f"recall@1 {score}"])]
    return "  ".join([*words, f"{cell.metrics().get('seconds', 0.0):.1f} s"])


def _failure_reason(exit_code: int, output: Path) -> str:
    """Return in one line why a cell failed."""
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    lines = [line.decode(errors="replace").rstrip() for line in tail(output) if line.strip()]
    return lines[-1] if lines else f"exit code {exit_code} without any output"


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
