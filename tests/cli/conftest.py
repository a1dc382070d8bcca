"""Fixtures of commands."""

import sys

import pytest

from nearfar.networks.weights.published import KNOWN


@pytest.fixture
def without_weights(tmp_path, monkeypatch):
    """An empty cache, and no packages of weights; the folder where downloaded weights would be."""
    monkeypatch.setenv("NEARFAR_CACHE", str(tmp_path / "cache"))
    for each in KNOWN:
        if each.inside:
            monkeypatch.setitem(sys.modules, each.inside.partition("/")[0], None)
    return tmp_path / "cache" / "weights"
