"""Running grids: finished cells are skipped, failures recorded, interruptions survived."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grids_for_tests import LONG, STEPS, DirectExecutor, Interrupts, small
from training_runs import vectors
from waiting import wait_for

from nearfar.bench.comparison.outcomes import find
from nearfar.bench.executors import local
from nearfar.bench.executors.job import COMMAND, Job
from nearfar.bench.grid import grid as grids
from nearfar.bench.grid import runner
from nearfar.bench.grid.records import open_datasets
from nearfar.training.run import checkpoints
from nearfar.training.run.folder import RunError, RunFolder, read_log
from nearfar.utils.folders import claim

WILD = {"loss": {"name": "contrastive"}, "optimizer": {"lr": 1e30}}


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[DirectExecutor]:
    """Cells are trained in this process; returns all executors that were created."""
    made: list[DirectExecutor] = []

    def create(room: Any, imports: Any) -> DirectExecutor:
        made.append(DirectExecutor(room, imports))
        return made[-1]

    monkeypatch.setattr(runner, "LocalExecutor", create)
    return made


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The display is updated often."""
    monkeypatch.setattr(runner, "SHOW_SECONDS", 0.05)


def states(ran: runner.GridResult) -> dict[str, str]:
    return {record.name: record.state for record in ran.records}


def test_every_cell_becomes_a_run_folder_that_says_what_it_is(direct: list[DirectExecutor], tmp_path: Path) -> None:
    ran = runner.run(small(tmp_path), tmp_path / "out")
    assert ran.complete
    assert ran.folder == tmp_path / "out" / "small"
    assert [outcome.loss for outcome in find(ran.folder)] == ["contrastive", "frozen", "proxy_anchor"]
    told = json.loads((ran.folder / "status.json").read_text())
    assert told["states"] == {"finished": 3}
    assert {cell["labels"]["loss"] for cell in told["cells"].values()} == {"contrastive", "frozen", "proxy_anchor"}
    assert grids.load(ran.folder / "grid.toml") == grids.load(small(tmp_path))


def test_what_is_finished_is_not_trained_again(direct: list[DirectExecutor], tmp_path: Path) -> None:
    runner.run(small(tmp_path), tmp_path / "out", only=["contrastive"])
    runner.run(small(tmp_path, seeds=[0, 1]), tmp_path / "out", only=["contrastive", "proxy_anchor"])
    assert [job.labels["loss"] + job.labels["seed"] for job in direct[0].started] == ["contrastive0"]
    trained = [job.labels["loss"] + job.labels["seed"] for job in direct[1].started]
    assert trained == ["proxy_anchor0", "contrastive1", "proxy_anchor1"]


def test_what_another_grid_has_finished_is_copied(direct: list[DirectExecutor], tmp_path: Path) -> None:
    first = runner.run(small(tmp_path), tmp_path / "out", only=["contrastive"])
    again = small(tmp_path, name="again", losses={"mine": {"loss": {"name": "contrastive"}}, "proxy_anchor": {}})
    ran = runner.run(again, tmp_path / "out")
    assert ran.complete
    assert [job.labels["loss"] for job in direct[1].started] == ["frozen", "proxy_anchor"]
    copied = next(record for record in ran.records if record.name == "mine-seed0")
    assert copied.metrics() == first.records[0].metrics()
    assert {outcome.labels["loss"] for outcome in find(ran.folder)} == {"frozen", "mine", "proxy_anchor"}
    assert not [entry for entry in copied.folder.parent.iterdir() if entry.name.startswith(".")]


