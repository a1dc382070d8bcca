"""Embeddings of several levels."""

import pytest
import torch
import torch.nn.functional as F
from network_cases import pictures, shape_only, tiny

from nearfar import networks

ALL = networks.LEVELS


def test_levels_equal_a_concatenation_by_hand():
    model = tiny(levels=ALL, pooling="max").eval()
    maps, state = model.backbone.maps(pictures()), model.state_dict()
    by_hand = []
    for level in ALL:
        weight, bias = state[f"heads.{level}.linear.weight"], state[f"heads.{level}.linear.bias"]
        by_hand.append(F.normalize(F.linear(maps[level].amax(dim=(2, 3)), weight, bias), dim=1))
    found = model.levels_forward(pictures())
    assert list(found) == list(ALL)
    for expected, (level, embedding) in zip(by_hand, found.items(), strict=True):
        torch.testing.assert_close(embedding, expected, msg=level)
    torch.testing.assert_close(model(pictures()), torch.cat(by_hand, dim=1) / 3**0.5)
    assert model.dim == 21


def test_levels_come_in_the_order_asked_for():
    model, reverse = tiny(levels=("low", "high")).eval(), tiny(levels=("high", "low")).eval()
    reverse.load_state_dict(model.state_dict())
    torch.testing.assert_close(reverse(pictures()), model(pictures()).roll(7, dims=1))


def test_without_normalisation_levels_are_only_put_side_by_side():
    model = tiny(levels=ALL, normalize=False).eval()
    assert torch.equal(model(pictures()), torch.cat(list(model.levels_forward(pictures()).values()), dim=1))


def test_one_level_may_be_a_low_one():
    model = tiny(levels=("low",)).eval()
    assert torch.equal(model(pictures()), model.levels_forward(pictures())["low"])
    assert [key for key in model.state_dict() if key.startswith("heads.")] == [
        "heads.low.linear.weight",
        "heads.low.linear.bias",
    ]


def test_pooled_features_of_all_levels():
    model = tiny(levels=ALL, dim=None).eval()
    assert model(pictures()).shape == (3, model.dim) == (3, 4 + 5 + 6)


def test_each_level_has_its_own_head_and_pooling():
    model = tiny(levels=ALL, pooling="gem")
    model.levels_forward(pictures())["mid"][:, 0].sum().backward()
    touched = {name for name, each in model.named_parameters() if each.grad is not None and each.grad.any()}
    assert {name for name in touched if not name.startswith("backbone.")} == {
        "heads.mid.linear.weight",
        "heads.mid.linear.bias",
        "poolings.mid.p",
    }
    assert not [name for name in touched if name.startswith("backbone.stages.2")]


def test_the_ranked_list_losss_network():
    # Three fully connected layers of 512 on inception 3c, 4e and 5b of BN-Inception.
    model = networks.Embedder(shape_only("bn_inception"), levels=ALL)
    heads = {key: tuple(v.shape) for key, v in model.state_dict().items() if key.startswith("heads.") and v.ndim == 2}
    assert heads == {
        "heads.low.linear.weight": (512, 576),
        "heads.mid.linear.weight": (512, 1056),
        "heads.high.linear.weight": (512, 1024),
    }


@pytest.mark.parametrize(
    ("levels", "error", "message"),
    [
        (("low", "middle"), ValueError, "levels has 'middle'; tiny has low, mid, high"),
        (("low", "low"), ValueError, "none twice"),
        ((), ValueError, "at least one"),
        ("low", TypeError, r"levels is 'low'; a tuple is needed, such as \('low',\)"),
    ],
)
def test_wrong_levels_are_named(levels, error, message):
    with pytest.raises(error, match=message):
        tiny(levels=levels)


def test_vectors_have_one_level():
    with pytest.raises(ValueError, match="levels has 'low'; linear has high"):
        networks.create("linear", in_dim=3, levels=ALL)
