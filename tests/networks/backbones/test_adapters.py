"""Backbones of other libraries: with stand-ins for the libraries, and with the libraries where they are installed."""

from __future__ import annotations

import hashlib
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from nearfar.networks import Embedder, create, create_backbone
from nearfar.networks.backbones.external import MINUS_ONE_TO_ONE
from nearfar.networks.weights.published import local_only
from nearfar.networks.weights.save import describe, load, save
from nearfar.utils.preprocessing import IMAGENET, Normalization


def chain(*widths):
    """Convolutions of stride 2."""
    return nn.Sequential(*(nn.Conv2d(a, b, 3, 2, 1) for a, b in zip((3, *widths), widths, strict=False)))


# --- stand-ins -----------------------------------------------------------------------------------------------


class TimmConv(nn.Module):
    """Stages, told apart by feature_info."""

    output_fmt = "NCHW"

    def __init__(self) -> None:
        super().__init__()
        self.stages = chain(4, 5, 6, 7, 8)
        self.feature_info = [{"num_chs": width} for width in (4, 5, 6, 7, 8)]
        self.pretrained_cfg = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "input_size": (3, 64, 64)}

    def forward_features(self, x):
        return self.stages(x)

    def forward_intermediates(self, x, indices, output_fmt):
        assert output_fmt == "NCHW"
        found = []
        for place, stage in enumerate(self.stages):
            x = stage(x)
            if place in indices:
                found.append(x)
        return x, found


class TimmTokens(nn.Module):
    """Sixteen patches behind a class token of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, 6, 16, 16)
        self.pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "input_size": (3, 64, 64)}

    def forward_features(self, x):
        patches = self.proj(x).flatten(2).transpose(1, 2)
        return torch.cat([torch.ones_like(patches[:, :1]), patches], dim=1)


class TimmChannelsLast(TimmTokens):
    output_fmt = "NHWC"

    def forward_features(self, x):
        return self.proj(x).permute(0, 2, 3, 1)


class TimmSized(TimmTokens):
    """For pictures of one size; "registers" of ones stand before the patches."""

    def __init__(self, *, img_size: int | list[int] = 64, registers: int = 0, drop_path_rate: float = 0.0) -> None:
        super().__init__()
        self.img_size, self.num_prefix_tokens, self.drop_path_rate = img_size, registers, drop_path_rate
        self.places = nn.Parameter(torch.randn((img_size if isinstance(img_size, int) else img_size[0]) // 16, 6))

    def forward_features(self, x):
        patches = (self.proj(x) + self.places.T[:, :, None]).flatten(2).transpose(1, 2)
        return torch.cat([torch.ones_like(patches[:, :1])] * self.num_prefix_tokens + [patches], dim=1)


TIMM = {"conv": TimmConv, "tokens": TimmTokens, "channels_last": TimmChannelsLast, "sized": TimmSized}


@pytest.fixture
def timm(monkeypatch):
    """The settings with which the stand-in for timm was asked for networks."""
    asked = []

    def create_model(name, **settings):
        asked.append(settings)
        if name not in TIMM:
            raise RuntimeError(f"Unknown model ({name})")
        ours = ("pretrained", "num_classes", "global_pool")
        return TIMM[name](**{key: value for key, value in settings.items() if key not in ours})

    module = ModuleType("timm")
    module.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", module)
    return asked


class Vision(nn.Module):
    """What torchvision's networks have: parts in a row, and a classifier."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 10)


class DenseNet(Vision):
    pass


def vision(name):
    if name == "split":
        return Vision(stem=chain(4), blocks=nn.ModuleList([nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 1)]))
    if name == "odd":
        return Vision(encoder=nn.Linear(5, 8))
    kind = DenseNet if name == "dense" else Vision
    return kind(features=chain(4, 5, 6, 7, 8))


