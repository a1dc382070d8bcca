"""Folds of a seed as one result: the embeddings of their networks side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from nearfar.bench.comparison.runs import repetitions
from nearfar.training.evaluation.embeddings import measure_embeddings
from nearfar.training.evaluation.evaluate import concatenate
from nearfar.training.run.reader import Run
from nearfar.utils.progress import Watch

FOLDS = ("separated", "concatenated")


def concatenated(runs: Iterable[Run], *, watch: Watch = lambda work: None) -> list[Run]:
    """Replace the folds of each seed by one result, that of their concatenated embeddings."""
    results: list[Run] = []
    for group in repetitions(runs).values():
        by_seed: dict[int, list[Run]] = {}
        for run in group:
            by_seed.setdefault(run.seed, []).append(run)
        for folds in by_seed.values():
            results += folds if folds[0].fold is None or folds[0].is_baseline else [_join(folds, watch)]
    return results


def _join(runs: Sequence[Run], watch: Watch) -> Run:
    sets = {}
    for run in runs:
        if run.embeddings is None:
            raise ValueError(
                f"{run.folder} did not keep its embeddings; grids do without --lean, and packed ones do not hold them"
            )
        sets[run.name] = run.embeddings
    joined = concatenate(sets)
    first = runs[0]
    section = first.tables.get("evaluation", {})
    measured = measure_embeddings(
        joined, ks=section.get("ks", (1, 2, 4, 8)), measure=section.get("measure", "cosine"), watch=watch
    )
    memory = [run.memory for run in runs if run.memory is not None]
    metrics = {
        "test": measured.retrieval,
        "seconds": sum(run.seconds for run in runs),
        "memory": max(memory, default=None),
    }
    values_of = {name: values.cpu().numpy() for name, values in measured.per_query.items()}
    kept = {"recall@1": values_of["precision@1"], "map@r": values_of["map@r"]}  # the former is measured for any ks
    answered = ~np.isnan(kept["recall@1"])  # as runs keep them: queries that have something to find
    per_query = {"rows": joined.rows.numpy(), "labels": np.asarray(joined.labels)} | kept
    per_query = {name: values[answered] for name, values in per_query.items()}
    return Run(first.folder, metrics=metrics, per_query=per_query)
