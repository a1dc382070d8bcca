"""A backbone with pooling and head."""

import copy

import pytest
import torch
import torch.nn.functional as F
from network_cases import batch, pictures, shape_only, tiny

from nearfar import losses, networks
from nearfar.training import setup
from nearfar.training.recipe.schema import OptimizerSection


def names_of(model, groups):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {group["name"]: [names[id(parameter)] for parameter in group["params"]] for group in groups}


# --- embeddings -----------------------------------------------------------------------------------------------


def test_it_is_backbone_then_pooling_then_head():
    model = tiny(normalize=False).eval()
    pooled = model.backbone(pictures()).mean(dim=(2, 3))
    state = model.state_dict()
    expected = F.linear(pooled, state["heads.high.linear.weight"], state["heads.high.linear.bias"])
    torch.testing.assert_close(model(pictures()), expected)


def test_normalize_gives_length_one():
    model = tiny().eval()
    raw = copy.deepcopy(model)
    raw.normalize = False
    torch.testing.assert_close(model(pictures()), F.normalize(raw(pictures()), dim=1))


@pytest.mark.parametrize("choice", [{"dim": None}, {"head": "none"}, {"dim": None, "head": "mlp"}], ids=str)
def test_without_a_head_it_gives_pooled_features(choice):
    model = tiny(normalize=False, pooling="avg+max", **choice).eval()
    maps = model.backbone(pictures())
    torch.testing.assert_close(model(pictures()), maps.mean(dim=(2, 3)) + maps.amax(dim=(2, 3)))
    assert model.dim == 6


@pytest.mark.parametrize("name", networks.names())
def test_pooled_features_have_the_channels_of_the_last_map(name):
    model = networks.Embedder(shape_only(name), dim=None)
    assert model(batch(model.backbone)).shape == (2, model.dim) == (2, model.backbone.channels["high"])


def test_eval_is_deterministic_and_training_is_not():
    model = tiny()
    assert torch.equal(model.eval()(pictures()), model(pictures()))
    assert not torch.equal(model.train()(pictures()), model(pictures()))  # dropout


@pytest.mark.parametrize("pooling", ["avg", "gem"])
def test_embeddings_of_half_precision_are_float32(pooling):
    model = tiny(pooling=pooling).eval()
    expected = model(pictures())
    with torch.autocast("cpu", torch.bfloat16):
        found = model(pictures())
    assert found.dtype == torch.float32
    assert F.cosine_similarity(found, expected).min() > 0.99
    torch.testing.assert_close(found.norm(dim=1), torch.ones(3), rtol=1e-5, atol=0)


def test_a_whole_model_in_bfloat16_and_channels_last():
    model = tiny().eval()
    expected = model(pictures())
    model.to(torch.bfloat16, memory_format=torch.channels_last)
    found = model(pictures().to(torch.bfloat16, memory_format=torch.channels_last))
    assert found.dtype == torch.float32
    assert F.cosine_similarity(found, expected).min() > 0.99


def test_double_precision_stays():
    assert tiny().double().eval()(pictures().double()).dtype == torch.float64


@pytest.mark.parametrize("head", ["linear", "linear_norm", "mlp"])
@pytest.mark.parametrize("pooling", ["avg", "max", "avg+max", "gem"])
def test_the_gradient_reaches_every_parameter(pooling, head):
    model = tiny(pooling=pooling, head=head)
    (model(pictures()) * torch.randn(3, 7)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_linear_is_a_mahalanobis_metric():
    model = networks.create("linear", in_dim=4, dim=3, normalize=False)
    torch.nn.init.normal_(model.state_dict()["heads.high.linear.bias"])
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    metric = (matrix := model.state_dict()["heads.high.linear.weight"]).T @ matrix
    expected = torch.einsum("bi,ij,bj->b", x - y, metric, x - y)
    torch.testing.assert_close((model(x) - model(y)).square().sum(dim=1), expected)


def test_vectors_have_nothing_to_pool():
    with pytest.raises(ValueError, match="pooling is 'gem'; mlp returns vectors, which are not pooled"):
        networks.create("mlp", in_dim=3, pooling="gem")


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"dim": 0}, "dim is 0; it must be ≥ 1"),
        ({"head": "fc"}, "head is 'fc'; allowed are linear, linear_norm, mlp, residual, none"),
        ({"pooling": "sum"}, r"pooling is 'sum'; allowed are avg, max, avg\+max, gem, token"),
    ],
)
def test_errors_name_argument_and_value(choice, message):
    with pytest.raises(ValueError, match=message):
        tiny(**choice)


# --- what an optimiser gets -----------------------------------------------------------------------------------


