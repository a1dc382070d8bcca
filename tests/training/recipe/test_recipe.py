"""Recipes: strict, typed, free of contradictions, and the same again after a file."""

from __future__ import annotations

import inspect
import tomllib

import pytest

from nearfar import losses, metrics, networks
from nearfar.data import View, splits
from nearfar.training import RecipeError, load_recipe
from nearfar.training.recipe.files import difference, from_dict, parse_override, to_dict, to_toml
from nearfar.training.recipe.schema import json_schema


def table(**sections):
    """A small recipe, with some sections changed."""
    small = {
        "sampler": {"classes": 4, "per_class": 8},
        "network": {"name": "mlp", "dim": 16},
        "loss": {"name": "raw", "alpha": 3.0},
        "optimizer": {"lr": 0.001},
        "training": {"epochs": 5},
    }
    return {**small, **sections}


def test_what_is_not_said_has_its_default():
    recipe = load_recipe(table())
    assert (recipe.data.name, recipe.split.name, recipe.evaluation.ks) == ("digits", "standard", (1, 2, 4, 8))
    assert recipe.selection.metric == "recall@1"


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"trainig": {}}, ["unknown section [trainig]", "'training'"]),
        ({"training": {"epoch": 5}}, ["training.epoch", "'training.epochs'"]),
        ({"training": {"epochs": "5"}}, ["training.epochs is '5'", "whole number"]),
        ({"training": {"epochs": True}}, ["training.epochs is true", "whole number"]),
        ({"training": {"epochs": 0}}, ["training.epochs is 0", "≥ 1"]),
        ({"training": {"epochs": 1, "precision": "bfloat"}}, ["'bfloat16'", '"float32"']),
        ({"training": 5}, ["training is 5", "table"]),
        ({"optimizer": {}}, ["optimizer.lr is missing"]),
        ({"optimizer": {"lr": -1.0}}, ["optimizer.lr is -1.0"]),
        ({"optimizer": {"lr": 1, "betas": [0.9]}}, ["optimizer.betas", "2 numbers"]),
        ({"network": {"name": "resnet5"}}, ["network.name is 'resnet5'", "'resnet50'"]),
        (
            {"network": {"name": "mlp", "settings": {"hiden": [8]}}},
            ["network.settings.hiden", "'network.settings.hidden'"],
        ),
        ({"network": {"name": "mlp", "levels": ["low", "low"]}}, ["network.levels", "once"]),
        ({"data": {"name": "digit"}}, ["data.name is 'digit'", "'digits'"]),
        ({"data": {"name": "digits", "root": "here"}}, ["data.root", "takes none"]),
        (
            {"data": {"name": "digits", "settings": {"vector": True}}},
            ["data.settings.vector", "'data.settings.vectors'"],
        ),
        ({"stages": {"epochs": 1}}, ["[[stages]]"]),
        ({"evaluation": {"size": 288, "resize": 256}}, ["evaluation.resize is 256", "288"]),
        ({"augmentation": {"color": 1.5}}, ["augmentation.color is 1.5", "> 0 and ≤ 1.0"]),
        ({"augmentation": {"grey": 0}}, ["augmentation.grey is 0;", "> 0"]),
        ({"augmentation": {"erase": True}}, ["augmentation.erase is true", "a number"]),
        ({"augmentation": {"rotate": 360}}, ["augmentation.rotate is 360;", "≤ 180.0"]),
        ({"augmentation": {"colour": 0.4}}, ["augmentation.colour", "'augmentation.color'"]),
        # Losses are looked at before anything is trained.
        ({"loss": {"name": "rav"}}, ["'rav'", "'raw'"]),
        ({"loss": {"name": "raw", "alhpa": 1}}, ["unknown key loss.alhpa", "'loss.alpha'"]),
        ({"loss": {"name": "raw", "nmae": "nra"}}, ["unknown key loss.nmae (did you mean 'loss.name'?)"]),
        ({"loss": {"name": "raw", "alpha": -1}}, ["loss.alpha is -1"]),
        ({"loss": {"name": "raw", "alpha": "2"}}, ["loss.alpha is '2'; allowed: a number"]),
        ({"loss": {"name": "raw", "alpha": True}}, ["loss.alpha is true; allowed: a number"]),
        ({"loss": {"name": "raw", "mining": "hardest"}}, ["mining is 'hardest'", "valid_triplet"]),
        ({"loss": {"name": "raw", "mining": {"name": "valid_triplet", "size": 1}}}, ["'size'", "margin"]),
        ({"loss": {"name": "nra", "mining": "hard"}}, ["unknown key loss.mining", "nra has alpha, epsilon"]),
        ({"loss": {"name": "proxy_anchor", "num_classes": 5}}, ["loss.num_classes", "comes from data and network"]),
        ({"loss": {"alpha": 1}}, ["loss.name is missing"]),
        # Contradictions.
        ({"training": {"epochs": 5, "iterations": 9}}, ["both are given"]),
        ({"training": {"seed": 1}}, ["neither is given"]),
        ({"training": {"epochs": 5, "warmup_epochs": 5}}, ["must be < training.epochs"]),
        ({"training": {"epochs": 5, "memory": 8}}, ["at least a batch"]),
        ({"training": {"epochs": 5, "memory": 64}, "loss": {"name": "softmax"}}, ["a memory is for pair losses"]),
        ({"sampler": {"name": "pairs", "classes": 4, "per_class": 2}}, ["sampler.per_class belongs to groups"]),
        ({"sampler": {"name": "random", "batch_size": 8, "classes": 4}}, ["sampler.classes belongs to"]),
        ({"sampler": {"name": "random"}}, ["sampler.batch_size is missing"]),
        ({"sampler": {"per_class": 4}}, ["needs it, or sampler.batch_size"]),
        ({"sampler": {"per_class": 4, "classes": 4, "batch_size": 16}}, ["both given"]),
        ({"sampler": {"per_class": 4, "batch_size": 7}}, ["must hold two classes"]),
        ({"sampler": {"classes": 8, "per_class": 1}}, ["needs positives"]),
        ({"optimizer": {"name": "adamw", "lr": 1, "momentum": 0.9}}, ["optimizer.momentum belongs to sgd"]),
        ({"schedule": {"name": "constant", "gamma": 0.1}}, ["schedule.gamma belongs to"]),
        ({"schedule": {"name": "step"}}, ["schedule.step_size is missing"]),
        ({"schedule": {"name": "plateau"}, "evaluation": {"every": 0}}, ["needs evaluations"]),
        ({"split": {"share": 0.1}}, ["split.share belongs to fixed_validation"]),
        ({"split": {"name": "kfold"}}, ["did you mean 'k_fold'"]),
        ({"split": {"name": "default"}}, ['allowed: "standard", "fixed_validation", "k_fold", ']),
        ({"selection": {"metric": "recall@3"}}, ["evaluation.ks"]),
        ({"selection": {"metric": "recal@1"}}, ["did you mean 'recall@1'"]),
        ({"selection": {"metric": "nmi"}}, ["evaluation.clustering"]),
        ({"stages": [{"epochs": 5}, {}]}, ["none is left for the last"]),
        ({"stages": [{}, {"epochs": 5}]}, ["stages.0.epochs is missing"]),
        ({"stages": [{"epochs": 1}, {"epochs": 1}]}, ["take 2 epochs"]),
        ({"stages": [{"epochs": 1, "loss": {"name": "rav"}}, {}]}, ["stages.0.loss"]),
        ({"stages": [{"epochs": 1}, {}], "training": {"iterations": 9}}, ["counted in epochs"]),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(sections, words):
    with pytest.raises(RecipeError) as caught:
        load_recipe(table(**sections))
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("name", losses.names())
def test_every_loss_can_be_named(name):
    assert load_recipe(table(loss={"name": name})).loss.name == name


