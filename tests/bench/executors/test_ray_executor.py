"""The same grid on a Ray cluster, a real one of two processors on this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grids_for_tests import LONG, STEPS, Interrupts, small

from nearfar.bench.executors import ray as ray_executor
from nearfar.bench.grid import runner
from nearfar.training.run.folder import RunFolder, read_log


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
def test_a_grid_is_interrupted_and_resumed_on_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "SHOW_SECONDS", 0.05)
    grid = small(tmp_path, losses={"contrastive": LONG}, baseline=False)
    ran = runner.run(grid, tmp_path / "out", engine="ray", display=Interrupts())
    assert [record.state for record in ran.records] == ["stopped"]
    wild = {"loss": {"name": "nra"}, "optimizer": {"lr": 1e30}}
    again = runner.run({**grid, "losses": {"contrastive": LONG, "wild": wild}}, tmp_path / "out", engine="ray")
    assert {record.name: record.state for record in again.records} == {
        "contrastive-seed0": "finished",
        "wild-seed0": "failed",
    }
    assert str(again.records[1].error).startswith("NonFiniteError")
    assert "resumed at step" in ran.records[0].output.read_text()
    assert read_log(RunFolder(ran.records[0].folder).log)[-1]["step"] == STEPS
    assert not list(ran.folder.glob(".stop-*"))


class Fake:
    """What is asked of Ray, without a cluster."""

    def __init__(self, **resources: float) -> None:
        self.resources, self.wants = resources, {}
        self.asked: dict[str, Any] = {}

    def is_initialized(self) -> bool:
        return False

    def init(self, **settings: Any) -> None:
        self.asked = settings

    def cluster_resources(self) -> dict[str, float]:
        return self.resources

    def remote(self, **wants: Any) -> Any:
        self.wants = wants
        return lambda task: task

    def shutdown(self) -> None:
        pass


def test_cells_take_their_share_of_the_gpus_of_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(CPU=32, GPU=4)
    monkeypatch.setitem(sys.modules, "ray", fake)
    engine = ray_executor.RayExecutor(tmp_path, address="ray://head:10001", per_gpu=4)
    assert (fake.wants["num_gpus"], fake.asked["address"], engine.room) == (0.25, "ray://head:10001", 17)
    assert ray_executor.RayExecutor(tmp_path, device="cpu").room == 33
    assert fake.wants["num_gpus"] == 0
    assert ray_executor.RayExecutor(tmp_path, jobs=3).room == 3


def test_a_cluster_without_gpus_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", Fake(CPU=2))
    with pytest.raises(ValueError, match="device is 'cuda', but the Ray cluster has no GPU"):
        ray_executor.RayExecutor(tmp_path, device="cuda")


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'nearfar\[ray\]'"):
        ray_executor.RayExecutor(tmp_path)
