"""Tune every loss of a grid with the same number of trials, on validation classes of the training half.

    python benchmarks/tune_grid.py recipes/grids/cub.toml --spaces recipes/spaces/benchmark --trials 6 \
        --set data.name=cars196 --set split.share=0.5 --data cars-0.zip --data cars-1.zip --out tuning/cars196

The first trial of each loss has the settings of the grid; the others are drawn at random. Every loss needs a file
NAME.toml among the spaces. Only keys of the loss may be searched, so that tuned losses still differ in nothing else.
The test classes are never used. The same command resumes an interrupted search.

Prints a table and writes OUT/losses.toml, the section [losses] of a grid with the best settings.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import tomli_w

from nearfar.bench import grid, tune
from nearfar.bench.tuning import space
from nearfar.training.recipe.files import load, to_dict
from nearfar.training.recipe.schema import Recipe


def recipes(file: Path, only: list[str], changes: list[str]) -> dict[str, Recipe]:
    """Return the recipe of each loss of a grid for its first seed."""
    found: dict[str, Recipe] = {}
    for cell in grid.expand(grid.load(file)):
        name = cell.labels["loss"]
        if not cell.is_baseline and name not in found and (not only or name in only):
            found[name] = load(cell.recipe, overrides=changes)
    return found


def keys_of(searched: space.Space) -> list[str]:
    """Return the keys of a space."""
    return [one.key for one in searched]


def start(recipe: Recipe, searched: space.Space) -> dict[str, Any]:
    """Return the point of a space that has the settings of a recipe, with the loss's defaults."""
    from nearfar import losses

    settings = {**losses.defaults(recipe.loss.name), **recipe.loss.settings}
    found = {key: settings[key.removeprefix("loss.")] for key in keys_of(searched)}
    return {key: value for key, value in found.items() if value is not None}


def main() -> None:
    """Tune and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", type=Path)
    parser.add_argument("--spaces", type=Path, required=True, help="folder with a space for each loss")
    parser.add_argument("--trials", type=int, default=6, help="for each loss, the settings of the grid included")
    parser.add_argument("--only", nargs="+", default=[], help="names of losses")
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="SECTION.KEY=VALUE")
    parser.add_argument("--data", action="append", default=[], help="where the data is; repeat for several archives")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, help="start no further trial after this time")
    options = parser.parse_args()
    begun = time.monotonic()
    roots = (
        [f"data.root={json.dumps(options.data if len(options.data) > 1 else options.data[0])}"] if options.data else []
    )
    best: dict[str, Any] = {}
    print("| loss | first | best | trials | settings |\n|---|--:|--:|--:|---|")
    for name, recipe in recipes(options.grid, options.only, [*options.changes, *roots]).items():
        file = options.spaces / f"{name}.toml"
        searched = space.load(file)
        if foreign := [key for key in keys_of(searched) if not key.startswith("loss.")]:
            raise SystemExit(f"{name}.toml searches {', '.join(foreign)}; only keys of the loss may differ")
        if options.seconds is not None and time.monotonic() - begun > options.seconds:
            print(f"| {name} | not started: out of time |")
            continue
        found = tune(
            recipe,
            file,
            options.out / name,
            sampler="random",
            trials=options.trials,
            prune=False,
            first=start(recipe, searched),
        )
        finished = [trial for trial in found.trials if trial.value is not None]
        top = max(finished, key=lambda trial: trial.value or 0.0)
        words = ", ".join(f"{key.removeprefix('loss.')} {value:.4g}" for key, value in top.values.items())
        given = 100 * (finished[0].value or 0.0)
        print(f"| {name} | {given:.1f} | {100 * (top.value or 0.0):.1f} | {len(finished)} | {words} |", flush=True)
        chosen = {key.removeprefix("loss."): value for key, value in top.values.items()}
        best[name] = {"loss": {**to_dict(recipe)["loss"], **chosen}}
        if not recipe.network.normalize:
            best[name]["network"] = {"normalize": False}
    (options.out / "losses.toml").write_text(tomli_w.dumps({"losses": best}))


if __name__ == "__main__":
    main()
