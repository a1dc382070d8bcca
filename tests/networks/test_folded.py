"""Convolutions with batch norms that do not change: one convolution, and Triton kernels in the interpreter."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import depthwise_cases
import pytest
import torch
import torch.nn.functional as F
from checks import assert_close
from torch import nn
from torch.nn.utils import prune

import nearfar as nf
from nearfar.networks.backbones import efficientnet_lite, folded
from nearfar.networks.backbones.base import freeze_batchnorms
from nearfar.utils import kernels

SHAPE = depthwise_cases.Shape(2, 3, 6, 5, 3, 2)


def outcome(conv, norm, x, fold):
    x = x.clone().requires_grad_()
    conv.weight.grad = None
    y = folded.conv_norm_relu6(x, conv, norm) if fold else F.relu6(norm(conv(x)))
    (y * torch.arange(y.numel()).view_as(y)).sum().backward()
    assert x.grad is not None
    assert conv.weight.grad is not None
    return [y.detach(), x.grad, conv.weight.grad]


@pytest.mark.parametrize("shape", depthwise_cases.SHAPES)
def test_a_frozen_batch_norm_is_part_of_the_convolution(shape):
    conv, norm = (layer.double() for layer in depthwise_cases.layers(shape))
    assert isinstance(conv, nn.Conv2d)
    assert isinstance(norm, nn.BatchNorm2d)
    x = 3 * torch.randn(shape.images, shape.channels, shape.height, shape.width, dtype=torch.float64)
    for found, expected in zip(outcome(conv, norm, x, True), outcome(conv, norm, x, False), strict=True):
        assert_close(found, expected, 1e-12)


def test_it_follows_new_statistics():
    conv, norm = depthwise_cases.layers(SHAPE)
    x = torch.randn(1, 3, 4, 4)
    outcome(conv, norm, x, True)
    other = copy.deepcopy(norm)
    changes = (
        lambda: norm.running_mean.add_(1.0),
        lambda: norm.load_state_dict(other.state_dict()),
        lambda: norm.weight.data.mul_(2.0),  # as in averages of weights; this leaves no trace in the tensor
        lambda: norm.running_var.data.mul_(2.0),
    )
    for change in changes:
        change()
        for found, expected in zip(outcome(conv, norm, x, True), outcome(conv, norm, x, False), strict=True):
            assert_close(found, expected, 1e-5)


def test_only_a_batch_norm_that_does_not_change_is_folded():
    conv, norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
    assert not folded.folds(conv, norm)  # in training
    assert not folded.folds(conv, norm.eval())  # its parameters need a gradient
    with torch.no_grad():
        assert folded.folds(conv, norm)
        assert not folded.folds(conv, nn.BatchNorm2d(3, track_running_stats=False).eval())
        assert not folded.folds(conv, nn.BatchNorm2d(3, affine=False).eval())
    freeze_batchnorms(norm)
    assert folded.folds(conv, norm)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "efficientnet_lite0", "googlenet", "bn_inception"])
def test_hooks_of_convolutions_and_batch_norms_are_called(name):
    model = nf.networks.create(name, dim=8, pretrained=False).eval()
    layers = [layer for layer in model.backbone.modules() if isinstance(layer, nn.Conv2d | nn.BatchNorm2d | nn.ReLU6)]
    called = []
    for layer in layers:
        layer.register_forward_hook(lambda layer, _given, _found: called.append(layer))
    with torch.no_grad():
        model(torch.randn(1, 3, 32, 32))
    assert len(called) == len(layers)


def test_weights_that_a_hook_computes_are_up_to_date():
    conv, norm = depthwise_cases.layers(SHAPE)
    prune.l1_unstructured(conv, "weight", 0.5)
    x = torch.randn(1, 3, 4, 4)
    before = folded.conv_norm(x, conv, norm)
    with torch.no_grad():
        conv.weight_orig.mul_(2.0)
    after = folded.conv_norm(x, conv, norm)
    assert_close(after, norm(conv(x)), 1e-6)
    assert not torch.equal(before, after)


class Adapter(nn.Module):
    """A layer around another, as adapters of low rank are."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return 2 * self.layer(x)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "efficientnet_lite0"])
def test_layers_can_be_replaced(name):
    model = nf.networks.create(name, dim=8, pretrained=False).eval()
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        expected = model(x)
        converted = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
        assert_close(converted(x), expected, 1e-4)
        names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d)]
        for place in names:
            parent, _, child = place.rpartition(".")
            layers = model.get_submodule(parent)
            setattr(layers, child, Adapter(getattr(layers, child)))
        assert not torch.allclose(model(x), expected, atol=1e-3)


def test_an_activation_can_be_replaced():
    model = nf.networks.create_backbone("mobilenet_v2").eval()
    first = model.features[0]
    x = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        first[2] = nn.Tanh()
        assert_close(first(x), torch.tanh(first[1](first[0](x))), 1e-6)


