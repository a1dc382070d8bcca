"""Networks by name."""

import inspect

import pytest
import torch
from network_cases import PUBLISHED, VECTORS, batch, settings

from nearfar import networks


def test_the_names():
    assert networks.names() == sorted([*PUBLISHED, *VECTORS, "small_cnn"])


@pytest.mark.parametrize("name", networks.names())
def test_a_name_is_the_key_of_its_class(name):
    assert networks.get(name).key == name
    assert inspect.getdoc(networks.get(name))


@pytest.mark.parametrize("name", networks.names())
def test_every_network_makes_unit_embeddings(name):
    model = networks.create(name, dim=16, **settings(name)).train()
    found = model(batch(model.backbone))
    assert found.shape == (2, 16)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(2))


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(ValueError, match=r"network is 'resnet5O' \(did you mean 'resnet50'\?\); allowed are bn_inc"):
        networks.create("resnet5O")


def test_an_unknown_setting_gets_the_nearest_one():
    with pytest.raises(TypeError, match=r"mlp has no setting 'hiden' \(did you mean 'hidden'\?\); it has in_dim, hid"):
        networks.create("mlp", in_dim=3, hiden=(4,))
    with pytest.raises(TypeError, match="resnet18 has no setting 'in_dim'; it has none"):
        networks.create("resnet18", in_dim=3)


@pytest.mark.parametrize("name", VECTORS)
def test_vectors_need_their_dimensions(name):
    with pytest.raises(TypeError, match=f"{name} needs in_dim"):
        networks.create(name)


def test_two_backbones_cannot_have_one_key():
    class Other(networks.Backbone):
        key = "resnet50"

    with pytest.raises(ValueError, match=r"'resnet50' is taken: network nearfar.*ResNet50 has it, so .*Other needs"):
        networks.register(Other)


def test_settings_reach_backbone_and_embedder():
    model = networks.create("mlp", in_dim=5, hidden=(4,), dim=3, head="mlp", normalize=False)
    assert model.backbone.channels == {"high": 4}
    assert (model.dim, model.normalize) == (3, False)
    assert "heads.high.hidden.weight" in model.state_dict()
