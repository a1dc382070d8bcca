"""Every registered loss goes through the battery of tests/checks.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import CASES, DEFAULTS, Case
from checks import CHECKS, assert_close, make_batch

import nearfar as nf


def test_every_registered_loss_is_in_the_battery() -> None:
    assert {case.key for case in CASES} == set(nf.losses.names())


def test_every_loss_is_tested_with_its_defaults() -> None:
    assert all(not case.settings for case in DEFAULTS)


def test_every_setting_of_every_loss_is_varied() -> None:
    varied = {(case.key, name) for case in CASES for name in case.settings}
    settings = {(key, name) for key in nf.losses.names() for name in nf.losses.defaults(key)}
    # The learning rate of the boundary has nothing to do with its value; see test_margin.py.
    assert settings - varied == {("margin", "beta_lr")}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_battery(check: Callable[[Case], None], case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", DEFAULTS, ids=lambda case: case.key)
def test_a_compiled_step_has_the_same_gradient(case: Case) -> None:
    loss = case.create()
    embeddings, labels = make_batch(dtype=torch.float32)
    network = torch.nn.Linear(4, 3)

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss(network(inputs).tanh(), labels) * 2.0

    def gradient(step: Callable[..., torch.Tensor]) -> torch.Tensor:
        network.zero_grad()
        torch.manual_seed(0)
        step(embeddings, labels).backward()
        assert network.weight.grad is not None
        return network.weight.grad.clone()

    expected = gradient(step)
    torch.compiler.reset()
    assert_close(gradient(torch.compile(step, backend="aot_eager")), expected, 1e-5)
