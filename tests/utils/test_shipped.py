"""Recipes, grids and spaces that come with nearfar are found by name."""

from pathlib import Path

import pytest

from nearfar.bench import grid
from nearfar.bench.tuning import space
from nearfar.training import load_recipe
from nearfar.training.trainer import free_folder
from nearfar.utils import shipped

RECIPES = Path(__file__).parents[2] / "recipes"


def test_every_file_has_one_name_and_a_summary():
    files = [
        shipped.find(name, kind)
        for kind in shipped.FOLDERS
        for name in shipped.names(kind)
        if len(shipped.summary(name, kind)) > 10
    ]
    assert sorted(files) == sorted(RECIPES.rglob("*.toml"))


def test_recipes_grids_and_spaces_load_by_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("folder")
    assert recipe == load_recipe(RECIPES / "folder.toml")
    assert free_folder("folder", recipe).as_posix() == "runs/folder"
    assert free_folder("digits/nra", recipe).as_posix() == "runs/digits-nra"
    assert grid.load("thesis_cub") == grid.load(RECIPES / "grids" / "thesis_cub.toml")
    assert space.load("benchmark/triplet") == space.load(RECIPES / "spaces" / "benchmark" / "triplet.toml")


def test_a_file_of_the_user_comes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()  # a folder of images, and not a run
    assert load_recipe("folder").data.name == "folder"
    text = (RECIPES / "digits" / "nra.toml").read_text(encoding="utf-8")
    Path("folder", "recipe.toml").write_text(text, encoding="utf-8")
    assert load_recipe("folder").data.name == "digits"


@pytest.mark.parametrize("given", ["recipes/folder.toml", "foldr", "folders.toml"])
def test_an_error_names_what_was_probably_meant(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"does not exist \(did you mean 'folder'\?\); a recipe is needed"):
        load_recipe(given)
