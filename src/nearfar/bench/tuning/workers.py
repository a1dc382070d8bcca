"""Several workers on one study: one process each, which share only its database."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from nearfar.bench.tuning.results import StudyResults
from nearfar.bench.tuning.tuner import OnUpdate, TuningPlan, open_study, tune, write_results
from nearfar.training.run.console import Display, Lines, Silent
from nearfar.training.trainer import Stopped, catch_signals
from nearfar.utils import plugins
from nearfar.utils.system import processors
from nearfar.utils.validation import whole


def run(
    plan: TuningPlan, *, jobs: int = 1, display: Display | None = None, on_update: OnUpdate | None = None
) -> StudyResults:
    """Run the missing trials, several at a time."""
    whole("jobs", jobs)
    if jobs == 1:
        return tune(plan, display=display, on_update=on_update)
    study = open_study(plan)  # so that workers do not all create its tables
    silent = isinstance(display, Silent)
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
    display: Any = Silent() if silent else Lines()
    try:
        parent = multiprocessing.parent_process()
        tune(plan, display=display, on_update=on_update, worker=number, parent=parent, device=device)
    except Stopped as stopped:
        raise SystemExit(stopped.code) from None
    except Exception as error:
        Lines().say(f"worker {number}: {' '.join(str(error).split())}")
        raise SystemExit(1) from None


def _stop(workers: list[BaseProcess]) -> None:
    for worker in workers:
        if worker.is_alive():
            worker.terminate()  # SIGTERM: the worker saves its trial and stops
