"""Batch norms that stay as they are."""

import copy

import pytest
import torch
from network_cases import PUBLISHED, pictures, tiny
from torch import nn

from nearfar import networks
from nearfar.networks.backbones import base as batchnorm


def norms(model):
    """All that batch norms hold: statistics, affine parameters and counters."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            found.update({f"{name}.{key}": value.detach().clone() for key, value in layer.state_dict().items()})
    return found


def train_a_little(model):
    """Two steps with weight decay, over all parameters, as a careless trainer would do it."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for seed in range(2):
        optimiser.zero_grad()
        (model(pictures(seed=seed)) * torch.arange(7.0)).sum().backward()
        optimiser.step()


def warm_up(model):
    model.freeze_backbone()
    model.train()
    model.unfreeze_backbone()


def reload(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()))


def reload_by_assignment(model):
    fresh = tiny(seed=0)
    fresh.load_state_dict(model.state_dict())
    model.load_state_dict({**fresh.state_dict(), **dict(fresh.named_parameters())}, assign=True)


def train_the_backbone_alone(model):
    model.backbone.train()


UNDOINGS = [
    lambda model: model.train(),
    lambda model: model.eval().train(),
    train_the_backbone_alone,
    warm_up,
    reload,
    reload_by_assignment,
]
NAMES = ["train", "eval and train", "backbone.train", "warm-up", "reload", "reload by assignment"]


@pytest.mark.parametrize("undo", UNDOINGS, ids=NAMES)
def test_statistics_and_affine_parameters_stay(undo):
    model = tiny(freeze_batchnorm=True).train()
    undo(model)
    before, weight = norms(model), model.state_dict()["backbone.stages.0.0.weight"].clone()
    train_a_little(model)
    after = norms(model)
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert not torch.equal(model.state_dict()["backbone.stages.0.0.weight"], weight)


def test_without_it_both_change():
    model = tiny().train()
    before = norms(model)
    train_a_little(model)
    assert not any(torch.equal(value, before[key]) for key, value in norms(model).items())


def test_a_copy_is_frozen_too():
    model = copy.deepcopy(tiny(freeze_batchnorm=True)).train()
    before = norms(model)
    train_a_little(model)
    assert all(torch.equal(value, before[key]) for key, value in norms(model).items())


def test_only_batch_norms_are_frozen():
    model = tiny(freeze_batchnorm=True).train()
    asleep = {name for name, each in model.named_parameters() if not each.requires_grad}
    assert asleep == {f"backbone.stages.{stage}.1.{part}" for stage in range(3) for part in ("weight", "bias")}
    modes = {type(layer): layer.training for layer in model.backbone.modules()}
    assert modes[nn.Dropout]
    assert not modes[batchnorm.FixedBatchNorm2d]


def test_frozen_is_not_sealed_published_weights_still_come_in():
    model, published = tiny(freeze_batchnorm=True), tiny(seed=3).train()
    train_a_little(published)
    model.load_state_dict(published.state_dict())
    assert all(torch.equal(value, norms(published)[key]) for key, value in norms(model).items())


def test_groups_leave_them_out():
    model = tiny(freeze_batchnorm=True)
    held = {id(parameter) for group in model.param_groups(0.1) for parameter in group["params"]}
    assert held == {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert len(list(model.parameters())) - len(held) == 6


def test_a_warm_up_that_began_before_freezing_ends_with_them_frozen():
    model = tiny()
    model.freeze_backbone()
    model.backbone.freeze_batchnorm()
    model.unfreeze_backbone()
    assert sum(not parameter.requires_grad for parameter in model.parameters()) == 6


def test_a_reload_during_a_warm_up_does_not_wake_the_backbone():
    model = tiny().train()
    model.freeze_backbone()
    reload_by_assignment(model)
    assert not any(parameter.requires_grad for parameter in model.backbone.parameters())
    model.unfreeze_backbone()
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_all_batch_norms_of_a_published_network(name):
    with torch.device("meta"):
        model = networks.create(name, freeze_batchnorm=True).train()
    layers = list(batchnorm.batchnorm_layers(model))
    assert len(layers) == sum(key.endswith("running_mean") for key in model.state_dict())
    assert layers
    assert not any(layer.training or parameter.requires_grad for layer in layers for parameter in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_gradient_passes_a_fixed_batch_norm_as_it_passes_any_other(dtype):
    torch.manual_seed(0)
    usual = nn.BatchNorm2d(3, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    for tensor in usual.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 2.0)
    usual.eval()
    fixed = copy.deepcopy(usual)
    batchnorm.freeze_batchnorms(fixed)
    assert isinstance(fixed, batchnorm.FixedBatchNorm2d)
    x = torch.randn(4, 3, 5, 5, dtype=dtype).contiguous(memory_format=torch.channels_last)
    wanted = torch.randn_like(x)
    results = []
    for layer in (usual, fixed):
        leaf = x.clone().requires_grad_()
        out = layer(leaf)
        results.append((out.detach(), *torch.autograd.grad(out, leaf, wanted)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    assert results[1][1].is_contiguous(memory_format=torch.channels_last)


def test_a_fixed_batch_norm_that_is_woken_learns_again():
    layer = nn.BatchNorm2d(3)
    batchnorm.freeze_batchnorms(layer)
    layer.train().requires_grad_(True)
    layer(torch.randn(4, 3, 2, 2, requires_grad=True)).sum().backward()
    assert layer.bias.grad is not None
    assert int(layer.num_batches_tracked) == 1


def test_a_fixed_batch_norm_keeps_nothing_of_its_input():
    layer = nn.BatchNorm2d(3)
    batchnorm.freeze_batchnorms(layer)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape), lambda _: None):
        layer(torch.randn(4, 3, 5, 5, requires_grad=True))
    assert set(kept) == {torch.Size([3])}
