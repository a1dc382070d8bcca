"""``nearfar.train`` with data in memory."""

from pathlib import Path

import numpy as np
import pandas
import pytest
from PIL import Image

import nearfar as nf

RNG = np.random.default_rng(0)
LABELS = pandas.Series([f"class {row % 6}" for row in range(48)])
FRAME = pandas.DataFrame(RNG.normal(size=(48, 5)) + 4 * RNG.normal(size=(6, 5))[np.arange(48) % 6]).add_prefix("x")
RECIPE = {
    "sampler": {"classes": 3, "per_class": 4, "steps": 2},
    "network": {"name": "linear", "dim": 3},
    "loss": {"name": "contrastive"},
    "optimizer": {"lr": 0.01},
    "training": {"epochs": 2, "device": "cpu"},
}


@pytest.mark.parametrize("kind", ["frame", "array", "list"])
def test_vectors_of_any_kind_give_the_same_run(kind, tmp_path):
    X, y = {
        "frame": (FRAME, LABELS),
        "array": (FRAME.to_numpy(), LABELS.to_numpy()),
        "list": (FRAME.to_numpy().tolist(), LABELS.tolist()),
    }[kind]
    np.savez(tmp_path / "own.npz", X=FRAME.to_numpy(), y=LABELS.to_numpy().astype(str))
    expected = nf.train(RECIPE, tmp_path / "file", data={"name": "arrays", "root": str(tmp_path / "own.npz")})
    found = nf.train(RECIPE, tmp_path / "run", data=(X, y))
    assert found.metrics["test"] == expected.metrics["test"]
    assert nf.evaluate(found.folder, device="cpu")["retrieval"]["recall@1"] == found.metrics["test"]["recall@1"]


def test_images_of_several_sizes_are_trained_with(tmp_path):
    images = [Image.fromarray(RNG.integers(0, 256, (8, 8 + row % 3, 3), dtype=np.uint8)) for row in range(48)]
    recipe = {
        **RECIPE,
        "network": {"name": "small_cnn", "dim": 3, "settings": {"size": 8}},
        "augmentation": {"size": 8},
    }
    split = ["train"] * 24 + ["test"] * 24
    run = nf.train(recipe, tmp_path / "run", data=(images, [f"{row // 8}" for row in range(48)], split))
    assert sorted(file.name for file in run.folder.glob("data.*")) == ["data.csv", "data.zip"]
    embeddings = nf.load(run.folder).embed(images[24:])
    found = nf.metrics.retrieval(embeddings, np.arange(24, 48) // 8)
    assert found["recall@1"] == pytest.approx(run.metrics["test"]["recall@1"])


def test_a_run_is_resumed_with_the_data_in_its_folder(tmp_path):
    whole = nf.train(RECIPE, tmp_path / "whole", data=(FRAME, LABELS))
    run = nf.train(RECIPE, tmp_path / "run", data=(FRAME, LABELS), training={"epochs": 2})
    (run.folder / "metrics.json").unlink()
    assert nf.train(resume=run.folder).metrics["test"] == whole.metrics["test"]
    with pytest.raises(ValueError, match="a run is resumed with the data in its folder"):
        nf.train(resume=run.folder, data=(FRAME, LABELS))


def test_the_runs_folder_is_named_after_arrays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert nf.train(RECIPE, data=(FRAME, LABELS)).folder == Path("runs/arrays-contrastive")


def test_nothing_is_left_of_a_run_that_could_not_begin(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="small_cnn"):
        nf.train(RECIPE, data=(FRAME, LABELS), network={"name": "small_cnn"})
    assert list(Path("runs").iterdir()) == []


def test_data_is_not_written_to_another_run(tmp_path):
    nf.train(RECIPE, tmp_path / "run", data=(FRAME, LABELS))
    before = (tmp_path / "run" / "data.npz").read_bytes()
    with pytest.raises(FileExistsError, match="which holds a run already"):
        nf.train(RECIPE, tmp_path / "run", data=(FRAME + 1, LABELS))
    assert (tmp_path / "run" / "data.npz").read_bytes() == before
