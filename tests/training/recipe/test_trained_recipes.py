"""Every recipe trains: a few steps with random weights on made-up images in the layout of its dataset."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import made_up_data
import pytest
import torch
from test_recipes import FILES, FOLDER

from nearfar.distributed import World
from nearfar.training import load_recipe
from nearfar.training.evaluation.embeddings import Evaluator
from nearfar.training.loop.builder import build
from nearfar.training.loop.state import Session
from nearfar.training.recipe.schema import Recipe

TRAINABLE = [file for file in FILES if file.parent != FOLDER]  # folder.toml has data of its own
SIZE, DIM = 32, 4


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipes")


def small(file: Path, place: Path) -> Recipe:
    """The recipe with everything that costs time made small, and nothing else changed."""
    given = load_recipe(file)
    changes: dict[str, Any] = {
        "network.pretrained": False,
        "network.dim": min(given.network.dim or DIM, DIM),
        "sampler.steps": 1,
        "training.device": "cpu",
        "training.precision": "float32",
        "evaluation.batch_size": 64,
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
        changes["training.iterations"] = 2
    else:
        changes["training.epochs"] = max(2, len(given.stages), given.training.warmup_epochs + 1)
    return load_recipe(file, overrides=changes)


def _batch(given: Recipe) -> dict[str, Any]:
    """A batch of six images, or a few more where a loss or an ensemble needs them."""
    sampler = given.sampler
    if sampler.name == "random" or sampler.classes is None:
        return {"sampler.batch_size": 6}
    return {"sampler.classes": 3} | (
        {} if sampler.per_class is None else {"sampler.per_class": min(sampler.per_class, 3)}
    )


@pytest.mark.parametrize("file", TRAINABLE, ids=lambda file: str(file.relative_to(FOLDER)))
def test_every_recipe_trains_and_is_evaluated(file: Path, place: Path) -> None:
    parts = build(small(file, place), cache=place / "cache")
    session, evaluator = Session(parts, World()), Evaluator(parts)
    before = [parameter.detach().clone() for parameter in parts.model.parameters()]
    while not session.finished:
        session.begin_epoch()
        for batch in parts.loader.epoch(parts.sampler, session.position.epoch, rows=parts.rows["train"]):
            assert bool(session.train_step(batch).finite)
        session.end_epoch(0.5)
    assert any(not torch.equal(old, new) for old, new in zip(before, parts.model.parameters(), strict=True))
    values, _ = evaluator.measure(evaluator.embed())
    assert "test" in values
    assert all(math.isfinite(value) for part in values.values() for value in part.values() if isinstance(value, float))