def test_all_contradictions_are_told_at_once():
    with pytest.raises(RecipeError) as caught:
        load_recipe(table(training={"epochs": 5, "memory": 8}, selection={"metric": "nmi"}))
    assert "training.memory" in str(caught.value)
    assert "clustering" in str(caught.value)


def test_ten_mistakes_are_ten_lines():
    wrong = table(
        data={"name": "digits", "settings": {"vector": True}, "root": "here"},
        split={"name": "kfold"},
        sampler={"classes": 4.5, "per_class": 0},
        network={"name": "resnet5", "levels": []},
        loss={"name": "raw", "alpha": -3.0, "plus": [{"name": "rav"}]},
        optimizer={"lr": 0.1, "weight_decy": 0.1},
        training={"epochs": 5, "warmup_epochs": 9},
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe(wrong)
    assert str(caught.value).splitlines()[0] == "10 problems:"
    assert [*map(str.strip, str(caught.value).splitlines()[1:])] == [*caught.value.problems]
    assert [line.partition(";")[0] for line in caught.value.problems] == [
        "unknown key data.settings.vector (did you mean 'data.settings.vectors'?)",
        "data.root is 'here'",
        "split.name is 'kfold' (did you mean 'k_fold'?)",
        "sampler.classes is 4.5",
        "sampler.per_class is 0",
        "network.name is 'resnet5' (did you mean 'resnet50'?)",
        "network.levels is []",
        "loss.plus.0.name is 'rav' (did you mean 'raw'?)",
        "unknown key optimizer.weight_decy (did you mean 'optimizer.weight_decay'?)",
        "training.warmup_epochs is 9",
    ]


def test_what_sections_say_of_each_other_is_told_once_each_of_them_is_right():
    with pytest.raises(RecipeError) as caught:
        load_recipe(table(optimizer={"lr": -1.0}, selection={"metric": "nmi"}))
    assert "clustering" not in str(caught.value)
    with pytest.raises(RecipeError, match="clustering"):
        load_recipe(table(selection={"metric": "nmi"}))


def test_what_follows_from_a_problem_is_not_a_second_one():
    with pytest.raises(RecipeError) as caught:
        load_recipe(table(training={"epochs": "5", "warmup_epochs": 3}))
    assert caught.value.problems == ("training.epochs is '5'; allowed: a whole number ≥ 1 or \"none\"",)


class Ramp(losses.PairLoss):
    """A loss of a plugin."""

    key = "ramp"
    source = "a test"

    def __init__(self, *, slope: float, cuts: tuple[int, ...] = (1,), curve: str = "flat") -> None:
        super().__init__()
        if slope < 0:
            raise ValueError(f"slope is {slope}; it must be ≥ 0")
        self.slope, self.cuts, self.curve = slope, cuts, curve


def test_settings_of_plugins_are_checked_by_their_signatures(monkeypatch):
    monkeypatch.setitem(losses.base.LOSSES.entries, "ramp", Ramp)
    assert load_recipe(table(loss={"name": "ramp", "slope": 1, "cuts": [1, 2]})).loss.settings["cuts"] == [1, 2]
    with pytest.raises(RecipeError) as caught:
        load_recipe(table(loss={"name": "ramp", "slop": 1, "cuts": 3, "curve": "steep"}))
    assert caught.value.problems == (
        "loss.slope is missing",
        "loss.cuts is 3; allowed: a list of whole numbers",
        "unknown key loss.slop (did you mean 'loss.slope'?); ramp has slope, cuts, curve",
    )
    variants = json_schema()["$defs"]["LossSection"]["oneOf"]
    ramp = next(each for each in variants if each["properties"]["name"]["const"] == "ramp")
    assert ramp["required"] == ["name", "slope"]
    assert ramp["properties"]["cuts"] == {"default": [1], "items": {"type": "integer"}, "type": "array"}


def test_there_is_no_way_to_select_on_the_test_classes():
    with pytest.raises(RecipeError):
        load_recipe(table(selection={"metric": "recall@1", "part": "test"}))
    with pytest.raises(RecipeError):
        load_recipe(table(selection={"metric": "test recall@1"}))


def test_errors_name_the_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[training]\nepoch = 5\n", encoding="utf-8")
    with pytest.raises(RecipeError, match=r"mine\.toml: 5 problems:\n(.*\n)+  unknown key training\.epoch"):
        load_recipe(file)
    file.write_text("[training\n", encoding="utf-8")
    with pytest.raises(RecipeError, match=r"mine\.toml is not valid TOML.*line 1"):
        load_recipe(file)
    with pytest.raises(FileNotFoundError, match=r"other\.toml does not exist"):
        load_recipe(tmp_path / "other.toml")


def rich():
    return load_recipe(
        table(
            data={"name": "glyphs", "settings": {"classes": 12}},
            split={"name": "k_fold", "folds": 3, "fold": 1},
            augmentation={"resize": None, "scale": [0.2, 1], "color": 0.4, "rotate": 10},
            network={"name": "small_cnn", "dim": None, "head": "none", "members": 2},
            loss={"name": "raw", "mining": {"name": "valid_triplet", "margin": 0.2}},
            schedule={"name": "multi_step", "milestones": [2, 3]},
            training={"epochs": 5, "clip": 1},
            stages=[{"epochs": 1, "loss": {"name": "softmax"}}, {"lr_factor": 0.1}],
        )
    )


def test_a_recipe_survives_its_file():
    assert from_dict(tomllib.loads(to_toml(rich()))) == rich()
    assert from_dict(to_dict(rich())) == rich()


def test_effects_are_told_where_they_are_on():
    # A recipe without them says what it said before there were any: its cells and runs are known by that.
    assert [*to_dict(load_recipe(table()))["augmentation"]] == ["crop", "resize", "aspect", "scale", "ratio", "flip"]
    recipe = load_recipe(table(augmentation={"color": 0.4, "grey": "none", "erase": 1}))
    assert recipe.augmentation.effects == {"color": 0.4, "erase": 1.0}
    told = to_dict(recipe)["augmentation"]
    assert (told["color"], told["erase"], "grey" in told) == (0.4, 1.0, False)
    assert difference(load_recipe(table()), recipe) == [
        "augmentation.color: not set → 0.4",
        "augmentation.erase: not set → 1.0",
    ]


def test_none_has_a_word_in_files():
    assert 'resize = "none"' in to_toml(rich())
    assert load_recipe(table(network={"name": "mlp", "dim": "none"})).network.dim is None
    section = load_recipe(table(loss={"name": "margin", "beta_lr": "none"})).loss
    assert section.create(num_classes=3, dim=2).settings()["beta_lr"] is None


def test_a_difference_is_told_key_by_key():
    other = load_recipe(table(), overrides={"optimizer.lr": 0.01, "loss.beta": 40.0})
    told = difference(load_recipe(table()), other)
    assert sorted(told) == ["loss.beta: not set → 40.0", "optimizer.lr: 0.001 → 0.01"]
    assert difference(rich(), rich()) == []


@pytest.mark.parametrize(
    ("text", "value"),
    [("32", 32), ("0.5", 0.5), ("true", True), ("True", True), ("[1, 2]", [1, 2]), ("raw", "raw"), ('"a=b"', "a=b")],
)
def test_values_on_a_command_line_are_toml_or_text(text, value):
    assert parse_override(f"loss.alpha={text}") == ("loss.alpha", value)


@pytest.mark.parametrize("text", ["loss.alpha", "alpha=1", "loss.=1", "loss.alpha=", "=1"])
def test_an_override_without_section_key_or_value_is_refused(text):
    with pytest.raises(ValueError, match=r"SECTION\.KEY=VALUE"):
        parse_override(text)


def test_overrides_reach_into_sections_and_stages():
    staged = table(stages=[{"epochs": 1, "loss": {"name": "softmax"}}, {}])
    recipe = load_recipe(staged, overrides=["stages.0.epochs=2", "evaluation.ks=[1, 10]"])
    assert (recipe.stages[0].epochs, recipe.evaluation.ks) == (2, (1, 10))
    with pytest.raises(RecipeError, match="0 to 1"):
        load_recipe(staged, overrides=["stages.7.epochs=2"])
    assert load_recipe(table(), overrides={"loss": {"alpha": 9.0}}).loss.settings == {"alpha": 9.0}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [({"name": "x"}, r"unknown section \[name\]"), (["stages.name=raw"], "0 to 1, and no 'name'")],
)
def test_names_that_are_no_section_s_are_refused(overrides, words):
    with pytest.raises(RecipeError, match=words):
        load_recipe(table(stages=[{"epochs": 1}, {}]), overrides=overrides)


