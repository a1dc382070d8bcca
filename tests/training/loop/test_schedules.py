"""Learning rates over time, against what the words say."""

import json
import math
from dataclasses import asdict

import pytest

from nearfar.training.checkpoint import State
from nearfar.training.recipe.schema import ScheduleSection
from nearfar.training.setup import schedule_factor

STEPS, EPOCHS = 10, 6


class Schedule:
    """A training that only counts."""

    def __init__(self, **section):
        self.section, self.state = ScheduleSection(**section), State()

    def factor(self):
        return schedule_factor(self.section, self.state, STEPS, STEPS * EPOCHS)

    def step_iteration(self):
        self.state.iteration += 1

    def step_epoch(self, metric=None):
        self.state.end_epoch(self.section, metric)


def by_epoch(schedule, metrics=None):
    """The factor in every epoch."""
    rates = []
    for epoch in range(EPOCHS):
        rates.append(round(schedule.factor(), 6))
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
def test_rates_of_the_epochs(section, rates):
    assert by_epoch(Schedule(**section)) == rates


@pytest.mark.parametrize("per", ["epoch", "iteration"])
def test_cosine_falls_to_the_minimum(per):
    schedule = Schedule(name="cosine", per=per, minimum=0.2)
    wanted = [0.2 + 0.8 * (1 + math.cos(math.pi * epoch / EPOCHS)) / 2 for epoch in range(EPOCHS)]
    assert by_epoch(schedule) == pytest.approx(wanted, abs=1e-6)
    assert schedule.factor() == pytest.approx(0.2)


def test_plateau_waits_and_then_falls_down_to_the_minimum():
    schedule = Schedule(name="plateau", patience=1, gamma=0.1, minimum=0.05)
    assert by_epoch(schedule, [0.5, 0.5, 0.4, 0.4, 0.4, 0.6]) == [1.0, 1.0, 1.0, 0.1, 0.1, 0.05]


def test_an_epoch_without_evaluation_tells_plateau_nothing():
    schedule = Schedule(name="plateau", patience=0)
    assert by_epoch(schedule) == [1.0] * 6


def test_warm_up_rises_by_the_step():
    schedule = Schedule(name="constant", warmup=4)
    rates = []
    for _ in range(6):
        rates.append(schedule.factor())
        schedule.step_iteration()
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "section",
    [{"name": "cosine", "per": "iteration", "warmup": 5}, {"name": "plateau", "patience": 0}],
    ids=lambda section: section["name"],
)
def test_state_is_plain_and_goes_on_exactly(section):
    whole, first = Schedule(**section), Schedule(**section)
    for schedule in (whole, first):
        for _ in range(13):
            schedule.step_iteration()
        schedule.step_epoch(0.5)
    resumed = Schedule(**section)
    resumed.state = State(**json.loads(json.dumps(asdict(first.state))))
    assert resumed.factor() == whole.factor()
    for schedule in (whole, resumed):
        schedule.step_epoch(0.4)
        schedule.step_iteration()
    assert resumed.factor() == whole.factor()
