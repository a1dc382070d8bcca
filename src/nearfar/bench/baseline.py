"""Baseline: how well a network retrieves unseen classes before any training."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from nearfar.bench.grid import FROZEN
from nearfar.training.evaluation.embeddings import Evaluator
from nearfar.training.loop.builder import build, untrained
from nearfar.training.loop.step import kernels
from nearfar.training.loop.trainer import peak_memory, reset_peak_memory
from nearfar.training.recipe.files import to_dict, to_toml
from nearfar.training.recipe.schema import Recipe
from nearfar.training.run import provenance
from nearfar.training.run.folder import RunFolder, finite
from nearfar.utils.atomic import write_json, write_text


def measure(recipe: Recipe, folder: str | Path, *, cache: str | Path | None = None) -> dict[str, Any]:
    """Evaluate the features of an untrained network and write a run folder."""
    run = RunFolder(folder)
    with run.owned(), kernels(deterministic=recipe.training.deterministic):
        start = time.monotonic()
        parts = untrained(build(recipe, cache=cache))
        reset_peak_memory(parts.device)
        about = {**provenance.of(parts), "recipe": to_dict(recipe), "selection": "no training", "baseline": FROZEN}
        write_json(run.manifest, finite(about))
        write_text(run.recipe, to_toml(recipe))
        evaluator = Evaluator(parts)
        embeddings = evaluator.embed()
        if "test" in embeddings:
            provenance.record_look(run, "baseline")
        measured, per_query = evaluator.measure(embeddings)
        evaluator.write_queries(run, embeddings, per_query)
        metrics = {
            "selection": about["selection"],
            "epoch": -1,  # no epoch was trained
            "steps": 0,
            "seconds": round(time.monotonic() - start, 2),
            "memory": round(peak_memory(parts.device), 1) or None,
            "skipped": 0,
            **measured,
        }
        provenance.finish(run, metrics)
        evaluator.write_embeddings(run, embeddings)
    return metrics
