"""Every recipe is trained to its metrics: a small network on made-up images in the layout of its dataset."""

import math

import made_up_data
import pytest
from test_recipes import FILES, FOLDER
from training_runs import train

from nearfar.networks import create
from nearfar.training import load_recipe
from nearfar.utils.tensors import shapes_only

SIZE, DIM = 16, 4


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("recipes")


def small(file, place):
    """The recipe with everything that costs time made small, and nothing else changed."""
    given = load_recipe(file)
    changes = {
        "network.name": "small_cnn" if given.network.pooling == "avg" else given.network.name,
        "network.pretrained": False,
        "network.dim": min(given.network.dim or DIM, DIM),
        "sampler.steps": 1,
        "training.device": "cpu",
        "training.precision": "float32",
        **_batch(given),
    }
    root = made_up_data.make(given.data.name, place)
    if root is not None:
        changes["data.root"] = str(root)
    if given.network.name != "small_cnn":
        changes |= {f"{section}.size": SIZE for section in ("augmentation", "evaluation")}
        for section, view in (("augmentation", given.augmentation), ("evaluation", given.evaluation)):
            changes[f"{section}.resize"] = SIZE + 4 if isinstance(view.resize, int) else "auto"
    if given.stages:
        changes |= {f"stages.{number}.epochs": 1 for number in range(len(given.stages))}
    if given.schedule.warmup:
        changes["schedule.warmup"] = 1
    if given.training.iterations:
        changes["training.iterations"] = 1
    else:
        changes["training.epochs"] = max(len(given.stages), given.training.warmup_epochs + 1)
    return load_recipe(file, overrides=changes)


def _batch(given):
    """A batch of eight images, or three classes."""
    sampler = given.sampler
    if sampler.name == "random" or sampler.classes is None:
        return {"sampler.batch_size": 8}
    return {"sampler.classes": 3} | (
        {} if sampler.per_class is None else {"sampler.per_class": min(sampler.per_class, 3)}
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(FOLDER)))
def test_every_recipe_is_trained_to_its_metrics(file, place, tmp_path):
    found = train(small(file, place), tmp_path / "run", cache=place / "cache").metrics
    assert "test" in found
    assert found["steps"] > 0
    parts = [values for values in found.values() if isinstance(values, dict)]
    assert all(math.isfinite(value) for part in parts for value in part.values() if value is not None)


def test_every_network_of_a_recipe_can_be_created():
    sections = {repr(section): section for section in (load_recipe(file).network for file in FILES)}
    kept = {"dim", "pooling", "normalize", "head", "levels", "freeze_batchnorm"}
    for section in sections.values():
        with shapes_only():
            create(section.name, **section.settings, **section.model_dump(include=kept))
