"""Exported networks give the same embeddings elsewhere, and say how pictures become their input."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from nearfar.networks import Ensemble, create
from nearfar.networks.weights.export import export
from nearfar.networks.weights.save import load, save
from nearfar.utils.preprocessing import LITE, PLAIN, Preprocessing, from_json

MODELS = {
    "mlp": {"in_dim": 6, "dim": 3, "head": "mlp"},
    "small_cnn": {"dim": 3},
    "resnet18": {"dim": 8, "pooling": "gem"},
    "mobilenet_v2": {"dim": 8, "levels": ("low", "mid", "high"), "pooling": "avg+max"},
    "bn_inception": {"dim": 8, "pooling": "max", "head": "linear_norm"},
    "efficientnet_lite0": {"dim": None},
    "googlenet": {"dim": 8, "normalize": False},
}


def session(file):
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    return runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def small(model):
    """Smaller pictures than usual, to save time."""
    if model.normalization is None or model.input_size is None:
        return None
    side = min(64, model.input_size)
    return Preprocessing(size=side, resize=side, normalization=model.normalization)


def compare(model, file, shape):
    generator = torch.Generator().manual_seed(0)
    running = session(file)
    (reads,) = running.get_inputs()
    for batch in (1, 5):
        x = torch.randn(batch, *shape, generator=generator)
        with torch.no_grad():
            wanted = model.eval()(x)
        (found,) = running.run(["embeddings"], {reads.name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", list(MODELS))
def test_onnx_runtime_gives_the_same_embeddings_for_any_batch(name, tmp_path):
    pytest.importorskip("onnx")
    torch.manual_seed(0)
    model = create(name, **MODELS[name])
    used = small(model)
    file = export(model, tmp_path / "model.onnx", preprocessing=used)
    shape = (6,) if used is None else (model.backbone.in_channels, used.size, used.size)
    compare(model, file, shape)


def test_an_ensemble_is_one_onnx_model(tmp_path):
    pytest.importorskip("onnx")
    model = Ensemble([create("mlp", in_dim=6, dim=3), create("linear", in_dim=6, dim=2)])
    compare(model, export(model, tmp_path / "model.onnx"), (6,))


def test_the_metadata_say_how_pictures_become_input(tmp_path):
    pytest.importorskip("onnx")
    model = create("efficientnet_lite0", dim=4)
    used = Preprocessing(size=64, resize=80, normalization=LITE)
    words = session(export(model, tmp_path / "model.onnx", preprocessing=used)).get_modelmeta().custom_metadata_map
    assert json.loads(words["nearfar.preprocessing"]) == {
        "size": 64,
        "resize": 80,
        "aspect": "keep",
        "crop": "center",
        "normalization": {"mean": [127.0] * 3, "std": [128.0] * 3, "range": 255.0, "order": "RGB"},
        "interpolation": "bilinear, antialiased",
    }
    assert json.loads(words["nearfar.model"])["name"] == "efficientnet_lite0"


def test_a_loaded_network_says_what_it_was_trained_with(tmp_path):
    pytest.importorskip("onnx")
    used = Preprocessing(size=8, resize=12, aspect="shrink", normalization=replace(PLAIN, grey=True))
    model = load(save(create("small_cnn", size=8, channels=3, dim=4), tmp_path, preprocessing=used))
    words = session(export(model, tmp_path / "model.onnx")).get_modelmeta().custom_metadata_map
    assert from_json(json.loads(words["nearfar.preprocessing"]), "model.onnx") == used


def test_names_and_shapes_of_input_and_output(tmp_path):
    pytest.importorskip("onnx")
    running = session(export(create("small_cnn", dim=3), tmp_path / "model.onnx"))
    (reads,), (gives,) = running.get_inputs(), running.get_outputs()
    assert (reads.name, reads.shape, gives.name, gives.shape) == (
        "images",
        ["batch", 1, 28, 28],
        "embeddings",
        ["batch", 3],
    )


def test_the_model_itself_is_left_as_it_was(tmp_path):
    pytest.importorskip("onnx")
    model = create("mlp", in_dim=6, dim=3).train().double()
    export(model, tmp_path / "model.onnx")
    assert model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}


def test_plain_weights_open_again(tmp_path):
    model = create("mlp", in_dim=6, dim=3).eval()
    file = export(model, tmp_path / "new" / "model.safetensors", format="safetensors")
    x = torch.randn(2, 6)
    assert torch.equal(load(file)(x), model(x))


def test_format_and_ending_are_checked(tmp_path):
    model = create("linear", in_dim=6, dim=3)
    with pytest.raises(ValueError, match="format is 'pickle'; allowed are onnx, safetensors"):
        export(model, tmp_path / "model.pkl", format="pickle")
    with pytest.raises(ValueError, match=r"its name must end in \.onnx"):
        export(model, tmp_path / "model.safetensors")


def test_a_missing_onnx_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match=r"needs onnx; install it with: pip install 'nearfar\[export\]'"):
        export(create("linear", in_dim=6, dim=3), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []
