"""Grids: from a file to cells that are known by their content."""

from pathlib import Path

import pytest

from nearfar.bench import grid
from nearfar.training.recipe.files import load as load_recipe

GRIDS = Path(__file__).parents[2] / "recipes" / "grids"
RECIPE = {
    "sampler": {"classes": 4, "per_class": 8},
    "network": {"name": "mlp", "dim": 8},
    "optimizer": {"lr": 1e-3},
    "training": {"epochs": 5},
}


def tables(**changes):
    return {"name": "small", "recipe": RECIPE, "losses": {"raw": {}, "nra": {}}, **changes}


def expanded(**changes):
    return grid.expand(grid.load(tables(**changes)))


def names(**changes):
    return [cell.name for cell in expanded(**changes)]


def test_every_loss_meets_every_network_dimension_data_set_and_seed():
    cells = names(
        baseline=False,
        networks={"deep": {"network": {"settings": {"hidden": [8, 8]}}}, "flat": {"network": {"name": "linear"}}},
        dims=[4, 8],
        data={"bundled": {"data": {"name": "digits"}}},
        seeds=[0, 7],
    )
    assert len(cells) == len(set(cells)) == 2 * 2 * 2 * 2
    assert (cells[0], cells[-1]) == ("raw-deep-4d-bundled-seed0", "nra-flat-8d-bundled-seed7")


def test_a_cell_holds_the_whole_recipe():
    cell = expanded(dims=[4], seeds=[3], losses={"sharp": {"loss": {"name": "raw", "alpha": 9.0}}}, baseline=False)[0]
    assert cell.recipe.loss.settings == {"alpha": 9.0}
    assert (cell.recipe.network.dim, cell.recipe.training.seed) == (4, 3)
    assert cell.labels == {"loss": "sharp", "dim": "4", "seed": "3"}


def test_a_label_that_begins_with_a_loss_names_it():
    hard = expanded(baseline=False, losses={"raw+hard": {"loss": {"mining": "hard"}}})[0]
    assert (hard.recipe.loss.name, hard.recipe.loss.settings) == ("raw", {"mining": "hard"})
    assert [cell.recipe.loss.name for cell in expanded(baseline=False)] == ["raw", "nra"]


def test_a_loss_may_change_any_section_and_bring_stages():
    stages = [{"epochs": 2, "loss": {"name": "softmax"}}, {"lr_factor": 0.1}]
    changes = {"sampler": {"name": "random", "batch_size": 32}, "network": {"normalize": False}, "stages": stages}
    recipe = expanded(losses={"group": changes}, baseline=False)[0].recipe
    assert (recipe.sampler.name, recipe.sampler.images, recipe.sampler.classes) == ("random", 32, None)
    assert not recipe.network.normalize
    assert [stage.epochs for stage in recipe.stages] == [2, None]


def test_a_network_may_change_one_loss():
    small = {"network": {"name": "linear"}, "losses": {"nra": {"sampler": {"classes": 2}}}}
    cells = expanded(networks={"small": small, "usual": {}}, baseline=False)
    assert {cell.name: cell.recipe.sampler.classes for cell in cells} == {
        "raw-small-seed0": 4,
        "nra-small-seed0": 2,
        "raw-usual-seed0": 4,
        "nra-usual-seed0": 4,
    }


def test_changes_are_for_all_cells_and_the_command_line_has_the_last_word():
    changed = grid.load(tables(changes={"training": {"epochs": 2}}))
    assert {cell.recipe.training.epochs for cell in grid.expand(changed)} == {2}
    assert {cell.recipe.training.epochs for cell in grid.expand(changed, overrides=["training.epochs=1"])} == {1}


def test_values_of_settings_are_cells_each_with_each():
    settings = {"loss": {"alpha": [2.0, 4.0]}, "sampler.per_class": [4, 8]}
    cells = expanded(settings=settings, losses={"raw": {"loss": {"alpha": 9.0}}})
    assert [cell.name for cell in cells] == [
        "frozen-seed0",
        "raw-alpha-2.0-per_class-4-seed0",
        "raw-alpha-2.0-per_class-8-seed0",
        "raw-alpha-4.0-per_class-4-seed0",
        "raw-alpha-4.0-per_class-8-seed0",
    ]
    assert cells[2].labels == {"loss": "raw", "loss.alpha": "2.0", "sampler.per_class": "8", "seed": "0"}
    assert cells[2].recipe.loss.settings == {"alpha": 2.0}
    assert cells[2].recipe.sampler.per_class == 8
    chosen = grid.expand(grid.load(tables(settings=settings)), only=["raw", "alpha=4.0", "8"])
    assert [cell.name for cell in chosen] == ["raw-alpha-4.0-per_class-8-seed0"]
    with pytest.raises(ValueError, match=r"loss.alpha cannot be set for all cells: settings of the grid defines it"):
        grid.expand(grid.load(tables(settings=settings)), overrides=["loss.alpha=3"])


def test_features_depend_on_settings_of_what_is_seen_alone():
    assert names(settings={"network.normalize": [True, False]}, losses={"raw": {}})[:2] == [
        "frozen-normalize-true-seed0",
        "frozen-normalize-false-seed0",
    ]
    shares = expanded(protocol="fixed_validation", settings={"split.share": [0.1, 0.3]}, losses={"raw": {}})
    assert [cell.name for cell in shares] == ["frozen-seed0", "raw-share-0.1-seed0", "raw-share-0.3-seed0"]
    assert [cell.recipe.split.share for cell in shares] == [0.1, 0.1, 0.3]


def test_folds_are_cells_and_share_a_baseline():
    cells = names(protocol="k_fold", protocol_settings={"folds": 3}, losses={"raw": {}})
    assert cells == ["frozen-fold0-seed0", "raw-fold0-seed0", "raw-fold1-seed0", "raw-fold2-seed0"]
    splits = [cell.recipe.split for cell in expanded(protocol="k_fold", protocol_settings={"folds": 3}, baseline=False)]
    assert [split.fold for split in splits] == [0, 0, 1, 1, 2, 2]


def test_the_reality_check_is_one_word():
    cells = expanded(protocol="reality_check", baseline=False, losses={"raw": {}})
    assert len(cells) == 4 * 10
    assert {(cell.recipe.split.name, cell.recipe.split.folds) for cell in cells} == {("k_fold", 4)}
    fewer = expanded(
        protocol="reality_check", protocol_settings={"folds": 2}, seeds=[3], baseline=False, losses={"raw": {}}
    )
    assert [(cell.recipe.split.fold, cell.recipe.training.seed) for cell in fewer] == [(0, 3), (1, 3)]


def test_the_protocol_says_how_to_split():
    recipe = expanded(protocol="fixed_validation", protocol_settings={"share": 0.3})[0].recipe
    assert (recipe.split.name, recipe.split.share) == ("fixed_validation", 0.3)
    assert expanded()[0].recipe.split.name == "standard"


def test_features_without_training_depend_on_the_seed_where_weights_are_random():
    assert [name for name in names(seeds=[0, 1]) if "frozen" in name] == ["frozen-seed0", "frozen-seed1"]
    pretrained = {**RECIPE, "network": {"name": "efficientnet_lite0", "pretrained": True}}
    assert [name for name in names(seeds=[0, 1], recipe=pretrained) if "frozen" in name] == ["frozen-seed0"]
    file = {"network.name": "small_cnn", "network.pretrained": "weights.safetensors"}
    cells = grid.expand(grid.load(tables(seeds=[0, 1])), overrides=file)
    assert [cell.name for cell in cells if cell.is_baseline] == ["frozen-seed0"]


def test_the_baseline_has_the_network_that_losses_share():
    first = {"network": {"normalize": False}, "sampler": {"classes": 2}}
    frozen = expanded(losses={"nra": first, "raw": {}})[0]
    assert (frozen.is_baseline, frozen.labels["loss"], frozen.recipe.network.normalize) == (True, "frozen", True)


def test_what_only_one_loss_has_can_be_changed_for_that_one():
    both = grid.load(tables(losses={"nra": {}, "margin": {}}))
    cells = grid.expand(both, only=["margin", "frozen"], overrides=["loss.beta_lr=1e-4", "network.dim=2"])
    assert [cell.recipe.loss.settings.get("beta_lr") for cell in cells] == [None, 1e-4]
    assert {cell.recipe.network.dim for cell in cells} == {2}


# --- keys ------------------------------------------------------------------------------------------------------


def key_of(what="raw-seed0", **changes):
    return {cell.name: cell.key for cell in expanded(**changes)}[what]


def test_a_key_is_the_same_as_long_as_no_number_can_change():
    elsewhere = {**RECIPE, "training": {"epochs": 5, "device": "cpu", "checkpoint_steps": 7}}
    assert key_of() == key_of(seeds=[0, 1], name="other") == key_of(recipe=elsewhere)
    assert key_of("frozen-seed0") == key_of("frozen-seed0", losses={"nra": {}, "raw": {}})


def test_a_key_changes_with_everything_else():
    other = {**RECIPE, "optimizer": {"lr": 2e-3}}
    keys = [key_of(), key_of(recipe=other), key_of(protocol="fixed_validation"), key_of("nra-seed0")]
    keys += [key_of(losses={"raw": {"loss": {"alpha": 9.0}}}), key_of("frozen-seed0")]
    assert len(set(keys)) == len(keys)


