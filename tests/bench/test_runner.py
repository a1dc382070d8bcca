"""Running grids: finished cells are skipped, failures recorded, interruptions survived."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from grids_for_tests import LONG, STEPS, Interrupts, Recorder, small
from training_runs import vectors
from waiting import wait_for

from nearfar.bench import executors, find, plan, runner
from nearfar.bench import grid as grids
from nearfar.training.run.folder import RunError, RunFolder, read_log
from nearfar.utils.folders import claim

WILD = {"loss": {"name": "contrastive"}, "optimizer": {"lr": 1e30}}


def run(grid, out, **settings):
    """Run a grid in this process; returns its cells, and the names of those that were trained."""
    recorder = Recorder()
    return runner.run(grid, out, engine="inline", display=recorder, **settings), recorder.trained


@pytest.fixture
def quick_looks(monkeypatch):
    """The display is updated often."""
    monkeypatch.setattr(runner, "SHOW_SECONDS", 0.05)


def states(cells):
    return {cell.name: cell.state for cell in cells}


def complete(cells):
    return set(states(cells).values()) == {"finished"}


def test_every_cell_becomes_a_run_folder_that_says_what_it_is(tmp_path):
    cells, _ = run(small(tmp_path), tmp_path / "out")
    assert complete(cells)
    assert {cell.grid for cell in cells} == {tmp_path / "out" / "small"}
    assert [outcome.loss for outcome in find(cells[0].grid)] == ["contrastive", "frozen", "proxy_anchor"]
    assert grids.load(cells[0].grid / "grid.toml") == grids.load(small(tmp_path))


def test_what_is_finished_is_not_trained_again(tmp_path):
    _, first = run(small(tmp_path), tmp_path / "out", only=["contrastive"])
    both = ["contrastive", "proxy_anchor"]
    _, then = run(small(tmp_path, seeds=[0, 1]), tmp_path / "out", only=both)
    assert first == ["contrastive"]
    assert then == ["proxy_anchor", "contrastive-seed1", "proxy_anchor-seed1"]


def test_what_another_grid_has_finished_is_copied(tmp_path):
    first, _ = run(small(tmp_path), tmp_path / "out", only=["contrastive"])
    again = small(tmp_path, name="again", losses={"mine": {"loss": {"name": "contrastive"}}, "proxy_anchor": {}})
    cells, trained = run(again, tmp_path / "out")
    assert complete(cells)
    assert trained == ["frozen", "proxy_anchor"]
    copied = next(cell for cell in cells if cell.name == "mine-seed0")
    assert copied.metrics() == first[0].metrics()
    assert {outcome.labels["loss"] for outcome in find(copied.grid)} == {"frozen", "mine", "proxy_anchor"}
    assert not [entry for entry in copied.folder.parent.iterdir() if entry.name.startswith(".")]


def test_what_was_trained_on_other_data_is_neither_copied_nor_kept(tmp_path):
    run(small(tmp_path), tmp_path / "out", only=["contrastive"])
    other = small(tmp_path, name="other")
    file = np.load(vectors(tmp_path))
    np.savez(tmp_path / "changed.npz", X=file["X"] + 1, y=file["y"])
    other["recipe"]["data"]["root"] = str(tmp_path / "changed.npz")
    assert run(other, tmp_path / "out", only=["contrastive"])[1] == ["contrastive"]
    with pytest.raises(RunError, match=r"contrastive-seed0: finished in .* with other data than given now"):
        runner.run({**other, "name": "small"}, tmp_path / "out", only=["contrastive"])


def test_a_copy_that_was_cut_short_is_not_taken(tmp_path):
    ((cell,), _) = run(small(tmp_path), tmp_path / "out", only=["contrastive"])
    cell.folder.rename(cell.folder.with_name(f".{cell.folder.name}.draft"))
    assert run(small(tmp_path, name="again"), tmp_path / "out", only=["contrastive"])[1] == ["contrastive"]


def test_lean_grids_copy_numbers_and_others_want_weights_too(tmp_path):
    trained = []

    def again(name, **settings):
        (cell,), losses = run(small(tmp_path, name=name), tmp_path / "out", only=["contrastive"], **settings)
        trained.append(len(losses))
        return {entry.name for entry in cell.folder.iterdir()}

    assert "checkpoint.safetensors" not in again("lean", lean=True)
    assert "checkpoint.safetensors" in again("whole")  # trained, as there were no weights to copy
    assert "checkpoint.safetensors" in again("copied")
    assert "checkpoint.safetensors" not in again("lean_too", lean=True)
    assert trained == [1, 1, 0, 0]


def test_a_copied_run_counts_once(tmp_path):
    run(small(tmp_path), tmp_path / "out", only=["contrastive"])
    run(small(tmp_path, name="again", losses={"contrastive": {}}, baseline=False), tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*/cells/*"))) == 2
    assert [outcome.loss for outcome in find(tmp_path / "out")] == ["contrastive"]


def test_what_another_grid_has_not_finished_is_trained(tmp_path):
    ((cell,), _) = run(small(tmp_path), tmp_path / "out", only=["contrastive"])
    RunFolder(cell.folder).metrics.unlink()
    cells, trained = run(small(tmp_path, name="again"), tmp_path / "out", only=["contrastive"])
    assert complete(cells)
    assert trained == ["contrastive"]


def test_a_cell_that_fails_is_recorded_and_the_rest_goes_on(tmp_path):
    grid = small(tmp_path, losses={"wild": WILD, "contrastive": {}}, baseline=False)
    cells, _ = run(grid, tmp_path / "out")
    assert states(cells) == {"wild-seed0": "failed", "contrastive-seed0": "finished"}
    assert cells[0].error.startswith("NonFiniteError: the loss or its gradient was NaN or infinite")
    assert run(grid, tmp_path / "out")[1] == ["wild"]


def test_lean_cells_keep_numbers_and_no_weights(tmp_path):
    ((cell,), _) = run(small(tmp_path, baseline=False), tmp_path / "out", lean=True, only=["contrastive"])
    kept = {entry.name for entry in cell.folder.iterdir()}
    assert kept >= {"metrics.json", "manifest.json", "queries.safetensors", "recipe.toml", "cell.json"}
    assert not kept & {"checkpoint.safetensors", "model.safetensors", "embeddings.safetensors"}


def test_a_plan_writes_nothing(tmp_path):
    assert set(states(plan(small(tmp_path), tmp_path / "out")).values()) == {"new"}
    assert not (tmp_path / "out").exists()


def test_one_grid_is_run_once_at_a_time(tmp_path):
    with runner._exclusive(tmp_path / "out" / "small"), pytest.raises(RunError, match="another process runs this grid"):
        runner.run(small(tmp_path), tmp_path / "out")


def test_pictures_are_decoded_before_the_cells_begin(tmp_path):
    from PIL import Image

    root = tmp_path / "photos"
    for name in ("jay/1.png", "jay/2.png", "owl/1.png", "owl/2.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20)).save(root / name)
    recipe = {"data": {"name": "folder"}, "network": {"name": "small_cnn", "dim": 4}, "augmentation": {"size": 16}}
    grid = small(tmp_path)
    grid["recipe"] = {**grid["recipe"], **recipe, "sampler": {"classes": 2, "per_class": 2, "steps": 1}}
    cells = plan(grid, tmp_path / "out", roots=[str(root)])
    runner.prepare(cells, runner.open_datasets(cells), cache=tmp_path / "cache")
    assert [entry for entry in (tmp_path / "cache").iterdir() if not entry.name.startswith(".")]


# --- processes -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_looks")
def test_interrupted_cells_save_and_go_on(tmp_path):
    grid = small(tmp_path, losses={"contrastive": LONG, "proxy_anchor": {}}, baseline=False)
    display = Interrupts()
    cells = runner.run(grid, tmp_path / "out", display=display)
    assert states(cells) == {"contrastive-seed0": "stopped", "proxy_anchor-seed0": "new"}
    assert "stopping: 1 cells save their state; press Ctrl-C again to end them at once" in display.said
    folder = cells[0].folder
    assert RunFolder(folder).checkpoint.exists()
    assert complete(runner.run(grid, tmp_path / "out", jobs=2))
    assert "resumed at step" in cells[0].output.read_text()
    assert read_log(RunFolder(folder).log)[-1]["step"] == STEPS


@pytest.mark.usefixtures("quick_looks")
def test_a_crash_hurts_nobody_else(tmp_path):
    class Kills(Interrupts):
        def show(self, work, done, total, text):
            if self.number is not None and work == "contrastive-seed0" and done < total:
                self.number = None
                (lock,) = (tmp_path / "out").glob(f"*/cells/{work}-*/.lock")
                os.kill(int(lock.read_text()), signal.SIGKILL)

    grid = small(tmp_path, losses={"contrastive": LONG, "proxy_anchor": {}, "wild": WILD}, baseline=False)
    cells = runner.run(grid, tmp_path / "out", display=Kills())
    assert states(cells) == {"contrastive-seed0": "failed", "proxy_anchor-seed0": "finished", "wild-seed0": "failed"}
    assert cells[0].error == "killed by SIGKILL (out of memory?)"
    assert cells[2].error.startswith("NonFiniteError: the loss or its gradient was NaN or infinite")


CALLER = """
import sys, time
from pathlib import Path
from nearfar.bench import executors, plan
(cell,) = plan(Path(sys.argv[1]), sys.argv[2])
executor = executors.Processes(executors.execute, [executors.Slot("cpu")])
executor.start(cell)
time.sleep(600)
"""


def test_cells_stop_when_their_caller_is_killed_and_can_be_resumed(tmp_path):
    grid = small(tmp_path, changes=LONG, baseline=False, losses={"contrastive": {}})
    file = tmp_path / "small.toml"
    file.write_text(grids.to_toml(grids.load(grid)), encoding="utf-8")
    (cell,) = plan(file, tmp_path / "out")
    claim(cell.grid, "grid")
    caller = subprocess.Popen([sys.executable, "-c", CALLER, file, tmp_path / "out"])
    wait_for(lambda: cell.steps() is not None, 300.0)  # on a busy machine, importing everything twice takes long
    caller.kill()
    caller.wait()
    wait_for(lambda: "Resume with: " in cell.output.read_text())
    wait_for(lambda: not is_locked(cell.folder / ".lock"))
    cells, _ = run(grid, tmp_path / "out")
    assert complete(cells)
    assert read_log(RunFolder(cell.folder).log)[-1]["step"] == STEPS


def test_without_a_fork_server_every_cell_is_a_new_process(tmp_path, monkeypatch):
    monkeypatch.setattr(executors, "METHOD", "spawn")
    monkeypatch.setenv("WORLD_SIZE", "8")
    cell = plan(small(tmp_path, baseline=False, changes=LONG), tmp_path / "out")[0]
    executor = executors.Processes(executors.execute, [executors.Slot("cpu", {"OMP_NUM_THREADS": "1"})])
    executor.start(cell)
    assert os.environ["WORLD_SIZE"] == "8"
    assert (executor.room, executor.ended()) == (0, [])
    wait_for(lambda: cell.steps() is not None)
    executor.stop()
    ended = []
    wait_for(lambda: bool(ended.extend(executor.ended()) or ended))
    executor.close()
    assert ended == [(cell, 128 + signal.SIGTERM)]
    assert "Resume with: " in cell.output.read_text()


def is_locked(file):
    import fcntl

    with open(file, "ab") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


# --- where -----------------------------------------------------------------------------------------------------


def test_cells_share_gpus_and_processors(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr(executors, "processors", lambda: 16)
    found = executors.slots(per_gpu=2)
    assert [(slot.device, slot.environment["CUDA_VISIBLE_DEVICES"]) for slot in found] == [("cuda", g) for g in "4646"]
    assert {slot.environment["OMP_NUM_THREADS"] for slot in found} == {"4"}
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in executors.slots(device="cuda:1")] == ["6"]
    assert [slot.device for slot in executors.slots(device="cpu", jobs=3)] == ["cpu"] * 3
    with pytest.raises(ValueError, match="device is 'cuda:2'; available are cuda:0 to cuda:1"):
        executors.slots(device="cuda:2")


def test_a_gpu_that_is_not_there_is_missed(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device is 'cuda', but PyTorch finds no GPU"):
        executors.slots(device="cuda")