@pytest.fixture
def torchvision(monkeypatch):
    """A stand-in; its ``url`` is where its weights are said to be."""
    names = ("plain", "split", "dense", "odd", "googlenet")
    state = SimpleNamespace(url="https://example.org/plain-00000000.pth")

    def check(name):
        if name not in names:
            raise ValueError(f"Unknown model {name}")

    def get_model(name, weights):
        check(name)
        return vision(name)

    def get_model_weights(name):
        check(name)
        about = SimpleNamespace(mean=list(IMAGENET.mean), std=list(IMAGENET.std), crop_size=[64])
        return SimpleNamespace(DEFAULT=SimpleNamespace(url=state.url, transforms=lambda: about))

    module = ModuleType("torchvision")
    module.models = SimpleNamespace(get_model=get_model, get_model_weights=get_model_weights)
    monkeypatch.setitem(sys.modules, "torchvision", module)
    return state


class TokensOfTransformers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = TimmTokens()

    def forward(self, pixel_values):
        return SimpleNamespace(last_hidden_state=self.inner.forward_features(pixel_values))


class TwoHalves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision_model, self.text_model = TokensOfTransformers(), nn.Linear(2, 2)


class VitConfig:
    def __init__(self, model_type: str = "vit", hidden_size: int = 8) -> None:
        self.model_type, self.hidden_size = model_type, hidden_size

    def to_dict(self):
        return vars(self)


@pytest.fixture
def transformers(monkeypatch):
    """What the stand-in for transformers was asked for."""
    asked = []

    def processor(name, local_files_only=False):
        if name == "nobody/knows" or (local_files_only and name == "only/online"):
            raise OSError("no such repository")
        return {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "size": {"height": 64, "width": 64}}, {}

    def make(name, **settings):
        asked.append((name if isinstance(name, str) else "", settings))
        config = settings.pop("config", name)
        return TwoHalves() if config.hidden_size == 2 else TokensOfTransformers()

    module, inner = ModuleType("transformers"), ModuleType("transformers.image_processing_utils")
    module.AutoModel = SimpleNamespace(from_pretrained=make, from_config=make)
    read = lambda name, **_: VitConfig(hidden_size=2 if name == "two/halves" else 8)  # noqa: E731
    module.AutoConfig = SimpleNamespace(from_pretrained=read)
    module.CONFIG_MAPPING = {"vit": VitConfig}
    inner.BaseImageProcessor = SimpleNamespace(get_image_processor_dict=processor)
    monkeypatch.setitem(sys.modules, "transformers", module)
    monkeypatch.setitem(sys.modules, "transformers.image_processing_utils", inner)
    return asked


def pictures():
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


# --- what is not there ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["timm", "torchvision", "transformers"])
def test_a_missing_library_is_named(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        ImportError, match=f"^{library}:resnet18 needs {library}; install it with: pip install {library}$"
    ):
        create(f"{library}:resnet18")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("keras:resnet18", "allowed before the colon are timm, torchvision, transformers"),
        ("timm:", "a name must follow, as in timm:resnet50"),
    ],
)
def test_names_are_checked(name, message):
    with pytest.raises(ValueError, match=message):
        create(name)


@pytest.mark.usefixtures("timm", "torchvision", "transformers")
@pytest.mark.parametrize("name", ["timm:nothing", "torchvision:nothing", "transformers:nobody/knows"])
def test_a_network_that_the_library_does_not_have(name):
    with pytest.raises(ValueError, match=f"^{name} cannot be created: "):
        create(name)


# --- timm ----------------------------------------------------------------------------------------------------


def test_timm_is_asked_for_no_classifier_and_no_pooling(timm):
    create_backbone("timm:conv")
    create_backbone("timm:conv", pretrained=True)
    assert timm == [{"pretrained": given, "num_classes": 0, "global_pool": ""} for given in (False, True)]


