"""Counts and times in the text format that Prometheus reads."""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64)
Labels = tuple[tuple[str, str], ...]


class Metrics:
    """What a server counts. All methods may be called from any thread.

    >>> metrics = Metrics()
    >>> metrics.count("requests_total", "Requests.", route="/", status="200")
    >>> "nearfar_requests_total{route=\\"/\\",status=\\"200\\"} 1" in metrics.text()
    True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._help: dict[str, tuple[str, str]] = {}
        self._counters: dict[str, dict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        self._histograms: dict[str, dict[Labels, _Histogram]] = defaultdict(dict)
        self._gauges: list[tuple[str, str, Callable[[], float], Labels]] = []
        self._began = time.time()

    def count(self, name: str, meaning: str, /, **labels: str) -> None:
        """One more."""
        with self._lock:
            self._help[name] = ("counter", meaning)
            self._counters[name][_sorted(labels)] += 1

    def observe(self, name: str, meaning: str, value: float, buckets: Sequence[float], /, **labels: str) -> None:
        """A value into a histogram."""
        key = _sorted(labels)
        with self._lock:
            self._help[name] = ("histogram", meaning)
            if key not in self._histograms[name]:
                self._histograms[name][key] = _Histogram(buckets)
            self._histograms[name][key].add(value)

    def gauge(self, name: str, meaning: str, read: Callable[[], float], /, **labels: str) -> None:
        """A value that is read whenever somebody asks."""
        self._gauges.append((name, meaning, read, _sorted(labels)))

    def text(self) -> str:
        """Everything, as version 0.0.4 of the text format."""
        lines: list[str] = []
        with self._lock:
            for name, (kind, meaning) in sorted(self._help.items()):
                lines += _head(f"nearfar_{name}", kind, meaning)
                for labels, value in sorted(self._counters.get(name, {}).items()):
                    lines.append(f"nearfar_{name}{_braces(labels)} {value:g}")
                for labels, histogram in sorted(self._histograms.get(name, {}).items()):
                    lines += histogram.lines(f"nearfar_{name}", labels)
        told = set()
        for name, meaning, read, labels in self._gauges:
            if name not in told:
                lines += _head(f"nearfar_{name}", "gauge", meaning)
                told.add(name)
            lines.append(f"nearfar_{name}{_braces(labels)} {read():g}")
        lines += _head("process_resident_memory_bytes", "gauge", "Memory in use.")
        lines.append(f"process_resident_memory_bytes {resident()}")
        lines += _head("process_start_time_seconds", "gauge", "When the server began.")
        lines.append(f"process_start_time_seconds {self._began:.3f}")
        return "\n".join(lines) + "\n"


class _Histogram:
    def __init__(self, buckets: Sequence[float]) -> None:
        self.buckets = tuple(buckets)
        self.counts = [0] * (len(self.buckets) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.buckets, value)] += 1
        self.sum += value

    def lines(self, name: str, labels: Labels) -> list[str]:
        lines, below = [], 0
        for edge, count in zip((*self.buckets, "+Inf"), self.counts, strict=True):
            below += count
            lines.append(f"{name}_bucket{_braces((*labels, ('le', str(edge))))} {below}")
        return [*lines, f"{name}_sum{_braces(labels)} {self.sum:g}", f"{name}_count{_braces(labels)} {below}"]


def resident() -> int:
    """Bytes of memory in use; 0 where the system does not say."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError, IndexError):
        return 0


def _sorted(labels: Mapping[str, str]) -> Labels:
    return tuple(sorted(labels.items()))


def _head(name: str, kind: str, meaning: str) -> list[str]:
    return [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]


def _braces(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
