"""The same grid on a Ray cluster: a real one of two nodes on this machine."""

import sys

import pytest
from grids_for_tests import LONG, STEPS, Interrupts, small
from waiting import wait_for

from nearfar.bench import executors, plan, runner
from nearfar.training.run.folder import RunFolder, read_log


@pytest.fixture(scope="module")
def cluster():
    """Two nodes, each with a processor and a GPU that only Ray believes in."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    nodes = Cluster()
    for _ in range(2):
        nodes.add_node(num_cpus=1, num_gpus=1, include_dashboard=False)
    ray.init(nodes.address, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
    nodes.shutdown()


@pytest.mark.usefixtures("cluster")
def test_a_grid_is_interrupted_and_resumed_on_a_cluster(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "SHOW_SECONDS", 0.05)
    grid = small(tmp_path, losses={"contrastive": LONG, "proxy_anchor": LONG}, baseline=False)
    settings = {"engine": "ray", "device": "cpu"}
    cells = runner.run(grid, tmp_path / "out", display=Interrupts(both=True), **settings)
    assert [cell.state for cell in cells] == ["stopped", "stopped"]  # both at once: one on each node
    wild = {"loss": {"name": "nra"}, "optimizer": {"lr": 1e30}}
    again = runner.run({**grid, "losses": {**grid["losses"], "wild": wild}}, tmp_path / "out", **settings)
    assert [cell.state for cell in again] == ["finished", "finished", "failed"]
    assert again[2].error.startswith("NonFiniteError")
    for cell in cells:
        assert "resumed at step" in cell.output.read_text()
        assert read_log(RunFolder(cell.folder).log)[-1]["step"] == STEPS


@pytest.mark.usefixtures("cluster")
def test_cells_run_on_every_node_with_a_gpu_of_their_own(tmp_path):
    def where(cell, device):
        """Stands for a training; nested, so that it is pickled by value."""
        import os
        import time

        import ray

        until = time.monotonic() + 100.0
        while len(list(cell.output.parent.glob("*.txt"))) < 2 and time.monotonic() < until:  # both run at once
            time.sleep(0.1)
        print(device, ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
        return 3

    cells = plan(small(tmp_path, baseline=False), tmp_path / "out")
    executor = executors.Ray(where)
    for cell in cells:
        executor.start(cell)
    ended = []
    wait_for(lambda: bool(ended.extend(executor.ended()) or len(ended) == 2), 120.0)
    assert sorted((cell.name, code) for cell, code in ended) == [("contrastive-seed0", 3), ("proxy_anchor-seed0", 3)]
    words = [cell.output.read_text().split() for cell in cells]
    assert {device for device, _, _ in words} == {"cuda"}
    assert len({node for _, node, _ in words}) == 2
    assert all(gpu.isdecimal() for _, _, gpu in words)
    executor.close()


class Fake:
    """What is asked of Ray, without a cluster."""

    def __init__(self, **resources):
        self.resources, self.wants = resources, {}
        self.asked = {}

    def is_initialized(self):
        return False

    def init(self, **settings):
        self.asked = settings

    def cluster_resources(self):
        return self.resources

    def remote(self, **wants):
        self.wants = wants
        return lambda task: task

    def shutdown(self):
        pass


def test_cells_take_their_share_of_the_gpus_of_a_cluster(monkeypatch):
    fake = Fake(CPU=32, GPU=4)
    monkeypatch.setitem(sys.modules, "ray", fake)
    engine = executors.Ray(executors.execute, address="ray://head:10001", per_gpu=4)
    assert (fake.wants["num_gpus"], fake.asked["address"], engine.room) == (0.25, "ray://head:10001", 17)
    assert executors.Ray(executors.execute, device="cpu").room == 33
    assert fake.wants["num_gpus"] == 0
    assert executors.Ray(executors.execute, jobs=3).room == 3


def test_a_cluster_without_gpus_is_told_apart(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", Fake(CPU=2))
    with pytest.raises(ValueError, match="device is 'cuda', but the Ray cluster has no GPU"):
        executors.Ray(executors.execute, device="cuda")


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'nearfar\[ray\]'"):
        executors.Ray(executors.execute)
