"""NTXent in both directions with a learned temperature: the loss of CLIP."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

import nearfar as nf


def clip(images, texts, logit_scale):
    """The pseudocode of the paper, Figure 3."""
    logits = logit_scale.exp() * normalize(images, dim=1) @ normalize(texts, dim=1).T
    items = torch.arange(len(images))
    return (cross_entropy(logits, items) + cross_entropy(logits.T, items)) / 2


def towers(count=12):
    generator = torch.Generator().manual_seed(0)
    images, noise = (torch.randn(count, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    return images.requires_grad_(), (images.detach() + 0.8 * noise).requires_grad_()


def clip_loss(**settings):
    return nf.losses.NTXent(symmetric=True, learn_temperature=True, **settings).double()


@pytest.mark.parametrize("temperature", [0.02, 0.07, 1.0])
def test_value_and_gradients_are_those_of_clip(temperature):
    images, texts = towers()
    loss, items = clip_loss(temperature=temperature), torch.arange(len(images))
    expected = clip(images, texts, loss.logit_scale)
    actual = loss(images, items, texts, items)
    assert actual.item() == pytest.approx(expected.item(), rel=1e-12)
    leaves = [images, texts, loss.logit_scale]
    for mine, other in zip(torch.autograd.grad(actual, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


def test_both_directions_have_the_same_loss():
    images, texts = towers()
    items, other_items = torch.arange(12) // 2, torch.arange(12) // 3  # several of each item, on both sides
    loss = clip_loss()
    one, other = loss(images, items, texts, other_items), loss(texts, other_items, images, items)
    assert one.item() == pytest.approx(other.item(), rel=1e-12)


def test_texts_of_one_item_are_not_pushed_from_its_images():
    images, texts = towers()
    loss, items = nf.losses.NTXent(symmetric=True), torch.arange(12) // 2
    weights = loss.pair_weights(images, items, texts, items)
    assert (weights >= 0).all()  # those of positives pull, those of negatives push
    positives = items.unsqueeze(1) == items
    assert (weights[positives] > 0).all()


def test_the_scale_is_limited_to_100_and_comes_back():
    images, texts = towers()
    loss, items = clip_loss(temperature=0.01), torch.arange(len(images))
    with torch.no_grad():
        loss.logit_scale.add_(5.0)
    value = loss(images, items, texts, items)
    limit = torch.tensor(math.log(100.0), dtype=torch.float64)
    assert loss.logit_scale.item() == pytest.approx(limit.item())
    assert value.item() == pytest.approx(clip(images, texts, limit).item())
    value.backward()
    assert loss.logit_scale.grad.item() != 0


def test_the_temperature_is_trained_without_weight_decay():
    loss = nf.losses.NTXent(learn_temperature=True)
    (group,) = loss.param_groups(lr=1e-3)
    assert group == {"params": [loss.logit_scale], "lr": 1e-3, "weight_decay": 0.0}
    assert nf.losses.NTXent().param_groups(lr=1e-3) == []


def test_a_learned_temperature_beyond_the_limit_is_an_error():
    with pytest.raises(ValueError, match=r"temperature is 0\.001; it must be ≥ 0\.01"):
        nf.losses.NTXent(learn_temperature=True, temperature=0.001)
