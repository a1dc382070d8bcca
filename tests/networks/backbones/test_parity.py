"""The same weights give the same maps as in the libraries the weights come from, where those are installed."""

import re

import pytest
import torch
from network_cases import randomise

from nearfar import networks
from nearfar.utils import preprocessing

# By network, the modules of torchvision's whose outputs are the levels low, mid and high.
TORCHVISION = {
    "googlenet": ("inception3b", "inception4e", "inception5b"),
    "mobilenet_v2": ("features.7.conv.1", "features.14.conv.1", "features.18"),
    "resnet18": ("layer2", "layer3", "layer4"),
    "resnet50": ("layer2", "layer3", "layer4"),
}
LITE = {f"efficientnet_lite{number}": f"tf_efficientnet_lite{number}" for number in range(3)}
SIZES = ((64, 64), (75, 97))

both_sizes = pytest.mark.parametrize("size", SIZES, ids=str)


def torchvision_peer(name):
    models = pytest.importorskip("torchvision.models")
    settings = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
    return getattr(models, name)(weights=None, **settings)


def outputs(peer, modules, x):
    found = []
    for module in modules:
        peer.get_submodule(module).register_forward_hook(lambda _, __, output: found.append(output))
    with torch.no_grad():
        peer(x)
    return found


def assert_same(ours, peer, modules, size):
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        maps = ours.maps(x)
    for level, expected in zip(networks.LEVELS, outputs(peer, modules, x), strict=True):
        assert expected.std() > 0.05, "a map that is nearly constant proves nothing"
        torch.testing.assert_close(maps[level], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TORCHVISION)
def test_keys_and_shapes_are_torchvisions_without_its_classifiers(name):
    peer, ours = torchvision_peer(name), networks.create_backbone(name)
    wanted = {k: v.shape for k, v in peer.state_dict().items() if not k.startswith(ours.ignored_keys)}
    assert {k: v.shape for k, v in ours.state_dict().items()} == wanted


@both_sizes
@pytest.mark.parametrize("name", TORCHVISION)
def test_maps_are_torchvisions(name, size):
    peer, ours = torchvision_peer(name).eval(), networks.create_backbone(name).eval()
    randomise(peer)
    ours.load_state_dict({k: v for k, v in peer.state_dict().items() if not k.startswith(ours.ignored_keys)})
    assert_same(ours, peer, TORCHVISION[name], size)


def test_googlenets_normalization_is_what_torchvision_does_inside_the_network():
    peer, ours = torchvision_peer("googlenet").eval(), networks.create_backbone("googlenet")
    peer.transform_input = True
    seen = outputs_of_input(peer, picture := torch.randint(256, (1, 3, 64, 64), dtype=torch.uint8))
    assert ours.normalization is not None
    torch.testing.assert_close(ours.normalization(picture), seen, rtol=1e-4, atol=1e-4)


def outputs_of_input(peer, picture):
    """What the first convolution of a network gets for a picture that was normalised as torchvision asks for."""
    seen = []
    peer.get_submodule("conv1").register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        peer(preprocessing.IMAGENET(picture))
    return seen[0]


def test_maps_are_those_of_bn_inceptions_port():
    models = pytest.importorskip("pretrainedmodels.models.bninception")
    peer, ours = models.BNInception().eval(), networks.create_backbone("bn_inception").eval()
    randomise(peer)
    ours.load_state_dict({k: v for k, v in peer.state_dict().items() if not k.startswith(ours.ignored_keys)})
    # The port's blocks are no modules, and it has no hook for them but at the end. Odd sides it cannot do.
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(x), peer.features(x), rtol=1e-4, atol=1e-4)


@both_sizes
@pytest.mark.parametrize("name", LITE)
def test_maps_are_timms(name, size):
    timm = pytest.importorskip("timm")
    peer, ours = timm.create_model(LITE[name], pretrained=False).eval(), networks.create_backbone(name).eval()
    randomise(peer)
    ours.load_state_dict(lite_keys({k: v for k, v in peer.state_dict().items() if not k.startswith("classifier.")}))
    assert_same(ours, peer, ("blocks.3.0.bn2", "blocks.5.0.bn2", "bn2"), size)


def lite_keys(state):
    """timm's keys, in which blocks are counted by stage, as those of the weight packages, which count them through."""
    outer = {"conv_stem": "_conv_stem", "bn1": "_bn0", "conv_head": "_conv_head", "bn2": "_bn1"}
    first = {"conv_dw": "_depthwise_conv", "bn1": "_bn1", "conv_pw": "_project_conv", "bn2": "_bn2"}
    inner = {
        "conv_pw": "_expand_conv",
        "bn1": "_bn0",
        "conv_dw": "_depthwise_conv",
        "bn2": "_bn1",
        "conv_pwl": "_project_conv",
        "bn3": "_bn2",
    }
    blocks = {}
    renamed = {}
    for key, value in state.items():
        if match := re.fullmatch(r"blocks\.(\d+\.\d+)\.(\w+)\.(\w+)", key):
            block, layer, rest = match.groups()
            number = blocks.setdefault(block, len(blocks))
            renamed[f"_blocks.{number}.{(inner if number else first)[layer]}.{rest}"] = value
        else:
            layer, rest = key.split(".")
            renamed[f"{outer[layer]}.{rest}"] = value
    return renamed
