"""What is to be tuned, looked at before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearfar.bench.tuning.space import Space, check, finite, from_dict, load, size
from nearfar.training.recipe.files import load as load_recipe
from nearfar.training.recipe.overrides import Overrides
from nearfar.training.recipe.schema import Recipe
from nearfar.utils.validation import one_of, whole

POINTWISE = ("grid", "in_turn")  # samplers that go through points one by one; the others draw theirs
SAMPLERS = ("tpe", "random", *POINTWISE)
TRIALS = 50  # of samplers that have no end
MOST_COMBINATIONS = 1000  # of a grid that nobody limited


@dataclass(frozen=True)
class Plan:
    """What is tuned, and how.

    Args:
        recipe: What all trials share; it must have validation classes.
        space: Which keys take which values.
        out: Where trials, best.toml, trials.json and the page are written.
        sampler: "tpe", "random", "grid" (every combination) or "in_turn" (one key after the other).
        trials: How many there are to be in all, those of earlier sittings included; None for all of a grid.
        storage: The address of a data base that workers share; SQLite in ``out`` unless told.
        study: Its name there.
        prune: Whether trials end early that are worse than half of the others were at that time.
        keep: Whether checkpoints of trials are kept; by default only their numbers are.
        seed: Of the sampler.
        cache: Where decoded pictures are kept.
    """

    recipe: Recipe
    space: Space
    out: Path
    sampler: str = "tpe"
    trials: int | None = None
    storage: str | None = None
    study: str = "study"
    prune: bool = True
    keep: bool = False
    seed: int = 0
    cache: Path | None = None

    @property
    def metric(self) -> str:
        """What is maximised, of the validation classes."""
        return self.recipe.selection.metric


def plan(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    space: str | Path | Mapping[str, Any],
    out: str | Path,
    *,
    sampler: str = "tpe",
    trials: int | None = None,
    storage: str | None = None,
    study: str | None = None,
    prune: bool = True,
    keep: bool = False,
    seed: int = 0,
    cache: str | Path | None = None,
    overrides: Overrides = (),
) -> Plan:
    """A plan that can be followed; whatever is wrong with it is said before anything is trained.

    Args:
        recipe: A TOML file or what one holds, changed by ``overrides``.
        space: A TOML file or what one holds.
        ...: And what else a ``Plan`` has.
    """
    one_of("sampler", sampler, SAMPLERS)
    whole("seed", seed, low=0)
    if trials is not None:
        whole("trials", trials)
    found = load_recipe(recipe, overrides=overrides)
    if found.split.name == "standard":
        raise ValueError(
            "split.name is 'standard', which has no validation classes, and the test classes must not choose; set some "
            "of the training classes aside: --set split.name=fixed_validation"
        )
    searched = from_dict(space) if isinstance(space, Mapping) else load(space)
    check(searched, found)
    if sampler in POINTWISE:
        lengths = [len(values) for values in finite(searched, sampler).values()]
        count = size(searched) or 0
        if sampler == "grid" and trials is None and count > MOST_COMBINATIONS:
            raise ValueError(
                f"trials is missing; the grid has {count:,} combinations. Say how many are to be drawn from it, or "
                f"take sampler 'in_turn', which makes {sum(lengths):,}"
            )
    elif trials is None:
        trials = TRIALS
    place = Path(out)
    return Plan(
        recipe=found,
        space=searched,
        out=place,
        sampler=sampler,
        trials=trials,
        storage=storage,
        study=study or place.absolute().name,
        prune=prune,
        keep=keep,
        seed=seed,
        cache=None if cache is None else Path(cache),
    )
