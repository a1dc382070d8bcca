"""Groups, such as cameras, in recipes and in ``nearfar evaluate``."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import nearfar as nf
from nearfar.training.evaluation.embeddings import EmbeddingSet

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A table of images with queries, a gallery and cameras."""
    folder = tmp_path_factory.mktemp("photos")
    rows = []
    for number in range(96):
        label, camera = number % 8, ["north", "south", "east"][number // 8 % 3]
        pixels = RNG.integers(0, 90, (8, 8)) + 12 * label + 40 * (camera == "south")
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
        split = "train" if label < 4 else "query" if number // 24 == 0 else "gallery"
        rows.append((f"{number}.png", label, split, camera))
    with open(folder / "photos.csv", "w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "split", "camera"), *rows])
    return folder / "photos.csv"


def recipe(photos, **evaluation):
    return {
        "data": {"name": "table", "root": str(photos), "channels": 1},
        "sampler": {"classes": 4, "per_class": 4, "steps": 2},
        "network": {"name": "small_cnn", "dim": 4},
        "loss": {"name": "contrastive"},
        "optimizer": {"lr": 0.001},
        "training": {"epochs": 1, "device": "cpu"},
        "evaluation": evaluation,
    }


def test_a_run_ignores_the_camera_of_the_query(photos, tmp_path, nearfar):
    run = nf.train(recipe(photos, groups="camera"), tmp_path / "run")
    stored = EmbeddingSet.load(run.folder / "embeddings.safetensors")
    cameras = nf.data.open("table", photos).columns["camera"]
    expected = nf.metrics.retrieval(
        stored.embeddings,
        stored.labels,
        stored.gallery.embeddings,
        stored.gallery.labels,
        groups=cameras[stored.rows.numpy()],
        gallery_groups=cameras[stored.gallery.rows.numpy()],
    )
    assert run.metrics["test"]["map"] == expected["map"]
    assert nf.evaluate(run.folder, device="cpu")["retrieval"]["map"] == expected["map"]
    assert nf.evaluate(run.folder, str(photos), device="cpu")["retrieval"]["map"] == pytest.approx(expected["map"])

    plain = nf.train(recipe(photos), tmp_path / "plain")
    assert plain.metrics["test"]["map"] != expected["map"]
    assert nf.evaluate(plain.folder, groups="camera", device="cpu")["retrieval"]["map"] == expected["map"]

    file = str(tmp_path / "found.json")
    words = ["evaluate", str(plain.folder), "--groups", "camera", "--rerank", "k_reciprocal", "--no-clustering"]
    shown = nearfar(*words, "--json", file).out
    found = json.loads(Path(file).read_text())
    assert found["retrieval"]["map"] == expected["map"]
    assert found["reranked"]["map"] != expected["map"]
    assert f"{100 * found['reranked']['map']:.2f}" in shown
    assert "re-ranked" in shown


def test_groups_of_a_file(evaluated, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vectors, labels, cameras = RNG.normal(size=(40, 4)), np.arange(40) % 5, RNG.integers(0, 3, 40)
    np.savez("e.npz", embeddings=vectors, labels=labels, camera=cameras)
    expected = nf.metrics.retrieval(vectors, labels, groups=cameras)
    found = evaluated("e.npz", "--groups", "camera", "--no-clustering")
    assert found["retrieval"]["map"] == expected["map"]


def test_columns_that_are_missing_and_groups_that_leave_nothing(photos, tmp_path):
    with pytest.raises(ValueError, match=r"evaluation.groups is 'cam'; table has the columns split, camera"):
        nf.train(recipe(photos, groups="cam"), tmp_path / "a")
    rows = [
        row for row in csv.reader(photos.read_text().splitlines()) if row[2] == "train" or row[3] in ("camera", "north")
    ]
    with open(photos.with_name("north.csv"), "w", newline="") as file:
        csv.writer(file).writerows(rows)
    with pytest.raises(ValueError, match="has no image of a query's class in another camera"):
        nf.train(recipe(photos.with_name("north.csv"), groups="camera"), tmp_path / "b")
