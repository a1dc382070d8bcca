"""Saved networks open again as they were, without running anything, or with one clear line."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from nearfar.networks import Embedder, Ensemble, create, registry
from nearfar.networks.backbones.base import Backbone
from nearfar.networks.weights.save import describe, load, preprocessing_of, save
from nearfar.utils.preprocessing import CAFFE, IMAGENET, Preprocessing

MODELS = {
    "linear": lambda: create("linear", in_dim=6, dim=3, normalize=False),
    "mlp": lambda: create("mlp", in_dim=6, dim=3, hidden=(5, 4), head="mlp"),
    "no head": lambda: create("mlp", in_dim=6, dim=None),
    "grey": lambda: create("small_cnn", dim=3),
    "colour": lambda: create("small_cnn", channels=3, size=16, dim=3, head="linear_norm"),
    "levels": lambda: create("mobilenet_v2", dim=3, levels=("low", "high"), pooling="gem", freeze_batchnorm=True),
    "residual": lambda: create("resnet18", dim=None, levels=("low", "high"), head="residual"),
    "ensemble": lambda: Ensemble([create("mlp", in_dim=6, dim=3), create("linear", in_dim=6, dim=2)], normalize=False),
}


def example(model):
    generator = torch.Generator().manual_seed(0)
    if model.input_size is None:
        return torch.randn(4, 6, generator=generator)
    channels = model.normalization.channels if model.normalization else 1
    side = 64 if model.input_size > 64 else model.input_size
    return torch.randn(4, channels, side, side, generator=generator)


def edit(folder, **changes):
    file = folder / "model.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.fixture
def folder(tmp_path):
    save(create("mlp", in_dim=6, dim=3), tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", MODELS)
def test_a_network_opens_as_it_was_saved(name, tmp_path):
    torch.manual_seed(1)
    model = MODELS[name]()
    save(model, tmp_path / "run")
    torch.manual_seed(2)
    again = load(tmp_path / "run")
    assert type(again) is type(model)
    assert describe(again) == describe(model)
    assert not again.training
    with torch.no_grad():
        assert torch.equal(again(example(model)), model.eval()(example(model)))


def test_the_json_holds_the_arguments_of_create(folder):
    arguments = json.loads((folder / "model.json").read_text())["model"]
    assert arguments == {
        "name": "mlp",
        "dim": 3,
        "pooling": "avg",
        "normalize": True,
        "head": "linear",
        "levels": ["high"],
        "freeze_batchnorm": False,
        "in_dim": 6,
        "hidden": [512, 512],
    }
    assert isinstance(create(**arguments), Embedder)


def test_a_file_may_have_its_own_name(tmp_path):
    save(create("linear", in_dim=6, dim=3), tmp_path / "birds.safetensors")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["birds.json", "birds.safetensors"]
    assert load(tmp_path / "birds.safetensors").dim == 3


def test_the_same_network_gives_the_same_bytes(tmp_path):
    model = create("linear", in_dim=6, dim=3)
    assert save(model, tmp_path / "a").read_bytes() == save(model, tmp_path / "b").read_bytes()


def test_blocks_that_are_passed_by_are_so_again(tmp_path):
    again = load(save(create("efficientnet_lite0", dim=3, drop_path=0.2), tmp_path))
    assert isinstance(again, Embedder)
    assert again.backbone.drop_path == 0.2


# --- pre-processing ------------------------------------------------------------------------------------------


def test_the_usual_preprocessing_is_saved(tmp_path):
    model = create("resnet18", dim=3)
    save(model, tmp_path)
    usual = Preprocessing(size=224, resize=256, normalization=IMAGENET)
    assert vars(load(tmp_path))["preprocessing"] == preprocessing_of(model) == usual


def test_another_preprocessing_is_saved(tmp_path):
    own = Preprocessing(size=227, resize=227, aspect="squash", crop="none", normalization=CAFFE)
    save(create("resnet18", dim=3), tmp_path, preprocessing=own)
    assert preprocessing_of(load(tmp_path)) == own


def test_digits_are_not_cut():
    found = preprocessing_of(create("small_cnn"))
    assert found.resize == found.size == 28


@pytest.mark.parametrize("changes", [{"size": 0}, {"resize": 100}, {"aspect": "stretch"}, {"crop": "left"}])
def test_preprocessing_is_checked(changes):
    settings = {"size": 224, "resize": 256, "normalization": IMAGENET, **changes}
    with pytest.raises(ValueError, match=f"{next(iter(changes))} is "):
        Preprocessing(**settings)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_network_of_ones_own_is_saved_with_its_settings(keeps, tmp_path, monkeypatch):
    class Repeated(Backbone):
        key, normalization, input_size, gives_maps = "repeated", None, None, False

        def __init__(self, *, times):
            super().__init__()
            self.in_channels, self.times, self.channels = 2, times, {"high": 2 * times}
            if keeps:
                self.settings = {"times": times}

        def maps(self, x):
            return {"high": x.repeat(1, self.times)}

    monkeypatch.setitem(registry._BACKBONES.entries, "repeated", Repeated)
    model = create("repeated", times=3, dim=None, normalize=False)
    if keeps:
        assert torch.equal(load(save(model, tmp_path))(torch.eye(2)), torch.eye(2).repeat(1, 3))
    else:
        with pytest.raises(ValueError, match="repeated cannot be saved: its attribute settings must hold its settings"):
            save(model, tmp_path)


# --- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format": "nearfar model", "version": 2}', "is of version 2; this version of nearfar reads version 1"),
        ('{"format": "nearfar model", "version": 1}', "does not describe the network: 'model' is missing"),
        ("[1, 2]", "does not describe a nearfar network"),
        ('{"format": ', "is not valid JSON"),
    ],
)
def test_a_description_that_cannot_be_read_is_refused(folder, content, message):
    (folder / "model.json").write_text(content)
    with pytest.raises(ValueError, match=rf"model\.json {message}"):
        load(folder)


@pytest.mark.parametrize("name", ["model.json", "model.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{name} does not exist"):
        load(folder)


def test_broken_weights_are_refused(folder):
    (folder / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        load(folder)


def test_files_of_two_networks_are_refused(folder, tmp_path):
    other = save(create("mlp", in_dim=6, dim=2), tmp_path / "other")
    (folder / "model.safetensors").write_bytes(other.read_bytes())
    with pytest.raises(ValueError, match="do not belong together"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("heads.high.linear.bias"), r"1 keys are missing, such as heads\.high\.linear\.bias"),
        (lambda state: state.update({"heads.high.linear.bias": torch.ones(9)}), r"another shape, such as .*\[9\]"),
        (lambda state: state.update({"extra": torch.ones(1)}), "1 unexpected keys, such as extra"),
    ],
)
def test_weights_that_do_not_fit_are_refused(folder, change, message):
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "resnet49"}, "did you mean 'resnet"),
        ({"name": "mlp", "in_dim": 6, "colour": "red"}, "no setting 'colour'"),
        ({"name": "resnet18", "pretrained": True}, "'pretrained' is not allowed"),
        ({"ensemble": []}, "describes a network that cannot be created"),
    ],
)
def test_a_description_of_no_network_is_refused(folder, arguments, message):
    edit(folder, model=arguments)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_a_network_of_other_making_is_not_saved(tmp_path):
    backbone = create("small_cnn").backbone
    backbone.conv1 = torch.nn.Conv2d(1, 32, 7)
    with pytest.raises(ValueError, match="small_cnn cannot be saved"):
        save(Embedder(backbone, dim=3), tmp_path)
    model = create("linear", in_dim=6, dim=3)
    model.heads["high"] = torch.nn.Sequential(model.heads["high"], torch.nn.ReLU())
    with pytest.raises(ValueError, match="linear cannot be saved"):
        save(model, tmp_path)
    with pytest.raises(TypeError, match="model is a Backbone"):
        save(Backbone(), tmp_path)