def test_where_data_lies_is_no_matter_but_for_data_sets_of_one_grid():
    roots = {name: {"data": {"name": "folder", "root": name}} for name in ("here", "there")}
    cells = expanded(data=roots, baseline=False, losses={"raw": {}})
    assert cells[0].key != cells[1].key
    moved = grid.expand(
        grid.load(tables(data=roots, baseline=False, losses={"raw": {}})), roots=["here=/x", "there=/y"]
    )
    assert [cell.key for cell in moved] == [cell.key for cell in cells]
    assert [cell.recipe.data.root for cell in moved] == ["/x", "/y"]


def test_one_place_is_for_all_data_that_needs_one():
    chosen = grid.load(tables(recipe={**RECIPE, "data": {"name": "folder"}}, baseline=False))
    assert grid.expand(chosen, roots=["photos"])[0].recipe.data.root == "photos"
    assert grid.expand(chosen, roots=["one.tar", "two.tar"])[0].recipe.data.root == ("one.tar", "two.tar")
    assert grid.expand(grid.load(tables(baseline=False)), roots=["photos"])[0].recipe.data.root is None


def test_labels_choose_cells():
    wide = grid.load(tables(dims=[4, 8], seeds=[0, 1]))

    def chosen(*labels):
        return [cell.name for cell in grid.expand(wide, only=labels)]

    assert chosen("nra", "frozen", "8", "1") == ["frozen-8d-seed1", "nra-8d-seed1"]
    assert chosen("raw-4d-seed1") == ["raw-4d-seed1"]
    assert len(chosen()) == 12
    assert chosen("raw", "8d", "seed1") == ["raw-8d-seed1"]
    with pytest.raises(ValueError, match="only is '4', which is both a dim and a seed; use 4d or seed4"):
        grid.expand(grid.load(tables(dims=[4], seeds=[4])), only=["4"])
    with pytest.raises(ValueError, match=r"only is 'nar' \(did you mean 'nra'\?\); the labels are"):
        chosen("nar")


@pytest.mark.parametrize(
    ("key", "axis"),
    [("loss.name", "losses"), ("split.name", "protocol"), ("training.seed", "seeds"), ("network.dim", "dims")],
)
def test_what_an_axis_says_cannot_be_set_for_all_cells(key, axis):
    section, _, inner = key.partition(".")
    for changes in ({key: 1}, {section: {inner: 1}}):
        with pytest.raises(ValueError, match=f"{key} cannot be set for all cells: {axis} of the grid defines it"):
            grid.expand(grid.load(tables(dims=[4])), overrides=changes)


def test_a_place_for_data_that_the_grid_does_not_have_is_refused():
    with pytest.raises(ValueError, match="data is 'foo=photos'; the grid has no dataset 'foo'"):
        grid.expand(grid.load(tables()), roots=["foo=photos"])


# --- files and errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted(GRIDS.glob("*.toml")), ids=lambda file: file.stem)
def test_a_grid_of_ours_makes_cells(file):
    ours = grid.load(file)
    assert ours.name == file.stem
    assert grid.expand(ours, roots=["somewhere"])


def test_a_grid_is_written_so_that_it_needs_no_other_file(tmp_path):
    settings = {"loss.margin": (0.1, 0.2), "data.side": (64,)}
    ours = grid.load(GRIDS / "cub.toml").model_copy(update={"settings": settings})
    (tmp_path / "copy.toml").write_text(grid.to_toml(ours), encoding="utf-8")
    assert grid.load(tmp_path / "copy.toml") == ours


