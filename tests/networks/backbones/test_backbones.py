"""What every backbone promises: published keys, maps of any size, gradients, precision, clear errors."""

import hashlib

import pytest
import torch
from network_cases import PROBES, PUBLISHED, VECTORS, batch, probe, randomise, settings, shape_only
from torch import nn

from nearfar import networks
from nearfar.utils import preprocessing

IMAGES = [name for name in networks.names() if name not in VECTORS]
ANY_SIZE = [name for name in IMAGES if name != "small_cnn"]


@pytest.fixture(scope="module", params=networks.names())
def backbone(request):
    """One network of every name, in eval mode; tests leave it as they found it."""
    model = networks.create_backbone(request.param, **settings(request.param)).eval()
    randomise(model)
    return model


def assert_near(found, expected):
    """To 1e-4 of the largest value: rounding grows with the values on the way."""
    assert expected.std() > 0.05, "a map that is nearly constant proves nothing"
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


# --- the published networks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_its_parameters_keys_and_shapes_are_the_published_ones(name):
    assert sum(parameter.numel() for parameter in shape_only(name).parameters()) == PUBLISHED[name][0]
    lines = sorted(f"{key} {list(value.shape)}" for key, value in shape_only(name).state_dict().items())
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] == PUBLISHED[name][1], lines[:5]


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_key_is_one_that_is_left_out_of_published_weights(name):
    model = shape_only(name)
    assert model.ignored_keys
    assert not [key for key in model.state_dict() if key.startswith(model.ignored_keys)]


@pytest.mark.parametrize(
    ("name", "mean", "std", "white", "order", "size"),
    [
        ("bn_inception", 104, 1, 255, "BGR", 224),
        ("efficientnet_lite0", 127, 128, 255, "RGB", 224),
        ("efficientnet_lite1", 127, 128, 255, "RGB", 240),
        ("efficientnet_lite2", 127, 128, 255, "RGB", 260),
        ("googlenet", 0.5, 0.5, 1, "RGB", 224),
        ("mobilenet_v2", 0.485, 0.229, 1, "RGB", 224),
        ("resnet18", 0.485, 0.229, 1, "RGB", 224),
        ("resnet50", 0.485, 0.229, 1, "RGB", 224),
        ("small_cnn", 0, 1, 1, "RGB", 28),
    ],
)
def test_it_knows_what_its_weights_read(name, mean, std, white, order, size):
    model = shape_only(name)
    assert isinstance(model.normalization, preprocessing.Normalization)
    found = model.normalization
    assert (found.mean[0], found.std[0], found.range, found.order) == (mean, std, white, order)
    assert found.channels == model.in_channels
    assert model.input_size == size


@pytest.mark.parametrize("name", VECTORS)
def test_vectors_have_no_normalization_and_no_size(name):
    assert shape_only(name).normalization is None
    assert shape_only(name).input_size is None


# --- maps -----------------------------------------------------------------------------------------------------


def test_every_level_has_the_channels_it_says(backbone):
    x = batch(backbone)
    with torch.no_grad():
        maps = backbone.maps(x)
        assert torch.equal(backbone(x), maps["high"])
    assert {level: found.shape[1] for level, found in maps.items()} == dict(backbone.channels)
    assert set(maps) <= set(networks.LEVELS)
    assert (maps["high"].ndim == 4) == backbone.gives_maps


@pytest.mark.parametrize("size", [(32, 32), (65, 111)], ids=str)
@pytest.mark.parametrize("name", ANY_SIZE)
def test_pictures_may_have_any_sides(name, size):
    maps = shape_only(name).maps(torch.empty(1, 3, *size))
    areas = [found.shape[2] * found.shape[3] for found in maps.values()]
    assert areas == sorted(areas, reverse=True)
    assert areas[-1] >= 1


@pytest.mark.parametrize("name", ANY_SIZE)
def test_the_last_map_has_a_thirty_second_of_the_side(name):
    assert shape_only(name)(torch.empty(1, 3, 224, 224)).shape[2:] == (7, 7)


@pytest.mark.parametrize(
    ("name", "side", "low", "mid", "high"),
    [
        ("bn_inception", 227, 576, 1056, 1024),  # inception 3c and 4e
        ("efficientnet_lite0", 224, 240, 672, 1280),  # narrow blocks halve where they are wide
        ("mobilenet_v2", 224, 192, 576, 1280),
    ],
)
def test_the_levels_are_maps_that_a_block_has_just_halved(name, side, low, mid, high):
    maps = shape_only(name).maps(torch.empty(1, 3, side, side))
    assert [tuple(level_map.shape[1:]) for level_map in maps.values()] == [(low, 14, 14), (mid, 7, 7), (high, 7, 7)]


def test_lites_padding_is_tensorflows():
    # With an even side, TensorFlow pads below and to the right only: the first output starts at the first pixel.
    stem = networks.create_backbone("efficientnet_lite0").get_submodule("_conv_stem")
    assert isinstance(stem, nn.Conv2d)
    x = torch.randn(1, 3, 8, 9)
    expected = nn.functional.conv2d(nn.functional.pad(x, (1, 1, 0, 1)), stem.weight, stride=2)
    torch.testing.assert_close(stem(x), expected)


