"""The network to deploy: trained on all classes, with what a run on some of them chose."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from nearfar.training import verdict
from nearfar.training.blend import UNTESTED
from nearfar.training.recipe.files import load
from nearfar.training.recipe.schema import Recipe
from nearfar.training.run.folder import RunError, contradictions
from nearfar.training.run.reader import Run
from nearfar.utils.formatting import command


def find_run(recipe: Recipe, source: Any, runs: Path) -> Run:
    """Return the run of a recipe: a run folder that is given as the recipe, or the last finished one below ``runs``."""
    if isinstance(source, (str, Path)) and (Path(source) / "manifest.json").is_file():
        run = Run(source)
        if changed := contradictions(run.recipe, recipe):
            raise RunError(f"{source} was trained otherwise: {'; '.join(changed)}; final takes the settings of its run")
        return run
    finished = []
    for file in runs.glob("*/metrics.json"):
        with suppress(OSError, ValueError):  # damaged, or without a recipe
            if not contradictions(load(file.parent), recipe):
                finished.append(file.parent)
    if not finished:
        raise RunError(
            f"no finished run of this recipe is in {runs}, and final takes what such a run has chosen; train the "
            "recipe first, or name the folder of its run in place of the recipe"
        )
    return Run(max(finished, key=lambda folder: (folder / "metrics.json").stat().st_mtime))


def of_all_classes(recipe: Recipe, run: Run) -> tuple[Recipe, dict[str, Any]]:
    """Return the recipe that trains on all classes with what its run chose, and what the manifest says of that run."""
    metrics = run.metrics
    if not run.has("map@r"):
        raise RunError(f"{run.folder} was not tested, so nothing is known of a training with its settings")
    said, blend = verdict.text(metrics), metrics.get("blend")
    if verdict.is_unchanged(metrics):
        raise RunError(
            f"{run.folder}: {said}. There is nothing to train: use the network as it is, "
            f"{command('index', 'build', recipe.network.name)} IMAGES"
        )
    changes: dict[str, Any] = {"split": {"name": "everything"}, "evaluation": UNTESTED}
    if blend is not None:
        changes["selection.blend"] = blend["share"]
    elif metrics["selection"] != "last epoch":  # chosen by validation classes, which are trained on now
        changes["training.epochs"] = metrics["epoch"] + 1
    scores = {name: run.score(name) for name in verdict.METRICS}
    unmeasured = ", ".join(f"{name} {100 * score:.1f} of unseen classes" for name, score in scores.items())
    final = {"of": str(run.folder), "verdict": said or unmeasured, **scores}
    return load(recipe, overrides=changes), {"final": final}