@pytest.mark.usefixtures("timm")
def test_timm_says_what_pixels_it_wants():
    backbone = create_backbone("timm:conv")
    assert backbone.normalization == Normalization(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    assert backbone.input_size == 64


@pytest.mark.usefixtures("timm")
def test_levels_of_timm_are_its_last_three_stages():
    model = create("timm:conv", dim=3, levels=("low", "mid", "high"))
    assert dict(model.backbone.channels) == {"low": 6, "mid": 7, "high": 8}
    assert [tuple(found.shape) for found in model.backbone.maps(pictures()).values()] == [
        (2, 6, 8, 8),
        (2, 7, 4, 4),
        (2, 8, 2, 2),
    ]
    assert model(pictures()).shape == (2, 9)


@pytest.mark.usefixtures("timm")
def test_patch_tokens_are_pooled_without_the_class_token():
    model = create("timm:tokens", dim=None, normalize=False)
    patches = model.backbone.model.proj(pictures())
    torch.testing.assert_close(model(pictures()), patches.mean(dim=(2, 3)))


@pytest.mark.usefixtures("timm")
def test_channels_come_first():
    backbone = create_backbone("timm:channels_last")
    torch.testing.assert_close(backbone(pictures()), backbone.model.proj(pictures()))


@pytest.mark.usefixtures("timm")
def test_trying_leaves_the_mode_of_training():
    assert all(module.training for module in create_backbone("timm:conv").modules())


@pytest.mark.usefixtures("timm")
def test_tokens_before_the_patches_are_as_many_as_timm_says():
    model = create("timm:sized", dim=None, normalize=False, img_size=32, registers=5)  # 9 tokens: no square of patches
    x = pictures()[:, :, :32, :32]
    wanted = model.backbone.model.proj(x) + model.backbone.model.places.T[:, :, None]
    torch.testing.assert_close(model(x), wanted.mean(dim=(2, 3)))


# --- settings of timm ----------------------------------------------------------------------------------------


def test_settings_are_passed_on_to_timm(timm):
    create_backbone("timm:sized", img_size=32, drop_path_rate=0.1)
    assert timm[0].items() >= {"img_size": 32, "drop_path_rate": 0.1, "num_classes": 0, "global_pool": ""}.items()


@pytest.mark.usefixtures("timm")
@pytest.mark.parametrize("size", [32, (32, 32), [32, 32]])
def test_the_size_asked_for_is_the_size_that_is_read(size):
    assert create_backbone("timm:sized", img_size=size).input_size == 32
    assert create_backbone("timm:sized").input_size == 64


@pytest.mark.usefixtures("timm")
def test_settings_are_saved_with_the_network(tmp_path):
    model = create("timm:sized", dim=3, img_size=(32, 32), drop_path_rate=0.1).eval()
    again = load(save(model, tmp_path))
    written = json.loads((tmp_path / "model.json").read_text())
    assert written["model"].items() >= {"img_size": [32, 32], "drop_path_rate": 0.1}.items()
    assert written["preprocessing"]["size"] == 32
    assert describe(again) == describe(model)
    assert isinstance(again, Embedder)
    assert again.backbone.model.drop_path_rate == 0.1
    assert torch.equal(again(pictures()[:, :, :32, :32]), model(pictures()[:, :, :32, :32]))


@pytest.mark.usefixtures("timm", "torchvision", "transformers")
@pytest.mark.parametrize(
    ("name", "settings", "error", "message"),
    [
        ("timm:conv", {"img_size": 32}, ValueError, "timm:conv cannot be created with img_size=32: .*'img_size'"),
        ("timm:sized", {"drop_path": 0.1}, ValueError, r"timm:sized cannot be created with drop_path=0\.1: "),
        ("timm:sized", {"img_size": 8}, ValueError, "timm:sized cannot be created with img_size=8: "),
        ("timm:sized", {"img_size": (32, 64)}, ValueError, r"img_size .* is \[32, 64\]; images are square"),
        ("timm:sized", {"img_size": "big"}, TypeError, "img_size is 'big'; a whole number is needed"),
        ("timm:sized", {"norm_layer": nn.LayerNorm}, TypeError, "norm_layer .*; allowed are numbers, words and lists"),
        ("timm:sized", {"global_pool": "avg"}, TypeError, "timm:sized has no setting 'global_pool': use pooling"),
        ("timm:sized", {"checkpoint_path": "x.pth"}, TypeError, "'checkpoint_path': pass the file as pretrained"),
        ("torchvision:plain", {"img_size": 32}, TypeError, "torchvision:plain has no setting 'img_size'; it has none"),
        ("transformers:some/vit", {"img_size": 32}, TypeError, "some/vit has no setting 'img_size'; it has none"),
    ],
    ids=str,
)
def test_settings_that_cannot_be(name, settings, error, message):
    with pytest.raises(error, match=message):
        create(name, **settings)


@pytest.mark.usefixtures("timm")
def test_a_file_cannot_ask_timm_for_other_weights(tmp_path):
    save(create("timm:sized", dim=3), tmp_path)
    card = json.loads((tmp_path / "model.json").read_text())
    card["model"]["checkpoint_path"] = "other.pth"
    (tmp_path / "model.json").write_text(json.dumps(card))
    with pytest.raises(ValueError, match=r"describes a network that cannot be created: .*'checkpoint_path'"):
        load(tmp_path)


# --- torchvision ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("torchvision")
def test_torchvision_loses_its_classifier_and_keeps_its_keys():
    backbone = create_backbone("torchvision:plain")
    assert sorted({key.split(".")[1] for key in backbone.state_dict()}) == ["features"]
    assert dict(backbone.channels) == {"low": 6, "mid": 7, "high": 8}
    assert (backbone.normalization, backbone.input_size) == (IMAGENET, 64)


@pytest.mark.usefixtures("torchvision")
def test_lists_of_parts_are_gone_through():
    backbone = create_backbone("torchvision:split")
    stem, blocks = backbone.model.stem, backbone.model.blocks
    torch.testing.assert_close(backbone(pictures()), blocks[1](blocks[0](stem(pictures()))))


@pytest.mark.usefixtures("torchvision")
def test_densenets_end_in_a_relu():
    assert create_backbone("torchvision:dense")(pictures()).min() == 0


@pytest.mark.usefixtures("torchvision")
def test_networks_from_tensorflow_read_pixels_from_minus_one_to_one():
    assert create_backbone("torchvision:googlenet").normalization == MINUS_ONE_TO_ONE


@pytest.mark.usefixtures("torchvision")
def test_networks_that_are_no_chain_are_refused():
    with pytest.raises(ValueError, match="torchvision:odd is not a sequence of parts"):
        create("torchvision:odd")


def test_weights_of_torchvision_are_verified_and_loaded_here(torchvision, tmp_path, monkeypatch):
    monkeypatch.setenv("NEARFAR_CACHE", str(tmp_path))
    state = vision("plain").state_dict()
    torch.save(state, tmp_path / "file")
    digits = hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()[:8]
    torchvision.url = f"https://example.org/plain-{digits}.pth"
    (tmp_path / "weights").mkdir()
    (tmp_path / "file").rename(tmp_path / "weights" / f"plain-{digits}.pth")  # as if downloaded
    backbone = create_backbone("torchvision:plain", pretrained=True)
    assert torch.equal(backbone.state_dict()["model.features.0.weight"], state["features.0.weight"])


# --- transformers --------------------------------------------------------------------------------------------


def test_transformers_load_no_pickles(transformers):
    create_backbone("transformers:some/vit", pretrained=True)
    create_backbone("transformers:some/vit")
    safe = {"trust_remote_code": False}
    assert transformers == [("some/vit", {"use_safetensors": True, **safe}), ("", safe)]


@pytest.mark.usefixtures("transformers")
def test_a_saved_network_of_transformers_is_its_configuration(tmp_path):
    model = create("transformers:only/online", dim=4).eval()
    save(model, tmp_path)
    with local_only(), pytest.raises(ValueError, match="only/online cannot be created: no such repository; --download"):
        create("transformers:only/online", dim=4)
    again = load(tmp_path)
    assert describe(again) == describe(model)
    assert describe(again)["config"] == {"model_type": "vit", "hidden_size": 8}
    assert torch.equal(again(pictures()), model(pictures()))


@pytest.mark.parametrize("source", ["hf-hub:", "HF-HUB:", " hf_hub:", "local-dir:"])
def test_a_network_of_a_repository_is_saved_by_its_architecture(source, timm, tmp_path, monkeypatch):
    arguments = {"registers": 1, "num_classes": 5}
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "sized", "model_args": arguments}))
    hub = SimpleNamespace(load_model_config_from_hf=lambda place: ({}, "sized", arguments))
    monkeypatch.setattr(sys.modules["timm"], "models", hub, raising=False)
    name = f"{source}{tmp_path}"
    monkeypatch.setitem(TIMM, name, lambda **settings: TimmSized(**{"registers": 1, **settings}))
    model = create(f"timm:{name}", dim=3, img_size=32)
    again = load(save(model, tmp_path / "saved"))
    assert describe(again) == describe(model)
    assert describe(again).items() >= {"name": "timm:sized", "registers": 1, "img_size": 32}.items()
    with local_only(), pytest.raises(ValueError, match="would be downloaded"):
        create(f"timm:{name}", dim=3)


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize("name", ["some/vit", "two/halves"])
def test_transformers_give_patch_tokens(name):
    model = create(f"transformers:{name}", dim=None, normalize=False)
    patches = model.backbone.model.inner.proj(pictures())
    torch.testing.assert_close(model(pictures()), patches.mean(dim=(2, 3)))
    assert model.normalization == Normalization(mean=(0.5,) * 3, std=(0.25,) * 3)
    assert model.input_size == 64


