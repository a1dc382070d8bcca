"""A share of a training is kept where it helps held-out classes, and the verdict says what it brought."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_runs import Interrupts, assert_same

import nearfar as nf
from nearfar.bench import Run
from nearfar.training import verdict
from nearfar.training.blend import SHARES, choose, interpolate, trained_weights
from nearfar.training.recipe.files import RecipeError, load
from nearfar.training.trainer import Stopped

CLASSES, EACH, SIGNAL, NOISE = 20, 10, 4, 12
HEAD = {
    "sampler": {"name": "groups", "per_class": 4, "batch_size": 40},
    "network": {"name": "linear", "head": "residual", "dim": "none"},
    "loss": {"name": "multi_similarity"},
    "optimizer": {"name": "adamw", "lr": 2e-2},
    "schedule": {"name": "cosine", "per": "iteration"},
    "training": {"epochs": 8, "device": "cpu"},
    "evaluation": {"every": 0, "before": True},
    "selection": {"blend": True},
}
WHOLE = {  # of images
    **HEAD,
    "network": {"name": "small_cnn", "head": "residual", "dim": "none", "freeze_batchnorm": True},
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "split": {"name": "fixed_validation", "share": 0.4},
}


def vectors(*, shuffled=False):
    """Classes that differ in four of sixteen dimensions; the others are noise, which training finds out."""
    rng = np.random.default_rng(1)
    labels = np.repeat(np.arange(CLASSES), EACH)
    signal = rng.standard_normal((CLASSES, SIGNAL))[labels] + 0.3 * rng.standard_normal((len(labels), SIGNAL))
    points = np.hstack([signal, 1.5 * rng.standard_normal((len(labels), NOISE))]).astype(np.float32)
    return points, rng.permutation(labels) if shuffled else labels


def images():
    rng = np.random.default_rng(2)
    labels = np.repeat(np.arange(CLASSES), EACH)
    pixels = rng.uniform(60, 195, (CLASSES, 8, 8))[labels] + 40 * rng.standard_normal((len(labels), 8, 8))
    return pixels.clip(0, 255).astype(np.uint8), labels


def test_a_share_is_kept_if_its_gain_exceeds_its_standard_error():
    rng = np.random.default_rng(0)
    gains = np.array([0.0, 0.01, 0.05, 0.03, -0.1]) + 0.02 * rng.standard_normal((12, len(SHARES)))
    gains[:, 0] = 0.0
    chosen = choose(gains, 4)
    assert (chosen.share, chosen.best, chosen.classes, chosen.folds) == (0.5, 0.5, 12, 4)
    assert chosen.gain == pytest.approx(gains[:, 2].mean())
    assert chosen.error == pytest.approx(gains[:, 2].std(ddof=1) / np.sqrt(12))
    noisy = choose(np.where(gains == 0.0, 0.0, gains + np.array([[-1.0], [1.0]] * 6)), 4)
    assert (noisy.share, noisy.best) == (0.0, 0.5)
    assert choose(gains / 100, 4).share == 0.0  # certain, and of no use


def test_weights_lie_between_those_before_and_after():
    model = nf.networks.create("linear", in_dim=3, dim=2)
    before = trained_weights(model)
    after = {name: value + 4.0 for name, value in before.items()}
    for share in SHARES:
        interpolate(model, before, after, share)
        for name, value in model.named_parameters():
            torch.testing.assert_close(value.detach(), before[name] + 4.0 * share)


def test_what_helps_held_out_classes_is_kept(tmp_path):
    run = nf.train(HEAD, tmp_path / "run", data=vectors())
    blend, said = run.metrics["blend"], run.metrics["verdict"]
    assert blend["share"] > 0
    assert blend["gain"] > blend["error"] > 0
    assert (blend["classes"], blend["folds"]) == (CLASSES // 2, 4)
    assert said["says"] == "helps"
    assert said["classes"] == CLASSES // 2
    for name in ("map@r", "recall@1"):
        assert said[name]["before"] == pytest.approx(run.metrics["before"][name], abs=1e-6)
        assert said[name]["after"] == pytest.approx(run.metrics["test"][name], abs=1e-6)
        assert said[name]["low"] < said[name]["after"] - said[name]["before"] < said[name]["high"]
    looks = (run.folder / "test_looks.jsonl").read_text().splitlines()
    assert [json.loads(line)["by"] for line in looks] == ["before", "train"]


def test_a_training_on_shuffled_labels_leaves_the_network_as_it_was(tmp_path):
    points, labels = vectors(shuffled=True)
    run = nf.train(HEAD, tmp_path / "run", data=(points, labels))
    assert run.metrics["blend"]["share"] == 0.0
    assert run.metrics["test"]["map@r"] == run.metrics["before"]["map@r"]
    assert run.metrics["verdict"]["says"] == "no clear gain"
    assert verdict.text(run.metrics).endswith("the network was left as it was")
    weights = load_file(run.folder / "model.safetensors")
    assert not any(value.any() for value in weights.values())  # a residual head begins with zeros


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_given_share_is_kept(tmp_path, share):
    data = vectors()
    whole = nf.train({**HEAD, "selection": {}}, tmp_path / "whole", data=data)
    kept = nf.train({**HEAD, "selection": {"blend": share}}, tmp_path / "kept", data=data)
    after = load_file(whole.folder / "model.safetensors")
    for name, value in load_file(kept.folder / "model.safetensors").items():
        torch.testing.assert_close(value, share * after[name])
    assert kept.metrics["blend"]["share"] == share
    assert "blend" not in whole.metrics


def test_validation_classes_choose_for_a_whole_network(tmp_path):
    run = nf.train(WHOLE, tmp_path / "run", data=images())
    blend = run.metrics["blend"]
    assert (blend["classes"], blend["folds"]) == (4, 0)
    assert run.metrics["selection"] == "last epoch"
    measured = nf.evaluate(run.folder)["retrieval"]["map@r"]
    assert measured == pytest.approx(run.metrics["test"]["map@r"], abs=1e-6)


def test_too_few_classes_keep_nothing(tmp_path):
    points, labels = vectors()
    few = labels < 6
    run = nf.train(HEAD, tmp_path / "run", data=(points[few], labels[few]))
    assert run.metrics["blend"]["share"] == 0.0
    assert "too few training classes" in verdict.text(run.metrics)


@pytest.mark.parametrize("recipe", [HEAD, WHOLE], ids=["head", "whole"])
def test_a_resumed_training_keeps_the_same(tmp_path, recipe):
    data = vectors() if recipe is HEAD else images()
    whole = nf.train(recipe, tmp_path / "whole", data=data)
    with pytest.raises(Stopped):
        nf.train(recipe, tmp_path / "resumed", data=data, display=Interrupts(3))
    resumed = nf.train(resume=tmp_path / "resumed")
    assert resumed.metrics["blend"] == whole.metrics["blend"]
    assert resumed.metrics["verdict"] == whole.metrics["verdict"]
    assert_same(*(load_file(run.folder / "model.safetensors") for run in (whole, resumed)))


def test_a_training_that_ends_while_a_share_is_chosen_is_finished_by_resuming(tmp_path, monkeypatch):
    whole = nf.train(WHOLE, tmp_path / "whole", data=images())
    with monkeypatch.context() as patch:
        patch.setattr("nearfar.training.trainer.Trainer._final_metrics", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):  # the network was written, and the metrics were not
            nf.train(WHOLE, tmp_path / "killed", data=images())
    resumed = nf.train(resume=tmp_path / "killed")
    assert resumed.metrics["blend"] == whole.metrics["blend"]
    assert_same(*(load_file(run.folder / "model.safetensors") for run in (whole, resumed)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"network.head": "linear", "network.dim": 4}, "network.head is 'linear'"),
        ({"selection.patience": 2}, "selection.patience is 2"),
        ({"split.name": "closed_set"}, "it needs validation classes"),
        ({"network": {"name": "small_cnn", "head": "none", "dim": "none", "freeze_batchnorm": True}}, "it needs valid"),
        ({"network": {"name": "small_cnn", "head": "none", "dim": "none"}}, "network.freeze_batchnorm = true"),
        ({"selection.blend": 1.5}, "selection.blend is 1.5"),
    ],
)
def test_recipes_in_which_a_share_means_nothing_are_refused(changes, said):
    with pytest.raises(RecipeError, match=said):
        load(HEAD, overrides=changes)


def test_runs_with_and_without_a_chosen_share_are_not_compared(tmp_path):
    data, kept = vectors(), {"contrastive": True, "multi_similarity": False}
    recipes = [{**HEAD, "loss": {"name": loss}, "selection": {"blend": blend}} for loss, blend in kept.items()]
    runs = [nf.train(recipe, tmp_path / recipe["loss"]["name"], data=data) for recipe in recipes]
    reasons = nf.bench.compare(runs).verdict.reasons
    assert any("selection.blend" in str(reason) for reason in reasons)


def queries(before, after):
    labels = np.repeat(np.arange(6), 4)
    before, after = (np.asarray(values)[labels] for values in (before, after))
    metrics = dict.fromkeys(verdict.METRICS, after) | {f"before {name}": before for name in verdict.METRICS}
    return {"labels": labels, **metrics}


@pytest.mark.parametrize(
    ("gains", "says"),
    [([2, 3, 2, 3, 2, 3], "helps"), ([-2, -3, -2, -3, -2, -3], "worse"), ([2, -3, 2, -1, 2, -3], "no clear gain")],
)
def test_the_verdict_depends_on_the_interval_over_classes(gains, says):
    before = np.linspace(0.2, 0.7, 6)
    said = verdict.compare(queries(before, before + np.array(gains) / 100))
    assert said["says"] == says
    change = said["map@r"]
    half = (change["high"] - change["low"]) / 2
    assert half == pytest.approx(2.5706 * np.std(np.array(gains) / 100, ddof=1) / np.sqrt(6), rel=1e-4)  # t of 5
    line = verdict.text({"verdict": said})
    assert line.startswith(f"{says}: map@r of unseen classes 45.0 → ")
    assert line.endswith("(6 test classes)")
    kept = {"share": 0.5, "best": 0.5, "gain": 0.02, "error": 0.01, "classes": 10, "folds": 4}
    line = verdict.text({"verdict": said, "blend": kept})
    assert line.endswith("(6 test classes; half of what was learned is kept, chosen on training classes)")


def test_one_class_or_an_unmeasured_network_has_no_verdict():
    assert verdict.compare({}) is None
    assert verdict.compare({name: values[:4] for name, values in queries([0.1] * 6, [0.2] * 6).items()}) is None
    assert verdict.text({}) is None


@pytest.fixture(scope="module")
def helped(tmp_path_factory):
    """A run whose training helps, in a folder "runs" of its own."""
    folder = tmp_path_factory.mktemp("final")
    points, labels = vectors()
    np.savez(folder / "vectors.npz", X=points, y=labels)
    recipe = {**HEAD, "data": {"name": "arrays", "root": str(folder / "vectors.npz")}}
    return recipe, nf.train(recipe, folder / "runs" / "first")


def test_the_final_network_is_trained_on_all_classes_with_what_a_run_chose(helped, monkeypatch):
    recipe, tested = helped
    monkeypatch.chdir(tested.folder.parents[1])
    final = nf.train(recipe, final=True)  # finds the run of this recipe
    assert final.folder.name == "first-final"
    assert final.manifest["data"]["classes"] == {"train": CLASSES, "validation": 0}
    assert final.recipe.selection.blend == tested.metrics["blend"]["share"]
    assert final.recipe.training == tested.recipe.training
    assert not (final.folder / "test_looks.jsonl").exists()
    assert final.manifest["final"]["of"] == str(tested.folder.relative_to(tested.folder.parents[1]))
    assert final.manifest["final"]["verdict"] == verdict.text(tested.metrics)
    assert verdict.text(final.metrics).startswith("untested: trained on all classes with what runs/first chose")
    with pytest.raises(ValueError, match="test"):
        nf.bench.compare([tested, final])


def test_the_command_trains_the_final_network_of_a_run(helped, tmp_path, nearfar):
    _, tested = helped
    printed = nearfar("train", tested.folder, "--final", "-o", tmp_path / "final").out
    assert "untested: trained on all classes" in printed
    assert f"search with it: nearfar index build {tmp_path / 'final'} {tested.folder.parents[1]}/vectors.npz" in printed


def test_advice_is_to_use_what_is_better(helped):
    _, tested = helped
    words = [str(line) for line in verdict.advice(tested)]
    assert words[0].startswith(f"search with it: nearfar index build {tested.folder} ")
    assert words[1].endswith(f"nearfar train {tested.folder} --final")
    assert any(f"nearfar train {tested.folder} --set loss.name=proxy_anchor" in line for line in words)
    pretrained = {"network.name": "efficientnet_lite0", "network.pretrained": True, "selection.blend": False}
    worse = Run(tested.folder, metrics=tested.metrics | {"verdict": tested.metrics["verdict"] | {"says": "worse"}})
    worse.recipe = load(tested.recipe, overrides=pretrained)
    words = [str(line) for line in verdict.advice(worse)]
    assert words[0].startswith("use the network as it is: nearfar index build efficientnet_lite0 ")
    assert not any("--final" in line for line in words)
    untested = Run(tested.folder, metrics={})
    assert [line.text for line in verdict.advice(untested)] == ["search with it"]


def test_the_final_network_has_the_settings_of_its_run(helped, monkeypatch):
    recipe, tested = helped
    with pytest.raises(ValueError, match=r"was trained otherwise: training\.epochs: 8 → 3"):
        nf.train(tested.folder, final=True, training={"epochs": 3})
    damaged = tested.folder.with_name("damaged")
    damaged.mkdir()
    (damaged / "metrics.json").write_text("{}")
    monkeypatch.chdir(tested.folder.parents[1])
    assert nf.train(recipe, final=True, training={"device": "cpu"}).manifest["final"]["of"] == "runs/first"


def test_a_network_that_was_not_measured_before_has_its_scores_in_place_of_a_verdict(tmp_path):
    tested = nf.train({**HEAD, "evaluation": {"every": 0}}, tmp_path / "run", data=vectors())
    final = nf.train(tested.folder, tmp_path / "final", final=True)
    assert f"map@r {100 * tested.score('map@r'):.1f} of unseen classes" in verdict.text(final.metrics)


def test_nothing_is_trained_finally_where_nothing_helped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = nf.train(HEAD, "runs/first", data=vectors(shuffled=True))
    with pytest.raises(ValueError, match="There is nothing to train: use the network as it is"):
        nf.train(run.folder, final=True)
    with pytest.raises(ValueError, match="no finished run of this recipe is in runs"):
        nf.train({**HEAD, "data": {"name": "digits", "settings": {"vectors": True}}}, final=True)
