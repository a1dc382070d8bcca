"""Sections that meet: any three values of a recipe are trained to metrics, or refused before the first step."""

from contextlib import suppress
from itertools import combinations, product
from typing import Any

from safetensors.torch import save_file
from training_runs import pictures, recipe, train

import nearfar as nf
from nearfar.training.recipe.files import RecipeError

WEIGHTS = "network__pretrained"
VALUES = (
    ({}, {"training__warmup_epochs": 1}),
    ({}, {"evaluation__before": True}),
    ({}, {"network__freeze": True}),
    ({}, {"network__head": "none"}, {"network__head": "residual", "network__dim": "none"}),
    ({}, {"network__levels": ["low", "high"]}),
    ({}, {"stages": [{"epochs": 1, "loss": {"name": "proxy_anchor"}}, {"lr_factor": 0.1}]}),
    ({}, {WEIGHTS: True}),
    ({}, {"split__name": "fixed_validation", "split__share": 0.34}),
)


def covering(allowed):
    """Few of the choices, which together have all threes of values that occur in any of them."""
    threes = {choice: set(combinations(enumerate(choice), 3)) for choice in allowed}
    left, few = set[Any]().union(*threes.values()), []
    while left:
        few.append(max(allowed, key=lambda choice: len(threes[choice] & left)))
        left -= threes[few[-1]]
    return few


def test_sections_that_meet_are_trained_to_metrics(tmp_path):
    data, weights = pictures(tmp_path), tmp_path / "backbone.safetensors"
    save_file(nf.networks.create("small_cnn", channels=1, size=8).backbone.state_dict(), weights)
    recipes = {}
    for choice in product(*(range(len(values)) for values in VALUES)):
        changes = {key: value for at, values in zip(choice, VALUES, strict=True) for key, value in values[at].items()}
        changes |= {WEIGHTS: str(weights)} if WEIGHTS in changes else {}
        with suppress(RecipeError):
            recipes[choice] = recipe(data, network__name="small_cnn", training__epochs=2, sampler__steps=1, **changes)
    trained = 0
    for number, choice in enumerate(covering(list(recipes))):
        run = tmp_path / str(number)
        try:
            metrics = train(recipes[choice], run, cache=tmp_path / "cache").metrics
        except ValueError:
            assert not (run / "recipe.toml").exists(), choice  # refused before the first step
            continue
        trained += 1
        assert ("before" in metrics) == recipes[choice].evaluation.before
        assert metrics["steps"] == 2
    assert trained >= 15