# --- all of them ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("timm", "torchvision")
@pytest.mark.parametrize(("name", "inner"), [("timm:conv", TimmConv), ("torchvision:plain", lambda: vision("plain"))])
def test_a_file_with_the_librarys_keys_is_loaded(name, inner, tmp_path):
    state = inner().state_dict()
    torch.save({**state, "fc.weight": torch.ones(1)}, tmp_path / "own.pth")
    backbone = create_backbone(name, pretrained=tmp_path / "own.pth")
    assert torch.equal(next(backbone.parameters()), next(iter(state.values())))


# --- the libraries themselves --------------------------------------------------------------------------------


def test_timms_own_resnet():
    timm = pytest.importorskip("timm", exc_type=ImportError)
    torch.manual_seed(0)
    model = timm.create_model("resnet18", num_classes=0).eval()
    torch.manual_seed(0)
    ours = create("timm:resnet18", dim=None, normalize=False).eval()
    ours.backbone.model.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(ours(pictures()), model(pictures()))


@pytest.mark.parametrize("settings", [{}, {"img_size": 64}], ids=str)
def test_timms_own_class_token(settings, tmp_path):
    timm = pytest.importorskip("timm", exc_type=ImportError)
    ours = create("timm:vit_tiny_patch16_224", dim=None, normalize=False, pooling="token", **settings).eval()
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, global_pool="token", **settings).eval()
    model.load_state_dict(ours.backbone.model.state_dict())
    side = settings.get("img_size", 224)
    x = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(ours(x), model(x))
        assert torch.equal(load(save(ours, tmp_path))(x), model(x))


