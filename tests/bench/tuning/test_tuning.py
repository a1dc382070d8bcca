"""Searching for settings: on validation classes alone, interrupted and shared, to the end."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from training_runs import Interrupts, recipe, train, vectors

import nearfar
from nearfar.bench.tuning import samplers
from nearfar.bench.tuning import space as tuning_space
from nearfar.bench.tuning import study as tuning_study
from nearfar.bench.tuning.samplers import Tried, next_combination, next_in_turn
from nearfar.training.evaluation import embeddings
from nearfar.training.recipe.files import RecipeError, load, to_toml
from nearfar.training.run.folder import RunFolder
from nearfar.training.trainer import Stopped
from nearfar.utils.progress import Display

optuna = pytest.importorskip("optuna")

SPACES = Path(__file__).parents[3] / "recipes" / "spaces"
MARGINS = {"loss.margin": {"low": 0.0, "high": 0.4, "step": 0.2}}
ONE = {"loss.margin": {"choices": [0.3]}}
THREE = {"loss.margin": {"choices": [0.1, 0.2, 0.3]}}
VALIDATED = {"split__name": "fixed_validation", "split__share": 0.34}


def validated(folder, **settings):
    """A recipe with validation classes that trains for a second."""
    file = folder / "vectors.npz"
    settings = settings if "split__name" in settings else VALIDATED | settings
    return recipe(file if file.exists() else vectors(folder), **{"training__epochs": 2, **settings})


def tune(folder, space=MARGINS, **settings):
    """A tuning of seconds; settings with "__" are the recipe's."""
    chosen = validated(folder, **{key: settings.pop(key) for key in list(settings) if "__" in key})
    return nearfar.bench.tune(chosen, space, **{"out": folder / "tuned", "sampler": "grid", **settings})


def states(study):
    return [trial.state for trial in study.trials]


def margins(study):
    return sorted(trial.values["loss.margin"] for trial in study.trials)


class Told(Display):
    """Remembers what is said."""

    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)


# --- a run without its test --------------------------------------------------------------------------------------


def test_a_run_may_leave_the_test_classes_alone(tmp_path, monkeypatch):
    embedded = []
    original = embeddings.embed

    def embed(model, loader, rows, **settings):
        embedded.extend(rows)
        return original(model, loader, rows, **settings)

    monkeypatch.setattr(embeddings, "embed", embed)
    result = train(validated(tmp_path, evaluation__test=False), tmp_path / "run")
    assert "test" not in result.metrics
    assert 0 < result.metrics["validation"]["recall@1"] <= 1
    assert embedded
    assert max(embedded) < 72, "the second half of the classes is the test"
    run = RunFolder(tmp_path / "run")
    assert not run.embeddings.exists()
    assert not run.queries.exists()
    assert json.loads(run.manifest.read_text())["recipe"]["evaluation"]["test"] is False


def test_a_run_that_would_measure_nothing_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"evaluation\.test is false and split\.name is 'standard'.*fixed_validation"):
        recipe(vectors(tmp_path), evaluation__test=False)


# --- spaces ------------------------------------------------------------------------------------------------------


def test_keys_may_be_written_in_one_or_as_tables():
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
        (
            {"loss.margin": {"lo": 0.0, "high": 1.0}, "split": {"share": {"low": 0.1, "high": 0.2}}, "loss.alpha": 3},
            "4 problems:\n  loss.margin.low is missing\n  unknown key loss.margin.lo .*\n  split.share .*\n  loss.al",
        ),
    ],
)
def test_a_wrong_space_is_refused_with_all_its_problems(table, words):
    with pytest.raises((TypeError, ValueError), match=words):
        tuning_space.from_dict(table)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({"loss.marign": {"choices": [0.1]}}, "marign.*did you mean 'loss.margin'"),
        ({"loss.margin": {"choices": [0.1, "much"]}}, "margin is 'much'"),
        (
            {"loss.marign": {"choices": [0.1, 0.2]}, "optimizer.lr": {"low": -1.0, "high": 1.0}},
            r"2 problems:\n.*marign.*\n.*optimizer.lr is -1.0",
        ),
        ({"optimizer.lr": {"low": 1e-4, "high": 1e-2, "log": True}}, r"optimizer\.lr is continuous.*add a step"),
        (
            {key: {"low": 0.001, "high": 1.0, "step": 0.001} for key in ("loss.margin", "optimizer.lr")},
            r"1,000,000 combinations.*in_turn.*2,000",
        ),
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_is_trained(tmp_path, space, words):
    with pytest.raises((RecipeError, ValueError), match=words):
        tune(tmp_path, space)
    assert not (tmp_path / "tuned").exists()


