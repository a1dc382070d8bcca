"""The network to deploy: trained on all classes, with what a run on some of them chose."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nearfar.training import verdict
from nearfar.training.recipe.files import difference, load
from nearfar.training.recipe.schema import Recipe
from nearfar.training.run.folder import RunError
from nearfar.training.run.reader import Run
from nearfar.utils.formatting import command

EVALUATION = {"test": False, "test_every": 0, "before": False, "train_recall": False}


def find_run(recipe: Recipe, source: Any, runs: Path) -> Run:
    """Return the run of a recipe: a run folder that is given as the recipe, or the last finished one below ``runs``."""
    if isinstance(source, (str, Path)) and (Path(source) / "manifest.json").is_file():
        return Run(source)
    finished = [file.parent for file in runs.glob("*/metrics.json") if not difference(load(file.parent), recipe)]
    if not finished:
        raise RunError(
            f"no finished run of this recipe is in {runs}, and final takes what such a run has chosen; train the "
            "recipe first, or name the folder of its run in place of the recipe"
        )
    return Run(max(finished, key=lambda folder: (folder / "metrics.json").stat().st_mtime))


def of_all_classes(run: Run, overrides: Mapping[str, Any]) -> tuple[Recipe, dict[str, Any]]:
    """Return the recipe that trains on all classes with what a run chose, and what its manifest says of that run."""
    recipe, metrics = run.recipe, run.metrics
    if not run.has("map@r"):
        raise RunError(f"{run.folder} was not tested, so nothing is known of a training with its settings")
    said, blend = verdict.text(metrics), metrics.get("blend")
    if verdict.is_unchanged(metrics):
        raise RunError(
            f"{run.folder}: {said}. There is nothing to train: use the network as it is, "
            f"{command('index', 'build', recipe.network.name)} IMAGES"
        )
    changes: dict[str, Any] = {"split": {"name": "everything"}, "evaluation": EVALUATION}
    if blend is not None:
        changes["selection.blend"] = blend["share"]
    elif metrics["selection"] != "last epoch":  # chosen by validation classes, which are trained on now
        changes["training.epochs"] = metrics["epoch"] + 1
    final = {"of": str(run.folder), "verdict": said, "map@r": run.score("map@r"), "recall@1": run.score("recall@1")}
    device = {"training.device": load(recipe, overrides=overrides).training.device}
    return load(recipe, overrides={**changes, **device}), {"final": final}
