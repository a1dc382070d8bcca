"""nearfar train: from a file to a run folder, in one line."""

import pytest
import torch
from PIL import Image

import nearfar as nf
from nearfar.networks.weights.save import save
from nearfar.training import load, load_recipe

RECIPE = """
[data]
name = "digits"
settings = {vectors = true}
[sampler]
classes = 5
per_class = 4
steps = 3
[network]
name = "linear"
dim = 4
[loss]
name = "raw"
[optimizer]
lr = 0.01
[training]
epochs = 1
device = "cpu"
"""


@pytest.fixture
def recipe(tmp_path):
    file = tmp_path / "tiny.toml"
    file.write_text(RECIPE, encoding="utf-8")
    return file


def test_a_recipe_becomes_a_run_folder_and_a_model(recipe, tmp_path, nearfar):
    out = tmp_path / "run"
    printed = nearfar("train", recipe, "--set", "loss.alpha=5", "--set", "network.dim=3", "--out", out)
    assert printed.out.startswith(f"{out}: test recall@1 0.")
    assert load_recipe(out).loss.settings == {"alpha": 5}
    assert load(out).dim == 3


def test_a_run_is_exported(nearfar, recipe, tmp_path):
    out = tmp_path / "run"
    nearfar("train", recipe, "--out", out, "--quiet")
    nearfar("export", out, "--format", "safetensors", "--out", tmp_path / "model.safetensors")
    exported, trained = (load(place).state_dict() for place in (tmp_path / "model.safetensors", out))
    assert exported.keys() == trained.keys()
    assert all(torch.equal(exported[name], trained[name]) for name in trained)


def test_a_run_is_named_after_its_recipe(nearfar, recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        nearfar("train", recipe, "--quiet")
    assert sorted(folder.name for folder in (tmp_path / "runs").iterdir()) == [
        f"{tmp_path.name}-tiny",
        f"{tmp_path.name}-tiny-2",
    ]


def test_quiet_says_one_line(recipe, tmp_path, nearfar):
    said = nearfar("train", recipe, "--out", tmp_path / "run", "--quiet")
    assert (said.err, said.out.count("\n")) == ("", 1)


@pytest.fixture
def photos(tmp_path):
    """Eight classes of two images, and a file that is none."""
    for number in range(16):
        file = tmp_path / "photos" / "abcdefgh"[number // 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (28, 28), 15 * number).save(file)
    (tmp_path / "photos" / "a" / "broken.png").write_text("not an image", encoding="utf-8")
    return tmp_path / "photos"


def test_files_that_cannot_be_decoded_are_skipped_by_an_option(photos, tmp_path, monkeypatch, nearfar):
    monkeypatch.setenv("NEARFAR_CACHE", str(tmp_path / "cache"))
    settings = ["network.name=small_cnn", "network.pretrained=false", "network.pooling=avg", "network.dim=4"]
    words = [word for setting in (*settings, "training.epochs=2", "data.on_error=fail") for word in ("--set", setting)]
    err = nearfar("train", "folder", "--data", photos, "--out", tmp_path / "run", *words, code=1).err
    assert "a/broken.png (text, not an image). --set data.on_error=skip continues" in err
    save(nf.networks.create("small_cnn", dim=4).eval(), tmp_path / "model")
    err = nearfar("evaluate", tmp_path / "model", "--data", photos, code=1).err
    assert "a/broken.png (text, not an image). --on-error skip continues" in err
    out = nearfar("evaluate", tmp_path / "model", "--data", photos, "--on-error", "skip").out
    assert "16 embeddings of 4 dimensions, 8 classes" in out
