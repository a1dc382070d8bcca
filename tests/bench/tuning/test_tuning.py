"""Searching for settings: on validation classes alone, interrupted and shared, to the end."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock
from training_runs import Interrupts, recipe, train, vectors

import nearfar
from nearfar.bench.tuning import results, samplers, tuner, workers
from nearfar.bench.tuning import space as tuning_space
from nearfar.bench.tuning import study as tuning_study
from nearfar.bench.tuning.samplers import TakenPoint, next_combination, next_in_turn
from nearfar.training.evaluation import embeddings
from nearfar.training.recipe.files import RecipeError, load, to_toml
from nearfar.training.run.folder import RunFolder
from nearfar.training.trainer import Stopped
from nearfar.utils.progress import Display

optuna = pytest.importorskip("optuna")

SPACES = Path(__file__).parents[3] / "recipes" / "spaces"
MARGINS = {"loss.margin": {"low": 0.0, "high": 0.4, "step": 0.2}}
VALIDATED = {"split__name": "fixed_validation", "split__share": 0.34, "training__epochs": 2}


def plan(folder: Path, space: Any = MARGINS, **settings: Any) -> tuner.TuningPlan:
    """A tuning of seconds; settings with "__" are the recipe's."""
    chosen = VALIDATED | {key: value for key, value in settings.items() if "__" in key}
    others = {key: value for key, value in settings.items() if "__" not in key}
    file = folder / "vectors.npz"
    found = recipe(file if file.exists() else vectors(folder), **chosen)
    return tuner.plan(found, space, folder / "tuned", **{"sampler": "grid", **others})


def states(found: results.StudyResults) -> list[str]:
    return [trial.state for trial in found.trials]


