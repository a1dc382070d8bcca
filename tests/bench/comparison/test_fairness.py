"""Which runs may be ranked against each other."""

import json
import re

import pytest
from runs import finished

from nearfar.bench import differences, find, judge, repetitions
from nearfar.bench.comparison.manifest_keys import flat


def pair(folder, overrides=None, about=None, *, first=None):
    """Two runs of two losses, the second of them changed."""
    second = finished(folder / "two", "nra", overrides=overrides, about=about)
    return [finished(folder / "one", "proxy_anchor", overrides=first), second]


def test_manifests_are_flat_tables():
    assert flat({"a": {"b": {"c": 1}}, "stages": [{"epochs": 1}]}) == {"a.b.c": 1, "stages.0.epochs": 1}


def test_runs_of_two_losses_may_be_ranked(tmp_path):
    verdict = judge(pair(tmp_path))
    assert verdict.fair
    assert verdict.reasons == []
    assert verdict.notes == ["the test classes were evaluated 2 times for these 2 runs"]
    alone = judge([finished(tmp_path / "three", "nra")])
    assert alone.notes == ["the test classes were evaluated 1 time for this run"]


@pytest.mark.parametrize(
    "overrides",
    [
        {"loss": {"name": "margin", "beta": 1.2}},
        {"loss": {"name": "raw", "mining": {"name": "valid_triplet"}}},
        {"optimizer.loss_multiplier": 50.0},
        {"data.root": "/elsewhere"},
        {"data.mode": "streaming"},
        {"training.device": "cpu"},
        {"training.checkpoint_steps": 10},
        {"evaluation.ks": [1, 10]},
        {"evaluation.clustering": True},
        {"evaluation.batch_size": 8},
    ],
)
def test_the_loss_and_what_changes_no_number_may_differ(tmp_path, overrides):
    assert judge(pair(tmp_path, overrides)).reasons == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("network.name", "googlenet"),
        ("network.dim", 128),
        ("network.pooling", "max"),
        ("network.freeze_batchnorm", True),
        ("network.head", "mlp"),
        ("data.side", 128),
        ("data.on_error", "skip"),
        ("split.share", 0.2),
        ("split.seed", 1),
        ("sampler.classes", 16),
        ("sampler.per_class", 2),
        ("augmentation.crop", "random_resized"),
        ("augmentation.flip", False),
        ("optimizer.name", "sgd"),
        ("optimizer.lr", 1e-3),
        ("optimizer.weight_decay", 0.1),
        ("optimizer.head_multiplier", 10.0),
        ("schedule.name", "cosine"),
        ("schedule.warmup", 5),
        ("training.epochs", 6),
        ("training.warmup_epochs", 1),
        ("training.precision", "bfloat16"),
        ("training.clip", 1.0),
        ("training.memory", 512),
        ("evaluation.measure", "euclidean"),
        ("evaluation.resize", 128),
        ("evaluation.every", 5),
        ("selection.metric", "map@r"),
    ],
)
def test_any_other_setting_is_unfair_and_named(tmp_path, key, value):
    verdict = judge(pair(tmp_path, {key: value}))
    assert not verdict.fair
    (reason,) = (reason for reason in verdict.reasons if reason.startswith(f"{key}: "))
    shown = value if isinstance(value, str) else json.dumps(value)
    assert re.fullmatch(rf"{key}: \S.* in one; {re.escape(shown)} in two", reason)


