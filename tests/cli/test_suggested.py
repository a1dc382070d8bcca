"""Every command that an output suggests in an hour of use can be run, in a folder whose name has a space."""

import re
import shlex
import sys

import numpy as np
import pytest
import tomli_w
from grids_for_tests import small
from PIL import Image
from safetensors.torch import save_file
from training_runs import recipe as tiny
from training_runs import vectors

from nearfar import networks
from nearfar.losses.base import LOSSES
from nearfar.networks.weights import published
from nearfar.training.recipe import starter
from nearfar.training.recipe.files import to_toml
from nearfar.utils import plugins

COMMANDS = "train|init|report|index|search|serve|calibrate|verify|evaluate|bench|tournament|tune|data|recipe|losses"
SUGGESTED = re.compile(rf"\bnearfar (?:{COMMANDS}) [^\n]*?(?=, or |; |$)", re.MULTILINE)
IMAGE = "my photos/class 1/3.png"
PLACES = {
    "IMAGES": "my photos",
    "IMAGE": IMAGE,
    "A.jpg": IMAGE,
    "B.jpg": "my photos/class 2/1.png",
    "folder:PHOTOS": "folder:other photos",
}
PLUGIN = """
import nearfar as nf

@nf.losses.register("mine")
class Mine(nf.losses.Contrastive):
    pass
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The present folder, with images of twenty classes and a plugin."""
    folder, rng = tmp_path / "my work", np.random.default_rng(0)
    for number in range(20):
        part = "my photos" if number < 16 else "other photos"
        (folder / part / f"class {number}").mkdir(parents=True)
        for image in range(2 if number == 1 else 6):
            pixels = np.clip(rng.normal(12 * number, 20, (28, 28, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / part / f"class {number}" / f"{image}.png")
    (folder / "my photos" / "class 1" / "3.png").write_bytes((folder / "my photos" / "class 1" / "0.png").read_bytes())
    (folder / "my plugin.py").write_text(PLUGIN)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(LOSSES, "entries", dict(LOSSES.entries))  # without the plugin's, for other tests
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setenv("NEARFAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("nearfar.training.recipe.starter.measure_seconds", lambda name: (0.001, 0.002))
    monkeypatch.setattr("nearfar.serve.server.run", lambda *_, **__: None)
    yield folder
    plugins.forget()


class Hour:
    """Runs commands, and then every command that they suggested."""

    def __init__(self, run):
        self.run, self.suggested = run, {}

    def __call__(self, *words, code=0):
        printed = self.run(*words, code=code)
        for suggestion in SUGGESTED.findall(printed.out + printed.err):
            words = tuple(PLACES.get(word, word) for word in shlex.split(suggestion)[1:])
            self.suggested.setdefault(words)
        return printed

    def run_suggested(self):
        for words in self.suggested:
            self.run(*words)
        return {words[0] for words in self.suggested}


@pytest.fixture
def hour(nearfar):
    return Hour(nearfar)


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """Random weights of the network that init chooses, as if they were on this machine."""
    values = networks.create_backbone(starter.NETWORK).state_dict().items()
    save_file({key: value.contiguous() for key, value in values}, tmp_path / "random.safetensors")
    for name in ("fetch", "locate"):
        monkeypatch.setattr(published, name, lambda *_, **__: tmp_path / "random.safetensors")
    short = [setting.replace(f"epochs={starter.EPOCHS}", "epochs=2") for setting in starter.WHOLE_NETWORK]
    monkeypatch.setattr(starter, "WHOLE_NETWORK", short)
    monkeypatch.setattr(starter, "WHOLE_CLASSES", 4)


def test_images_from_a_folder_to_a_page(place, weights, hour):
    hour("init", "my photos", "--device", "cpu")
    text = (place / "my photos.toml").read_text().replace("epochs = 40", 'epochs = 2\ndevice = "cpu"')
    (place / "my photos.toml").write_text(
        text.replace("[evaluation]", "[augmentation]\nsize = 32\n[evaluation]\nsize = 32")
    )
    said = hour("train", "my photos.toml", "--out", "my runs/first").out
    for words in ("another loss, about", "the whole network, about", "training classes with the fewest: class 1 (3)"):
        assert words in said
    hour("report", "my runs/first")
    hour("verify", "my runs/first", IMAGE, IMAGE, code=1)
    hour("calibrate", "my runs/first", "--data", "folder:other photos", "--out", "my threshold.json")
    hour("index", "build", "my runs/first", "my photos", "-o", "my images.index", "--device", "cpu")
    hour("search", "my images.index", IMAGE)
    hour("data", "info", "folder", "my photos")
    hour("data", "audit", "my photos", "--model", "my runs/first")
    assert hour.run_suggested() >= {"train", "report", "index", "search", "serve", "calibrate", "verify", "data"}


def test_losses_from_a_recipe_to_a_ranking(place, hour):
    changes = {"split__name": "fixed_validation", "split__share": 0.34, "training__epochs": 1}
    (place / "my recipe.toml").write_text(to_toml(tiny(vectors(place), **changes)))
    (place / "space.toml").write_text('"loss.margin" = {low = 0.0, high = 0.5, step = 0.5}\n')
    hour("tune", "my recipe.toml", "--space", "space.toml", "--sampler", "grid", "--out", "my tuning")
    (place / "my grid.toml").write_text(tomli_w.dumps(small(place)))
    hour("bench", "run", "my grid.toml", "--engine", "inline", "-o", "my bench")
    changed = small(place, losses={"contrastive": {}, "raw": {}})  # the same seeds: otherwise it is unfair, rightly
    (place / "my grid.toml").write_text(tomli_w.dumps(changed))
    hour("bench", "run", "my grid.toml", "--engine", "inline", "-o", "my bench")
    untested = small(place, protocol="fixed_validation", protocol_settings={"share": 0.34})
    (place / "untested.toml").write_text(tomli_w.dumps(untested))
    hour("bench", "run", "untested.toml", "--engine", "inline", "--set", "evaluation.test=false")
    hour("train", "my recipe.toml", "--set", "optimizer.lr=1e38", "--set", "loss.name=proxy_anchor", code=None)
    assert hour.run_suggested() >= {"train", "bench"}


def test_a_plugin_is_used_by_what_is_suggested(place, hour):
    (place / "my recipe.toml").write_text(to_toml(tiny(vectors(place), training__epochs=1)))
    said = hour("train", "my recipe.toml", "--use", "my plugin.py", "--set", "loss.name=mine", "-o", "my run").out
    found = SUGGESTED.findall(said)
    assert found
    assert all(f"--use '{place / 'my plugin.py'}'" in command for command in found)
    hour.run_suggested()