def test_lites_later_blocks_are_passed_by_more_often():
    backbone = networks.create_backbone("efficientnet_lite0", drop_path=0.4)
    rates = [block.drop for block in backbone.get_submodule("_blocks").children()]
    assert rates[0] == 0.0
    assert rates == pytest.approx([0.4 * place / 16 for place in range(16)])


def test_in_training_a_picture_passes_a_block_by_or_is_changed_the_more():
    blocks = networks.create_backbone("efficientnet_lite0", drop_path=0.8).get_submodule("_blocks")
    block = next(block for place, block in enumerate(blocks.children()) if place > 10 and block.residual)
    torch.manual_seed(0)
    x = torch.randn(200, 192, 2, 2)
    changed = block.eval()(x) - x
    block.train()
    for norm in (block._bn0, block._bn1, block._bn2):
        norm.eval()
    found = block(x) - x
    past = found.flatten(1).abs().amax(dim=1) == 0
    assert past.float().mean().item() == pytest.approx(block.drop, abs=0.1)
    torch.testing.assert_close(found[~past], changed[~past] / (1 - block.drop), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_of_blocks_is_a_share(share):
    with pytest.raises(ValueError, match="drop_path"):
        networks.create_backbone("efficientnet_lite0", drop_path=share)


# --- numbers --------------------------------------------------------------------------------------------------


def test_its_maps_are_the_published_networks(backbone):
    if backbone.key not in PROBES:
        pytest.skip("was never published")
    assert probe(backbone) == pytest.approx(PROBES[backbone.key], abs=1e-3)


def test_eval_is_deterministic_and_row_by_row(backbone):
    x = batch(backbone)
    with torch.no_grad():
        both = backbone(x)
        assert torch.equal(both, backbone(x))
        assert_near(backbone(x[1:]), both[1:])


def test_channels_last_changes_nothing(backbone):
    x = batch(backbone)
    if x.ndim == 2:
        pytest.skip("reads vectors")
    with torch.no_grad():
        expected = backbone(x)
        backbone.to(memory_format=torch.channels_last)
        found = backbone(x.contiguous(memory_format=torch.channels_last))
        backbone.to(memory_format=torch.contiguous_format)
    assert_near(found, expected)


def test_bfloat16_comes_near(backbone):
    x = batch(backbone)
    with torch.no_grad():
        expected = backbone(x).flatten(1)
        with torch.autocast("cpu", torch.bfloat16):
            found = backbone(x).flatten(1).float()
    assert nn.functional.cosine_similarity(found, expected).min() > 0.98


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_lite0"])
def test_a_network_may_be_all_bfloat16(name):
    model = networks.create_backbone(name).eval().bfloat16()
    with torch.no_grad():
        assert model(batch(model).bfloat16()).dtype == torch.bfloat16


def test_the_gradient_reaches_every_parameter(backbone):
    if not list(backbone.parameters()):
        pytest.skip("has none")
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    backbone.train()
    x = batch(backbone)
    sum((found * torch.randn_like(found)).sum() for found in backbone.maps(x).values()).backward()
    norms = {name for name, layer in backbone.named_modules() if isinstance(layer, nn.BatchNorm2d)}
    for name, parameter in backbone.named_parameters():
        # A batch norm takes out the bias of the convolution before it.
        useless = name.endswith(".bias") and f"{name.removesuffix('.bias')}_bn" in norms
        assert parameter.grad is not None, name
        assert useless or parameter.grad.abs().max() > 0, name
    backbone.zero_grad()
    backbone.load_state_dict(before)
    backbone.eval()


# --- errors ---------------------------------------------------------------------------------------------------


def test_input_that_it_does_not_read_is_refused(backbone):
    x = batch(backbone)
    with pytest.raises(ValueError, match=rf"{backbone.key} reads \[b, {backbone.in_channels}"):
        backbone(torch.cat([x, x[:, :1]], dim=1))
    with pytest.raises(ValueError, match="input has shape"):
        backbone(x[0])
    with pytest.raises(TypeError, match=r"input is of torch\.uint8; floating point is needed"):
        backbone(x.to(torch.uint8))


def test_small_cnn_fits_one_size():
    assert networks.create_backbone("small_cnn", size=16, channels=3)(torch.zeros(1, 3, 16, 16)).shape == (1, 1024)
    with pytest.raises(ValueError, match=r"input is 30 × 28; small_cnn expects size=28"):
        networks.create_backbone("small_cnn")(torch.zeros(1, 1, 30, 28))
    with pytest.raises(ValueError, match="channels is 2; allowed are 1 and 3"):
        networks.create_backbone("small_cnn", channels=2)


def test_mlp_has_the_layers_asked_for():
    model = networks.create_backbone("mlp", in_dim=8, hidden=(6, 4))
    assert {key: tuple(value.shape) for key, value in model.state_dict().items()} == {
        "layers.0.weight": (6, 8),
        "layers.0.bias": (6,),
        "layers.1.weight": (4, 6),
        "layers.1.bias": (4,),
    }
    with pytest.raises(ValueError, match="hidden is empty"):
        networks.create_backbone("mlp", in_dim=8, hidden=())
