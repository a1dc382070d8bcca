"""The recipes that come with nearfar."""

from __future__ import annotations

from pathlib import Path

import pytest

from nearfar.training import load_recipe

FOLDER = Path(__file__).parents[3] / "recipes"
OTHERS = ("grids", "spaces")  # what is made of recipes, and tested where it is read
FILES = sorted(file for file in FOLDER.rglob("*.toml") if not set(file.relative_to(FOLDER).parts) & set(OTHERS))
CITES = ("Table", "Figure", "section", "No published setting")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(FOLDER)))
def test_every_recipe_is_well_formed(file: Path) -> None:
    recipe = load_recipe(file)
    folder = file.relative_to(FOLDER).parts[0].removesuffix(".toml")
    assert recipe.data.name == folder


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(FOLDER)))
def test_every_recipe_of_a_benchmark_says_where_it_comes_from(file: Path) -> None:
    directive, _, text = file.read_text(encoding="utf-8").partition("\n")
    assert (file.parent / directive.removeprefix("#:schema ")).resolve() == FOLDER / "recipe.schema.json"
    assert text.startswith("# ")
    if file.parent.name not in ("recipes", "digits"):
        assert any(word in text.partition("[data]")[0] for word in CITES)


def test_the_ranked_list_is_as_printed() -> None:
    """Sections 3.4 and 4.1 of its paper."""
    cub, sop = (load_recipe(FOLDER / name / "ranked_list.toml") for name in ("cub", "sop"))
    assert (cub.sampler.classes, cub.sampler.per_class, cub.network.levels) == (60, 3, ("low", "mid", "high"))
    assert (cub.optimizer.lr, sop.optimizer.lr, cub.optimizer.weight_decay) == (1e-3, 1e-2, 1e-5)
    assert (cub.training.iterations, sop.training.iterations) == (10_000, 16_000)


def test_the_group_loss_is_as_printed() -> None:
    """Section 4.1 of its paper: 10 epochs of classification, 60 of Group Loss, the rate × 0.1 after 30 of them."""
    recipe = load_recipe(FOLDER / "cub" / "group.toml")
    assert [stage.epochs for stage in recipe.stages] == [10, 30, None]
    assert [recipe.loss_of(stage).name for stage in range(3)] == ["softmax", "group", "group"]
    assert (recipe.stages[-1].lr_factor, recipe.training.epochs, recipe.optimizer.name) == (0.1, 70, "radam")
