"""From a recipe to the parts of a run."""

import re

import numpy as np
import pytest
import torch

from nearfar.data.datasets.base import open as open_data_set
from nearfar.distributed import World
from nearfar.networks import Ensemble
from nearfar.training import load_recipe
from nearfar.training.checkpoint import State
from nearfar.training.run import provenance
from nearfar.training.setup import build

VECTORS = {"name": "digits", "settings": {"vectors": True}}
FEW = {"classes": 2, "per_class": 4}


def built(*, rank=0, ranks=1, **sections):
    table = {
        "data": VECTORS,
        "sampler": {"classes": 4, "per_class": 4},
        "network": {"name": "linear", "dim": 8},
        "loss": {"name": "proxy_anchor"},
        "optimizer": {"lr": 0.01},
        "training": {"epochs": 3, "device": "cpu"},
    }
    return build(load_recipe({**table, **sections}), world=World(rank, ranks))


def first_batch(parts):
    return next(iter(parts.loader.epoch(parts.sampler, 0, rows=parts.rows["train"])))


@pytest.mark.parametrize("count", [1, 2])
def test_a_validation_part_of_one_class_is_refused(tmp_path, count):
    labels = np.repeat(np.arange(8), 4)
    parts = np.where(labels < 4, "train", np.where(labels < 4 + count, "validation", "test"))
    np.savez(tmp_path / "own.npz", X=np.eye(32, 8, dtype=np.float32), y=labels, split=parts)
    data = {"name": "arrays", "root": str(tmp_path / "own.npz")}
    if count > 1:
        assert len(built(data=data).rows["validation"]) == 8
        return
    with pytest.raises(ValueError, match="the validation part of arrays has a single class"):
        built(data=data)
    assert len(built(data=data, split={"name": "fixed_validation"}, sampler=FEW).rows["validation"]) == 8


HALVES = {"train": np.repeat(np.arange(4), 4)}
UNMEASURED = {
    "one class": ({"test": np.full(8, 4)}, {}, "the test part of arrays has a single class"),
    "lonely": ({"test": np.arange(4, 12)}, {}, "the test part of arrays has a single image of each class"),
    "strangers": (
        {"query": np.repeat([4, 5], 2), "gallery": np.repeat([6, 7], 2)},
        {},
        "the gallery of arrays has no class of the queries",
    ),
    "one in the gallery": (
        {"query": np.full(2, 4), "gallery": np.full(2, 4)},
        {},
        "the gallery of arrays has a single class",
    ),
    "lonely in training": (
        {"train": np.arange(8), "test": np.repeat([8, 9], 2)},
        {"evaluation": {"train_recall": True}, "sampler": {"classes": 4, "per_class": 1}},
        "the train part of arrays has a single image of each class",
    ),
}


@pytest.mark.parametrize(("labels", "sections", "words"), UNMEASURED.values(), ids=UNMEASURED.keys())
def test_a_part_that_cannot_be_measured_is_refused_before_training(labels, sections, words, tmp_path):
    labels = HALVES | labels
    split = np.concatenate([np.full(len(each), part) for part, each in labels.items()])
    y = np.concatenate([*labels.values()])
    np.savez(tmp_path / "own.npz", X=np.eye(len(y), 8, dtype=np.float32), y=y, split=split)
    with pytest.raises(ValueError, match=words):
        built(data={"name": "arrays", "root": str(tmp_path / "own.npz")}, **sections)


def test_training_labels_count_from_zero_and_others_come_after():
    parts = built(split={"name": "fixed_validation", "share": 0.4, "seed": 3}, sampler=FEW)
    assert np.unique(parts.train_labels).tolist() == [0, 1, 2]
    assert parts.num_classes == 3
    others = np.concatenate([parts.labels[parts.rows["validation"]], parts.labels[parts.rows["test"]]])
    assert np.unique(others).tolist() == [3, 4, 5, 6, 7, 8, 9]
    digits = open_data_set("digits").labels
    pairs = {(int(a), int(b)) for a, b in zip(digits, parts.labels, strict=True)}
    assert len(pairs) == 10  # a renumbering: no class is torn or joined


