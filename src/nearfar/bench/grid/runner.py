"""A grid from its file to the numbers of all its cells, however often that is interrupted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearfar.bench.executors.job import Job, last_words, why
from nearfar.bench.executors.local import Engine, Local, slots
from nearfar.bench.grid import cells as expanding
from nearfar.bench.grid import grid as grids
from nearfar.bench.grid.cells import Cell
from nearfar.bench.grid.console import Nobody, Watcher
from nearfar.bench.grid.grid import Grid, Tables
from nearfar.bench.grid.records import STATUS, Record, records, write_status
from nearfar.bench.grid.reuse import Opened, open_all, refuse_other_data, sources_of, take_over
from nearfar.training.loop.signals import Asked, listening
from nearfar.training.recipe.files import to_dict
from nearfar.training.recipe.overrides import Overrides
from nearfar.training.run.folder import RunError, RunFolder
from nearfar.utils import plugins
from nearfar.utils.atomic import write_text
from nearfar.utils.progress import Watch
from nearfar.utils.system import locked
from nearfar.utils.validation import one_of

OUT = Path("bench")
ENGINES = ("local", "inline", "ray")
STOPPING = (130, 143, -2, -15)  # codes of a process that was asked to stop, with its state saved or nothing to save
IMPORTS = {"digits": "sklearn.datasets"}  # what data sets bring with them that takes seconds
PAUSE, GLANCE = 0.1, 1.0  # seconds between looking who has ended, and how far the others are


@dataclass(frozen=True)
class Ran:
    """What became of a grid.

    Args:
        folder: OUT and the name of the grid.
        records: A record for each cell, in their order.
    """

    folder: Path
    records: list[Record]

    def having(self, state: str) -> list[Record]:
        """The records in a state, such as "finished" or "failed"."""
        return [record for record in self.records if record.state == state]

    @property
    def complete(self) -> bool:
        """Whether all cells are finished."""
        return len(self.having("finished")) == len(self.records)


def plan(
    grid: str | Path | Tables | Grid,
    out: str | Path = OUT,
    *,
    roots: Sequence[str] = (),
    only: Sequence[str] = (),
    overrides: Overrides = (),
) -> Ran:
    """What ``run`` would do: all cells, and how they stand now. Nothing is written."""
    found = grids.load(grid)
    cells = expanding.expand(found, overrides=overrides, roots=roots, only=only)
    place = Path(out) / found.name
    return Ran(place, records(cells, place))


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
    watcher: Watcher | None = None,
) -> Ran:
    """Train all cells of a grid that are not finished yet, each in a process of its own.

    What another grid in ``out`` has finished is copied from there.

    A cell that fails is recorded and the others go on. Being asked to stop (Ctrl-C, SIGTERM) is handed on to the cells,
    which save; called again, it goes on from there.

    Args:
        grid: The file, or what it holds.
        out: Where the folder of the grid lies, or is made.
        engine: "local": processes here; "inline": this process, one cell at a time; "ray": a cluster.
        jobs: At most so many cells at a time; one on processors unless told, as many as fit on GPUs.
        per_gpu: Cells that share a GPU.
        device: Where to compute, if not where the recipes say.
        cache: Where decoded pictures are kept.
        roots: Where data lies: "PLACE", or "LABEL=PLACE" for one data set.
        only: Labels of the cells to train; all of them unless told.
        overrides: Changes to every cell, as for ``nearfar.training.load_recipe``.
        ray_address: Of a Ray cluster; a local one is started unless told.
        lean: Throw weights and embeddings of a cell away once its numbers are there.
        watcher: Who is told how it goes, see ``nearfar.bench.grid.console``.
    """
    one_of("engine", engine, ENGINES)
    found, watcher = grids.load(grid), watcher or Nobody()
    ran = plan(found, out, roots=roots, only=only, overrides=overrides)
    if device is None:
        wanted = {record.cell.recipe.training.device for record in ran.records}
        device = wanted.pop() if len(wanted) == 1 else None
    with _alone(ran.folder):
        write_text(ran.folder / "grid.toml", grids.to_toml(found))
        cells = [record.cell for record in ran.records]
        opened = open_all(cells)
        sources = sources_of(cells, opened)
        refuse_other_data(ran.records, sources)
        taken = take_over(ran.records, ran.folder, sources, lean=lean)
        if taken:
            watcher.say(f"{', '.join(record.name for record in taken)}: taken from other grids in {ran.folder.parent}")
        rest = [record for record in ran.records if record.state != "finished"]
        prepare([record.cell for record in rest], opened, cache=cache, watch=watcher.watch)
        with ExitStack() as stack:
            asked = stack.enter_context(listening())
            worker: Engine
            if engine == "ray":
                from nearfar.bench.executors.ray import Ray

                worker = Ray(ran.folder, address=ray_address, jobs=jobs, per_gpu=per_gpu, device=device)
            elif engine == "inline":
                from nearfar.bench.executors.inline import Inline

                worker = Inline(slots(device=device))
            else:
                names = {record.cell.recipe.data.name for record in rest}
                imports = [module for name, module in IMPORTS.items() if name in names]
                worker = Local(slots(device=device, jobs=jobs, per_gpu=per_gpu), imports)
            stack.callback(worker.close)
            settings = {"cache": None if cache is None else str(Path(cache).absolute()), "lean": lean}
            _run(ran, worker, asked, watcher, found.name, settings)
    return ran


def prepare(
    cells: Sequence[Cell], opened: Opened, *, cache: str | Path | None = None, watch: Watch | None = None
) -> None:
    """Decode pictures and fetch weights once, so that processes that start together find them."""
    from nearfar.networks.weights import published
    from nearfar.training.loop.examples import store_of

    for name in dict.fromkeys(cell.recipe.network.name for cell in cells if cell.recipe.network.pretrained is True):
        known = published.find(name)
        if known is not None:
            published.fetch(known)
    for recipe, dataset in opened:
        if any(cell.recipe.data == recipe.data for cell in cells):
            store_of(recipe, dataset, cache, watch)


def _run(ran: Ran, worker: Engine, asked: Asked, watcher: Watcher, name: str, settings: Mapping[str, Any]) -> None:
    waiting = deque(record for record in ran.records if record.state != "finished")
    under_way: dict[str, Record] = {}
    stopping, glance = False, 0.0
    watcher.begin(len(ran.having("finished")), len(ran.records))
    write_status(ran.folder / STATUS, name, ran.records)
    while waiting or under_way:
        changed = False
        if asked and not stopping:
            stopping = True
            waiting.clear()
            watcher.say(f"stopping: {len(under_way)} cells save what they have; once more ends them at once")
            worker.stop()
        while waiting and worker.room:
            record = waiting.popleft()
            watcher.started(record)
            record.state, under_way[record.cell.folder], changed = "running", record, True
            worker.start(_job(record, settings))
        for ended, code in worker.ended():
            record = under_way.pop(ended)
            _settle(record, code)
            watcher.ended(record)
            changed = True
        if changed:
            write_status(ran.folder / STATUS, name, ran.records)
        elif under_way:
            time.sleep(PAUSE)
        if time.monotonic() - glance > GLANCE:
            glance = time.monotonic()
            watcher.show(list(under_way.values()))


def _job(record: Record, settings: Mapping[str, Any]) -> Job:
    """A job with settings that all jobs share."""
    cell = record.cell
    return Job(
        name=cell.folder,
        key=cell.key,
        labels=dict(cell.labels),
        what=cell.what,
        recipe=to_dict(cell.recipe),
        folder=str(record.folder.absolute()),
        output=str(record.output.absolute()),
        cache=settings["cache"],
        lean=settings["lean"],
        code=[str(file) for file in plugins.used()],
    )


def _settle(record: Record, code: int) -> None:
    """See what became of a cell whose process has ended."""
    if RunFolder(record.folder).metrics.is_file():
        record.state = "finished"
        return
    if code in STOPPING:
        record.state = "stopped"
        return
    record.state = "failed"
    record.said = last_words(record.output)
    record.error = why(code, record.said)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two that run the same grid would train the same cells."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise RunError(f"{folder} cannot be the folder of a grid: a file is in its place") from None

    def refuse() -> None:
        raise RunError(f"{folder} is in use: another process runs this grid; wait for it, or stop it")

    with locked(folder / ".lock", waiting=refuse):
        yield
