"""However a run is interrupted, it ends as if it had not been."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from training_runs import Interrupts, assert_same, interrupted, pictures, recipe, train, vectors, weights
from waiting import wait_for

from nearfar.training import checkpoint
from nearfar.training.recipe.files import load, to_toml
from nearfar.training.run.folder import RunError, RunFolder, read_log
from nearfar.training.run.provenance import is_finished
from nearfar.training.step import TrainStep
from nearfar.training.trainer import Stopped
from nearfar.utils.folders import claim

WORKER = Path(__file__).parents[2] / "helpers" / "run_worker.py"
KILLS = 3  # the full check is ten: NEARFAR_KILLS=10


@pytest.fixture(autouse=True)
def every_step_is_read(monkeypatch):
    """A page for each step, so that a signal can come after any of them."""
    monkeypatch.setattr(
        "nearfar.training.step.StepLog.__init__.__kwdefaults__",
        {"steps": 1, "seconds": 1.0, "clock": time.perf_counter},
    )


VARIANTS = {
    "pairs": {},
    "proxies, sgd, step by step": {
        "loss__name": "proxy_anchor",
        "optimizer__name": "sgd",
        "schedule__name": "cosine",
        "schedule__per": "iteration",
        "schedule__warmup": 5,
    },
    "random mining with a memory": {
        "loss__mining": "distance_weighted",
        "loss__name": "margin",
        "training__memory": 30,
        "training__memory_warmup": 4,
    },
    "stages": {"loss__name": "group", "stages": [{"epochs": 1, "loss": {"name": "softmax"}}, {"lr_factor": 0.1}]},
    "hard classes": {
        "sampler__name": "hard_classes",
        "sampler__classes": 4,
        "sampler__per_class": 3,
        "sampler__steps": 6,
    },
    "hard items, independent members and a tree": {
        "sampler__name": "smart_triplets",
        "sampler__batch_size": 12,
        "sampler__steps": 6,
        "network__members": 2,
        "network__independent": True,
        "loss__name": "hierarchical_triplet",
        "loss__num_classes": True,
    },
    "validation and plateau": {
        "split__name": "fixed_validation",
        "split__share": 0.34,
        "schedule__name": "plateau",
        "schedule__patience": 0,
    },
    "radam, warm-up epochs, chunks": {
        "optimizer__name": "radam",
        "training__warmup_epochs": 1,
        "training__chunk": 5,
        "training__clip": 0.5,
    },
    "an ensemble": {"network__members": 2, "loss__name": "proxy_anchor"},
    "iterations": {"training__iterations": 21},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_stopped_in_the_middle_of_epochs_and_resumed_is_undisturbed(name, tmp_path):
    chosen = recipe(vectors(tmp_path), **VARIANTS[name])
    whole = train(chosen, tmp_path / "whole")
    interrupted(chosen, tmp_path / "cut", 3, 6, 10, 20)
    assert_same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
    found = json.loads((tmp_path / "cut" / "metrics.json").read_text())
    took = {"seconds": 0, "memory": 0}
    assert found | took == whole.metrics | took


def test_pictures_with_levels_resume_bit_for_bit(tmp_path):
    settings = {
        "network__name": "small_cnn",
        "network__levels": ["low", "high"],
        "augmentation__size": 8,
        "augmentation__crop": "random_resized",
        "augmentation__color": 0.4,
        "augmentation__grey": 0.2,
        "augmentation__erase": 0.5,
        "augmentation__rotate": 15,
        "training__epochs": 2,
    }
    chosen = recipe(pictures(tmp_path), **settings)
    train(chosen, tmp_path / "whole")
    interrupted(chosen, tmp_path / "cut", 5)
    assert_same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_the_place_within_the_epoch_and_names_itself(number, code, tmp_path):
    chosen = recipe(vectors(tmp_path))
    with pytest.raises(Stopped, match=r"stopped at step 8 of 24\. Resume with: nearfar train --resume") as caught:
        train(chosen, tmp_path / "run", display=Interrupts(8, number))
    assert caught.value.code == code
    state = checkpoint.values_of(tmp_path / "run" / "checkpoint.safetensors")["state"]
    assert (state["epoch"], state["step"], state["iteration"]) == (1, 2, 8)


def test_signals_mean_what_they_did_before_when_the_run_is_over(tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    train(recipe(vectors(tmp_path), training__epochs=1), tmp_path / "run")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_the_log_of_a_resumed_run_has_each_step_once(tmp_path):
    chosen = recipe(vectors(tmp_path))
    train(chosen, tmp_path / "whole")
    interrupted(chosen, tmp_path / "cut", 3, 10)
    logs = [read_log(tmp_path / name / "log.jsonl") for name in ("whole", "cut")]
    losses = [[(line["step"], line["loss"]) for line in log if "loss" in line] for log in logs]
    measured = [[line["metrics"] for line in log if "metrics" in line] for log in logs]
    assert losses[0] == losses[1]
    assert measured[0] == measured[1]


def test_lines_after_the_checkpoint_are_cut_when_it_is_gone_on_from(tmp_path):
    chosen = recipe(vectors(tmp_path))
    with pytest.raises(Stopped):
        train(chosen, tmp_path / "run", display=Interrupts(9))
    log = tmp_path / "run" / "log.jsonl"
    with open(log, "a", encoding="utf-8") as file:
        file.write('{"step": 10, "loss": 1.0}\n{"step": 11, "lo')
    train(chosen, tmp_path / "run", resume=True)
    steps = [line["step"] for line in read_log(log) if "loss" in line]
    assert steps == list(range(1, 25))


def test_a_run_without_a_checkpoint_begins_again(tmp_path):
    chosen = recipe(vectors(tmp_path))
    train(chosen, tmp_path / "whole")
    claim(tmp_path / "cut", "run")
    (tmp_path / "cut" / "recipe.toml").write_text(to_toml(chosen))
    (tmp_path / "cut" / "log.jsonl").write_text('{"step": 1}\n')
    train(chosen, tmp_path / "cut", resume=True)
    assert_same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))


def test_a_finished_run_is_resumed_to_the_same_numbers(tmp_path):
    chosen = recipe(vectors(tmp_path))
    first = train(chosen, tmp_path / "run")
    before = weights(tmp_path / "run")
    again = train(chosen, tmp_path / "run", resume=True)
    assert again.metrics == first.metrics
    assert_same(weights(tmp_path / "run"), before)


def test_a_recipe_that_contradicts_the_run_is_refused_with_the_difference(tmp_path):
    file = vectors(tmp_path)
    train(recipe(file, training__epochs=1), tmp_path / "run")
    other = recipe(file, training__epochs=1, optimizer__lr=0.5, loss__name="triplet")
    with pytest.raises(
        RunError, match=r"differs from that of the run(?s:.*)loss.name: contrastive → triplet(?s:.*)lr: 0.01 → 0.5"
    ):
        train(other, tmp_path / "run", resume=True)


@pytest.mark.parametrize("saved", [True, False])
def test_other_data_under_the_same_recipe_is_refused(saved, tmp_path):
    file = vectors(tmp_path)
    chosen = recipe(file)
    with pytest.raises(Stopped):
        train(chosen, tmp_path / "run", display=Interrupts(4))
    if not saved:  # as if it had been killed before its first checkpoint
        (tmp_path / "run" / "checkpoint.safetensors").unlink()
    content = dict(np.load(file))
    np.savez(file, X=content["X"] + 1, y=content["y"])
    with pytest.raises(ValueError, match="the data is not what the run"):
        train(chosen, tmp_path / "run", resume=True)


class Fault:
    """Fails in the nth function that the trainer calls once the last step is saved; lists them without a number."""

    def __init__(self, number=None):
        self.number, self.names, self._saved = number, dict[str, None](), False

    def __call__(self, frame, event, argument):
        name, caller = frame.f_code.co_qualname, frame.f_back
        self._saved |= name == "due_parts"  # the first question after that
        files = [frame.f_code.co_filename, "" if caller is None else caller.f_code.co_filename]
        ours = "nearfar" in files[0] and files[1].endswith("trainer.py")
        if not (self._saved and ours and event == "call") or name in self.names:
            return
        self.names[name] = None
        if len(self.names) - 1 == self.number:
            raise OSError(f"no {name}")


def test_whatever_fails_after_the_last_step_costs_no_step(tmp_path, monkeypatch):
    settings = {"split__name": "fixed_validation", "split__share": 0.34, "evaluation__every": 0}
    chosen = recipe(vectors(tmp_path), training__epochs=1, evaluation__before=True, **settings)
    sys.setprofile(counted := Fault())
    expected = train(chosen, tmp_path / "whole").metrics
    sys.setprofile(None)
    assert len(counted.names) > 15
    for number, name in enumerate(counted.names):
        sys.setprofile(Fault(number))
        with suppress(OSError), warnings.catch_warnings(action="ignore"):
            train(chosen, tmp_path / name)
        sys.setprofile(None)
        with monkeypatch.context() as trained:
            trained.setattr(TrainStep, "__call__", None)
            found = train(chosen, tmp_path / name, resume=True).metrics
        assert (found["test"], found["before"]) == (expected["test"], expected["before"])
        assert is_finished(RunFolder(tmp_path / name))
        assert_same(weights(tmp_path / name), weights(tmp_path / "whole"))


def test_data_that_moved_is_the_same_data(tmp_path):
    file = vectors(tmp_path)
    with pytest.raises(Stopped):
        train(recipe(file), tmp_path / "run", display=Interrupts(4))
    moved = file.rename(tmp_path / "moved.npz")
    train(recipe(moved), tmp_path / "run", resume=True)


def test_what_changes_no_result_may_be_edited_in_a_run(tmp_path):
    with pytest.raises(Stopped):
        train(recipe(vectors(tmp_path), evaluation__before=True), tmp_path / "run", display=Interrupts(4))
    file = tmp_path / "run" / "recipe.toml"
    file.write_text(file.read_text().replace("before = true", "before = false"))
    assert "before" not in train(load(file), tmp_path / "run", resume=True).metrics
    assert is_finished(RunFolder(tmp_path / "run"))


def test_a_copy_of_the_pictures_is_the_same_data(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(16):
        file = tmp_path / "here" / str(number // 4) / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(file)
    network = {"name": "small_cnn", "dim": 4}
    data, few = {"name": "folder", "root": str(tmp_path / "here")}, {"classes": 2, "per_class": 2, "steps": 4}
    chosen = recipe(tmp_path, data=data, network=network, sampler=few, training__epochs=1)
    with pytest.raises(Stopped):
        train(chosen, tmp_path / "run", display=Interrupts(2), cache=tmp_path / "cache")
    shutil.copytree(tmp_path / "here", tmp_path / "there", copy_function=shutil.copyfile)
    data = chosen.data.model_copy(update={"root": str(tmp_path / "there")})
    moved = chosen.model_copy(update={"data": data})
    train(moved, tmp_path / "run", resume=True, cache=tmp_path / "cache")
    (tmp_path / "there" / "0" / "0.png").write_bytes((tmp_path / "there" / "0" / "1.png").read_bytes())
    with pytest.raises(ValueError, match="the data is not what the run"):
        train(moved, tmp_path / "run", resume=True, cache=tmp_path / "cache")


# --- by force ----------------------------------------------------------------------------------------------------


class Worker:
    """Starts trainings, one at a time."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self.said() == "ready"

    def said(self):
        return self.process.stdout.readline().strip()

    def start(self, file, folder):
        """Begin or resume; gives the number of the process."""
        how = "resume" if (folder / "recipe.toml").exists() else "new"
        assert self.process.stdin is not None
        print(file, folder, how, file=self.process.stdin, flush=True)
        return int(self.said())

    def ended(self):
        """Wait for the training; gives its exit code, or minus the signal that killed it."""
        return int(self.said())