@pytest.mark.parametrize(("value", "fits"), [(True, True), ("false", False), (1, False)])
def test_settings_of_data_sets_have_the_type_of_their_defaults(value, fits):
    given = table(data={"name": "digits", "settings": {"vectors": value}})
    if fits:
        assert load_recipe(given).data.settings == {"vectors": True}
        return
    with pytest.raises(RecipeError, match=r"data\.settings\.vectors is .*; allowed: true or false"):
        load_recipe(given)


def test_another_name_drops_what_belonged_to_the_old_one():
    recipe = load_recipe(table(), overrides=["loss.scale=30", "loss.name=arcface", "sampler.name=pairs"])
    assert recipe.loss.settings == {"scale": 30}
    assert recipe.sampler.per_class is None
    same = load_recipe(table(), overrides=["loss.name=raw"])
    assert same.loss.settings == {"alpha": 3.0}


def test_python_and_recipes_have_the_same_defaults():
    recipe = load_recipe(table(split={"name": "k_fold"}, network={"name": "mlp"}))
    folds = inspect.signature(splits.k_fold).parameters["folds"].default
    share = inspect.signature(splits.fixed_validation).parameters["share"].default
    assert folds == recipe.split.folds
    assert share == recipe.split.share
    head = inspect.signature(networks.Embedder.param_groups).parameters["head_multiplier"].default
    assert head == inspect.signature(networks.Ensemble.param_groups).parameters["head_multiplier"].default
    assert head == recipe.optimizer.head_multiplier
    created = inspect.signature(networks.create).parameters
    for key in ("dim", "pooling", "normalize", "head", "levels", "pretrained", "freeze_batchnorm"):
        assert created[key].default == getattr(recipe.network, key)
    seen = inspect.signature(View).parameters
    for key in ("crop", "aspect", "scale", "ratio", "flip", "color", "grey", "erase", "rotate"):
        assert seen[key].default == getattr(recipe.augmentation, key)
    retrieval = inspect.signature(metrics.retrieval).parameters
    assert (retrieval["ks"].default, retrieval["measure"].default) == (recipe.evaluation.ks, recipe.evaluation.measure)


def test_overrides_leave_the_given_table_alone():
    given = table()
    load_recipe(given, overrides=["loss.alpha=9"])
    assert given == table()