def test_every_fold_validates_other_classes():
    folds = [built(split={"name": "k_fold", "folds": 2, "fold": fold}, sampler=FEW) for fold in range(2)]
    digits = open_data_set("digits").labels
    assert sorted(np.concatenate([np.unique(digits[parts.rows["validation"]]) for parts in folds])) == [0, 1, 2, 3, 4]


def test_a_batch_fits_the_loss():
    parts = built()
    batch = first_batch(parts)
    found = parts.model.levels_forward(batch.images)
    assert {key: tuple(each.shape) for key, each in found.items()} == {"high": (16, 8)}
    loss = parts.stages[0].losses["high"](found["high"], batch.labels)
    assert loss.isfinite()


def test_every_process_makes_the_same_parameters_and_draws_its_share():
    here, there = built(rank=0, ranks=2), built(rank=1, ranks=2)
    for a, b in zip(here.model.parameters(), there.model.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(here.losses.parameters(), there.losses.parameters(), strict=True):
        assert torch.equal(a, b)
    shares = [set(parts.batch_contents(0)["indices"]) for parts in (here, there)]
    assert [len(share) for share in shares] == [8, 8]
    assert not shares[0] & shares[1]


def test_another_seed_makes_other_parameters():
    one, other = built(), built(training={"epochs": 3, "device": "cpu", "seed": 1})
    assert not torch.equal(next(one.model.parameters()), next(other.model.parameters()))


def test_sizes_are_read_off_the_pictures():
    parts = built(data={"name": "digits"}, network={"name": "small_cnn", "dim": 4}, augmentation={"flip": False})
    assert tuple(first_batch(parts).images.shape) == (16, 1, 8, 8)
    assert (parts.preprocessing.size, parts.preprocessing.resize) == (8, 8)


def test_evaluation_may_look_at_larger_pictures():
    network = {"name": "resnet18", "dim": 4}
    evaluation = {"size": 40, "resize": 44}
    parts = built(
        data={"name": "digits", "channels": 3}, network=network, augmentation={"size": 32}, evaluation=evaluation
    )
    assert tuple(first_batch(parts).images.shape) == (16, 3, 32, 32)
    shown = next(iter(parts.eval_loader.all(np.arange(2))))
    assert tuple(shown.images.shape) == (2, 3, 40, 40)
    assert (parts.preprocessing.size, parts.preprocessing.resize) == (40, 44)


def test_effects_are_for_training_pictures():
    effects = {"color": 0.4, "grey": 0.2, "erase": 0.5, "rotate": 15.0}
    parts = built(data={"name": "digits"}, network={"name": "small_cnn", "dim": 4}, augmentation=effects)
    assert parts.loader.view is not None
    assert parts.eval_loader.view is not None
    assert {key: getattr(parts.loader.view, key) for key in effects} == effects
    assert {getattr(parts.eval_loader.view, key) for key in effects} == {None}
    assert provenance.of(parts)["recipe"]["augmentation"].items() >= effects.items()


def test_vectors_have_no_effects():
    with pytest.raises(ValueError, match=r"augmentation\.erase is 0\.5; it is for images, and \w+ holds vectors"):
        built(augmentation={"erase": 0.5})


def test_every_level_and_member_has_a_loss_of_its_own():
    network = {"name": "small_cnn", "dim": 4, "levels": ["low", "high"], "members": 2}
    parts = built(data={"name": "digits"}, network=network)
    assert isinstance(parts.model, Ensemble)
    wanted = ["0_low", "0_high", "1_low", "1_high"]
    assert list(parts.model.outputs) == list(parts.stages[0].losses) == wanted
    assert len({id(loss.proxies) for loss in parts.stages[0].losses.values()}) == 4


def test_features_without_a_head_have_proxies_of_their_size():
    parts = built(network={"name": "linear", "dim": None, "head": "none"})
    assert parts.model.outputs == {"high": 64}
    assert parts.stages[0].losses["high"].proxies.shape == (5, 64)


def test_stages_go_on_with_a_loss_and_hand_over_class_vectors():
    parts = built(
        loss={"name": "group"}, stages=[{"epochs": 1, "loss": {"name": "softmax"}}, {"epochs": 1}, {"lr_factor": 0.1}]
    )
    assert [parts.stage_at(epoch).first for epoch in range(3)] == [0, 1, 2]
    assert [stage.epochs for stage in parts.stages] == [1, 1, 1]
    softmax, group, again = (stage.losses["high"] for stage in parts.stages)
    assert group is again
    assert softmax.proxies is group.proxies
    assert len(parts.losses) == 2


def test_groups_keep_their_ratio_in_every_stage():
    stages = [{"epochs": 1}, {"epochs": 1, "lr_factor": 0.1}, {}]
    setup = built(schedule={"name": "step", "step_size": 1, "gamma": 0.5}, stages=stages)
    initial = setup.learning_rates()
    assert initial["loss"] == pytest.approx(100 * initial["head"])
    for epoch, factor in enumerate((1.0, 0.05, 0.25)):
        setup.set_learning_rates(State(epoch=epoch))
        assert setup.learning_rates() == pytest.approx({name: rate * factor for name, rate in initial.items()})


def test_iterations_may_end_within_an_epoch():
    parts = built(training={"iterations": 70, "device": "cpu"})
    assert (parts.steps, parts.epochs, parts.steps_per_epoch) == (70, 2, 56)


def test_weights_are_looked_for_before_pictures_are_decoded(tmp_path, monkeypatch):
    monkeypatch.setenv("NEARFAR_CACHE", str(tmp_path))
    monkeypatch.setattr("nearfar.networks.weights.published._in_package", lambda weights: None)
    with pytest.raises(FileNotFoundError, match="the weights of efficientnet_lite0 are not on this machine"):
        built(data={"name": "digits"}, network={"name": "efficientnet_lite0", "pretrained": True})
    assert not list(tmp_path.glob("digits*"))


@pytest.mark.parametrize(("batch_size", "ranks", "classes"), [(64, 1, 5), (64, 2, 4), (19, 1, 4), (16, 2, 4)])
def test_a_batch_by_its_size_has_as_many_classes_as_there_are(batch_size, ranks, classes):
    sampler = built(sampler={"per_class": 4, "batch_size": batch_size}, ranks=ranks).sampler
    assert sampler.settings()["classes"] == classes
    assert sampler.batch_size == 4 * classes


def test_the_fingerprint_tells_another_split():
    assert built().fingerprint == built().fingerprint
    assert built().fingerprint != built(split={"name": "fixed_validation", "share": 0.4}, sampler=FEW).fingerprint


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"data": {"name": "digits"}}, "'linear', which reads vectors; digits holds images"),
        ({"network": {"name": "small_cnn"}}, "'small_cnn', which reads images; digits holds vectors"),
        ({"data": {"name": "cub"}}, "--data ROOT"),
        ({"schedule": {"name": "plateau"}}, "fixed_validation"),
        ({"sampler": {"classes": 50, "per_class": 4}}, "sampler: labels has 5 classes"),
        ({"sampler": {"classes": 50, "per_class": 4}}, "so sampler.classes can be 5 at most"),
        (
            {"split": {"name": "fixed_validation", "share": 0.9}, "sampler": {"per_class": 4, "batch_size": 16}},
            "the split has one training class, and a loss compares at least two; set fewer classes aside",
        ),
        (
            {"training": {"iterations": 3, "warmup_epochs": 3, "device": "cpu"}},
            "training.warmup_epochs is 3; the training has 1 epochs",
        ),
        (
            {"training": {"iterations": 3, "device": "cpu"}, "schedule": {"warmup": 4}},
            "schedule.warmup is 4; the training has 3 steps",
        ),
        (
            {
                "network": {"name": "mlp", "head": "none"},
                "loss": {"name": "raw"},
                "training": {"epochs": 2, "warmup_epochs": 1, "device": "cpu"},
            },
            "the network has no head, and the loss has no parameters",
        ),
    ],
)
def test_what_does_not_fit_together_is_told(sections, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        built(**sections)