@pytest.fixture(scope="module")
def worker():
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    made = Worker()
    yield made
    made.process.stdin.close()
    made.process.wait(timeout=60)


def test_killed_at_any_moment(worker, tmp_path):
    """Three kills, or as many as NEARFAR_KILLS says; they fall into steps, evaluations and checkpoints alike."""
    kills = int(os.environ.get("NEARFAR_KILLS", KILLS))
    chosen = recipe(
        vectors(tmp_path),
        loss__name="margin",
        loss__mining="distance_weighted",
        split__name="fixed_validation",
        split__share=0.34,
        training__memory=30,
        training__epochs=20,
        training__checkpoint_steps=2,
    )
    file = tmp_path / "recipe.toml"
    file.write_text(to_toml(chosen))
    worker.start(file, tmp_path / "whole")
    assert worker.ended() == 0
    lines = len(read_log(tmp_path / "whole" / "log.jsonl"))
    rng = random.Random(kills)

    def killed(past):
        child = worker.start(file, tmp_path / "cut")
        wait_for(lambda: len(read_log(tmp_path / "cut" / "log.jsonl")) > past)
        time.sleep(rng.uniform(0, 0.05))
        with suppress(ProcessLookupError):  # it was quicker
            os.kill(child, signal.SIGKILL)
        return worker.ended() == -signal.SIGKILL

    assert sum(killed(lines * number / (kills + 1)) for number in range(kills)) >= kills / 2
    worker.start(file, tmp_path / "cut")
    assert worker.ended() == 0
    for which in ("last", "best"):
        assert_same(weights(tmp_path / "cut", which), weights(tmp_path / "whole", which))
    steps = [line["step"] for line in read_log(tmp_path / "cut" / "log.jsonl") if "loss" in line]
    assert steps == sorted(set(steps))
    assert steps[-1] == 120


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_process_that_is_asked_to_stop_saves_and_exits(number, code, worker, tmp_path):
    chosen = recipe(vectors(tmp_path), training__epochs=100_000, evaluation__every=0)
    file = tmp_path / "recipe.toml"
    file.write_text(to_toml(chosen))
    child = worker.start(file, tmp_path / "run")
    last = tmp_path / "run" / "checkpoint.safetensors"
    wait_for(last.exists)
    os.kill(child, number)
    assert worker.ended() == code
    assert 0 < checkpoint.values_of(last)["state"]["iteration"] < 600_000
