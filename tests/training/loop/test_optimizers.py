"""Optimisers: whose parameters move, and how fast."""

import pytest
import torch
from torch import nn

from nearfar import losses, networks
from nearfar.training.recipe.schema import OptimizerSection
from nearfar.training.setup import create_optimizer


def parts():
    loss = losses.create("proxy_anchor", num_classes=3, dim=2)
    return networks.create("mlp", in_dim=4, dim=2, hidden=[5]), nn.ModuleDict({"high": loss})


@pytest.mark.parametrize(
    ("name", "kind"),
    [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("radam", torch.optim.RAdam)],
)
def test_every_parameter_is_there_once(name, kind):
    model, loss = parts()
    optimizer = create_optimizer(OptimizerSection(name=name, lr=0.1), model, loss)
    assert isinstance(optimizer, kind)
    held = [id(each) for group in optimizer.param_groups for each in group["params"]]
    assert sorted(held) == sorted(id(each) for module in (model, loss) for each in module.parameters())


@pytest.mark.parametrize(("multiplier", "rate"), [(None, 10.0), (3.0, 0.3)])
def test_head_and_proxies_have_rates_of_their_own_and_proxies_no_decay(multiplier, rate):
    section = OptimizerSection(lr=0.1, head_multiplier=2.0, weight_decay=0.5, loss_multiplier=multiplier)
    groups = create_optimizer(section, *parts()).param_groups
    found = {group["name"]: (group["lr"], group["weight_decay"]) for group in groups}
    assert found == {"backbone": (0.1, 0.5), "head": (0.2, 0.5), "loss": (pytest.approx(rate), 0.0)}


def test_proxies_that_two_losses_share_move_once():
    first, second = (losses.create(name, num_classes=3, dim=2) for name in ("softmax", "group"))
    second.proxies = first.proxies
    optimizer = create_optimizer(OptimizerSection(lr=0.1), parts()[0], nn.ModuleList([first, second]))
    assert [group["name"] for group in optimizer.param_groups] == ["backbone", "head", "loss.0"]


def test_nothing_to_train_is_an_error():
    model = networks.create("linear", in_dim=4, dim=None, head="none")
    with pytest.raises(ValueError, match="nothing to train"):
        create_optimizer(OptimizerSection(lr=0.1), model, losses.create("raw"))