def test_a_recipe_without_validation_classes_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"split\.name is 'standard'.*--set split\.name=fixed_validation"):
        nearfar.bench.tune(recipe(vectors(tmp_path)), MARGINS, tmp_path / "tuned")


@pytest.mark.parametrize("file", sorted(SPACES.glob("*.toml")), ids=lambda file: file.stem)
def test_published_spaces_fit_their_recipes(file):
    recipes = sorted((SPACES.parent / "cub").glob(f"*{file.stem}.toml"))
    assert recipes
    for one in recipes:
        tuning_space.check(tuning_space.load(file), load(one))


def test_spaces_of_the_thesis_hold_what_it_found():
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
def test_a_grid_goes_through_every_combination_once(monkeypatch, shuffled):
    monkeypatch.setattr(samplers, "SHUFFLED", shuffled)
    values = {"a": [1, 2, 3], "b": ["x", "y"]}
    tried = []
    while (point := next_combination(values, tried, seed=3)) is not None:
        tried.append(Tried(point, None, False))
    assert sorted((one.point["a"], one.point["b"]) for one in tried) == [(a, b) for a in (1, 2, 3) for b in ("x", "y")]


def test_keys_in_turn_keep_the_best_value_of_those_before():
    values = {"a": [1, 2], "b": [5, 6]}
    score = {(1, None): 0.5, (2, None): 0.4, (1, 5): 0.6, (1, 6): 0.7}
    tried = []
    while (point := next_in_turn(values, tried)) is not None:
        tried.append(Tried(point, score[point["a"], point.get("b")], True))
    assert [one.point for one in tried] == [{"a": 1}, {"a": 2}, {"a": 1, "b": 5}, {"a": 1, "b": 6}]


def test_in_turn_waits_for_what_decides():
    tried = [Tried({"a": 1}, 0.5, True), Tried({"a": 2}, None, False)]
    assert next_in_turn({"a": [1, 2], "b": [5, 6]}, tried) is None


def test_a_key_whose_trials_all_failed_stays_as_it_is():
    assert next_in_turn({"a": [1], "b": [5]}, [Tried({"a": 1}, None, True)]) == {"b": 5}


# --- studies -----------------------------------------------------------------------------------------------------


def test_a_grid_is_searched_and_written_down(tmp_path):
    study = tune(tmp_path, training__epochs=1)
    assert states(study) == ["finished"] * 3
    assert margins(study) == [0.0, 0.2, 0.4]
    best = study.best
    assert best.value == max(trial.value for trial in study.trials)
    written = load(tmp_path / "tuned" / "best.toml")
    assert written.loss.settings["margin"] == best.values["loss.margin"]
    assert written.evaluation.test, "training the best recipe measures the test"
    listed = json.loads((tmp_path / "tuned" / "trials.json").read_text())
    assert listed["part"] == "validation"
    assert listed["best"] == best.number
    assert [trial["value"] for trial in listed["trials"]] == [trial.value for trial in study.trials]


