"""The class token of transformers as the picture's features."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from network_cases import tiny
from torch import nn

from nearfar import training
from nearfar.networks import Ensemble, create, export
from nearfar.networks.weights.save import describe, load, save

SIDE, PATCH, WIDTH = 16, 4, 8


class Transformer(nn.Module):
    """One block of attention over patches, behind a class token and registers."""

    def __init__(self, *, class_token: bool = True, registers: int = 2, deep: bool = False) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH)) if class_token else None
        self.reg_token = nn.Parameter(torch.randn(1, registers, WIDTH))
        self.num_prefix_tokens = class_token + registers
        self.qkv, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.LayerNorm(WIDTH)
        self.pretrained_cfg = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "input_size": (3, SIDE, SIDE)}
        self.feature_info = [{"num_chs": WIDTH}] * (6 if deep else 0)

    def forward_features(self, x):
        patches = self.proj(x).flatten(2).transpose(1, 2)
        before = [each.expand(x.shape[0], -1, -1) for each in (self.cls_token, self.reg_token) if each is not None]
        tokens = torch.cat([*before, patches], dim=1)
        return self.norm(tokens + F.scaled_dot_product_attention(*self.qkv(tokens).chunk(3, dim=2)))

    def forward_intermediates(self, x, indices, output_fmt):
        return self.forward_features(x), [self.proj(x) for _ in indices]


@pytest.fixture(autouse=True)
def _timm(monkeypatch):
    def create_model(name, *, pretrained, num_classes, global_pool, **settings):
        return Transformer(**settings)

    module = ModuleType("timm")
    module.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", module)


def vit(**settings):
    torch.manual_seed(0)
    return create("timm:vit", **{"dim": 5, "pooling": "token", **settings})


def pictures(count=3):
    return torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


# --- what it gives -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("registers", [0, 4])
def test_it_is_the_first_of_all_tokens(registers: int, deep: bool) -> None:
    model = vit(dim=None, normalize=False, registers=registers, deep=deep).eval()
    assert torch.equal(model(pictures()), model.backbone.model.forward_features(pictures())[:, 0])


def test_the_other_poolings_have_the_patches_alone():
    model = vit(dim=None, normalize=False, pooling="avg").eval()
    patches = model.backbone.model.forward_features(pictures())[:, 3:]
    torch.testing.assert_close(model(pictures()), patches.mean(dim=1))


def test_it_has_no_parameters_and_changes_no_keys():
    assert list(vit().state_dict()) == list(vit(pooling="avg").state_dict())


def test_the_gradient_reaches_every_parameter():
    model = vit().train()
    (model(pictures()) * torch.randn(3, 5)).sum().backward()
    assert all(each.grad is not None and each.grad.any() for each in model.parameters())


# --- where there is none -------------------------------------------------------------------------------------


def test_backbones_without_one_say_what_they_have():
    message = r"pooling is 'token'; {} has no class token; allowed are avg, max, avg\+max, gem"
    with pytest.raises(ValueError, match=message.format("tiny")):
        tiny(pooling="token")
    with pytest.raises(ValueError, match=message.format("timm:vit")):
        vit(class_token=False)  # the first token is a register
    with pytest.raises(ValueError, match="pooling is 'token'; mlp returns vectors, which are not pooled"):
        create("mlp", in_dim=3, pooling="token")


@pytest.mark.parametrize("levels", [("low", "mid", "high"), ("low",)])
def test_only_the_highest_level_has_one(levels):
    with pytest.raises(ValueError, match=r"levels is \('low',.*\); only the level 'high' has a class token"):
        vit(deep=True, levels=levels)
    assert vit(deep=True, levels=("high",))(pictures()).shape == (3, 5)
    assert vit(deep=True, levels=levels, pooling="max")(pictures()).shape == (3, 5 * len(levels))


# --- transformers --------------------------------------------------------------------------------------------


class OfTransformers(nn.Module):
    """Tokens as transformers gives them; CLIP's class token has a norm of its own."""

    def __init__(self, word: str, *, clip: bool = False) -> None:
        super().__init__()
        self.inner, self.embeddings = Transformer(registers=0), nn.Module()
        self.embeddings.register_parameter(word, nn.Parameter(torch.zeros(WIDTH)))
        if clip:
            self.post_layernorm = nn.LayerNorm(WIDTH)

    def forward(self, pixel_values):
        found = self.inner.forward_features(pixel_values)
        pooled = self.post_layernorm(3 * found[:, 0]) if hasattr(self, "post_layernorm") else found[:, 0].tanh()
        return SimpleNamespace(last_hidden_state=found, pooler_output=pooled)


@pytest.mark.parametrize(("word", "clip"), [("cls_token", False), ("class_embedding", True), ("mask_token", False)])
def test_transformers_class_token(word, clip, monkeypatch):
    model = OfTransformers(word, clip=clip)
    module, inner = ModuleType("transformers"), ModuleType("transformers.image_processing_utils")
    module.AutoModel = SimpleNamespace(from_config=lambda _, **__: model)
    config = SimpleNamespace(to_dict=lambda: {"model_type": "vit"})
    module.AutoConfig = SimpleNamespace(from_pretrained=lambda name, **_: config)
    module.CONFIG_MAPPING = {"vit": lambda **_: config}
    about = SimpleNamespace(get_image_processor_dict=lambda _: ({"size": {"height": SIDE}}, {}))
    inner.BaseImageProcessor = about
    monkeypatch.setitem(sys.modules, "transformers", module)
    monkeypatch.setitem(sys.modules, "transformers.image_processing_utils", inner)
    if word == "mask_token":
        with pytest.raises(ValueError, match="transformers:some/vit has no class token"):
            create("transformers:some/vit", pooling="token")
        return
    found = create("transformers:some/vit", dim=None, pooling="token", normalize=False)(pictures())
    given = model(pixel_values=pictures())
    assert torch.equal(found, given.pooler_output if clip else given.last_hidden_state[:, 0])


# --- files ---------------------------------------------------------------------------------------------------


def test_onnx_runtime_gives_the_same_embeddings(tmp_path):
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    model = vit().eval()
    file = export(model, tmp_path / "model.onnx")
    running = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    for batch in (1, 5):
        (found,) = running.run(["embeddings"], {"images": pictures(batch).numpy()})
        torch.testing.assert_close(torch.from_numpy(found), model(pictures(batch)).detach(), atol=1e-4, rtol=1e-4)


def test_a_member_of_an_ensemble_may_have_it(tmp_path):
    model = Ensemble([vit(), vit(pooling="gem")]).eval()
    assert torch.equal(load(save(model, tmp_path))(pictures()), model(pictures()))


def test_a_recipe_trains_and_loads_it(tmp_path):
    recipe = training.load_recipe(
        {
            "sampler": {"classes": 5, "per_class": 4, "steps": 2},
            "network": {"name": "timm:vit", "dim": 4, "pooling": "token", "settings": {"registers": 1}},
            "augmentation": {"flip": False},
            "loss": {"name": "contrastive"},
            "optimizer": {"lr": 1e-3},
            "training": {"epochs": 2, "warmup_epochs": 1, "device": "cpu"},
        }
    )
    training.train(recipe, tmp_path / "run")
    model = training.load(tmp_path / "run")
    assert describe(model).items() >= {"pooling": "token", "registers": 1}.items()
