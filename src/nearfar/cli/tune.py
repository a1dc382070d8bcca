"""nearfar tune: search for settings of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from nearfar.cli import complete
from nearfar.cli.app import app
from nearfar.cli.options import Cache, Quiet, RecipeDevice, Roots, Seed, Settings, recipe_overrides
from nearfar.cli.output import say
from nearfar.utils.formatting import command

if TYPE_CHECKING:
    from nearfar.bench.tuning.results import StudyResults
    from nearfar.bench.tuning.tuner import TuningPlan

PAGE = "tuning.html"


@app.command(name="tune", short_help="Search for the best settings of a recipe on its validation classes.")
def tune_recipe(
    recipe: Annotated[
        Path,
        Argument(
            metavar="RECIPE",
            help="A recipe with validation classes: TOML file, or name.",
            autocompletion=complete.recipes,
        ),
    ],
    space: Annotated[
        Path,
        Option(
            metavar="SPACE",
            help="Keys to tune and their values: TOML file, or name of a space.",
            autocompletion=complete.spaces,
        ),
    ],
    trials: Annotated[
        int | None,
        Option(metavar="N", help="Number of trials, including earlier ones; by default 50, or all of a grid."),
    ] = None,
    sampler: Annotated[
        str, Option(help="tpe, random, grid (every combination) or in_turn (one key after the other).")
    ] = "tpe",
    storage: Annotated[
        str | None,
        Option(metavar="URL", help="Database that workers share, such as postgresql://…; by default SQLite in OUT."),
    ] = None,
    study: Annotated[
        str | None, Option(metavar="NAME", help="Name of the study in the database; by default that of OUT.")
    ] = None,
    jobs: Annotated[int, Option(metavar="N", help="Trials at a time, each in a process of its own.")] = 1,
    out: Annotated[
        Path | None,
        Option("-o", "--out", metavar="FOLDER", help="Folder of the results; by default tuning/NAME of the recipe."),
    ] = None,
    settings: Settings = None,
    data: Roots = None,
    device: RecipeDevice = None,
    cache: Cache = None,
    prune: Annotated[
        bool | None,
        Option(
            "--prune/--no-prune",
            help="End trials early that are worse than the median of the others; default: unless --sampler in_turn.",
        ),
    ] = None,
    keep: Annotated[bool, Option("--keep", help="Keep all files of the trials, including checkpoints.")] = False,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Search for the best settings of a recipe on its validation classes. The test classes are never used.

    Writes best.toml (a complete recipe), trials.json and tuning.html to OUT. The same command resumes an interrupted
    search, and a larger --trials extends it. With split.name=k_fold, each trial is the mean of all folds. Several
    workers can share a --storage, on one machine or on many.

    Example: nearfar tune digits/proxy_anchor --space proxy_anchor --trials 20 --set
    split.name=fixed_validation --set split.share=0.4 --set sampler.classes=3 --set evaluation.every=1
    """
    from nearfar.bench.tuning import results, tuner, workers
    from nearfar.training.run import console

    overrides = recipe_overrides(settings, data, device)
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
        display.say("evaluation.every is 0, so no trial can be pruned; --set evaluation.every=1 evaluates every epoch")
    try:
        found = workers.run(plan, jobs=jobs, display=display, on_update=write_page)
    finally:
        display.close()
    best = found.best
    if best is None:
        raise RuntimeError(f"no trial has finished; see {plan.out / results.LIST}")
    say(f"trial {best.number} of {len(found.trials)}: validation {found.metric} {best.value:.4f}")
    say(f"  {results.settings_text(best.values)}")
    say(f"wrote {plan.out / results.BEST} and {plan.out / PAGE}")
    if not quiet:
        say(f"Train the best settings and test them once with: {command('train', plan.out / results.BEST)}")


def write_page(plan: TuningPlan, found: StudyResults) -> None:
    """Write the page of a study; workers call this after each trial."""
    from nearfar.reports import tuning_page
    from nearfar.utils.atomic import write_text

    write_text(plan.out / PAGE, tuning_page.html(found, plan.space, title=plan.study, sampler=plan.sampler))