class Told(Display):
    """Remembers what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


# --- a run without its test --------------------------------------------------------------------------------------


def test_a_run_may_leave_the_test_classes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedded: list[int] = []
    original = embeddings.embed

    def embed(model: Any, loader: Any, rows: Any, **settings: Any) -> Any:
        embedded.extend(rows)
        return original(model, loader, rows, **settings)

    monkeypatch.setattr(embeddings, "embed", embed)
    result = train(recipe(vectors(tmp_path), evaluation__test=False, **VALIDATED), tmp_path / "run")
    assert "test" not in result.metrics
    assert 0 < result.metrics["validation"]["recall@1"] <= 1
    assert embedded
    assert max(embedded) < 72, "the second half of the classes is the test"
    run = RunFolder(tmp_path / "run")
    assert not run.embeddings.exists()
    assert not run.queries.exists()
    assert json.loads(run.manifest.read_text())["recipe"]["evaluation"]["test"] is False


def test_a_run_that_would_measure_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"evaluation\.test is false and split\.name is 'standard'.*fixed_validation"):
        recipe(vectors(tmp_path), evaluation__test=False)


# --- spaces ------------------------------------------------------------------------------------------------------


def test_keys_may_be_written_in_one_or_as_tables() -> None:
    entry = {"low": 0, "high": 1, "step": 0.5}
    one, other = (tuning_space.from_dict(table) for table in ({"loss.margin": entry}, {"loss": {"margin": entry}}))
    assert one == other
    assert one[0].values() == [0, 0.5, 1.0]
    assert tuning_space.from_dict(tuning_space.to_dict(one)) == one


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "the space is empty"),
        ({"loss.margin": 0.5}, "loss.margin is 0.5; allowed: a table with low and high, or with choices"),
        ({"loss.margin": {"low": 0.0}}, "loss.margin.high is missing"),
        (
            {"loss.margin": {"lo": 0.0, "high": 1.0}},
            "unknown key loss.margin.lo .did you mean 'loss.margin.low'..; loss.margin has low, high, step, log",
        ),
        ({"loss.margin": {"low": 1.0, "high": 0.0}}, "loss.margin.high is 0.0; it must be > loss.margin.low, 1.0"),
        ({"loss.margin": {"low": 0.0, "high": 1.0, "step": 2.0}}, r"loss.margin.step is 2.0; it must be > 0 and ≤ 1.0"),
        ({"loss.margin": {"low": 0.0, "high": 1.0, "log": True}}, "requires low > 0"),
        ({"loss.margin": {"low": 0, "high": 1}}, "write 0.0 and 1.0 for all numbers"),
        ({"loss.margin": {"low": "a", "high": 1}}, "loss.margin.low is 'a'; allowed: a number"),
        ({"loss.margin": {"choices": []}}, r"loss.margin.choices is \[\]; allowed: a list of one or more values"),
        ({"loss.margin": {"choices": [1, 1]}}, "values must be different"),
        ({"loss.margin": {"choices": [1], "low": 0}}, "unknown key loss.margin.low; loss.margin has choices"),
        ({"training.seed": {"choices": [0, 1]}}, "training.seed defines the evaluation"),
        ({"split.share": {"low": 0.1, "high": 0.5}}, "split.share defines the evaluation"),
        ({"evaluation.crop": {"choices": ["none"]}}, "evaluation.crop defines the evaluation"),
        ({"training": {"choices": [{"seed": 0}, {"seed": 1}]}}, "training contains training.seed.*one by one"),
        ({"data": {"choices": [{"root": "a"}, {"root": "b"}]}}, "data contains data.name.*one by one"),
    ],
)
def test_a_wrong_space_is_refused_with_what_is_allowed(table: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        tuning_space.from_dict(table)


def test_all_problems_of_a_space_are_in_one_error(tmp_path: Path) -> None:
    wrong = {"loss.margin": {"lo": 0.0, "high": 1.0}, "split": {"share": {"low": 0.1, "high": 0.2}}, "loss.alpha": 3}
    lines = (
        "4 problems:",
        "  loss.margin.low is missing",
        "  unknown key loss.margin.lo .*",
        "  split.share .*",
        "  loss.al",
    )
    with pytest.raises(ValueError, match="\n".join(lines)):
        tuning_space.from_dict(wrong)
    with pytest.raises(RecipeError, match=r"2 problems:\n.*marign.*\n.*-1.0"):
        plan(tmp_path, {"loss.marign": {"choices": [0.1, 0.2]}, "optimizer.lr": {"low": -1.0, "high": 1.0}})


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({"loss.marign": {"choices": [0.1]}}, "marign.*did you mean 'loss.margin'"),
        ({"loss.margin": {"choices": [0.1, "much"]}}, "margin is 'much'"),
        ({"optimizer.lr": {"low": -1.0, "high": 1.0}}, "optimizer.lr is -1.0"),
    ],
)
def test_keys_and_values_that_the_recipe_cannot_have_are_refused_before_anything_is_trained(
    tmp_path: Path, space: dict[str, Any], words: str
) -> None:
    with pytest.raises(RecipeError, match=words):
        plan(tmp_path, space)


def test_a_recipe_without_validation_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"split\.name is 'standard'.*--set split\.name=fixed_validation"):
        tuner.plan(recipe(vectors(tmp_path)), MARGINS, tmp_path / "tuned")


def test_a_grid_needs_steps_and_a_huge_one_a_number(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"optimizer\.lr is continuous.*add a step"):
        plan(tmp_path, {"optimizer.lr": {"low": 1e-4, "high": 1e-2, "log": True}})
    huge = {key: {"low": 0.001, "high": 1.0, "step": 0.001} for key in ("loss.margin", "optimizer.lr")}
    with pytest.raises(ValueError, match=r"1,000,000 combinations.*in_turn.*2,000"):
        plan(tmp_path, huge)


@pytest.mark.parametrize("file", sorted(SPACES.glob("*.toml")), ids=lambda file: file.stem)
def test_published_spaces_fit_their_recipes(file: Path) -> None:
    recipes = sorted((SPACES.parent / "cub").glob(f"*{file.stem}.toml"))
    assert recipes
    for one in recipes:
        tuning_space.check(tuning_space.load(file), load(one))


def test_spaces_of_the_thesis_hold_what_it_found() -> None:
    """Table 15, "Optimal Value"."""
    found = {
        "multi_similarity": {"base": 0.8, "alpha": 18, "beta": 76, "epsilon": 0.4},
        "soft_triple": {"margin": 0.4, "alpha": 78, "lr_multiplier": 0.5, "gamma": 58, "tau": 0.4},
        "proxy_anchor": {"margin": 0.1, "alpha": 32},
    }
    for name, best in found.items():
        space = tuning_space.load(SPACES / f"{name}.toml")
        assert [one.key for one in space] == [f"loss.{key}" for key in best]
        for one, value in zip(space, best.values(), strict=True):
            assert value in (one.values() or []), one.key


# --- points ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffled", [samplers.SHUFFLED, 2])
def test_a_grid_goes_through_every_combination_once(monkeypatch: pytest.MonkeyPatch, shuffled: int) -> None:
    monkeypatch.setattr(samplers, "SHUFFLED", shuffled)
    values = {"a": [1, 2, 3], "b": ["x", "y"]}
    tried: list[TakenPoint] = []
    while (point := next_combination(values, tried, seed=3)) is not None:
        tried.append(TakenPoint(point, None, False))
    assert sorted((one.point["a"], one.point["b"]) for one in tried) == [(a, b) for a in (1, 2, 3) for b in ("x", "y")]


def test_keys_in_turn_keep_the_best_value_of_those_before() -> None:
    values = {"a": [1, 2], "b": [5, 6]}
    score = {(1, None): 0.5, (2, None): 0.4, (1, 5): 0.6, (1, 6): 0.7}
    tried: list[TakenPoint] = []
    while (point := next_in_turn(values, tried)) is not None:
        tried.append(TakenPoint(point, score[point["a"], point.get("b")], True))
    assert [one.point for one in tried] == [{"a": 1}, {"a": 2}, {"a": 1, "b": 5}, {"a": 1, "b": 6}]


def test_in_turn_waits_for_what_decides() -> None:
    tried = [TakenPoint({"a": 1}, 0.5, True), TakenPoint({"a": 2}, None, False)]
    with pytest.raises(samplers.Wait):
        next_in_turn({"a": [1, 2], "b": [5, 6]}, tried)


def test_a_key_whose_trials_all_failed_stays_as_it_is() -> None:
    tried = [TakenPoint({"a": 1}, None, True)]
    assert next_in_turn({"a": [1], "b": [5]}, tried) == {"b": 5}


# --- studies -----------------------------------------------------------------------------------------------------


def test_a_grid_is_searched_and_written_down(tmp_path: Path) -> None:
    chosen = plan(tmp_path, training__epochs=1)
    found = tuner.tune(chosen)
    assert states(found) == ["finished"] * 3
    assert sorted(trial.values["loss.margin"] for trial in found.trials) == [0.0, 0.2, 0.4]
    best = found.best
    assert best is not None
    assert best.value == max(trial.value or 0 for trial in found.trials)
    written = load(chosen.out / "best.toml")
    assert written.loss.settings["margin"] == best.values["loss.margin"]
    assert written.evaluation.test, "training the best recipe measures the test"
    listed = json.loads((chosen.out / "trials.json").read_text())
    assert listed["part"] == "validation"
    assert listed["best"] == best.number
    assert [trial["value"] for trial in listed["trials"]] == [trial.value for trial in found.trials]


def test_one_call_plans_and_searches(tmp_path: Path) -> None:
    settings = {"space": {"loss.margin": {"choices": [0.3]}}, "out": tmp_path / "tuned", "sampler": "grid"}
    overrides = {"split.name": "fixed_validation", "split.share": 0.34, "training.epochs": 1}
    found = nearfar.bench.tune(recipe(vectors(tmp_path)), overrides=overrides, **settings)
    assert states(found) == ["finished"]
    assert load(tmp_path / "tuned" / "best.toml").loss.settings["margin"] == 0.3
    with pytest.raises(ValueError, match="trials is 0"):
        nearfar.bench.tune(recipe(vectors(tmp_path)), trials=0, **settings)


def test_the_value_of_a_trial_is_that_of_training_it_with_its_test(tmp_path: Path) -> None:
    chosen = plan(tmp_path, {"loss.margin": {"choices": [0.3]}})
    found = tuner.tune(chosen)
    again = train(load(chosen.out / "best.toml"), tmp_path / "again")
    assert found.trials[0].value == again.metrics["validation"]["recall@1"]
    assert 0 < again.metrics["test"]["recall@1"] <= 1


def test_trials_keep_numbers_and_no_checkpoints(tmp_path: Path) -> None:
    chosen = plan(tmp_path, {"loss.margin": {"choices": [0.3]}})
    tuner.tune(chosen)
    (folder,) = (chosen.out / "trials").iterdir()
    assert (folder / "metrics.json").is_file()
    assert "test" not in json.loads((folder / "metrics.json").read_text())
    assert not (folder / "checkpoint.safetensors").exists()


def test_what_is_done_is_not_done_again_and_more_can_be_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = {"loss.margin": {"low": 0.0, "high": 0.9}}
    settings: dict[str, Any] = {"sampler": "random", "training__epochs": 1, "prune": False}
    first = tuner.tune(plan(tmp_path, space, trials=2, **settings))
    second = tuner.tune(plan(tmp_path, space, trials=4, **settings))
    assert [trial.values for trial in second.trials[:2]] == [trial.values for trial in first.trials]
    assert len({trial.values["loss.margin"] for trial in second.trials}) == 4, "a sitting draws other points"
    monkeypatch.setattr("nearfar.training.trainer.train", lambda *_, **__: pytest.fail("nothing is left to train"))
    assert tuner.tune(plan(tmp_path, space, trials=4, **settings)) == second


def test_another_sampler_goes_on_and_is_named(tmp_path: Path) -> None:
    told = Told()
    tuner.tune(plan(tmp_path, sampler="random", trials=1), display=told)
    assert not any("sampler" in text for text in told.lines)
    tuner.tune(plan(tmp_path, sampler="tpe", trials=2), display=told)
    assert "earlier trials used sampler 'random'; new ones use 'tpe'" in told.lines


def test_another_recipe_or_space_needs_another_study(tmp_path: Path) -> None:
    tuner.tune(plan(tmp_path, trials=1))
    with pytest.raises(ValueError, match=r"started with another recipe \(optimizer.lr: 0.01 → 0.02\)"):
        tuner.tune(plan(tmp_path, optimizer__lr=0.02))
    with pytest.raises(ValueError, match="started with another space"):
        tuner.tune(plan(tmp_path, {"loss.margin": {"choices": [0.1]}}))


def test_hopeless_trials_are_pruned_and_leave_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "STARTUP", 1)
    space = {"optimizer.lr": {"choices": [0.01, 1e-7, 2e-7]}}
    chosen = plan(
        tmp_path, space, sampler="in_turn", prune=True, training__epochs=3, **{"network__settings": {"hidden": [2]}}
    )
    scores = iter([0.5, 0.6, 0.7, *[0.1] * 9])
    monkeypatch.setattr(
        embeddings, "measure_parts", lambda _, found: ({part: {"recall@1": next(scores)} for part in found}, None)
    )
    told = Told()
    found = tuner.tune(chosen, display=told)
    assert states(found) == ["finished", "pruned", "pruned"]
    assert [len(trial.reports) for trial in found.trials] == [3, 1, 1]
    assert [folder.name for folder in (chosen.out / "trials").iterdir()] == ["0001"]
    assert any("pruned at 0.1000" in line for line in told.lines)


def test_a_kept_pruned_trial_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "STARTUP", 1)
    chosen = plan(tmp_path, {"optimizer.lr": {"choices": [0.01, 1e-7]}}, sampler="in_turn", prune=True, keep=True)
    scores = iter([0.5, 0.6, *[0.1] * 9])
    monkeypatch.setattr(
        embeddings, "measure_parts", lambda _, found: ({part: {"recall@1": next(scores)} for part in found}, None)
    )
    assert states(tuner.tune(chosen)) == ["finished", "pruned"]
    assert (chosen.out / "trials" / "0002" / "given_up").exists()
    assert not (chosen.out / "trials" / "0002" / "metrics.json").exists()
    assert (chosen.out / "trials" / "0001" / "checkpoint.safetensors").is_file()


def test_a_trial_that_fails_does_not_end_the_search(tmp_path: Path) -> None:
    chosen = plan(tmp_path, {"sampler.per_class": {"choices": [3, 500]}})
    found = tuner.tune(chosen)
    assert sorted(states(found)) == ["failed", "finished"]
    (failed,) = [trial for trial in found.trials if trial.state == "failed"]
    assert "per_class" in (failed.error or "") or "batch" in (failed.error or "")
    assert tuner.tune(chosen) == found, "and is not tried again"


def test_trials_that_all_fail_end_it_and_may_be_mended(tmp_path: Path) -> None:
    space = {"loss.margin": {"choices": [0.1, 0.2, 0.3]}}
    with pytest.raises(RuntimeError, match="all 3 trials failed; the last one: "):
        tuner.tune(plan(tmp_path, space, sampler__per_class=500))
    assert states(tuner.tune(plan(tmp_path, space, training__epochs=1))) == ["finished"] * 3


def test_missing_data_ends_it_at_once(tmp_path: Path) -> None:
    chosen = plan(tmp_path, data__root=str(tmp_path / "nowhere.npz"))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        tuner.tune(chosen)


def test_an_interrupted_trial_goes_on_where_it_was(tmp_path: Path) -> None:
    chosen = plan(tmp_path, {"loss.margin": {"choices": [0.3]}}, training__epochs=4)
    with pytest.raises(Stopped):
        tuner.tune(chosen, display=Interrupts(12, signal.SIGINT))
    assert (chosen.out / "trials" / "0001" / "checkpoint.safetensors").is_file()
    told = Told()
    found = tuner.tune(chosen, display=told)
    (trial,) = found.trials
    assert trial.state == "finished"
    assert trial.folder == "0001"
    whole = tuner.tune(dataclasses.replace(chosen, out=tmp_path / "whole", study="whole"))
    assert trial.value == whole.trials[0].value
    assert trial.reports == whole.trials[0].reports


WORKER = """
import sys
from nearfar.bench.tuning import tuner
tuner.tune(tuner.plan(sys.argv[1], {"loss.margin": {"choices": [0.1, 0.2, 0.3]}}, sys.argv[2], sampler="grid"))
"""


def test_a_killed_worker_leaves_nothing_undone(tmp_path: Path) -> None:
    chosen = plan(tmp_path, {"loss.margin": {"choices": [0.1, 0.2, 0.3]}}, training__epochs=6)
    (tmp_path / "recipe.toml").write_text(to_toml(chosen.recipe))
    command = [sys.executable, "-c", WORKER, str(tmp_path / "recipe.toml"), str(chosen.out)]
    victim = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    while not (chosen.out / "trials" / "0002" / "log.jsonl").is_file() and victim.poll() is None:
        time.sleep(0.01)
    victim.kill()
    assert victim.wait() == -signal.SIGKILL
    found = tuner.tune(chosen)
    assert sorted(trial.values["loss.margin"] for trial in found.trials) == [0.1, 0.2, 0.3]
    assert states(found) == ["finished"] * 3
    assert sorted(trial.folder or "" for trial in found.trials)[:2] == ["0001", "0002"], "the second went on"


def test_a_trial_is_its_workers_own_until_its_result_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = tuner._Worker._trial

    def and_another_looks(self: Any, *arguments: Any) -> float:
        value = trial(self, *arguments)
        tuner.open_study(self.plan).recover()
        return value

    monkeypatch.setattr(tuner._Worker, "_trial", and_another_looks)
    chosen = plan(tmp_path, {"loss.margin": {"choices": [0.0, 0.1]}}, trials=2, sampler="random", training__epochs=1)
    assert states(tuner.tune(chosen)) == ["finished", "finished"]
    assert len(tuner.open_study(chosen).trials()) == 2


# --- workers in each other's way ---------------------------------------------------------------------------------


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials end at once, and nothing is written down: workers are threads here, which would share their drafts."""
    metrics = {"seconds": 0.0, "epoch": 1, "validation": {"recall@1": 0.5}}
    monkeypatch.setattr(tuner._Worker, "_train", lambda *_: metrics)
    monkeypatch.setattr(results, "write", results.read)