@pytest.mark.parametrize("name", ["resnet18", "densenet121", "swin_t", "mobilenet_v3_small"])
def test_torchvisions_own_networks(name, tmp_path):
    models = pytest.importorskip("torchvision.models", exc_type=ImportError)
    model = models.get_model(name, weights=None).eval()
    torch.save(model.state_dict(), tmp_path / "own.pth")
    ours = create_backbone(f"torchvision:{name}", pretrained=tmp_path / "own.pth").eval()
    seen = []
    before = model.classifier if name == "densenet121" else model.avgpool
    before.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        model(pictures())
        found = ours(pictures())
    torch.testing.assert_close(found.mean(dim=(2, 3)) if seen[0].ndim == 2 else found, seen[0])


@pytest.mark.parametrize("kind", ["vit", "clip", "blip", "convnext"])
def test_networks_of_transformers_itself_are_saved_as_data(kind, tmp_path):
    library = pytest.importorskip("transformers", exc_type=ImportError)
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    image = {**small, "image_size": 64, "patch_size": 16, "hidden_act": "gelu_new"}
    settings = {"vit": image, "convnext": {"hidden_sizes": [4, 4, 4, 8], "depths": [1, 1, 1, 1]}}.get(
        kind, {"vision_config": image, "text_config": {**small, "vocab_size": 50_000}}
    )
    torch.manual_seed(0)
    config = library.CONFIG_MAPPING[kind](**settings)
    library.AutoModel.from_config(config).save_pretrained(tmp_path / "theirs")
    about = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "size": {"height": 64, "width": 64}}
    (tmp_path / "theirs" / "preprocessor_config.json").write_text(json.dumps(about))
    model = create(f"transformers:{tmp_path / 'theirs'}", dim=None, pretrained=True).eval()
    again = load(save(model, tmp_path / "ours"))
    assert describe(again) == describe(model)
    with torch.no_grad():
        assert torch.equal(again(pictures()), model(pictures()))
