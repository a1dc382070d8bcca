"""Starts a script once for each process of a group, with the environment ``torchrun`` gives."""

import os
import socket
import subprocess
import sys

from filelock import FileLock


def made_once(places, name, make):
    """A folder that is filled once for all processes in which tests run side by side."""
    base = places.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / name
    with FileLock(f"{folder}.lock"):
        if not (folder / "made").exists():
            folder.mkdir(exist_ok=True)
            make(folder)
            (folder / "made").touch()
    return folder


def run_ranks(ranks, script, *arguments, code=0, seconds=300.0):
    """Run a script in all ranks, and check the code that each of them exits with."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    surroundings = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    surroundings |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [
        subprocess.Popen(
            [sys.executable, script, *arguments],
            env=surroundings | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    try:
        for process in running:
            _, errors = process.communicate(timeout=seconds)
            assert process.returncode == code, errors.decode()
    finally:
        for process in running:
            process.kill()
