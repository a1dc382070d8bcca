"""Reads finished runs for comparisons, from run folders and from packed grids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

from nearfar.bench.comparison import manifest_keys as keys
from nearfar.training.recipe.files import flat
from nearfar.training.run.folder import RunError, RunFolder
from nearfar.training.run.packed import locate, run_folders
from nearfar.training.run.reader import Run


def read(folder: str | Path) -> Run:
    """Read a finished run.

    Args:
        folder: A run folder written by ``nearfar train`` or ``nearfar bench run``; it may lie in a packed grid.

    Returns:
        The run.

    Raises:
        RunError: If the folder holds no finished run, or a file is damaged or was changed after the run.
    """
    run = Run(folder)
    problems = {
        run.files.recipe: f"{run.folder} holds no run",
        run.files.metrics: f"the run in {run.folder} is not finished",
        run.files.manifest: f"the run in {run.folder} cannot be compared",
    }
    for file, problem in problems.items():
        if not locate(file).is_file():
            raise RunError(f"{problem}: {file.name} is missing")
    _ = run.labels, run.metrics, run.manifest  # damaged files raise here
    return run


def find(*places: str | Path) -> list[Run]:
    """Find all finished runs in folders and packed grids.

    A run that one grid copied from another is returned once.

    Args:
        *places: Run folders, folders that hold some at any depth, or packed grids.

    Returns:
        The runs, in the order of the places and of folder names.

    Raises:
        RunError: If one of the places holds no finished run.
    """
    folders = []
    for place in places:
        finished = [folder for folder in run_folders(place) if locate(RunFolder(folder).metrics).is_file()]
        if not finished:
            if locate(RunFolder(place).recipe).is_file():
                read(place)  # raises with the reason
            raise RunError(f"{place} holds no finished run")
        folders += finished
    return originals(read(folder) for folder in _once(folders))


def unfinished(*places: str | Path) -> list[Path]:
    """Run folders without results yet.

    Args:
        *places: As for ``find``.

    Returns:
        Their paths.
    """
    every = [folder for place in places for folder in run_folders(place)]
    return [folder for folder in _once(every) if not locate(RunFolder(folder).metrics).is_file()]


def repetition(run: Run) -> tuple[Any, ...]:
    """The identity that a run shares with runs of other seeds and folds."""
    kept = keys.relevant(run.manifest)
    if run.is_baseline:
        kept = {key: value for key, value in kept.items() if keys.within(key, keys.UNTRAINED)}
    else:
        facts = flat(run.manifest).items()
        kept |= {key: value for key, value in facts if keys.is_loss(key) or key in keys.NORMALIZE}
    rest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]
    return run.loss, run.network, run.dim, run.data, run.protocol, rest


def repetitions(runs: Iterable[Run]) -> dict[tuple[Any, ...], list[Run]]:
    """Group runs that differ in nothing but seed or fold.

    Args:
        runs: Finished runs.

    Returns:
        The runs of each group, ordered by seed and fold.
    """
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(repetition(run), []).append(run)
    return {key: sorted(group, key=lambda run: (run.seed, run.fold or 0)) for key, group in groups.items()}


def _once(folders: Iterable[Path]) -> list[Path]:
    return list({folder.resolve(): folder for folder in folders}.values())


def originals(runs: Iterable[Run]) -> list[Run]:
    """Each cell once: cells with the same key, loss and numbers, including the seconds, are copies."""
    first: dict[Hashable, Run] = {}
    for run in runs:
        copies = run.key, run.loss, json.dumps(run.metrics, sort_keys=True)
        first.setdefault(copies if run.key else run.folder, run)
    return list(first.values())
