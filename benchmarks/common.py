"""Shared by the benchmarks: time and memory measurement, and result tables."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import platform
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Step = Callable[[], None]


class Clock:
    """Measures the time and peak memory of steps on a CPU or a GPU."""

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")

    def seconds(self, step: Step, repeats: int = 1) -> float:
        """Mean time of a few consecutive steps, as in a training."""
        self._wait()
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        self._wait()
        return (time.perf_counter() - start) / repeats

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def take_turns(self, steps: list[Step], budget: float) -> list[float]:
        """Median seconds of each step, run in turn until the budget (seconds) is spent."""
        repeats = [1 if not self.cuda else max(1, min(10, int(0.05 / self.seconds(step)))) for step in steps]
        times: list[list[float]] = [[] for _ in steps]
        deadline = time.perf_counter() + budget
        while len(times[0]) < 3 or (time.perf_counter() < deadline and len(times[0]) < 500):
            for step, number, seen in zip(steps, repeats, times, strict=True):
                seen.append(self.seconds(step, number))
            if sum(seen[-1] for seen in times) > budget:
                break
        for step, number, seen in zip(steps, repeats, times, strict=True):
            while len(seen) < 5 and seen[-1] < budget / 5:  # a fast step that was stopped early by a slow one
                seen.append(self.seconds(step, number))
        return [statistics.median(seen) for seen in times]

    def extra_memory(self, step: Step) -> float:
        """Peak memory in MiB beyond what was allocated before the step."""
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            torch.cuda.synchronize()
            return (torch.cuda.max_memory_allocated() - before) / 2**20
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        before = _resident()
        peak, done = [before], threading.Event()

        def watch() -> None:
            pause = 0.0005
            while not done.wait(pause):
                peak[0] = max(peak[0], _resident())
                pause = min(0.02, 1.02 * pause)  # polling constantly would slow down a long step

        watcher = threading.Thread(target=watch)
        watcher.start()
        step()
        done.set()
        watcher.join()
        return (peak[0] - before) / 2**20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def limit_memory(gib: float) -> None:
    """Make a step that needs more memory fail, instead of the machine."""
    resource.setrlimit(resource.RLIMIT_AS, (int(gib * 2**30),) * 2)


def report(rows: list[dict[str, Any]], columns: list[str], clock: Clock, out: Path | None) -> None:
    """Print the rows as a table and optionally write them as JSON."""
    threads = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    name = torch.cuda.get_device_name() if clock.cuda else threads
    words = [word for word in sys.argv if word not in ("--out", str(out))]
    result = {"device": name, "torch": torch.__version__, "command": " ".join(["python", *words]), "rows": rows}
    show(result, columns)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")


def show(result: dict[str, Any], names: list[str]) -> None:
    """Print the result as a Markdown table with those columns that any row has."""
    rows = result["rows"]
    columns = [name for name in names if any(name in row for row in rows)]
    words = {column for column in columns if any(isinstance(row.get(column), str) for row in rows)}
    print(f"\n{result['device']}, PyTorch {result['torch']}: `{result['command']}`\n")
    print("| " + " | ".join(columns) + " |")
    print("|" + "|".join("---" if column in words else "--:" for column in columns) + "|")
    for row in rows:
        print("| " + " | ".join(cell(row.get(column)) for column in columns) + " |")


def show_line(row: dict[str, Any]) -> None:
    """Print a row as soon as it is measured."""
    print(" ".join(f"{key}={cell(value)}" for key, value in row.items()), file=sys.stderr, flush=True)


def cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def parse(parser: argparse.ArgumentParser, columns: list[str]) -> argparse.Namespace:
    """Parse the options of a benchmark. Adds --out and --show; --show prints a table and exits."""
    parser.add_argument("--out", type=Path, help="also write the rows as JSON")
    parser.add_argument("--show", type=Path, help="print the table of such a file and measure nothing")
    options = parser.parse_args()
    if options.show:
        show(json.loads(options.show.read_text()), columns)
        raise SystemExit
    return options
