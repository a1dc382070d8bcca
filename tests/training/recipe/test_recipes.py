"""The recipes that come with nearfar.

``python tests/training/recipe/test_recipes.py`` writes recipes.json anew, after a recipe or a default was changed on
purpose.
"""

import hashlib
import json
import tomllib
from pathlib import Path

import jsonschema
import pytest

from nearfar.training import RecipeError, load_recipe
from nearfar.training.recipe import files
from nearfar.training.recipe.schema import json_schema

FOLDER = Path(__file__).parents[3] / "recipes"
OTHERS = ("grids", "spaces")  # what is made of recipes, and tested where it is read
FILES = sorted(file for file in FOLDER.rglob("*.toml") if not set(file.relative_to(FOLDER).parts) & set(OTHERS))
SNAPSHOT = Path(__file__).with_name("recipes.json")  # digests of the complete recipes
CITES = ("Table", "Figure", "section", "No published setting")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(FOLDER)))
def test_every_recipe_is_well_formed(file):
    recipe = load_recipe(file)
    folder = file.relative_to(FOLDER).parts[0].removesuffix(".toml")
    assert recipe.data.name == folder


def digests():
    complete = {file: json.dumps(files.to_dict(load_recipe(file)), sort_keys=True) for file in FILES}
    return {
        file.relative_to(FOLDER).with_suffix("").as_posix(): hashlib.sha256(text.encode()).hexdigest()[:16]
        for file, text in complete.items()
    }


def test_every_recipe_with_its_bases_is_what_it_was():
    assert digests() == json.loads(SNAPSHOT.read_text(encoding="utf-8"))


def comments(file):
    """The comments that a recipe and its bases begin with."""
    text = file.read_text(encoding="utf-8")
    base = tomllib.loads(text).get("base")
    return text.partition("\n\n")[0] + (comments(file.parent / base) if base else "")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(FOLDER)))
def test_every_recipe_of_a_benchmark_says_where_it_comes_from(file):
    assert file.read_text(encoding="utf-8").startswith("# ")
    if file.parent.name not in ("recipes", "digits"):
        assert any(word in comments(file) for word in CITES)


def test_the_schema_accepts_every_recipe():
    validator = jsonschema.Draft7Validator(json_schema())
    for file in FILES:
        validator.validate(tomllib.loads(file.read_text(encoding="utf-8")))
    for wrong in ({"base": 3}, {"base": "nra.toml", "looss": {}}, {"loss": {"name": "nra"}}):
        assert not validator.is_valid(wrong)


def write(file, text):
    file.write_text(text, encoding="utf-8")
    return file


def test_a_recipe_changes_its_base(tmp_path):
    parent = write(tmp_path / "parent.toml", 'base = "digits/nra"\nloss.alpha = 2.0\n')
    child = write(tmp_path / "child.toml", 'base = "parent.toml"\nloss = {name = "raw", alpha = 3.0}\n')
    assert load_recipe(parent) == load_recipe("digits/nra", overrides=["loss.alpha=2.0"])
    assert load_recipe(child) == load_recipe("digits/nra", overrides={"loss": {"name": "raw", "alpha": 3.0}})
    assert files.changes(child, ["optimizer.lr=0.5"]) == [
        "loss.name: nra → raw",
        "loss.alpha: 2.0 → 3.0",
        "optimizer.lr: 0.001 → 0.5",
    ]


def test_the_second_of_two_bases_changes_the_first(tmp_path):
    write(tmp_path / "long.toml", "training.epochs = 30\n[schedule]\nname = 'step'\nstep_size = 9\n")
    both = write(tmp_path / "both.toml", 'base = ["digits/nra", "long.toml"]\n')
    assert load_recipe(both) == load_recipe(
        "digits/nra", overrides=["training.epochs=30", "schedule.name=step", "schedule.step_size=9"]
    )


def test_a_batch_size_replaces_the_inherited_number_of_classes(tmp_path):
    child = write(tmp_path / "child.toml", 'base = "digits/nra"\nsampler.batch_size = 24\n')
    assert (load_recipe(child).sampler.classes, load_recipe(child).sampler.batch_size) == (None, 24)
    again = load_recipe(child, overrides=["sampler.classes=3"])
    assert (again.sampler.classes, again.sampler.batch_size) == (3, None)


@pytest.mark.parametrize(
    ("base", "problem"),
    [
        ("3", "base is 3; the file or name of a recipe is needed, or a list of them"),
        ("[3]", r"base is \[3\]; the file"),
        ('"wrong.toml"', "base is 'wrong.toml', which has this recipe as its own base"),
        ('"other.toml"', "other.toml: base is 'wrong.toml', which has this recipe"),
        ('"digits/nrra"', "digits/nrra does not exist .did you mean 'digits/nra'"),
    ],
)
def test_a_wrong_base_is_an_error(tmp_path, base, problem):
    write(tmp_path / "other.toml", 'base = "wrong.toml"\n')
    with pytest.raises((RecipeError, FileNotFoundError), match=problem):
        load_recipe(write(tmp_path / "wrong.toml", f"base = {base}\n"))


def test_the_ranked_list_is_as_printed():
    """Sections 3.4 and 4.1 of its paper."""
    cub, sop = (load_recipe(FOLDER / name / "ranked_list.toml") for name in ("cub", "sop"))
    assert (cub.sampler.classes, cub.sampler.per_class, cub.network.levels) == (60, 3, ("low", "mid", "high"))
    assert (cub.optimizer.lr, sop.optimizer.lr, cub.optimizer.weight_decay) == (1e-3, 1e-2, 1e-5)
    assert (cub.training.iterations, sop.training.iterations) == (10_000, 16_000)


def test_the_group_loss_is_as_printed():
    """Section 4.1 of its paper: 10 epochs of classification, 60 of Group Loss, the rate × 0.1 after 30 of them."""
    recipe = load_recipe(FOLDER / "cub" / "group.toml")
    assert [stage.epochs for stage in recipe.stages] == [10, 30, None]
    assert [recipe.loss_of(stage).name for stage in range(3)] == ["softmax", "group", "group"]
    assert (recipe.stages[-1].lr_factor, recipe.training.epochs, recipe.optimizer.name) == (0.1, 70, "radam")


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(digests(), indent=0) + "\n", encoding="utf-8")
