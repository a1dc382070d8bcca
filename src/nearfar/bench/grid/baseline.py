"""Baseline: how well a network retrieves unseen classes before any training."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from nearfar.bench.grid.grid import FROZEN
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
    """Evaluate the features of an untrained network and write a run folder.

    Args:
        recipe: Recipe of the runs that the baseline is compared with; it defines test classes and preprocessing.
        folder: Run folder for manifest.json (with "baseline"), recipe.toml, metrics.json and the results per query.
        cache: Folder of decoded images.

    Returns:
        The metrics, as in metrics.json.

    Example:
        >>> import tempfile
        >>> from nearfar.training import load_recipe
        >>> recipe = load_recipe({
        ...     "data": {"name": "digits", "settings": {"vectors": True}},
        ...     "sampler": {"classes": 5, "per_class": 8},
        ...     "network": {"name": "linear", "dim": 8},
        ...     "loss": {"name": "raw"},
        ...     "optimizer": {"lr": 0.01},
        ...     "training": {"epochs": 1, "device": "cpu"},
        ... })
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     metrics = measure(recipe, folder)
        >>> metrics["steps"], 0.5 < metrics["test"]["recall@1"] < 1
        (0, True)
    """
    run = RunFolder(folder)
    with run.owned(), kernels(deterministic=recipe.training.deterministic):
        start = time.monotonic()
        parts = untrained(build(recipe, cache=cache))
        reset_peak_memory(parts.device)
        about = {**provenance.of(parts), "recipe": to_dict(recipe), "selection": "no training", "baseline": FROZEN}
        write_json(run.manifest, finite(about))
        write_text(run.recipe, to_toml(recipe))
        evaluator = Evaluator(parts)
        found = evaluator.embed()
        if "test" in found:
            provenance.record_look(run, "baseline")
        measured, per_query = evaluator.measure(found)
        evaluator.write_queries(run, found, per_query)
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
        evaluator.write_embeddings(run, found)
    return metrics