def together(chosen: tuner.TuningPlan, when_one_ends: Callable[[], object]) -> results.StudyResults:
    """What two workers find at the same time; neither may die."""
    tuner.open_study(chosen)
    with ThreadPoolExecutor(2) as pool:
        workers = [pool.submit(tuner.tune, chosen, worker=number) for number in range(2)]
        for worker in workers:
            worker.add_done_callback(lambda _: when_one_ends())
        for worker in workers:
            worker.result(timeout=60)
    return tuner.tune(chosen)


def each_once(found: results.StudyResults) -> bool:
    """Whether there is a trial for each of the three margins, and no other."""
    margins = sorted(trial.values["loss.margin"] for trial in found.trials)
    return margins == [0.0, 0.2, 0.4] and states(found) == ["finished"] * 3


def when_one_waits(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    """Call something when a worker waits for its turn."""

    class Lock(FileLock):
        def __enter__(self) -> Any:
            return self.acquire(cancel_check=lambda: call() is self).__enter__()  # never canceled

    monkeypatch.setattr(tuning_study, "FileLock", Lock)


@contextmanager
def before_trials_change(wait: Callable[[], object]) -> Iterator[None]:
    """Wait when somebody has read that a trial is to be had, and has not yet written that it is taken."""
    sqlalchemy = pytest.importorskip("sqlalchemy")

    def look(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("UPDATE trials "):
            wait()

    place = (sqlalchemy.engine.Engine, "before_cursor_execute", look)
    sqlalchemy.event.listen(*place)
    try:
        yield
    finally:
        sqlalchemy.event.remove(*place)


# Threads share what is done with warnings.
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.usefixtures("untrained")
def test_two_workers_never_take_the_same_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=30)
    when_one_waits(monkeypatch, both.abort)

    def wait() -> None:
        with suppress(threading.BrokenBarrierError):
            both.wait()

    with before_trials_change(wait):
        assert each_once(together(plan(tmp_path), both.abort))


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.usefixtures("untrained")
def test_what_a_worker_queued_for_itself_is_not_taken_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue, ask, taken = tuning_study.Study.enqueue, optuna.Study.ask, threading.Event()
    when_one_waits(monkeypatch, taken.set)

    def enqueue_and_wait(self: tuning_study.Study, point: dict[str, Any]) -> None:
        enqueue(self, point)
        taken.wait(timeout=30)

    def ask_and_tell(self: Any, *arguments: Any) -> Any:
        trial = ask(self, *arguments)
        taken.set()
        return trial

    monkeypatch.setattr(tuning_study.Study, "enqueue", enqueue_and_wait)
    monkeypatch.setattr(optuna.Study, "ask", ask_and_tell)
    chosen = plan(tmp_path)
    assert each_once(together(chosen, taken.set))
    assert len(tuner.open_study(chosen).study.trials) == 3, "none was dropped either"


def take_elsewhere(chosen: tuner.TuningPlan) -> Any:
    """A trial in the hands of a worker on another machine."""
    with tuning_study.quiet(), pytest.warns(UserWarning, match="Heartbeat"):
        trial = tuner.open_study(chosen).study.ask()
    trial.set_user_attr("worker", "elsewhere")
    return trial


@pytest.mark.usefixtures("untrained")
def test_a_point_that_another_machine_took_first_is_not_replaced_by_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, others = plan(tmp_path), []
    enqueue = tuning_study.Study.enqueue

    def enqueue_and_lose(self: tuning_study.Study, point: dict[str, Any]) -> None:
        enqueue(self, point)
        if not others:
            others.append(take_elsewhere(chosen))

    monkeypatch.setattr(tuning_study.Study, "enqueue", enqueue_and_lose)
    found = tuner.tune(chosen)
    assert sorted(states(found)) == ["finished", "finished", "running"]
    study = tuner.open_study(chosen).study
    others[0].suggest_float("loss.margin", 0.0, 0.4, step=0.2)
    study.tell(others[0].number, 0.5)
    assert each_once(tuner.tune(chosen))


def silent_for_long(trial: Any) -> None:
    """The last sign of life of a trial's worker was years ago."""
    storage = trial.study._storage
    storage.record_heartbeat(trial._trial_id)
    with storage._backend.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE trial_heartbeats SET heartbeat = '2000-01-01 00:00:00'")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting would be for ever."""
    monkeypatch.setattr(tuner, "time", SimpleNamespace(sleep=lambda _: pytest.fail("waits for ever")))


@pytest.mark.usefixtures("untrained", "impatient")
@pytest.mark.parametrize("sampler", ["grid", "in_turn"])
def test_what_a_silent_machine_left_is_made_at_the_end(tmp_path: Path, sampler: str) -> None:
    chosen = plan(tmp_path, sampler=sampler)
    tuner.tune(dataclasses.replace(chosen, trials=2))
    study = tuner.open_study(chosen)
    (last,) = {0.0, 0.2, 0.4} - {trial.params["loss.margin"] for trial in study.trials()}
    study.enqueue({"loss.margin": last})
    silent_for_long(take_elsewhere(chosen))
    assert each_once(tuner.tune(chosen))


@pytest.mark.usefixtures("untrained")
def test_a_worker_that_lives_is_not_given_up_because_its_machine_slept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = tuner._Worker._train

    def sleep_while_another_looks(self: Any, folder: Path, values: Any, reporter: Any) -> Any:
        silent_for_long(reporter.trial)
        tuner.open_study(self.plan).recover()
        return trained(self, folder, values, reporter)

    monkeypatch.setattr(tuner._Worker, "_train", sleep_while_another_looks)
    assert each_once(tuner.tune(plan(tmp_path)))


@pytest.mark.usefixtures("untrained", "impatient")
@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
@pytest.mark.parametrize("sampler", ["grid", "in_turn"])
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_trial_that_ended_before_it_took_its_values_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: str, how: str
) -> None:
    chosen = plan(tmp_path, sampler=sampler)

    def stop(*_: Any, **__: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tuning_study.Study, "is_redundant", stop)
        if how == "killed":
            patch.setattr(optuna.Study, "optimize", lambda self, *_, **__: (self.ask(), stop()))
        with pytest.raises(KeyboardInterrupt):
            tuner.tune(chosen)
    assert each_once(tuner.tune(chosen))


