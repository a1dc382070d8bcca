"""Any module as a network: wrapped in Python, or named as FILE.py:FUNCTION."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import nearfar as nf
from nearfar.cli import main
from nearfar.networks.backbones import external
from nearfar.utils import plugins

SOURCE = """
from torch import nn
import nearfar as nf

def maps():
    return nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.ReLU())

def vectors():
    flat = nn.Sequential(maps(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nf.networks.wrap(flat, size=40, mean=(0.5,) * 3, std=(0.5,) * 3)
"""


class Tiny(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, width, 3)

    def forward(self, x):
        return self.layer(x)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.setattr(external, "_WRAPPED", {})
    monkeypatch.setattr(plugins, "_FILES", {})
    (tmp_path / "mine.py").write_text(SOURCE)
    return tmp_path / "mine.py"


@pytest.fixture
def photos(tmp_path):
    """Images of mixed sizes."""
    rng = np.random.default_rng(0)
    for number in range(24):
        file = tmp_path / f"photos/{number // 4}/{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        shape = (30 + 7 * (number % 5), 45 + 11 * (number % 3), 3)
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(file)
    return tmp_path / "photos"


def test_a_wrapped_module_is_trained_and_comes_back(tmp_path):
    model = nf.networks.wrap(Tiny(), size=24, mean=(0.5,) * 3, std=(0.25,) * 3)
    assert (model.dim, model.input_size, model.normalization.std) == (5, 24, (0.25,) * 3)
    images, labels = torch.randn(8, 3, 24, 24), torch.arange(8) // 2
    nf.losses.create("contrastive")(model(images), labels).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        model.backbone.model.layer.bias.add_(1.0)
    nf.networks.save(model.eval(), tmp_path)
    again = nf.networks.load(tmp_path)
    torch.testing.assert_close(again(images), model(images))
    assert (again.input_size, again.normalization) == (model.input_size, model.normalization)


def test_gray_images_to_vectors():
    model = nf.networks.wrap(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten()), size=24, mean=(0.5,), std=(0.5,))
    assert (model.in_channels, model.dim, model.backbone.gives_maps) == (1, 4 * 22 * 22, False)
    assert model(torch.randn(2, 1, 24, 24)).shape == (2, model.dim)


def test_modules_that_cannot_be_wrapped_or_saved_are_told(tmp_path):
    class Pair(nn.Conv2d):
        def forward(self, x):
            return x, x

    with pytest.raises(TypeError, match=r"returns tuple; needed are \[b, c\], \[b, c, h, w\], or \[b, n, c\]"):
        nf.networks.wrap(Pair(3, 3, 1), size=8)
    with pytest.raises(ValueError, match="cannot be"):  # needs arguments
        nf.networks.save(nf.networks.wrap(nn.Conv2d(3, 3, 1), size=8), tmp_path / "conv")
    with pytest.raises(ValueError, match="creates a different network"):
        nf.networks.save(nf.networks.wrap(Tiny(7), size=8), tmp_path / "wide")


def test_a_file_is_run_only_where_it_is_named_and_only_unchanged(mine, tmp_path):
    with pytest.raises(ValueError, match=r"in a file that was not named; --use .*mine.py, or nearfar.use, runs it"):
        nf.networks.create(f"{mine}:maps")
    nf.use(mine)
    assert nf.networks.create("mine.py:vectors", dim=4).input_size == 40
    model = nf.networks.create("mine.py:maps", dim=4, size=32).eval()
    nf.networks.save(model, tmp_path / "saved")
    assert nf.networks.load(tmp_path / "saved").input_size == 32
    with pytest.raises(ValueError, match="has no function 'other'"):
        nf.networks.create("mine.py:other")
    plugins.forget()
    with pytest.raises(ValueError, match="was not named"):
        nf.networks.load(tmp_path / "saved")
    mine.write_text(SOURCE + "# changed")
    nf.use(mine)
    with pytest.raises(ValueError, match="is not as it was when the network was saved"):
        nf.networks.load(tmp_path / "saved")


def test_from_init_to_a_search(mine, photos, tmp_path, monkeypatch, capsys):
    def run(*words, code=0):
        with pytest.raises(SystemExit) as end:
            main([*words])
        printed = capsys.readouterr()
        assert end.value.code == code, printed.err
        plugins.forget()  # as in another process
        return printed.out + printed.err

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEARFAR_CACHE", str(tmp_path / "cache"))
    assert "--use" in run("init", "photos", "--network", "mine.py:vectors", "--device", "cpu")
    external._WRAPPED.clear()
    assert "was not named" in run("train", "photos.toml", code=1)
    short = ("--set", "training.epochs=1", "--set", "selection.blend=false", "--device", "cpu")
    assert "recall@1" in run("train", "photos.toml", "--use", "mine.py", *short)
    external._WRAPPED.clear()
    assert "was not named" in run("index", "build", "runs/photos", "photos", "-o", "an.index", code=1)
    run("index", "build", "runs/photos", "photos", "-o", "an.index", "--use", "mine.py", "--device", "cpu")
    assert "0/0.png" in run("search", "an.index", "photos/0/0.png", "--use", "mine.py")
    run("index", "build", "mine.py:maps", "photos", "-o", "plain.index", "--device", "cpu")
    run("export", "runs/photos", "--format", "safetensors", "--out", "e.safetensors", "--use", "mine.py")
