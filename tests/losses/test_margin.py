"""The learned boundary of margin loss."""

import pytest
import torch
from checks import make_batch, run

import nearfar as nf


def test_the_boundary_has_its_own_learning_rate_and_no_decay():
    loss = nf.losses.Margin(beta_lr=0.5)
    (group,) = loss.param_groups(lr=0.1)
    assert group["params"] == [loss.beta]
    assert group["lr"] == 0.5
    assert group["weight_decay"] == 0.0


def test_without_a_learning_rate_of_its_own_it_follows_the_network():
    (group,) = nf.losses.Margin(beta_lr=None).param_groups(lr=0.1)
    assert group["lr"] == 0.1


def test_an_optimiser_step_moves_the_boundary_by_its_gradient():
    loss = nf.losses.Margin(mining="all", beta_lr=0.5)
    optimiser = torch.optim.SGD(loss.param_groups(lr=0.1), lr=0.1, weight_decay=10.0)
    loss(*make_batch("mixed", dtype=torch.float32)).backward()
    before, gradient = loss.beta.item(), loss.beta.grad.item()
    optimiser.step()
    assert gradient != 0
    assert loss.beta.item() == pytest.approx(before - 0.5 * gradient)


def test_each_class_has_its_boundary_and_only_present_classes_learn():
    loss = nf.losses.Margin(mining="all", num_classes=8)
    assert loss.beta.shape == (8,)
    gradient = run(loss, *make_batch("mixed", dtype=torch.float32)).gradients["beta"]
    assert gradient[:5].all()
    assert not gradient[5:].any()


def test_the_price_of_a_wide_boundary():
    batch = make_batch()
    plain, priced = (nf.losses.Margin(mining="all", num_classes=5, nu=nu).double() for nu in (0.0, 0.1))
    assert run(priced, *batch).value.item() == pytest.approx(run(plain, *batch).value.item() + 0.1 * 5 * 1.2)


def test_a_float32_boundary_serves_float64_embeddings():
    embeddings, labels = make_batch("mixed")
    loss = nf.losses.Margin(mining="all")
    loss(embeddings, labels).backward()
    assert loss.beta.dtype == loss.beta.grad.dtype == torch.float32
