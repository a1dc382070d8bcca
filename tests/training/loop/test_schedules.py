"""Learning rates over time, against what the words say."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from nearfar.training.loop.optimizers import LearningRateSchedule
from nearfar.training.recipe.schema import ScheduleSection

STEPS, EPOCHS = 10, 6


def optimizer() -> torch.optim.Optimizer:
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate, "name": str(rate)} for rate in (1.0, 10.0)]
    return torch.optim.SGD(groups, lr=1.0)


def made(**section: Any) -> Any:
    return LearningRateSchedule(ScheduleSection(**section), optimizer(), steps_per_epoch=STEPS, steps=STEPS * EPOCHS)


def by_epoch(schedule: Any, metrics: list[float] | None = None) -> list[float]:
    """The first group's rate in every epoch."""
    rates = []
    for epoch in range(EPOCHS):
        rates.append(round(schedule.rates()["1.0"], 6))
        for _ in range(STEPS):
            schedule.step_iteration()
        schedule.step_epoch(None if metrics is None else metrics[epoch])
    return rates


@pytest.mark.parametrize(
    ("section", "rates"),
    [
        ({"name": "constant"}, [1.0] * 6),
        ({"name": "step", "step_size": 2, "gamma": 0.5}, [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]),
        ({"name": "multi_step", "milestones": [1, 4], "gamma": 0.1}, [1.0, 0.1, 0.1, 0.1, 0.01, 0.01]),
        ({"name": "step", "per": "iteration", "step_size": 30, "gamma": 0.5}, [1.0, 1.0, 1.0, 0.5, 0.5, 0.5]),
    ],
)
def test_rates_of_the_epochs(section: dict[str, Any], rates: list[float]) -> None:
    assert by_epoch(made(**section)) == rates


@pytest.mark.parametrize("per", ["epoch", "iteration"])
def test_cosine_falls_to_the_minimum(per: str) -> None:
    schedule = made(name="cosine", per=per, minimum=0.2)
    wanted = [0.2 + 0.8 * (1 + math.cos(math.pi * epoch / EPOCHS)) / 2 for epoch in range(EPOCHS)]
    assert by_epoch(schedule) == pytest.approx(wanted, abs=1e-6)
    assert schedule.rates()["1.0"] == pytest.approx(0.2)


def test_plateau_waits_and_then_falls_down_to_the_minimum() -> None:
    schedule = made(name="plateau", patience=1, gamma=0.1, minimum=0.05)
    assert by_epoch(schedule, [0.5, 0.5, 0.4, 0.4, 0.4, 0.6]) == [1.0, 1.0, 1.0, 0.1, 0.1, 0.05]


def test_an_epoch_without_evaluation_tells_plateau_nothing() -> None:
    schedule = made(name="plateau", patience=0)
    assert by_epoch(schedule) == [1.0] * 6


def test_warm_up_rises_by_the_step() -> None:
    schedule = made(name="constant", warmup=4)
    rates = []
    for _ in range(6):
        rates.append(schedule.rates()["1.0"])
        schedule.step_iteration()
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_groups_keep_their_ratio_in_every_stage() -> None:
    schedule = made(name="step", step_size=1, gamma=0.5)
    schedule.step_epoch()
    schedule.enter_stage(0.1)
    assert schedule.rates() == pytest.approx({"1.0": 0.05, "10.0": 0.5})
    schedule.enter_stage(1.0)
    assert schedule.rates() == pytest.approx({"1.0": 0.5, "10.0": 5.0})


@pytest.mark.parametrize(
    "section",
    [{"name": "cosine", "per": "iteration", "warmup": 5}, {"name": "plateau", "patience": 0}],
    ids=lambda section: section["name"],
)
def test_state_is_plain_and_goes_on_exactly(section: dict[str, Any]) -> None:
    whole, first = made(**section), made(**section)
    for schedule in (whole, first):
        for _ in range(13):
            schedule.step_iteration()
        schedule.step_epoch(0.5)
    resumed = made(**section)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert resumed.rates() == whole.rates()
    for schedule in (whole, resumed):
        schedule.step_epoch(0.4)
        schedule.step_iteration()
    assert resumed.rates() == whole.rates()
