"""nearfar recipe: list, check, show, schema."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from nearfar.training import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
NRA = RECIPES / "digits" / "nra.toml"


def test_recipes_grids_and_spaces_are_listed(nearfar):
    for kind, line in {
        "recipe": "folder .* Your own images: one folder per class",
        "grid": "digits .* Three losses and features without training",
        "space": "group .* Group Loss",
    }.items():
        assert re.search(f"^{line}", nearfar("recipe", "list", kind).out, re.MULTILINE)


def test_good_recipes_are_ok(nearfar):
    out = nearfar("recipe", "check", NRA, RECIPES / "folder.toml").out
    assert out == f"{NRA}: ok\n{RECIPES / 'folder.toml'}: ok\n"


def test_every_problem_is_a_line_and_the_exit_code_1(tmp_path, nearfar):
    file = tmp_path / "mine.toml"
    file.write_text(NRA.read_text().replace("alpha", "alhpa").replace("epochs = 10", "epochs = 0"))
    out = nearfar("recipe", "check", file, NRA, tmp_path / "no.toml", "--set", "loss.alhpa=3", code=1).out
    lines = out.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith(f"{file}: unknown key loss.alhpa (did you mean 'loss.alpha'?)")
    assert lines[1].startswith(f"{file}: training.epochs is 0; allowed: a whole number ≥ 1")
    assert lines[2].startswith(f"{NRA}: unknown key loss.alhpa")
    assert lines[3].startswith(f"{tmp_path / 'no.toml'} does not exist")


def test_grids_and_spaces_are_checked(tmp_path, nearfar):
    good = [RECIPES / "grids" / "digits.toml", RECIPES / "spaces" / "group.toml"]
    grid, space = tmp_path / "grid.toml", tmp_path / "space.toml"
    grid.write_text("dims = [0]\nsedes = [1]\n[losses.raw]\n", encoding="utf-8")
    space.write_text('"loss.margin" = {low = 0.0, high = 1.0, stp = 0.1}\n"loss.alpha" = 3\n', encoding="utf-8")
    lines = nearfar("recipe", "check", *good, grid, space, code=1).out.splitlines()
    assert lines[:2] == [f"{file}: ok" for file in good]
    assert lines[2].startswith(f"{grid}: dims is [0]; allowed: a list of whole numbers ≥ 1")
    assert lines[3].startswith(f"{grid}: unknown key sedes (did you mean 'seeds'?)")
    assert lines[4].startswith(f"{space}: unknown key loss.margin.stp (did you mean 'loss.margin.step'?)")
    assert lines[5].startswith(f"{space}: loss.alpha is 3; allowed: a table with low and high, or with choices")
    nearfar("recipe", "check", grid.with_name("nothing.toml"), "--set", "training.epochs=1", code=1)


def test_cells_of_a_grid_are_checked(nearfar):
    out = nearfar("recipe", "check", RECIPES / "grids" / "digits.toml", "--set", "training.epochs=0", code=1).out
    assert "training.epochs is 0" in out


def test_a_complete_recipe_is_shown(nearfar):
    shown = tomllib.loads(nearfar("recipe", "show", NRA, "--set", "loss.alpha=2", "--set", "evaluation.ks=[1, 3]").out)
    assert (shown["loss"], shown["evaluation"]["ks"]) == ({"name": "nra", "alpha": 2}, [1, 3])
    assert shown["training"]["precision"] == "float32"
    assert load_recipe(shown) == load_recipe(NRA, overrides=["loss.alpha=2", "evaluation.ks=[1, 3]"])


@pytest.mark.parametrize(("kind", "key"), [("recipe", "else"), ("grid", "properties"), ("space", "minProperties")])
def test_a_schema_is_written_to_a_file(nearfar, tmp_path, kind, key):
    nearfar("recipe", "schema", kind, "--out", tmp_path / "schema.json")
    written = json.loads((tmp_path / "schema.json").read_text())
    assert written["title"] == f"nearfar {kind}"
    assert key in written


def test_what_differs_from_the_base_is_shown(nearfar):
    out = nearfar("recipe", "show", "sop/ranked_list_high", "--diff", "--set", "optimizer.lr=0.5").out
    assert "optimizer.lr: 0.001 → 0.5" in out.splitlines()


def test_several_problems_are_several_lines_of_an_error(nearfar):
    err = nearfar("recipe", "show", NRA, "--set", "loss.alhpa=1", "--set", "training.epochs=0", code=1).err
    lines = err.splitlines()
    assert lines[0] == f"nearfar: {NRA}: 2 problems:"
    assert len(lines) == 3
