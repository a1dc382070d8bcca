"""How runs are measured: which classes validate, and what the number is of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nearfar.utils.validation import number, one_of, refuse_unknown, whole

# As in [split] of a recipe.
SETTINGS = {"standard": (), "fixed_validation": ("share", "seed"), "k_fold": ("folds", "seed")}
NAMES = tuple(SETTINGS)


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """One of the thesis's three ways to arrive at a number. The test classes are the same in all of them.

    "standard": half of the classes train, the last epoch counts. "fixed_validation": a share of the training classes
    validates and names the epoch that counts; the thesis tries the shares 0.3, 0.2, 0.1 and 0.05 (Table 14), and takes
    0.1. "k_fold": the training classes validate in turn, fold after fold; each fold is a run, and mean and deviation
    of their tests are the number.

    Args:
        name: "standard", "fixed_validation" or "k_fold".
        share: Of the training classes that validate.
        folds: How many.
        seed: Of which classes validate; the same for all seeds of training.

    >>> [fold for fold, _ in Protocol(name="k_fold", folds=3).splits()]
    [0, 1, 2]
    >>> Protocol(name="fixed_validation").splits()
    [(None, {'name': 'fixed_validation', 'share': 0.1, 'seed': 0})]
    """

    name: str = "standard"
    share: float = 0.1
    folds: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("protocol", self.name, NAMES)
        number("protocol_settings.share", self.share, low=0.0, high=1.0, open_low=True)
        whole("protocol_settings.folds", self.folds, low=2)
        whole("protocol_settings.seed", self.seed, low=0)

    def splits(self) -> list[tuple[int | None, dict[str, Any]]]:
        """The fold, None where there are none, and the section [split] of each run that a number takes."""
        if self.name == "standard":
            return [(None, {"name": self.name})]
        if self.name == "fixed_validation":
            return [(None, {"name": self.name, "share": self.share, "seed": self.seed})]
        shared = {"name": self.name, "folds": self.folds, "seed": self.seed}
        return [(fold, {**shared, "fold": fold}) for fold in range(self.folds)]


def create(name: str, settings: Mapping[str, Any]) -> Protocol:
    """A protocol with its own settings and no others."""
    one_of("protocol", name, NAMES)
    refuse_unknown(f"protocol {name!r}", settings, SETTINGS[name])
    return Protocol(name=name, **settings)