def test_what_a_grid_tries_values_of_is_compared(tmp_path):
    runs = [
        finished(tmp_path / f"{size}", overrides={"sampler.per_class": size}, cell={"sampler.per_class": f"{size}"})
        for size in (4, 8)
    ]
    verdict = judge(runs)
    assert (verdict.fair, verdict.tried) == (True, ("sampler.per_class",))
    assert verdict.notes[0].startswith("the grid varies sampler.per_class; ")
    # ... and nothing else, nor with runs that were not made for it.
    other = finished(tmp_path / "other", overrides={"sampler.per_class": 16})
    assert judge([*runs, other]).reasons == ["sampler.per_class: 4 in 4; 8 in 8; 16 in other"]
    cell = {"loss": "nra", "sampler.per_class": "4"}
    elsewhere = finished(tmp_path / "elsewhere", "nra", cell=cell, about={"data": {"name": "cub", "source": "other"}})
    assert any(line.startswith("data.source") for line in judge([*runs, elsewhere]).reasons)
    many = finished(tmp_path / "many", "nra", cell=cell, about={"batch": {"pictures": 32, "ranks": 2}})
    assert any(line.startswith("batch.ranks") for line in judge([*runs, many]).reasons)
    more = finished(tmp_path / "more", overrides={"training.epochs": 9}, cell={"loss": "nra", "sampler.per_class": "4"})
    assert judge([*runs, more]).reasons[0] == "training.epochs: 5 in 4, 8; 9 in more"


def test_long_settings_are_compared_to_their_end(tmp_path):
    steps = list(range(1, 30))
    runs = [
        finished(tmp_path / name, name, overrides={"schedule": {"name": "multi_step", "milestones": [*steps, last]}})
        for name, last in (("contrastive", 31), ("triplet", 32))
    ]
    (reason,) = judge(runs).reasons
    assert reason.startswith("schedule.milestones: [1, 2, 3, 4,… 28, 29, 31] in contrastive; ")


def test_runs_from_before_pictures_were_named_that_are_left_out_compare(tmp_path):
    old = finished(tmp_path / "old", "triplet")
    data = {**old.manifest["data"], "left_out": []}
    assert judge([old, finished(tmp_path / "new", "contrastive", about={"data": data})]).fair


@pytest.mark.parametrize(
    ("about", "key"),
    [
        ({"data": {"name": "cub", "fingerprint": "other", "source": "other"}}, "data.fingerprint"),
        ({"network": {"first_weights": "other"}}, "network.first_weights"),
        ({"weights": {"file": "a.pth", "sha256": "1"}}, "weights"),
        ({"batch": {"pictures": 32, "ranks": 2}}, "batch.ranks"),
        ({"length": {"epochs": 5, "steps": 19}}, "length.steps"),
        ({"selection": "last epoch"}, "selection"),
    ],
)
def test_facts_that_no_setting_explains_are_unfair(tmp_path, about, key):
    verdict = judge(pair(tmp_path, about=about))
    assert not verdict.fair
    assert [reason for reason in verdict.reasons if reason.startswith(key)], verdict.reasons


@pytest.mark.parametrize(
    ("about", "note"),
    [
        ({"versions": {"torch": "2.7.0"}}, "versions.torch: 2.6.0 in one; 2.7.0 in two"),
        ({"commit": "def+"}, "commit: abc in one; def+ in two"),
        ({"hardware": {"device": "cuda", "gpu": "two"}}, "hardware.gpu: one in one; two in two"),
    ],
)
def test_machines_and_versions_are_noted(tmp_path, about, note):
    verdict = judge(pair(tmp_path, about=about))
    assert verdict.fair
    assert note in verdict.notes
    assert any("seconds and memory are not comparable" in note for note in verdict.notes) == ("hardware" in about)


def test_whether_a_loss_sees_lengths_is_its_own_matter_where_angles_are_compared(tmp_path):
    verdict = judge(pair(tmp_path / "angles", {"network.normalize": False}))
    assert verdict.fair
    assert verdict.notes[0] == "network.normalize: true in one; false in two"
    lengths = {"evaluation.measure": "euclidean"}
    runs = pair(tmp_path / "lengths", lengths | {"network.normalize": False}, first=lengths)
    assert judge(runs).reasons == ["network.normalize: true in one; false in two"]


def test_lengths_of_levels_side_by_side_are_weights(tmp_path):
    levels = {"network.levels": ["low", "high"]}
    runs = pair(tmp_path, levels | {"network.normalize": False}, first=levels)
    assert judge(runs).reasons == ["network.normalize: true in one; false in two"]


