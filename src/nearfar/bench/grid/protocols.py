"""Evaluation protocols: which classes validate, and which runs make up a result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nearfar.utils.validation import number, one_of, refuse_unknown, whole

# The names are those of [split] in a recipe.
SETTINGS = {"standard": (), "fixed_validation": ("share", "seed"), "k_fold": ("folds", "seed")}
NAMES = tuple(SETTINGS)


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """One of the three evaluation protocols of the thesis. All of them share the same test classes.

    - "standard": half of the classes train, and the last epoch is tested.
    - "fixed_validation": a share of the training classes validates and selects the epoch to test. The thesis compares
      the shares 0.3, 0.2, 0.1 and 0.05 (Table 14) and uses 0.1.
    - "k_fold": the training classes take turns to validate. Each fold is a run, and the result is the mean and the
      standard deviation of their tests.

    Args:
        name: "standard", "fixed_validation" or "k_fold".
        share: Share of the training classes that validate.
        folds: Number of folds.
        seed: Seed of the choice of validation classes; the same for all training seeds.

    Example:
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

    def settings(self) -> dict[str, Any]:
        """Return the settings that belong to this protocol."""
        return {key: getattr(self, key) for key in SETTINGS[self.name]}

    def splits(self) -> list[tuple[int | None, dict[str, Any]]]:
        """Return the fold (None without folds) and the section [split] of each run of a result."""
        split = {"name": self.name, **self.settings()}
        if self.name != "k_fold":
            return [(None, split)]
        return [(fold, {**split, "fold": fold}) for fold in range(self.folds)]


def create(name: str, settings: Mapping[str, Any]) -> Protocol:
    """Create a protocol from its name and its own settings.

    Args:
        name: "standard", "fixed_validation" or "k_fold".
        settings: Settings of this protocol; others are refused.
    """
    one_of("protocol", name, NAMES)
    refuse_unknown(f"protocol {name!r}", settings, SETTINGS[name])
    return Protocol(name=name, **settings)
