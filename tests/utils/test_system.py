"""Memory that is kept for reuse. What it saves is measured by benchmarks/allocation.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nearfar.utils import system


@pytest.fixture
def calls(monkeypatch):
    """Settings that a C library gets, which accepts all of them."""
    made = []
    library = SimpleNamespace(mallopt=lambda name, value: made.append((name, value)) or 1)
    monkeypatch.setattr(system.ctypes, "CDLL", lambda name: library)
    for name in ("NEARFAR_REUSE_MEMORY", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    return made


def test_large_blocks_come_from_the_heap_which_is_not_trimmed(calls):
    assert system.reuse_memory()
    assert calls == [(-3, 1 << 30), (-1, (1 << 31) - 1)]  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h


@pytest.mark.parametrize(
    ("name", "value"),
    [("NEARFAR_REUSE_MEMORY", "0"), ("MALLOC_MMAP_THRESHOLD_", "9999"), ("MALLOC_TRIM_THRESHOLD_", "9999")],
)
def test_the_users_own_settings_stay(name, value, calls, monkeypatch):
    monkeypatch.setenv(name, value)
    assert not system.reuse_memory()
    assert not calls


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(system.ctypes, "CDLL", lambda name: object())
    assert not system.reuse_memory()


@pytest.mark.parametrize(("command", "kept"), [("losses", True), ("serve", False)])
def test_commands_keep_memory_and_the_server_does_not(
    command: str, kept: bool, calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nearfar.cli import main

    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert bool(calls) == kept
