"""Baseline: how well a network retrieves unseen classes before any training."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from nearfar.bench.grid import FROZEN
from nearfar.training.evaluation.embeddings import embed_parts, measure_parts, query_metrics, write_embeddings
from nearfar.training.recipe.files import to_dict, to_toml
from nearfar.training.recipe.schema import Recipe
from nearfar.training.run import provenance
from nearfar.training.run.folder import RunFolder, finite
from nearfar.training.setup import build, untrained
from nearfar.training.step import kernels
from nearfar.training.trainer import peak_memory, reset_peak_memory
from nearfar.utils.atomic import write_json, write_tensors, write_text


def measure(recipe: Recipe, folder: str | Path, *, cache: str | Path | None = None) -> dict[str, Any]:
    """Evaluate the features of an untrained network and write a run folder."""
    run = RunFolder(folder)
    with run.owned(), kernels(deterministic=recipe.training.deterministic):
        start = time.monotonic()
        setup = untrained(build(recipe, cache=cache))
        reset_peak_memory(setup.device)
        about = {**provenance.of(setup), "recipe": to_dict(recipe), "selection": "no training", "baseline": FROZEN}
        write_json(run.manifest, finite(about))
        write_text(run.recipe, to_toml(recipe))
        parts = embed_parts(setup)
        if "test" in parts:
            provenance.record_look(run, "baseline")
        measured, per_query = measure_parts(setup, parts)
        if queries := query_metrics(setup, parts, per_query):
            write_tensors(run.queries, queries)
        metrics = {
            "selection": about["selection"],
            "epoch": -1,  # no epoch was trained
            "steps": 0,
            "seconds": round(time.monotonic() - start, 2),
            "memory": round(peak_memory(setup.device), 1) or None,
            "skipped": 0,
            **measured,
        }
        provenance.finish(run, metrics)
        write_embeddings(setup, run, parts)
    return metrics