def test_what_was_trained_on_other_data_is_neither_copied_nor_kept(
    direct: list[DirectExecutor], tmp_path: Path
) -> None:
    runner.run(small(tmp_path), tmp_path / "out", only=["contrastive"])
    other = small(tmp_path, name="other")
    file = np.load(vectors(tmp_path))
    np.savez(tmp_path / "changed.npz", X=file["X"] + 1, y=file["y"])
    other["recipe"]["data"]["root"] = str(tmp_path / "changed.npz")
    runner.run(other, tmp_path / "out", only=["contrastive"])
    assert [job.labels["loss"] for job in direct[1].started] == ["contrastive"]
    with pytest.raises(RunError, match=r"contrastive-seed0: finished in .* with other data than given now"):
        runner.run({**other, "name": "small"}, tmp_path / "out", only=["contrastive"])


def test_a_copy_that_was_cut_short_is_not_taken(direct: list[DirectExecutor], tmp_path: Path) -> None:
    folder = runner.run(small(tmp_path), tmp_path / "out", only=["contrastive"]).records[0].folder
    draft = folder.with_name(f".{folder.name}.draft")
    folder.rename(draft)
    runner.run(small(tmp_path, name="again"), tmp_path / "out", only=["contrastive"])
    assert [job.labels["loss"] for job in direct[1].started] == ["contrastive"]


def test_lean_grids_copy_numbers_and_others_want_weights_too(direct: list[DirectExecutor], tmp_path: Path) -> None:
    def again(name: str, **settings: Any) -> set[str]:
        ran = runner.run(small(tmp_path, name=name), tmp_path / "out", only=["contrastive"], **settings)
        return {entry.name for entry in ran.records[0].folder.iterdir()}

    assert "checkpoint" not in again("lean", lean=True)
    assert "checkpoint" in again("whole")  # trained, as there were no weights to copy
    assert "checkpoint" in again("copied")
    assert "checkpoint" not in again("lean_too", lean=True)
    assert [len(engine.started) for engine in direct] == [1, 1, 0, 0]


