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
from torch import Tensor, nn

import nearfar as nf
from nearfar.networks.backbones import folded
from nearfar.networks.backbones.base import freeze_batchnorms

SHAPE = depthwise_cases.Shape(2, 3, 6, 5, 3, 2)


def outcome(conv: nn.Conv2d, norm: nn.BatchNorm2d, x: Tensor, fold: bool) -> list[Tensor]:
    x = x.clone().requires_grad_()
    conv.weight.grad = None
    y = folded.conv_norm_relu6(x, conv, norm) if fold else F.relu6(norm(conv(x)))
    (y * torch.arange(y.numel()).view_as(y)).sum().backward()
    assert x.grad is not None
    assert conv.weight.grad is not None
    return [y.detach(), x.grad, conv.weight.grad]


@pytest.mark.parametrize("shape", depthwise_cases.SHAPES)
def test_a_frozen_batch_norm_is_part_of_the_convolution(shape: depthwise_cases.Shape) -> None:
    conv, norm = (layer.double() for layer in depthwise_cases.layers(shape))
    assert isinstance(conv, nn.Conv2d)
    assert isinstance(norm, nn.BatchNorm2d)
    x = 3 * torch.randn(shape.images, shape.channels, shape.height, shape.width, dtype=torch.float64)
    for found, expected in zip(outcome(conv, norm, x, True), outcome(conv, norm, x, False), strict=True):
        assert_close(found, expected, 1e-12)


def test_it_follows_new_statistics() -> None:
    conv, norm = depthwise_cases.layers(SHAPE)
    x = torch.randn(1, 3, 4, 4)
    outcome(conv, norm, x, True)
    other = copy.deepcopy(norm)
    for change in (lambda: norm.running_mean.add_(1.0), lambda: norm.load_state_dict(other.state_dict())):
        change()
        for found, expected in zip(outcome(conv, norm, x, True), outcome(conv, norm, x, False), strict=True):
            assert_close(found, expected, 1e-5)


def test_only_a_batch_norm_that_does_not_change_is_folded() -> None:
    norm = nn.BatchNorm2d(3)
    assert folded.scale_and_shift(norm) is None  # in training
    assert folded.scale_and_shift(norm.eval()) is None  # its parameters need a gradient
    with torch.no_grad():
        assert folded.scale_and_shift(norm) is not None
        assert folded.scale_and_shift(nn.BatchNorm2d(3, track_running_stats=False).eval()) is None
        assert folded.scale_and_shift(nn.BatchNorm2d(3, affine=False).eval()) is None
    freeze_batchnorms(norm)
    assert folded.scale_and_shift(norm) is not None


def test_training_goes_on_after_an_evaluation_in_inference_mode() -> None:
    conv, norm = depthwise_cases.layers(SHAPE)
    x = torch.randn(1, 3, 4, 4)
    with torch.inference_mode():
        folded.conv_norm_relu6(x, conv, norm)
    outcome(conv, norm, x, True)


def test_relu6_keeps_only_its_result() -> None:
    x = torch.linspace(-3, 9, 50, dtype=torch.float64).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (kept.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        y = folded.relu6(x * 1.0)
    assert len({tensor.data_ptr() for tensor in kept if tensor.numel() > 1} - {y.data_ptr()}) == 0
    (found,) = torch.autograd.grad((y**2).sum(), x)
    (expected,) = torch.autograd.grad((F.relu6(x) ** 2).sum(), x)
    assert_close(found, expected, 1e-12)


NETWORKS = ["efficientnet_lite0", "mobilenet_v2", "resnet18", "resnet50", "googlenet", "bn_inception"]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nf.networks.create(name, dim=8, pretrained=False, freeze_batchnorm=True).double().train()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            assert layer.running_mean is not None
            layer.running_mean.normal_(0, 0.1)
            layer.bias.data.normal_(0, 0.1)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(x).cumsum(1).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    found = gradients()
    monkeypatch.setattr(folded, "scale_and_shift", lambda _: None)
    for mine, plain in zip(found, gradients(), strict=True):
        assert_close(mine, plain, 1e-9)


def test_the_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    script = Path(depthwise_cases.__file__)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert max(json.loads(done.stdout)) < 1e-6