def test_a_batch_norm_may_be_more_precise_than_its_convolution():
    conv, norm = depthwise_cases.layers(SHAPE)
    x = torch.randn(1, 3, 4, 4)
    expected = folded.conv_norm(x, conv, norm)
    for _ in range(2):
        found = folded.conv_norm(x.bfloat16(), conv.bfloat16(), norm)
        assert found.dtype == torch.bfloat16
        assert_close(found.float(), expected, 0.03)
        norm.bfloat16()


def test_training_goes_on_after_an_evaluation_in_inference_mode():
    conv, norm = depthwise_cases.layers(SHAPE)
    x = torch.randn(1, 3, 4, 4)
    with torch.inference_mode():
        folded.conv_norm_relu6(x, conv, norm)
    outcome(conv, norm, x, True)


def test_relu6_keeps_only_its_result():
    x = torch.linspace(-3, 9, 50, dtype=torch.float64).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (kept.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        y = folded.relu6(x * 1.0)
    assert len({tensor.data_ptr() for tensor in kept if tensor.numel() > 1} - {y.data_ptr()}) == 0
    (found,) = torch.autograd.grad((y**2).sum(), x)
    (expected,) = torch.autograd.grad((F.relu6(x) ** 2).sum(), x)
    assert_close(found, expected, 1e-12)


def test_relu6_is_differentiable_twice_and_by_functions():
    x = torch.linspace(-3, 9, 50, dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad((folded.relu6(x * 1.0) ** 3).sum(), x, create_graph=True)
    (found,) = torch.autograd.grad(slope.sum(), x)
    assert_close(found, 6 * x.detach() * ((x > 0) & (x < 6)), 1e-12)
    by_function = torch.func.grad(lambda x: (folded.relu6(x * 1.0) ** 3).sum())(x.detach())
    assert_close(by_function, slope.detach(), 1e-12)


def test_the_kernel_is_only_for_what_it_computes(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(kernels, "usable", lambda _: True)
    conv, norm = depthwise_cases.layers(SHAPE)
    x = torch.randn(2, 3, 6, 5).to(memory_format=torch.channels_last)
    assert folded.has_kernel(x, conv, norm)
    assert not folded.has_kernel(x.contiguous(), conv, norm)
    assert not folded.has_kernel(x.double(), conv, norm)
    grouped = nn.Conv2d(4, 8, 3, groups=4, bias=False)
    assert not folded.has_kernel(torch.randn(2, 4, 6, 5).to(memory_format=torch.channels_last), grouped, norm)
    conv.dilation = (2, 2)
    assert not folded.has_kernel(x, conv, norm)


def test_all_batch_norms_of_a_pass_are_folded_at_once(monkeypatch):
    model = nf.networks.create_backbone("resnet18").eval()
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    calls = []
    compute = folded._scales_and_shifts
    monkeypatch.setattr(folded, "_scales_and_shifts", lambda norms: (calls.append(len(norms)), compute(norms))[1])
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        found = model(x)
        assert calls == [len(norms)]
        norms[3].weight.data.mul_(2.0)
        assert not torch.equal(model(x), found)
        norms[3].eps = 0.1  # each on its own
        model(x)
    assert calls[2:] == [1] * len(norms)


NETWORKS = ["efficientnet_lite0", "mobilenet_v2", "resnet18", "resnet50", "googlenet", "bn_inception"]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_computes_the_same(name, monkeypatch):
    torch.manual_seed(0)
    model = nf.networks.create(name, dim=8, pretrained=False, freeze_batchnorm=True).double().train()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.1)
            layer.bias.data.normal_(0, 0.1)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)

    def gradients():
        model.zero_grad()
        model(x).cumsum(1).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    found = gradients()
    for place in (folded, efficientnet_lite):
        monkeypatch.setattr(place, "folds", lambda *_: False)
    for mine, plain in zip(found, gradients(), strict=True):
        assert_close(mine, plain, 1e-9)


def test_the_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    script = Path(depthwise_cases.__file__)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert max(found["errors"]) < 1e-6
    assert found["nan"] == [True, True]


def test_without_triton_pytorch_computes_the_same():
    code = """
import sys
sys.modules["triton"] = None
import depthwise_cases, torch
from nearfar.networks.backbones import folded
for shape in depthwise_cases.SHAPES:
    conv, norm = depthwise_cases.layers(shape)
    x = torch.randn(*shape[:4]).to(memory_format=torch.channels_last)
    assert not folded.has_kernel(x, conv, norm)
    assert torch.allclose(folded.conv_norm_relu6(x, conv, norm), norm(conv(x)).clamp(0, 6), atol=1e-5)
"""
    helpers = str(Path(depthwise_cases.__file__).parent)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": helpers}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
