"""Every registered loss goes through the battery of checks.py, those of pairs also through the other two files."""

import inspect

import pytest
import torch
from cases import CASES, DEFAULTS
from checks import CHECKS, assert_close, make_batch
from pair_checks import PAIR_CHECKS
from supervision_checks import SUPERVISION_CHECKS

import nearfar as nf
from nearfar.losses import PairLoss

PAIR_CASES = [case for case in CASES if case.family == "pair"]
SUPERVISED_CASES = [case for case in PAIR_CASES if case.create().needs_labels is None]


def test_every_registered_loss_is_in_the_battery():
    assert {case.key for case in CASES} == set(nf.losses.names())


def test_every_loss_of_pairs_is_tested_as_one():
    assert {case.key for case in PAIR_CASES} == {
        key for key in nf.losses.names() if issubclass(nf.losses.get(key), PairLoss)
    }


def test_every_loss_is_tested_with_its_defaults():
    assert all(not case.settings for case in DEFAULTS)


def test_every_setting_of_every_loss_is_varied():
    varied = {(case.key, name) for case in CASES for name in case.settings}
    settings = {
        (key, name)
        for key in nf.losses.names()
        for name, default in nf.losses.defaults(key).items()
        if default is not inspect.Parameter.empty  # sizes, as the batch has them
    }
    # Learning rates have nothing to do with the value; see test_margin.py and test_proxies.py.
    rates = {("margin", "beta_lr")} | {(key, name) for key, name in settings if name == "lr_multiplier"}
    assert settings - varied == rates


@pytest.mark.filterwarnings("ignore:.*more embeddings than dimensions")  # some batches have one or two
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_battery(check, case):
    check(case)


@pytest.mark.parametrize("case", PAIR_CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("check", PAIR_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_battery_of_pairs(check, case):
    check(case)


@pytest.mark.parametrize("case", SUPERVISED_CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("check", SUPERVISION_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_battery_of_supervision(check, case):
    check(case)


@pytest.mark.parametrize("case", DEFAULTS, ids=lambda case: case.key)
def test_a_compiled_step_has_the_same_gradient(case):
    loss = case.create(dim=3)
    embeddings, labels = make_batch(sizes=(3, 2, 1), dtype=torch.float32)  # greedy loops are unrolled
    network = torch.nn.Linear(4, 3)

    def step(inputs, labels):
        return loss(network(inputs).tanh(), labels) * 2.0

    def gradient(step):
        network.zero_grad()
        torch.manual_seed(0)
        step(embeddings, labels).backward()
        return network.weight.grad.clone()

    expected = gradient(step)
    torch.compiler.reset()
    assert_close(gradient(torch.compile(step, backend="aot_eager")), expected, 1e-5)