def test_the_first_trial_may_have_given_settings(tmp_path):
    space = {**MARGINS, "optimizer.lr": {"choices": [0.01, 0.02]}}
    chosen = {"sampler": "random", "training__epochs": 1, "first": {"loss.margin": 0.2}}
    assert tune(tmp_path, space, trials=1, **chosen).trials[0].values == {"loss.margin": 0.2}
    assert tune(tmp_path, space, trials=2, **chosen).trials[1].values.keys() == {"loss.margin", "optimizer.lr"}


@pytest.mark.parametrize("settings", [{"trials": 0}, {"jobs": 0}])
def test_wrong_numbers_are_refused(tmp_path, settings):
    (name,) = settings
    with pytest.raises(ValueError, match=f"{name} is 0"):
        tune(tmp_path, **settings)


def test_the_value_of_a_trial_is_that_of_training_it_with_its_test(tmp_path):
    study = tune(tmp_path, ONE)
    again = train(load(tmp_path / "tuned" / "best.toml"), tmp_path / "again")
    assert study.trials[0].value == again.metrics["validation"]["recall@1"]
    assert 0 < again.metrics["test"]["recall@1"] <= 1


def test_trials_keep_numbers_and_no_checkpoints(tmp_path):
    tune(tmp_path, ONE)
    (folder,) = (tmp_path / "tuned" / "trials").iterdir()
    assert (folder / "metrics.json").is_file()
    assert "test" not in json.loads((folder / "metrics.json").read_text())
    assert not (folder / "checkpoint.safetensors").exists()


def test_what_is_done_is_not_done_again_and_more_can_be_added(tmp_path, monkeypatch):
    space = {"loss.margin": {"low": 0.0, "high": 0.9}}
    settings = {"sampler": "random", "training__epochs": 1, "prune": False}
    first = tune(tmp_path, space, trials=2, **settings)
    second = tune(tmp_path, space, trials=4, **settings)
    assert [trial.values for trial in second.trials[:2]] == [trial.values for trial in first.trials]
    assert len(set(margins(second))) == 4, "a sitting draws other points"
    monkeypatch.setattr("nearfar.training.trainer.train", lambda *_, **__: pytest.fail("nothing is left to train"))
    assert tune(tmp_path, space, trials=4, **settings).trials == second.trials


def test_another_sampler_goes_on_and_is_named(tmp_path):
    told = Told()
    tune(tmp_path, sampler="random", trials=1, display=told)
    assert not any("sampler" in text for text in told.lines)
    tune(tmp_path, sampler="tpe", trials=2, display=told)
    assert "earlier trials used sampler 'random'; new ones use 'tpe'" in told.lines


def test_another_recipe_or_space_needs_another_study(tmp_path):
    tune(tmp_path, trials=1)
    with pytest.raises(ValueError, match=r"started with another recipe \(optimizer.lr: 0.01 → 0.02\)"):
        tune(tmp_path, optimizer__lr=0.02)
    with pytest.raises(ValueError, match="started with another space"):
        tune(tmp_path, ONE)


@pytest.fixture
def measured(monkeypatch):
    """Give the evaluations of trials these scores, and prune from the second trial on."""
    monkeypatch.setattr(tuning_study, "STARTUP", 1)

    def give(*values):
        scores = iter(values)
        measure = lambda _, found: ({part: {"recall@1": next(scores)} for part in found}, None)  # noqa: E731
        monkeypatch.setattr(embeddings, "measure_parts", measure)

    return give


def test_hopeless_trials_are_pruned_and_leave_no_folder(tmp_path, measured):
    measured(0.5, 0.6, 0.7, *[0.1] * 9)
    told, space = Told(), {"optimizer.lr": {"choices": [0.01, 1e-7, 2e-7]}}
    settings = {"training__epochs": 3, "network__settings": {"hidden": [2]}}
    study = tune(tmp_path, space, sampler="in_turn", prune=True, display=told, **settings)
    assert states(study) == ["finished", "pruned", "pruned"]
    assert [len(trial.reports) for trial in study.trials] == [3, 1, 1]
    assert [folder.name for folder in (tmp_path / "tuned" / "trials").iterdir()] == ["0001"]
    assert any("pruned at 0.1000" in line for line in told.lines)