def test_groups_hold_every_parameter_once():
    model = tiny(pooling="gem", levels=("low", "high"))
    groups = names_of(model, model.param_groups(0.1))
    assert sorted(groups["backbone"] + groups["head"]) == sorted(name for name, _ in model.named_parameters())
    assert all(name.startswith("backbone.") for name in groups["backbone"])
    assert "poolings.low.p" in groups["head"]


def test_a_loop_in_python_and_a_recipe_train_with_the_same_groups():
    model, loss = tiny(), losses.create("proxy_anchor", num_classes=3, dim=4)
    recipe = setup.create_optimizer(OptimizerSection(name="adamw", lr=1e-3), model, loss)
    loop = torch.optim.AdamW([*model.param_groups(1e-3), *loss.param_groups(1e-3)], lr=1e-3)

    def rates(optimizer):
        return [(group["lr"], [id(each) for each in group["params"]]) for group in optimizer.param_groups]

    assert rates(loop) == rates(recipe)


def test_the_head_learns_as_fast_as_told():
    assert [group["lr"] for group in tiny().param_groups(0.25)] == [0.25, 0.25]
    assert [group["lr"] for group in tiny().param_groups(0.25, head_multiplier=10)] == [0.25, 2.5]


def test_weight_decay_is_there_only_if_given():
    assert all("weight_decay" not in group for group in tiny().param_groups(0.1))
    assert [group["weight_decay"] for group in tiny().param_groups(0.1, weight_decay=0.5)] == [0.5, 0.5]


def test_frozen_parameters_are_left_out():
    model = tiny()
    frozen = next(model.backbone.parameters()).requires_grad_(False)
    held = [parameter for group in model.param_groups(0.1) for parameter in group["params"]]
    assert len(held) == len(list(model.parameters())) - 1
    assert all(parameter is not frozen for parameter in held)


def test_groups_without_parameters_are_left_out():
    model = tiny()
    model.freeze_backbone()
    assert [group["name"] for group in model.param_groups(0.1)] == ["head"]
    assert [group["name"] for group in tiny(dim=None).param_groups(0.1)] == ["backbone"]
    assert networks.create("linear", in_dim=3, dim=None).param_groups(0.1) == []


def test_rates_must_make_sense():
    for arguments in ({"lr": 0.0}, {"lr": 0.1, "head_multiplier": -1.0}, {"lr": 0.1, "weight_decay": -1.0}):
        with pytest.raises(ValueError, match="it must be"):
            tiny().param_groups(**arguments)


# --- warm-up --------------------------------------------------------------------------------------------------


def test_a_frozen_backbone_is_a_fixed_function():
    model = tiny().train()
    model.freeze_backbone()
    before = copy.deepcopy(model.backbone.state_dict())
    expected = copy.deepcopy(model).eval()(pictures())
    torch.testing.assert_close(model.train()(pictures()), expected)
    model(pictures()).sum().backward()
    assert all(parameter.grad is None for parameter in model.backbone.parameters())
    assert all(parameter.grad is not None for parameter in model.heads.parameters())
    assert_equal_states(model.backbone.state_dict(), before)


def test_an_unfrozen_backbone_learns_again():
    model = tiny().train()
    model.freeze_backbone()
    model.freeze_backbone()  # twice is once
    model.unfreeze_backbone()
    assert all(layer.training for layer in model.modules())
    model(pictures()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_unfreezing_leaves_mode_and_hand_frozen_parameters():
    model = tiny().eval()
    first = next(model.backbone.parameters()).requires_grad_(False)
    model.freeze_backbone()
    model.unfreeze_backbone()
    assert not any(layer.training for layer in model.modules())
    assert not first.requires_grad
    assert sum(not parameter.requires_grad for parameter in model.parameters()) == 1


def test_unfreezing_what_was_never_frozen_does_nothing():
    model = tiny()
    first = next(model.backbone.parameters()).requires_grad_(False)
    model.unfreeze_backbone()
    assert not first.requires_grad


def test_an_optimiser_made_before_the_warm_up_leaves_the_backbone_alone_meanwhile():
    model = tiny().train()
    optimiser = torch.optim.AdamW(model.param_groups(0.1, weight_decay=0.1))
    model.freeze_backbone()
    before = copy.deepcopy(model.state_dict())
    step(model, optimiser)
    assert_equal_states(model.backbone.state_dict(), {k[9:]: v for k, v in before.items() if k.startswith("backbone.")})
    assert not torch.equal(model.state_dict()["heads.high.linear.weight"], before["heads.high.linear.weight"])
    model.unfreeze_backbone()
    step(model, optimiser)
    assert not torch.equal(model.state_dict()["backbone.stages.0.0.weight"], before["backbone.stages.0.0.weight"])


def step(model, optimiser):
    optimiser.zero_grad()
    (model(pictures()) * torch.arange(7.0)).sum().backward()
    optimiser.step()


def assert_equal_states(found, expected):
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
