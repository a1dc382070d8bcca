"""nearfar tune"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nearfar.cli.app import app
from nearfar.cli.output import say


@app.command(name="tune", short_help="Search for settings of a recipe, judged by its validation classes.")
def tune_recipe(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A TOML file with validation classes.")],
    space: Annotated[
        Path, typer.Option(metavar="SPACE", help="A TOML file: which keys take which values; see recipes/spaces.")
    ],
    trials: Annotated[
        int | None,
        typer.Option(metavar="N", help="Trials in all, those of earlier sittings included; 50, or all of a grid."),
    ] = None,
    sampler: Annotated[
        str, typer.Option(help="tpe, random, grid (every combination) or in_turn (one key after the other).")
    ] = "tpe",
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Data base that workers share, as postgresql://…; SQLite in OUT unless told."),
    ] = None,
    study: Annotated[str | None, typer.Option(metavar="NAME", help="Its name there; that of OUT unless told.")] = None,
    jobs: Annotated[int, typer.Option(metavar="N", help="Trials at a time, each in a process of its own.")] = 1,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where it is written; tuning/NAME of the recipe unless told.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change the recipe of all trials; repeatable."),
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option(metavar="ROOT", help="Where the data lies, data.root; repeat for archives.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where to compute: auto, cpu, cuda, cuda:1, …")] = None,
    cache: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where decoded pictures are kept.")] = None,
    prune: Annotated[bool, typer.Option(help="End trials early that are worse than half of the others.")] = True,
    keep: Annotated[bool, typer.Option("--keep", help="Keep all that trials leave, checkpoints too.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the sampler.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say only what was found.")] = False,
) -> None:
    """Search for settings of a recipe. Validation classes judge; the test classes are not looked at.

    The same command again goes on: trials that ended are not made again, and a larger --trials adds some. Several may
    run at once with the same --storage, on one machine or on many. OUT then has best.toml (a complete recipe),
    trials.json and tuning.html.

    Example: nearfar tune recipes/digits/proxy_anchor.toml --space recipes/spaces/proxy_anchor.toml --trials 20 --set
    split.name=fixed_validation --set split.share=0.4 --set sampler.classes=3 --set evaluation.every=1
    """
    from nearfar.bench.tuning import results, tuner, workers
    from nearfar.training.recipe.overrides import parse_override
    from nearfar.training.run import console

    overrides = dict(map(parse_override, settings or ()))
    if data:
        overrides["data.root"] = data[0] if len(data) == 1 else data
    if device is not None:
        overrides["training.device"] = device
    plan = tuner.plan(
        recipe,
        space,
        out or Path("tuning") / f"{recipe.absolute().parent.name}-{recipe.stem}",
        sampler=sampler,
        trials=trials,
        storage=storage,
        study=study,
        prune=prune,
        keep=keep,
        seed=seed,
        cache=cache,
        overrides=overrides,
    )
    display = console.create(quiet=quiet) if jobs == 1 else console.Silent() if quiet else console.Lines()
    if plan.prune and plan.recipe.evaluation.every == 0:
        display.say("evaluation.every is 0, so no trial can be pruned; --set evaluation.every=1 measures each epoch")
    try:
        found = workers.run(plan, jobs=jobs, display=display)
    finally:
        display.close()
    best = found.best
    if best is None:
        raise RuntimeError(f"no trial has finished; what each came to stands in {plan.out / results.LIST}")
    say(f"trial {best.number} of {len(found.trials)}: validation {found.metric} {best.value:.4f}")
    say(f"  {results.shown(best.values)}")
    say(f"wrote {plan.out / results.BEST} and {plan.out / results.PAGE}")