def test_a_run_that_normalises_is_no_repetition_of_one_that_does_not(tmp_path):
    runs = [finished(tmp_path / f"{yes}", "n_pair", overrides={"network.normalize": yes}) for yes in (True, False)]
    assert len(repetitions(runs)) == 2
    assert not any("twice" in note for note in judge(runs).notes)


def test_folds_of_other_sizes_take_other_epochs_for_their_steps(tmp_path):
    runs = [
        finished(
            tmp_path / f"{loss}{fold}",
            loss,
            overrides={"split.name": "k_fold", "split.fold": fold},
            about={"length": {"epochs": 5 - fold, "steps": 20}},
        )
        for loss in ("nra", "raw")
        for fold in (0, 1)
    ]
    assert judge(runs).fair
    assert len(repetitions(runs)) == 2


def test_without_validation_it_does_not_matter_when_it_is_measured(tmp_path):
    last = {"split": {"name": "standard"}}
    assert judge(pair(tmp_path, last | {"evaluation.every": 1}, first=last | {"evaluation.every": 0})).fair


def test_stages_may_have_losses_of_their_own_and_not_epochs(tmp_path):
    def stages(first, epochs):
        return {"stages": [{"epochs": epochs, "loss": {"name": first}}, {"epochs": 5 - epochs}]}

    def runs(name, epochs):
        return pair(tmp_path / name, stages("proxy_nca", epochs), first=stages("normalized_softmax", 2))

    assert judge(runs("same", 2)).fair
    assert "stages.0.epochs: 2 in one; 1 in two" in judge(runs("other", 1)).reasons


def test_every_loss_needs_the_same_seeds(tmp_path):
    for seed in (0, 1):
        finished(tmp_path / f"a{seed}", "proxy_anchor", overrides={"training.seed": seed})
    finished(tmp_path / "b0", "nra", overrides={"training.seed": 0})
    assert judge(find(tmp_path)).reasons == ["repetitions: nra lacks seed 1"]
    finished(tmp_path / "b1", "nra", overrides={"training.seed": 1})
    assert judge(find(tmp_path)).fair


def test_weights_of_the_same_seed_must_be_the_same(tmp_path):
    for seed in (0, 1):
        finished(tmp_path / f"a{seed}", "proxy_anchor", overrides={"training.seed": seed})
        changed = {"network": {"first_weights": "other"}} if seed else None
        finished(tmp_path / f"b{seed}", "nra", overrides={"training.seed": seed}, about=changed)
    assert set(differences(find(tmp_path))["network.first_weights"]) == {"a1", "b1"}


def test_a_baseline_stands_beside_those_with_its_data_and_network(tmp_path):
    trained = pair(tmp_path)
    about = {
        "baseline": "frozen",
        "selection": "no training",
        "network": {"model": {"name": "resnet50", "dim": None, "head": "none"}, "first_weights": "pretrained"},
        "length": {"epochs": 0, "steps": 0},
    }
    assert judge([*trained, finished(tmp_path / "frozen", about=about)]).reasons == []
    elsewhere = finished(tmp_path / "other", about=about, overrides={"data.name": "cars196"})
    assert judge([*trained, elsewhere]).reasons == ["data.name: cub in one, two; cars196 in other"]


def test_skipped_steps_are_noted(tmp_path):
    runs = [finished(tmp_path / "a", skipped=3), finished(tmp_path / "c", "nra")]
    assert "a skipped 3 steps whose loss was NaN or infinite" in judge(runs).notes


def test_folders_of_the_same_name_are_told_apart(tmp_path):
    runs = [finished(tmp_path / "x" / "run"), finished(tmp_path / "y" / "run", "nra", overrides={"training.epochs": 9})]
    (reason,) = judge(runs).reasons
    assert str(tmp_path / "x" / "run") in reason
    assert str(tmp_path / "y" / "run") in reason


def test_many_runs_are_counted(tmp_path):
    for name in "abcdef":
        finished(tmp_path / name, overrides={"training.seed": ord(name)})
    finished(tmp_path / "z", "nra", overrides={"training.epochs": 9})
    assert "training.epochs: 5 in 6 runs; 9 in z" in judge(find(tmp_path)).reasons
