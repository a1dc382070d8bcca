"""Processes of distributed work die: the others end, and what is resumed ends as if nothing had happened.

Starting processes takes seconds, so these run with ``make soak`` only.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from grids_for_tests import LONG, STEPS, small
from training_runs import assert_same, recipe, vectors, weights
from waiting import wait_for

from nearfar.training.recipe.files import to_toml
from nearfar.training.run.folder import RunFolder, read_log

ROUNDS = int(os.environ.get("NEARFAR_ROUNDS", "3"))
SEED = int(os.environ.get("NEARFAR_SEED", "0"))
pytestmark = pytest.mark.skipif(ROUNDS <= 3, reason="takes minutes; run with make soak")


def ranks(*words):
    """`nearfar train` in two processes that train together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "nearfar", "train", *words, "--quiet"]
    return [
        subprocess.Popen(command, env=shared | {"RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]


def finish(running):
    try:
        return [process.wait(180) for process in running]
    finally:
        for process in running:
            process.kill()


def test_a_rank_that_dies_ends_the_others_and_the_run_can_be_resumed(tmp_path):
    rng = random.Random(SEED)
    settings = recipe(vectors(tmp_path), training__epochs=60, training__checkpoint_steps=20)
    (tmp_path / "r.toml").write_text(to_toml(settings), encoding="utf-8")
    assert finish(ranks(str(tmp_path / "r.toml"), "--out", str(tmp_path / "whole"))) == [0, 0]
    for number in range(2):
        folder = tmp_path / f"torn {number}"
        running = ranks(str(tmp_path / "r.toml"), "--out", str(folder))
        wait_for(lambda folder=folder: (folder / "checkpoint.safetensors").exists(), 120)
        time.sleep(rng.uniform(0, 0.5))
        running[number].send_signal(signal.SIGKILL)
        codes = finish(running)
        if codes[1 - number]:  # otherwise the training was over
            assert finish(ranks("--resume", str(folder))) == [0, 0]
        assert_same(weights(folder), weights(tmp_path / "whole"))


def test_a_worker_of_ray_that_dies_fails_its_cell_which_runs_again(tmp_path):
    ray = pytest.importorskip("ray")
    from nearfar.bench import runner

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        grid = small(tmp_path, losses={"contrastive": LONG}, baseline=False)

        def kill():
            """The process that holds the run's lock, once it trains."""
            held = [lock.read_text() for lock in (tmp_path / "out").rglob("cells/*/.lock")]
            os.kill(int(held[0]), signal.SIGKILL)

        def when_it_trains():
            wait_for(lambda: any((tmp_path / "out").rglob("checkpoint.safetensors")), 120)
            kill()

        killer = threading.Thread(target=when_it_trains)
        killer.start()
        ran = runner.run(grid, tmp_path / "out", engine="ray")
        killer.join()
        assert [cell.state for cell in ran] != ["finished"]
        again = runner.run(grid, tmp_path / "out", engine="ray")
        assert [cell.state for cell in again] == ["finished"]
        assert read_log(RunFolder(again[0].folder).log)[-1]["step"] == STEPS
    finally:
        ray.shutdown()