def test_the_name_of_a_file_is_the_name_of_its_grid(tmp_path):
    (tmp_path / "base.toml").write_text('[network]\nname = "mlp"\n', encoding="utf-8")
    (tmp_path / "mine.toml").write_text('recipe = "base.toml"\n[losses.raw]\n', encoding="utf-8")
    mine = grid.load(tmp_path / "mine.toml")
    assert (mine.name, mine.recipe) == ("mine", {"network": {"name": "mlp"}})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"lossses": {}}, r"unknown key lossses \(did you mean 'losses'\?\)"),
        ({"losses": {}}, "losses is missing"),
        ({"losses": {"raw": {"los": {}}}}, r"unknown key losses.raw.los \(did you mean 'losses.raw.loss'\?\)"),
        ({"losses": {"raw": {"loss": "raw"}}}, "losses.raw.loss is 'raw'; allowed: a table"),
        ({"losses": {"frozen": {}}}, "'frozen' is the label of the baseline"),
        ({"networks": {"a": {"losses": {"nar": {}}}}}, r"networks.a.losses.nar: no loss has this label \(did you mean"),
        ({"networks": {"a": {"losses": 3}}}, "networks.a.losses is 3; allowed: a table"),
        ({"seeds": [0, 0]}, r"seeds is \[0, 0\]; numbers must be different"),
        ({"dims": [0]}, r"dims is \[0\]; allowed: a list of whole numbers ≥ 1"),
        ({"protocol": "folds"}, "allowed: .standard., .fixed_validation., .k_fold. or .reality_check."),
        (
            {"protocol_settings": {"share": 0.2}},
            "protocol_settings.share is set, and protocol is 'standard', which has no settings",
        ),
        ({"baseline": "yes"}, "baseline is 'yes'; allowed: true or false"),
        ({"seeds": []}, r"seeds is \[\]; allowed: a list of one or more whole numbers ≥ 0"),
        ({"protocol_settings": {"shares": 0.2}}, r"protocol_settings.shares \(did you mean 'protocol_settings.share'"),
        ({"settings": {"los.alpha": [1]}}, r"settings.los.alpha is not a key of a recipe \(did you mean 'loss'\?\)"),
        ({"settings": {"loss": [1]}}, "settings.loss is not a key of a recipe"),
        ({"settings": {"loss": {"alpha": 2}}}, "settings.loss.alpha is 2; allowed: a list of one or more values"),
        ({"settings": {"loss.alpha": [2, 2.0]}}, "values must be different"),
        ({"settings": {"network.dim": [8, 16]}}, "settings.network.dim is not allowed; use dims of the grid instead"),
        ({"name": "../up"}, "name is '../up'; allowed: a folder name"),
        ({"recipe": {**RECIPE, "split": {"name": "k_fold"}}}, "define the split"),
        (
            {"protocol": "fixed_validation", "recipe": {**RECIPE, "split": {"share": 0.6}}},
            r"split.share 0.6.*define the split",
        ),
        (
            {"losses": {"proxy_ancor": {"loss": {"margin": 0.1}}}},
            r"there is no loss 'proxy_ancor' \(did you mean 'proxy_anchor'\?\)",
        ),
        ({"losses": {"proxy_ancor": {}}}, "there is no loss 'proxy_ancor'"),
    ],
)
def test_a_wrong_grid_is_refused_in_a_line(changes, told):
    with pytest.raises((TypeError, ValueError), match=told):
        grid.load(tables(**changes))


OF_KEYS = [
    "protocol is 'folds' (did you mean 'k_fold'?); allowed: ",
    "baseline is 1; allowed: true or false",
    "losses.nra is 3; allowed: a table",
    "unknown key networks.a.netwrk (did you mean 'networks.a.network'?)",
    "dims is [0]; allowed: a list of whole numbers ≥ 1",
    "unknown key sedes (did you mean 'seeds'?); a grid has name, recipe, ",
]
OF_EACH_OTHER = [
    "losses.raww: there is no loss 'raww' (did you mean 'raw'?); set loss.name",
    "settings.los.alpha is not a key of a recipe (did you mean 'loss'?)",
    "settings.training.seed is not allowed; use seeds of the grid instead",
]


@pytest.mark.parametrize("told", [OF_KEYS, OF_EACH_OTHER])
def test_all_problems_of_a_grid_are_in_one_error(told):
    wrong = tables(losses={"raww": {}}, settings={"los.alpha": [1], "training.seed": [1]})
    if told is OF_KEYS:
        wrong |= {"sedes": [0], "dims": [0], "baseline": 1, "protocol": "folds", "losses": {"raww": {}, "nra": 3}}
        wrong["networks"] = {"a": {"netwrk": {}}}
    with pytest.raises(grid.GridError) as error:
        grid.load(wrong)
    head, *lines = str(error.value).splitlines()
    assert head == f"{len(told)} problems:"
    assert [line.strip().startswith(begin) for line, begin in zip(lines, told, strict=True)] == [True] * len(told)


@pytest.mark.parametrize("losses", [{"nra": {}}, {}])  # of the first cell that has it, which is no baseline
def test_a_wrong_cell_is_named(losses):
    with pytest.raises(ValueError, match=r"cell raw-seed0: unknown key loss\.alhpa"):
        expanded(losses={**losses, "raw": {"loss": {"alhpa": 2.0}}})


def test_two_labels_for_the_same_are_refused():
    with pytest.raises(ValueError, match="cells raw-seed0 and again-seed0 are identical"):
        expanded(losses={"raw": {}, "again": {"loss": {"name": "raw"}}})


def test_a_cell_can_be_trained_without_its_grid(tmp_path):
    from nearfar.training.recipe.files import to_toml

    cell = expanded(baseline=False)[0]
    (tmp_path / "recipe.toml").write_text(to_toml(cell.recipe), encoding="utf-8")
    assert load_recipe(tmp_path) == cell.recipe
