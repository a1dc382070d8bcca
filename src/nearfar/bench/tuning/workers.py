"""Several workers on one study: a process each, which share the data base and nothing else."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from nearfar.bench.tuning import results
from nearfar.bench.tuning.plan import Plan
from nearfar.bench.tuning.tuner import open_study, tune
from nearfar.training.loop.signals import Stopped, listening
from nearfar.training.run.console import Display, Lines, Silent
from nearfar.utils import plugins
from nearfar.utils.system import processors
from nearfar.utils.validation import whole


def run(plan: Plan, *, jobs: int = 1, display: Display | None = None) -> results.Results:
    """Make the trials that are missing, with so many at a time.

    Args:
        plan: What is tuned, see ``nearfar.bench.tuning.tuner.plan``.
        jobs: Processes; each takes another GPU where there are several. More may join from other machines, with the
            same plan and the same storage.
        display: What a person sees, see ``nearfar.training.run.console``.
    """
    whole("jobs", jobs)
    if jobs == 1:
        return tune(plan, display=display)
    study = open_study(plan)  # so that the first ones do not all make the tables
    silent = isinstance(display, Silent)
    context = multiprocessing.get_context("spawn")
    workers: list[BaseProcess] = [
        context.Process(target=_work, args=(plan, number, jobs, silent, list(plugins.used())), name=f"worker {number}")
        for number in range(jobs)
    ]
    with listening() as asked:
        for worker in workers:
            worker.start()
        told = False
        while any(worker.is_alive() for worker in workers):
            if asked and not told:
                _stop(workers)
                told = True
            for worker in workers:
                worker.join(timeout=0.1)
    if asked:
        raise Stopped(asked.number or signal.SIGTERM, f"stopped; the same command goes on with {plan.out}")
    failed = [worker for worker in workers if worker.exitcode]
    found = results.write(study, plan)
    if failed and len(failed) == jobs:
        raise RuntimeError("all workers failed; what went wrong stands above")
    return found


def _work(plan: Plan, number: int, jobs: int, silent: bool, code: Sequence[Path]) -> None:
    """One worker, in a process of its own."""
    plugins.use(*code)
    # Ctrl-C reaches all processes of a terminal; only the one above is to hear it, and asks the others to stop.
    os.setpgid(0, 0)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, processors() // jobs))
    count = torch.cuda.device_count()
    several = plan.recipe.training.device in ("auto", "cuda") and count > 1
    device = f"cuda:{number % count}" if several else None
    display: Any = Silent() if silent else Lines()
    try:
        tune(plan, display=display, worker=number, above=multiprocessing.parent_process(), device=device)
    except Stopped as stopped:
        raise SystemExit(stopped.code) from None
    except Exception as error:
        Lines().say(f"worker {number}: {' '.join(str(error).split())}")
        raise SystemExit(1) from None


def _stop(workers: list[BaseProcess]) -> None:
    for worker in workers:
        if worker.is_alive():
            worker.terminate()  # SIGTERM: the step under way is saved
