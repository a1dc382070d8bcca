"""From a recipe to its numbers."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from training_runs import assert_same, pictures, recipe, train, vectors, weights

from nearfar import metrics
from nearfar.training import checkpoint
from nearfar.training import step as steps
from nearfar.training.evaluation import embeddings
from nearfar.training.evaluation.evaluate import model_embeddings
from nearfar.training.recipe.files import to_toml
from nearfar.training.run.folder import read_log
from nearfar.training.trainer import NonFiniteError, Trainer
from nearfar.utils.progress import Display


def test_training_helps(tmp_path):
    file = vectors(tmp_path)
    chosen = recipe(file, training__epochs=10, evaluation__train_recall=True)
    train(chosen, tmp_path / "run")
    measured = [line["metrics"] for line in read_log(tmp_path / "run" / "log.jsonl") if "metrics" in line]
    assert measured[-1]["train"]["map@r"] > measured[0]["train"]["map@r"] + 0.1
    losses = [line["loss"] for line in read_log(tmp_path / "run" / "log.jsonl") if "loss" in line]
    assert losses[-1] < losses[0]


def test_the_same_recipe_gives_the_same_numbers(tmp_path):
    chosen = recipe(vectors(tmp_path), training__epochs=2)
    one, two = (train(chosen, tmp_path / name) for name in ("one", "two"))
    assert one.metrics["test"] == two.metrics["test"]
    assert_same(weights(tmp_path / "one"), weights(tmp_path / "two"))


def test_another_seed_gives_others(tmp_path):
    file = vectors(tmp_path)
    for seed in (0, 1):
        train(recipe(file, training__epochs=1, training__seed=seed), tmp_path / str(seed))
    one, two = (weights(tmp_path / name)["model:heads.high.linear.weight"] for name in ("0", "1"))
    assert not torch.equal(one, two)


def test_measuring_does_not_change_what_is_trained(tmp_path):
    file = vectors(tmp_path)
    settings = {"loss__name": "triplet", "loss__mining": "distance_weighted", "training__epochs": 3}
    for name, every in (("each", 1), ("end", 0)):
        train(recipe(file, evaluation__test_every=every, evaluation__clustering=True, **settings), tmp_path / name)
    assert_same(weights(tmp_path / "each"), weights(tmp_path / "end"))
    lines = read_log(tmp_path / "end" / "log.jsonl")
    assert [line["epoch"] for line in lines if "metrics" in line] == [2]


def test_a_run_counts_iterations_to_the_last(tmp_path):
    result = train(recipe(vectors(tmp_path), training__iterations=8), tmp_path / "run")
    assert result.metrics["steps"] == 8
    assert [line["step"] for line in read_log(tmp_path / "run" / "log.jsonl") if "loss" in line][-1] == 8


# --- selection ---------------------------------------------------------------------------------------------------


def pretend(monkeypatch, validation, test):
    """Let evaluations find these, one after the other; the last again from then on."""
    calls = [0]

    def measured(_, found):
        epoch = min(calls[0], len(test) - 1)
        calls[0] += 1
        values = {"validation": validation[epoch], "test": test[epoch]}
        return {part: {"recall@1": values[part]} for part in found}, None

    monkeypatch.setattr(embeddings, "measure_parts", measured)


def test_the_validation_classes_choose_the_epoch_and_the_test_does_not(tmp_path, monkeypatch):
    pretend(monkeypatch, [0.1, 0.9, 0.9, 0.5], [0.2, 0.3, 0.4, 0.99])
    chosen = recipe(vectors(tmp_path), split__name="fixed_validation", split__share=0.34)
    result = train(chosen, tmp_path / "run")
    assert result.metrics["epoch"] == 1  # the first of equals
    assert result.metrics["selection"] == "best validation recall@1"
    assert checkpoint.values_of(tmp_path / "run" / "checkpoint.safetensors")["state"]["best"]["epoch"] == 1


@pytest.mark.parametrize(("every", "patience", "epochs"), [(1, 2, 4), (1, 1, 3), (1, 5, 6), (2, 1, 6)])
def test_training_ends_when_the_validation_classes_no_longer_improve(every, patience, epochs, tmp_path, monkeypatch):
    pretend(monkeypatch, [0.1, 0.9, 0.5, 0.9, 0.9, 0.9], [0.0] * 6)
    settings = {"split__name": "fixed_validation", "split__share": 0.34, "evaluation__every": every}
    chosen = recipe(vectors(tmp_path), training__epochs=6, selection__patience=patience, **settings)
    train(chosen, tmp_path / "run")
    assert max(line["epoch"] for line in read_log(tmp_path / "run" / "log.jsonl") if "loss" in line) == epochs - 1


def test_the_chosen_network_is_the_one_of_that_epoch(tmp_path, monkeypatch):
    file = vectors(tmp_path)
    settings = {"split__name": "fixed_validation", "split__share": 0.34}
    train(recipe(file, training__epochs=2, **settings), tmp_path / "short")
    pretend(monkeypatch, [0.1, 0.9, 0.5, 0.5], [0.0] * 4)
    train(recipe(file, training__epochs=4, **settings), tmp_path / "long")
    short = {key: value for key, value in weights(tmp_path / "short").items() if key.startswith("model:")}
    assert_same(weights(tmp_path / "long", "best"), short)


def test_without_validation_the_last_epoch_counts(tmp_path, monkeypatch):
    pretend(monkeypatch, [0.0] * 4, [0.9, 0.2, 0.1, 0.3])
    result = train(recipe(vectors(tmp_path)), tmp_path / "run")
    assert (result.metrics["epoch"], result.metrics["test"]["recall@1"]) == (3, 0.3)
    assert result.metrics["selection"] == "last epoch"
    last = {key: value for key, value in weights(tmp_path / "run").items() if key.startswith("model:")}
    assert_same(weights(tmp_path / "run", "best"), last)


def test_the_test_metrics_are_those_of_the_chosen_network(tmp_path):
    chosen = recipe(vectors(tmp_path), split__name="fixed_validation", split__share=0.34, training__epochs=6)
    result = train(chosen, tmp_path / "run")
    measured = [line["metrics"] for line in read_log(tmp_path / "run" / "log.jsonl") if "metrics" in line]
    values = [one["validation"]["recall@1"] for one in measured if "validation" in one]
    best = values.index(max(values))
    assert result.metrics["epoch"] == best
    (tmp_path / "run" / "embeddings.safetensors").unlink()
    found = model_embeddings(tmp_path / "run")  # of the selected network, anew
    assert result.metrics["test"] == metrics.retrieval(found.embeddings, found.labels, ks=(1, 2))


def test_where_classes_validate_the_test_is_looked_at_once(tmp_path):
    chosen = recipe(vectors(tmp_path), split__name="fixed_validation", split__share=0.34, training__epochs=3)
    result = train(chosen, tmp_path / "run")
    measured = [line for line in read_log(tmp_path / "run" / "log.jsonl") if "metrics" in line]
    assert ["test" in line["metrics"] for line in measured] == [False, False, False, True]
    assert measured[-1]["epoch"] == result.metrics["epoch"]
    assert measured[-1]["metrics"]["test"] == result.metrics["test"]


@pytest.mark.parametrize("kind", ["standard", "fixed_validation"])
def test_what_is_tested_is_ranked_once(kind, tmp_path, monkeypatch):
    asked, original = [], metrics.retrieval

    def retrieval(points, *arguments, **settings):
        asked.append(len(points))
        return original(points, *arguments, **settings)

    monkeypatch.setattr(metrics, "retrieval", retrieval)
    settings = {"split__name": kind, "sampler__classes": 3, "evaluation__every": 0, "evaluation__ks": [2]}
    settings["selection__metric"] = "map@r"
    folder = train(recipe(vectors(tmp_path), training__epochs=2, **settings), tmp_path / "run").folder
    assert asked.count(72) == 1, "the second half of the classes is the test"
    points, labels = (load_file(folder / "embeddings.safetensors")[name] for name in ("embeddings", "labels"))
    each, found = original(points, labels, per_query=True)["per_query"], load_file(folder / "queries.safetensors")
    assert torch.equal(found["recall@1"], each["recall@1"].to(torch.uint8))
    assert torch.equal(found["map@r"], each["map@r"].float())


# --- stages and warm-up --------------------------------------------------------------------------------------------


class Watches(Display):
    """Keeps a look at the trainer after each epoch."""

    def __init__(self, look):
        self.look, self.seen = look, []
        self.trainer = None

    def say(self, text):
        if text.startswith("epoch"):
            self.seen.append(self.look(self.trainer))


def watched(chosen, folder, look):
    display = Watches(look)
    display.trainer = Trainer(chosen, folder, display=display)
    display.trainer.run()
    return display.seen


def test_stages_change_loss_and_learning_rate(tmp_path):
    stages = [{"epochs": 1, "loss": {"name": "softmax"}}, {"epochs": 1}, {"lr_factor": 0.1}]
    chosen = recipe(vectors(tmp_path), loss__name="group", stages=stages)

    def look(trainer):
        return trainer.step.learners[0].losses["high"].key, trainer.setup.learning_rates()["backbone"]

    seen = watched(chosen, tmp_path / "run", look)
    assert [name for name, _ in seen] == ["softmax", "group", "group", "group"]
    assert [rate for _, rate in seen] == pytest.approx([1e-2, 1e-2, 1e-3, 1e-3])


def test_warm_up_epochs_leave_the_backbone_alone(tmp_path):
    chosen = recipe(vectors(tmp_path), training__warmup_epochs=2, training__epochs=3)

    def look(trainer):
        return trainer.setup.model.backbone.layers[0].weight.detach().clone()

    first, second, third = watched(chosen, tmp_path / "run", look)
    assert torch.equal(first, second)
    assert not torch.equal(second, third)


@pytest.mark.parametrize("chunk", [None, 5])
def test_proxies_may_warm_up_for_a_network_without_a_head(chunk, tmp_path):
    settings = {"network__head": "none", "loss__name": "proxy_anchor", "training__chunk": chunk or "none"}
    chosen = recipe(vectors(tmp_path), training__warmup_epochs=1, training__epochs=2, **settings)

    def look(trainer):
        return trainer.setup.losses[0]["high"].proxies.detach().clone()

    first, second = watched(chosen, tmp_path / "run", look)
    assert not torch.equal(first, second)


def test_a_memory_is_filled_from_its_first_iteration_on(tmp_path):
    chosen = recipe(vectors(tmp_path), training__memory=40, training__memory_warmup=8, training__epochs=3)
    assert watched(chosen, tmp_path / "run", lambda trainer: len(trainer.setup.memories["high"])) == [0, 40, 40]


def test_hard_classes_are_given_the_means_of_classes(tmp_path):
    settings = {"sampler__name": "hard_classes", "sampler__classes": 3, "sampler__per_class": 3, "sampler__steps": 4}
    seen = watched(
        recipe(vectors(tmp_path), **settings), tmp_path / "run", lambda trainer: trainer.setup.sampler.learned
    )
    assert seen[0] is None  # looked at before the first are given
    assert seen[1].shape == (6, 4)
    assert not np.array_equal(seen[1], seen[2])


def test_a_tree_of_classes_and_hard_items_follow_the_network(tmp_path):
    settings = {"sampler__name": "smart_triplets", "sampler__batch_size": 12, "sampler__neighbors": 4}
    loss = {"loss__name": "hierarchical_triplet", "loss__num_classes": True}

    def look(trainer):
        table, margins = trainer.setup.sampler.learned, trainer.setup.losses[0]["high"].margins
        return None if table is None else table.copy(), margins.clone()

    chosen = recipe(vectors(tmp_path), **settings, **loss, sampler__steps=4)
    (table, margins), (later_table, later_margins), *_ = watched(chosen, tmp_path / "run", look)
    assert table is None
    assert not margins.any()
    assert later_table.shape == (72, 5)
    assert later_margins.any()


@pytest.mark.parametrize(
    "settings",
    [
        {"network__levels": ["low", "mid", "high"]},
        {"network__members": 2, "network__levels": ["low", "high"], "loss__name": "proxy_anchor"},
        {"network__members": 2, "training__memory": 24},
        {"training__precision": "bfloat16", "training__clip": 1.0},
        {"training__channels_last": False, "training__chunk": 5},
    ],
    ids=lambda settings: " ".join(settings),
)
def test_pictures_are_trained_in_all_these_ways(settings, tmp_path):
    common = {"network__name": "small_cnn", "augmentation__size": 8, "training__epochs": 1}
    result = train(recipe(pictures(tmp_path), **common, **settings), tmp_path / "run")
    assert 0.0 <= result.metrics["test"]["recall@1"] <= 1.0


def test_a_network_that_cannot_be_evaluated_fails_before_the_first_step(tmp_path):
    settings = {"network__name": "small_cnn", "augmentation__size": 8, "evaluation__size": 16, "evaluation__every": 0}
    with pytest.raises(ValueError, match="small_cnn"):
        train(recipe(pictures(tmp_path), **settings), tmp_path / "run")
    assert not (tmp_path / "run" / "recipe.toml").exists()


# --- what is no number ---------------------------------------------------------------------------------------------


def exploding(file, **settings):
    return recipe(file, optimizer__name="sgd", optimizer__lr=1e38, network__normalize=False, **settings)


def test_a_loss_that_is_no_number_stops_the_run_and_names_its_batch(tmp_path):
    chosen = exploding(vectors(tmp_path))
    trainer = Trainer(chosen, tmp_path / "run")
    with pytest.raises(NonFiniteError, match=r"NaN or infinite at step \d+ \(epoch 1\); the batch is in .*\.json"):
        trainer.run()
    found = json.loads((tmp_path / "run" / "nonfinite.json").read_text())
    drawn = trainer.setup.rows["train"][trainer.setup.sampler.batch(found["epoch"], found["step"])]
    assert found["indices"] == drawn.tolist()
    assert len(found["names"]) == 12
    assert found["iteration"] > 0


def test_after_that_a_run_may_go_on_without_such_steps(tmp_path, monkeypatch):
    calls, honest = [0], steps.global_loss

    def once(*arguments, **settings):
        calls[0] += 1
        return honest(*arguments, **settings) * (torch.nan if calls[0] == 8 else 1.0)

    monkeypatch.setattr(steps, "global_loss", once)
    file = vectors(tmp_path)
    with pytest.raises(NonFiniteError, match=r"The checkpoint before it is kept.*training.on_nonfinite=skip"):
        train(recipe(file, training__checkpoint_steps=3), tmp_path / "run")
    calls[0] = 7 - 6  # the checkpoint is of step 6
    result = train(recipe(file, training__on_nonfinite="skip"), tmp_path / "run", resume=True)
    assert result.metrics["steps"] == 24


def test_that_there_is_no_checkpoint_is_said(tmp_path):
    with pytest.raises(NonFiniteError, match="No checkpoint was saved before it"):
        train(exploding(vectors(tmp_path)), tmp_path / "run")


def test_a_network_that_gives_no_numbers_any_more_ends_the_run(tmp_path, monkeypatch):
    honest = embeddings.embed

    def broken(*arguments, **settings):
        found = honest(*arguments, **settings)
        found.embeddings[0] = torch.nan
        return found

    monkeypatch.setattr(embeddings, "embed", broken)
    with pytest.raises(NonFiniteError, match="after step 6 the embeddings are NaN or infinite; a smaller"):
        train(recipe(vectors(tmp_path), training__on_nonfinite="skip"), tmp_path / "run")


def test_or_is_skipped_and_counted(tmp_path, monkeypatch):
    calls, honest = [0], steps.global_loss

    def sometimes(*arguments, **settings):
        calls[0] += 1
        return honest(*arguments, **settings) * (torch.nan if calls[0] % 5 == 0 else 1.0)

    monkeypatch.setattr(steps, "global_loss", sometimes)
    result = train(recipe(vectors(tmp_path), training__on_nonfinite="skip"), tmp_path / "run")
    assert result.metrics["skipped"] == 4
    assert all(bool(tensor.isfinite().all()) for key, tensor in weights(tmp_path / "run").items() if "model:" in key)
    last = [line for line in read_log(tmp_path / "run" / "log.jsonl") if "loss" in line][-1]
    assert (last["step"], last["skipped"]) == (24, 4)


# --- what people see -----------------------------------------------------------------------------------------------


def test_files_that_are_no_pictures_are_named(tmp_path):
    rng = np.random.default_rng(0)
    for label in "abcdefgh":
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(4):
            pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / label / f"{number}.png")
    (tmp_path / "photos" / "a" / "broken.png").write_bytes(b"nothing")
    (tmp_path / "photos" / "a" / "notes.txt").write_text("nothing")
    said = []

    class Hears(Display):
        def say(self, text):
            said.append(text)

    chosen = recipe(
        tmp_path / "photos",
        data__name="folder",
        data__root=str(tmp_path / "photos"),
        data__on_error="skip",
        data__side=8,
        network__name="small_cnn",
        training__epochs=1,
    )
    train(chosen, tmp_path / "run", display=Hears(), cache=tmp_path / "cache")
    assert said[0] == "skipped 1 file that could not be decoded (a/broken.png)"
    assert said[1] == "folder: a/notes.txt: no image by its file extension; left out"
    (named,) = json.loads((tmp_path / "run" / "manifest.json").read_text())["data"]["left_out"]
    assert named.startswith("a/broken.png: ")


def test_loggers_are_told_numbers_by_name(tmp_path):
    told = []

    class Tells:
        def log(self, step, values):
            told.append((step, values))

        def close(self):
            raise AssertionError("who made a logger closes it")

    train(recipe(vectors(tmp_path), training__epochs=1), tmp_path / "run", loggers=[Tells()])
    names = {name for _, values in told for name in values}
    assert {"loss", "lr/backbone", "images_s", "metrics/test/recall@1"} <= names
    assert told[-1][0] == 6


def test_training_does_not_import_the_compiler(tmp_path):
    """It takes seconds, and PyTorch's optimizers import it."""
    small = {"network__settings": {}, "network__name": "small_cnn", "training__epochs": 1}
    chosen = recipe(pictures(tmp_path), **small, loss__name="proxy_anchor")
    (tmp_path / "recipe.toml").write_text(to_toml(chosen), encoding="utf-8")
    program = f"""
import sys, nearfar
nearfar.train({str(tmp_path / "recipe.toml")!r}, out={str(tmp_path / "run")!r})
assert "torch" in sys.modules
assert not {{"torch._dynamo", "torch._inductor"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
