"""`nearfar serve` in a process of its own."""

import os
import subprocess
import sys
from contextlib import contextmanager


@contextmanager
def process(index, *words, files=None, errors=subprocess.PIPE):
    """Start `nearfar serve`, with a limit of open files, and return the process and its address."""
    command = [sys.executable, "-m", "nearfar", "serve", str(index), "--port", "0", "--device", "cpu", *words]
    if files is not None:
        command = ["sh", "-c", f'ulimit -n {files} && exec "$@"', "sh", *command]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as child:
        try:
            line = next((line for line in child.stdout if " is served at " in line), None)
            assert line is not None, child.stderr.read() if child.stderr else child.wait()
            yield child, line.split(" is served at ")[1].split()[0]
        finally:
            child.kill()