@pytest.mark.usefixtures("untrained")
def test_a_trial_whose_folder_is_held_waits_until_it_is_free(tmp_path: Path) -> None:
    chosen = plan(tmp_path, trials=1)
    study = tuner.open_study(chosen)
    study.enqueue({"loss.margin": 0.2})
    trial = take_elsewhere(chosen)
    with study.claim(trial):
        study.study.tell(trial.number, state=study.states.FAIL)
        with study.exclusive(), tuning_study.quiet():
            study.recover()
        assert len(study.study.trials) == 1
    (found,) = tuner.tune(chosen).trials
    assert (found.state, found.folder, found.values) == ("finished", "0001", {"loss.margin": 0.2})


def test_jobs_share_the_work(tmp_path: Path) -> None:
    chosen = plan(
        tmp_path, {"loss.margin": {"choices": [0.0, 0.1, 0.2]}}, trials=3, sampler="random", training__epochs=1
    )
    found = workers.run(chosen, jobs=2, display=Display())
    assert [state for state in states(found) if state in ("finished", "pruned")] == states(found)
    assert len(found.trials) == 3


def test_where_a_worker_trains_is_not_what_was_found(tmp_path: Path) -> None:
    chosen = plan(tmp_path, trials=1, training__device="auto")
    tuner.tune(chosen, device="cpu")
    assert load(tmp_path / "tuned" / "trials" / "0001").training.device == "cpu"
    assert load(tmp_path / "tuned" / "best.toml").training.device == "auto"


def test_workers_take_gpus_in_turn_and_share_the_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    told: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setattr(os, "setpgid", lambda *_: None)
    monkeypatch.setattr(workers, "processors", lambda: 8)
    monkeypatch.setattr(workers, "tune", lambda plan, *, device, **_: told.append((plan, device)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for device, expected in (("auto", "cuda:1"), ("cpu", None)):
        chosen = plan(tmp_path, training__device=device)
        workers._work(chosen, 3, 4, True, None, [])
        assert told == [2, (chosen, expected)]
        told.clear()


def test_optuna_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = plan(tmp_path)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"pip install 'nearfar\[tune\]'"):
        tuner.tune(chosen)