def test_a_copied_run_counts_once(direct: list[DirectExecutor], tmp_path: Path) -> None:
    runner.run(small(tmp_path), tmp_path / "out", only=["contrastive"])
    runner.run(small(tmp_path, name="again", losses={"contrastive": {}}, baseline=False), tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*/cells/*"))) == 2
    assert [outcome.loss for outcome in find(tmp_path / "out")] == ["contrastive"]


def test_what_another_grid_has_not_finished_is_trained(direct: list[DirectExecutor], tmp_path: Path) -> None:
    first = runner.run(small(tmp_path), tmp_path / "out", only=["contrastive"])
    RunFolder(first.records[0].folder).metrics.unlink()
    ran = runner.run(small(tmp_path, name="again"), tmp_path / "out", only=["contrastive"])
    assert ran.complete
    assert [job.labels["loss"] for job in direct[1].started] == ["contrastive"]


def test_a_cell_that_fails_is_recorded_and_the_rest_goes_on(direct: list[DirectExecutor], tmp_path: Path) -> None:
    grid = small(tmp_path, losses={"wild": WILD, "contrastive": {}}, baseline=False)
    ran = runner.run(grid, tmp_path / "out")
    assert states(ran) == {"wild-seed0": "failed", "contrastive-seed0": "finished"}
    told = json.loads((ran.folder / "status.json").read_text())["cells"][ran.records[0].cell.folder]
    assert "exit code 1" in told["error"]  # in this process, what it says does not go to its file
    runner.run(grid, tmp_path / "out")
    assert [job.labels["loss"] for job in direct[1].started] == ["wild"]


def test_lean_cells_keep_numbers_and_no_weights(direct: list[DirectExecutor], tmp_path: Path) -> None:
    ran = runner.run(small(tmp_path, baseline=False), tmp_path / "out", lean=True, only=["contrastive"])
    kept = {entry.name for entry in ran.records[0].folder.iterdir()}
    assert kept >= {"metrics.json", "manifest.json", "queries.safetensors", "recipe.toml", "cell.json"}
    assert not kept & {"checkpoint", "embeddings.safetensors"}


def test_a_plan_writes_nothing(tmp_path: Path) -> None:
    planned = runner.plan(small(tmp_path), tmp_path / "out")
    assert set(states(planned).values()) == {"new"}
    assert not (tmp_path / "out").exists()


def test_one_grid_is_run_once_at_a_time(direct: list[DirectExecutor], tmp_path: Path) -> None:
    from nearfar.training.run.folder import RunError

    with runner._exclusive(tmp_path / "out" / "small"), pytest.raises(RunError, match="another process runs this grid"):
        runner.run(small(tmp_path), tmp_path / "out")


def test_pictures_are_decoded_before_the_cells_begin(tmp_path: Path) -> None:
    from PIL import Image

    root = tmp_path / "photos"
    for name in ("jay/1.png", "jay/2.png", "owl/1.png", "owl/2.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20)).save(root / name)
    recipe = {"data": {"name": "folder"}, "network": {"name": "small_cnn", "dim": 4}, "augmentation": {"size": 16}}
    grid = small(tmp_path)
    grid["recipe"] = {**grid["recipe"], **recipe, "sampler": {"classes": 2, "per_class": 2, "steps": 1}}
    planned = runner.plan(grid, tmp_path / "out", roots=[str(root)])
    cells = [record.cell for record in planned.records]
    runner.prepare(cells, open_datasets(cells), cache=tmp_path / "cache")
    assert [entry for entry in (tmp_path / "cache").iterdir() if not entry.name.startswith(".")]


# --- processes -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_looks")
def test_interrupted_cells_save_and_go_on(tmp_path: Path) -> None:
    grid = small(tmp_path, losses={"contrastive": LONG, "proxy_anchor": {}}, baseline=False)
    display = Interrupts()
    ran = runner.run(grid, tmp_path / "out", display=display)
    assert states(ran) == {"contrastive-seed0": "stopped", "proxy_anchor-seed0": "new"}
    assert display.said == ["stopping: 1 cells save their state; press Ctrl-C again to end them at once"]
    record = ran.records[0]
    assert checkpoints.exists(RunFolder(record.folder).last)
    assert runner.run(grid, tmp_path / "out", jobs=2).complete
    assert "resumed at step" in record.output.read_text()
    assert read_log(RunFolder(record.folder).log)[-1]["step"] == STEPS


@pytest.mark.usefixtures("quick_looks")
def test_a_crash_hurts_nobody_else(tmp_path: Path) -> None:
    class Kills(Interrupts):
        def show(self, running: Any) -> None:
            for record in running:
                if self.number is not None and record.cell.labels["loss"] == "contrastive" and record.steps():
                    self.number = None
                    os.kill(int((record.folder / ".lock").read_text()), signal.SIGKILL)

    grid = small(tmp_path, losses={"contrastive": LONG, "proxy_anchor": {}, "wild": WILD}, baseline=False)
    ran = runner.run(grid, tmp_path / "out", display=Kills())
    assert states(ran) == {"contrastive-seed0": "failed", "proxy_anchor-seed0": "finished", "wild-seed0": "failed"}
    assert ran.records[0].error == "killed by SIGKILL (out of memory?)"
    assert str(ran.records[2].error).startswith("NonFiniteError: the loss or its gradient was NaN or infinite")


CALLER = """
import json, sys, time
from nearfar.bench.executors.job import COMMAND, Job
from nearfar.bench.executors.local import LocalExecutor, Slot
from nearfar.utils.folders import claim
executor = LocalExecutor([Slot("cpu")])
executor.start(Job(**json.loads(sys.stdin.readline())))
time.sleep(600)
"""
RELAY = """
import subprocess, sys
with open(sys.argv[1], "w") as output:
    process = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, stdout=output, stderr=output)
process.stdin.write(sys.stdin.buffer.readline())
process.stdin.flush()
process.wait()
"""


@pytest.mark.parametrize("method", ["forkserver", "subprocess"])
def test_jobs_stop_when_their_caller_is_killed_and_can_be_resumed(
    tmp_path: Path, direct: list[DirectExecutor], method: str
) -> None:
    grid = small(tmp_path, changes=LONG, baseline=False, losses={"contrastive": {}})
    record = runner.plan(grid, tmp_path / "out").records[0]
    claim(tmp_path / "out" / "small", "grid")
    command = [sys.executable, "-c", CALLER]
    if method == "subprocess":  # as the executor for Ray does
        record.output.parent.mkdir(parents=True)
        command = [sys.executable, "-c", RELAY, str(record.output), *COMMAND]
    caller = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert caller.stdin is not None
    caller.stdin.write(runner._job(record, cache=None, lean=False).to_line())
    caller.stdin.close()
    wait_for(lambda: record.steps() is not None, 300.0)  # on a busy machine, importing everything twice takes long
    caller.kill()
    caller.wait()
    wait_for(lambda: "Resume with: " in record.output.read_text())
    wait_for(lambda: not is_locked(record.folder / ".lock"))
    assert runner.run(grid, tmp_path / "out").complete
    assert read_log(RunFolder(record.folder).log)[-1]["step"] == STEPS


def test_without_a_fork_server_every_job_is_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "METHOD", "spawn")
    monkeypatch.setenv("WORLD_SIZE", "8")
    record = runner.plan(small(tmp_path, baseline=False, changes=LONG), tmp_path / "out").records[0]
    executor = local.LocalExecutor([local.Slot("cpu", {"OMP_NUM_THREADS": "1"})])
    executor.start(runner._job(record, cache=None, lean=False))
    assert os.environ["WORLD_SIZE"] == "8"
    assert (executor.room, executor.ended()) == (0, [])
    wait_for(lambda: record.steps() is not None)
    executor.stop()
    ended: list[tuple[str, int]] = []
    wait_for(lambda: bool(ended.extend(executor.ended()) or ended))
    executor.close()
    assert ended == [(record.cell.folder, 128 + signal.SIGTERM)]
    assert "Resume with: " in record.output.read_text()


def test_jobs_survive_the_loss_of_the_fork_server(tmp_path: Path) -> None:
    from multiprocessing import forkserver

    record = runner.plan(small(tmp_path, baseline=False, changes=LONG), tmp_path / "out").records[0]
    long = runner._job(record, cache=None, lean=False)
    wrong = Job(name="wrong", key="", recipe={}, folder=str(tmp_path / "wrong"), output=str(tmp_path / "wrong.txt"))
    executor = local.LocalExecutor(local.slots(device="cpu", jobs=2))
    executor.start(long)
    wait_for(lambda: record.steps() is not None)
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
    ended: list[tuple[str, int]] = []
    wait_for(lambda: bool(ended.extend(executor.ended()) or ended))
    assert ended == [(long.name, -signal.SIGKILL)]
    wait_for(lambda: "Resume with: " in record.output.read_text())
    executor.start(wrong)  # by a new server
    wait_for(lambda: bool(ended.extend(executor.ended()) or len(ended) == 2))
    assert ended[1] == ("wrong", 1)
    executor.close()


def is_locked(file: Path) -> bool:
    import fcntl

    with open(file, "ab") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


# --- where -----------------------------------------------------------------------------------------------------


def test_cells_share_gpus_and_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr(local, "processors", lambda: 16)
    found = local.slots(per_gpu=2)
    assert [(slot.device, slot.environment["CUDA_VISIBLE_DEVICES"]) for slot in found] == [("cuda", g) for g in "4646"]
    assert {slot.environment["OMP_NUM_THREADS"] for slot in found} == {"4"}
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in local.slots(device="cuda:1")] == ["6"]
    assert [slot.device for slot in local.slots(device="cpu", jobs=3)] == ["cpu"] * 3
    with pytest.raises(ValueError, match="device is 'cuda:2'; available are cuda:0 to cuda:1"):
        local.slots(device="cuda:2")


def test_a_gpu_that_is_not_there_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device is 'cuda', but PyTorch finds no GPU"):
        local.slots(device="cuda")
