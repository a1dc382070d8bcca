"""Networks on a GPU: depthwise convolutions by Triton kernels have the numbers of PyTorch."""

import pytest
import torch
from depthwise_cases import SHAPES, Shape, errors, keeps_nan
from torch import nn

import nearfar as nf
from nearfar.networks.backbones import efficientnet_lite, folded

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

LARGER = [
    Shape(120, 32, 128, 128, 3, 1),
    Shape(16, 96, 128, 128, 3, 2),
    Shape(8, 144, 67, 61, 5, 2),
    Shape(16, 672, 16, 16, 5, 1),
    Shape(16, 1152, 7, 7, 5, 1),
]
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 5e-4}
# Among millions of results some are so close to a bound of ReLU6 that they are rounded to its other side.
WITH_JUMPS = {torch.float32: 3e-3, torch.bfloat16: 0.06, torch.float16: 0.02}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_small_depthwise_convolution(shape):
    assert max(errors(shape, torch.float32, "cuda")) < 1e-5


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("shape", LARGER)
def test_a_depthwise_convolution(shape, dtype):
    result, *gradients = errors(shape, dtype, "cuda")
    assert result < LIMITS[dtype]
    assert max(gradients) < WITH_JUMPS[dtype]


def test_nan_stays_nan():
    assert keeps_nan("cuda") == [True, True]


@pytest.mark.parametrize("name", ["efficientnet_lite0", "mobilenet_v2"])
def test_a_network(name, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model = nf.networks.create(name, dim=8, pretrained=False, freeze_batchnorm=True).train().cuda()
    model = model.to(memory_format=torch.channels_last)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.1)
    x = torch.randn(4, 3, 96, 96, device="cuda").to(memory_format=torch.channels_last)
    calls = []
    kernel = folded.depthwise
    for place in (folded, efficientnet_lite):
        monkeypatch.setattr(place, "depthwise", lambda *given: (calls.append(1), kernel(*given))[1])

    def outcome(x):
        model.zero_grad()
        found = model(x)
        found.cumsum(1).sum().backward()
        return [found.detach().double(), *(one.grad.double() for one in model.parameters() if one.grad is not None)]

    found = outcome(x)
    assert len(calls) >= 16
    model.double()
    expected = outcome(x.double())
    embeddings, *gradients = (float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))
    assert embeddings < 1e-4
    assert max(gradients) < 0.02  # a ReLU6 at its bound may be rounded to either side
