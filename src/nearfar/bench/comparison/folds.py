"""Folds of a seed as one result: the embeddings of their networks side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearfar.bench.comparison.outcomes import Outcome, repetitions
from nearfar.training.evaluation.embeddings import EmbeddingSet, measure_embeddings
from nearfar.training.evaluation.evaluate import concatenate
from nearfar.training.run.folder import RunFolder
from nearfar.utils.progress import Watch

FOLDS = ("separated", "concatenated")


@dataclass(frozen=True, eq=False)
class ConcatenatedFolds(Outcome):
    """The runs of all folds of a seed, tested with their embeddings side by side."""

    # Metrics of each query, as Outcome.queries returns them.
    per_query: Mapping[str, NDArray[Any]] = field(default_factory=dict, repr=False)

    @property
    def fold(self) -> None:
        """None: all folds are one result."""

    def queries(self) -> dict[str, NDArray[Any]]:
        """Arrays with one value for each test query."""
        return dict(self.per_query)


def concatenated(outcomes: Iterable[Outcome], *, watch: Watch = lambda work: None) -> list[Outcome]:
    """Replace the folds of each seed by one result, that of their concatenated embeddings."""
    found: list[Outcome] = []
    for runs in repetitions(outcomes).values():
        by_seed: dict[int, list[Outcome]] = {}
        for run in runs:
            by_seed.setdefault(run.seed, []).append(run)
        for own in by_seed.values():
            found += own if own[0].fold is None or own[0].is_baseline else [_join(own, watch)]
    return found


def _join(runs: Sequence[Outcome], watch: Watch) -> ConcatenatedFolds:
    for run in runs:
        if not RunFolder(run.folder).embeddings.is_file():
            raise ValueError(
                f"{run.folder} did not keep its embeddings; grids do without --lean, and packed ones do not hold them"
            )
    joined = concatenate({run.name: EmbeddingSet.load(RunFolder(run.folder).embeddings) for run in runs})
    first = runs[0]
    section = first.recipe.get("evaluation", {})
    measured = measure_embeddings(
        joined, ks=section.get("ks", (1, 2, 4, 8)), measure=section.get("measure", "cosine"), watch=watch
    )
    memory = [run.memory for run in runs if run.memory is not None]
    metrics = {
        "test": measured.retrieval,
        "seconds": sum(run.seconds for run in runs),
        "memory": max(memory, default=None),
    }
    each = {name: values.cpu().numpy() for name, values in measured.per_query.items()}
    kept = {"recall@1": each["precision@1"], "map@r": each["map@r"]}  # the former is measured for any ks
    answered = ~np.isnan(kept["recall@1"])  # as runs keep them: queries that have something to find
    per_query = {"rows": joined.rows.numpy(), "labels": np.asarray(joined.labels)} | kept
    return ConcatenatedFolds(
        first.folder,
        first.manifest,
        metrics,
        first.labels,
        first.key,
        {name: values[answered] for name, values in per_query.items()},
    )
