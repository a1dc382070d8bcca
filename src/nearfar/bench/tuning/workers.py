"""Several workers on one study: one process each, which share only its database."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from nearfar.bench.tuning import tuner
from nearfar.bench.tuning.results import StudyResults
from nearfar.bench.tuning.tuner import OnUpdate, TuningPlan, open_study, plan, write_results
from nearfar.training.recipe.files import Overrides
from nearfar.training.recipe.schema import Recipe
from nearfar.training.trainer import Stopped, catch_signals
from nearfar.utils import plugins
from nearfar.utils.progress import Console, Display
from nearfar.utils.system import processors
from nearfar.utils.validation import whole


def tune(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    space: str | Path | Mapping[str, Any],
    out: str | Path,
    *,
    sampler: str = "tpe",
    trials: int | None = None,
    storage: str | None = None,
    study: str | None = None,
    jobs: int = 1,
    prune: bool | None = None,
    keep: bool = False,
    seed: int = 0,
    cache: str | Path | None = None,
    overrides: Overrides = (),
    display: Display | None = None,
    on_update: OnUpdate | None = None,
) -> StudyResults:
    """Search for the best settings of a recipe on its validation classes. The test classes are never used.

    Writes best.toml (a complete recipe) and trials.json to ``out``. The same call resumes an interrupted search, and
    more ``trials`` extend it.

    Args:
        recipe: A recipe with validation classes: a TOML file, its name, or its content.
        space: Keys to tune and their values: a TOML file, the name of a space, or its content.
        out: Folder of the results.
        sampler: "tpe", "random", "grid" (every combination) or "in_turn" (one key after the other).
        trials: Number of trials, including earlier ones; by default 50, or all of a grid.
        storage: Database that workers share, such as postgresql://…; by default SQLite in ``out``.
        study: Name of the study in the database; by default that of ``out``.
        jobs: Trials at a time, each in a process of its own.
        prune: Whether to end trials early that are worse than the median of the others; by default unless ``sampler``
            is "in_turn".
        keep: Whether to keep all files of the trials, including checkpoints.
        seed: Seed of the sampler.
        cache: Folder of decoded images.
        overrides: Changes to the recipe.
        display: Receives the progress.
        on_update: Called with the plan and the results after each trial.

    Returns:
        All trials of the study; ``best`` is the one whose recipe is best.toml.
    """
    chosen = plan(
        recipe,
        space,
        out,
        sampler=sampler,
        trials=trials,
        storage=storage,
        study=study,
        prune=prune,
        keep=keep,
        seed=seed,
        cache=cache,
        overrides=overrides,
    )
    return run(chosen, jobs=jobs, display=display, on_update=on_update)


def run(
    plan: TuningPlan, *, jobs: int = 1, display: Display | None = None, on_update: OnUpdate | None = None
) -> StudyResults:
    """Run the missing trials, several at a time."""
    whole("jobs", jobs)
    if display is not None and plan.prune and plan.recipe.evaluation.every == 0:
        display.say("evaluation.every is 0, so no trial can be pruned; --set evaluation.every=1 evaluates every epoch")
    if jobs == 1:
        return tuner.tune(plan, display=display, on_update=on_update)
    study = open_study(plan)  # so that workers do not all create its tables
    silent = not isinstance(display, Console)
    context = multiprocessing.get_context("spawn")
    workers: list[BaseProcess] = [
        context.Process(
            target=_work, args=(plan, number, jobs, silent, on_update, list(plugins.used())), name=f"worker {number}"
        )
        for number in range(jobs)
    ]
    with catch_signals() as asked:
        for worker in workers:
            worker.start()
        stopping = False
        while any(worker.is_alive() for worker in workers):
            if asked and not stopping:
                _stop(workers)
                stopping = True
            for worker in workers:
                worker.join(timeout=0.1)
    if asked:
        raise Stopped(asked.number or signal.SIGTERM, f"stopped; resume {plan.out} with the same command")
    failed = [worker for worker in workers if worker.exitcode]
    found = write_results(study, plan, on_update)
    if failed and len(failed) == jobs:
        raise RuntimeError("all workers failed; see the messages above")
    return found


def _work(
    plan: TuningPlan, number: int, jobs: int, silent: bool, on_update: OnUpdate | None, files: Sequence[Path]
) -> None:
    """Run one worker as the main function of its process."""
    plugins.use(*files)
    # Ctrl-C in the terminal must reach only the parent, which stops its workers itself.
    os.setpgid(0, 0)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, processors() // jobs))
    count = torch.cuda.device_count()
    several = plan.recipe.training.device in ("auto", "cuda") and count > 1
    device = f"cuda:{number % count}" if several else None
    display = Display() if silent else Console(bars=False)
    try:
        parent = multiprocessing.parent_process()
        tuner.tune(plan, display=display, on_update=on_update, worker=number, parent=parent, device=device)
    except Stopped as stopped:
        raise SystemExit(stopped.code) from None
    except Exception as error:
        Console(bars=False).say(f"worker {number}: {' '.join(str(error).split())}")
        raise SystemExit(1) from None


def _stop(workers: list[BaseProcess]) -> None:
    for worker in workers:
        if worker.is_alive():
            worker.terminate()  # SIGTERM: the worker saves its trial and stops