def test_trials_in_turn_run_to_their_end_unless_pruning_is_asked_for(tmp_path, measured):
    measured(0.5, 0.6, *[0.1] * 9)
    study = tune(tmp_path, {"optimizer.lr": {"choices": [0.01, 1e-7]}}, sampler="in_turn")
    assert states(study) == ["finished", "finished"]


def test_a_kept_pruned_trial_is_marked(tmp_path, measured):
    measured(0.5, 0.6, *[0.1] * 9)
    study = tune(tmp_path, {"optimizer.lr": {"choices": [0.01, 1e-7]}}, sampler="in_turn", prune=True, keep=True)
    assert states(study) == ["finished", "pruned"]
    trials = tmp_path / "tuned" / "trials"
    assert (trials / "0002" / "given_up").exists()
    assert not (trials / "0002" / "metrics.json").exists()
    assert (trials / "0001" / "checkpoint.safetensors").is_file()


def test_a_trial_is_the_mean_of_all_folds(tmp_path):
    folds = {"split__name": "k_fold", "split__folds": 2, "sampler__classes": 3, "training__epochs": 1}
    study = tune(tmp_path, {"loss.margin": {"choices": [0.3, 0.5]}}, **folds)
    assert len(study.trials) == 2
    for trial in study.trials:
        files = (tmp_path / "tuned" / "trials" / trial.folder).glob("fold*/metrics.json")
        folds = [json.loads(file.read_text())["validation"]["recall@1"] for file in files]
        assert len(folds) == 2
        assert trial.value == pytest.approx(sum(folds) / 2)
    best = load(tmp_path / "tuned" / "best.toml")
    assert (best.tuning.trials, best.tuning.chosen_by) == (2, "study")


def test_a_trial_that_fails_does_not_end_the_search(tmp_path):
    space = {"sampler.per_class": {"choices": [3, 500]}}
    study = tune(tmp_path, space)
    assert sorted(states(study)) == ["failed", "finished"]
    (failed,) = [trial for trial in study.trials if trial.state == "failed"]
    assert "per_class" in failed.error or "batch" in failed.error
    assert tune(tmp_path, space).trials == study.trials, "and is not tried again"


def test_trials_that_all_fail_end_it_and_may_be_mended(tmp_path):
    with pytest.raises(RuntimeError, match="all 3 trials failed; the last one: "):
        tune(tmp_path, THREE, sampler__per_class=500)
    assert states(tune(tmp_path, THREE, training__epochs=1)) == ["finished"] * 3


def test_missing_data_ends_it_at_once(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        tune(tmp_path, data__root=str(tmp_path / "nowhere.npz"))


# --- interrupted and shared --------------------------------------------------------------------------------------


def test_an_interrupted_trial_goes_on_where_it_was(tmp_path):
    with pytest.raises(Stopped):
        tune(tmp_path, ONE, training__epochs=4, display=Interrupts(12, signal.SIGINT))
    assert (tmp_path / "tuned" / "trials" / "0001" / "checkpoint.safetensors").is_file()
    (trial,) = tune(tmp_path, ONE, training__epochs=4).trials
    assert (trial.state, trial.folder) == ("finished", "0001")
    (whole,) = tune(tmp_path, ONE, training__epochs=4, out=tmp_path / "whole").trials
    assert (trial.value, trial.reports) == (whole.value, whole.reports)


@pytest.mark.parametrize("settings", [{}, {"sampler": "in_turn"}, {"sampler": "random", "trials": 3}])
def test_a_trial_that_ended_before_it_had_its_values_comes_again(tmp_path, monkeypatch, settings):
    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tuning_study.Study, "claim", stop)
        with pytest.raises(KeyboardInterrupt):
            tune(tmp_path, THREE, training__epochs=1, **settings)
    study = tune(tmp_path, THREE, training__epochs=1, **settings)
    assert states(study) == ["finished"] * 3
    if not settings.get("trials"):
        assert margins(study) == [0.1, 0.2, 0.3]


WORKER = """
import sys
from nearfar.bench import tune
space = {"loss.margin": {"choices": [0.1, 0.2, 0.3]}}
tune(sys.argv[1], space, sys.argv[2], sampler="grid", storage=sys.argv[3] or None)
"""


@pytest.mark.parametrize("database", ["", "study.db"])
def test_a_killed_worker_leaves_nothing_undone(tmp_path, database):
    storage = f"sqlite:///{tmp_path / database}" if database else ""
    (tmp_path / "recipe.toml").write_text(to_toml(validated(tmp_path, training__epochs=6)))
    command = [sys.executable, "-c", WORKER, str(tmp_path / "recipe.toml"), str(tmp_path / "tuned"), storage]
    victim = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    while not (tmp_path / "tuned" / "trials" / "0002" / "log.jsonl").is_file() and victim.poll() is None:
        time.sleep(0.01)
    victim.kill()
    assert victim.wait() == -signal.SIGKILL
    study = tune(tmp_path, THREE, training__epochs=6, storage=storage or None)
    assert margins(study) == [0.1, 0.2, 0.3]
    assert states(study) == ["finished"] * 3
    assert sorted(trial.folder for trial in study.trials)[:2] == ["0001", "0002"], "the second went on"


def test_a_trial_belongs_to_its_worker_while_it_runs(tmp_path):
    """Another worker that looks at the study in between takes none of its trials."""

    class Looks(Display):
        def show(self, *_):
            other = tuning_study.Study(study.plan)
            with other.exclusive(), tuning_study.quiet():
                other.recover()
            assert len(other.counted()) == 2

    study = tune(tmp_path, {"loss.margin": {"choices": [0.0, 0.1]}}, trials=1, training__epochs=1)
    both = tune(tmp_path, {"loss.margin": {"choices": [0.0, 0.1]}}, trials=2, training__epochs=1, display=Looks())
    assert states(both) == ["finished", "finished"]


@pytest.mark.parametrize("sampler", ["grid", "in_turn"])
def test_a_machine_elsewhere_that_falls_silent_loses_its_trial(tmp_path, sampler):
    database = tmp_path / "study.db"
    settings = {"storage": f"sqlite:///{database}", "sampler": sampler, "training__epochs": 1}
    first = tune(tmp_path, trials=1, **settings)
    study = tuning_study.Study(first.plan)
    study.enqueue({"loss.margin": 0.2 if margins(first) != [0.2] else 0.4})
    with tuning_study.quiet(), pytest.warns(UserWarning, match="Heartbeat"):
        trial = study.study.ask()
    trial.set_user_attr("worker", "elsewhere")
    if sampler == "grid":  # in turn would wait for it
        assert sorted(states(tune(tmp_path, **settings))) == ["finished", "finished", "running"]
    study._storage.record_heartbeat(trial._trial_id)
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE trial_heartbeats SET heartbeat = '2000-01-01 00:00:00'")
    ended = tune(tmp_path, **settings)
    assert margins(ended) == [0.0, 0.2, 0.4]
    assert states(ended) == ["finished"] * 3


def test_jobs_share_the_work(tmp_path):
    study = tune(tmp_path, THREE, jobs=2, training__epochs=1)
    assert margins(study) == [0.1, 0.2, 0.3]
    assert all(state in ("finished", "pruned") for state in states(study))


def test_where_a_worker_trains_is_not_what_was_found(tmp_path):
    tune(tmp_path, ONE, jobs=2, training__device="auto")
    assert load(tmp_path / "tuned" / "trials" / "0001").training.device == "cpu"
    assert load(tmp_path / "tuned" / "best.toml").training.device == "auto"


def test_optuna_is_an_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"pip install 'nearfar\[tune\]'"):
        tune(tmp_path)
