"""Options that are made of functions: their defaults and texts are those of the function."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any, get_args

import pytest

from nearfar import cli
from nearfar.bench import compare, pack, run, tournament
from nearfar.cli import bench, calibrate, data, export, index, search
from nearfar.data.store.prepare import prepare
from nearfar.networks.weights import export as exporting
from nearfar.search import Index
from nearfar.training.evaluation import calibration

DERIVED = [
    (bench.compare_runs, compare),
    (bench.hold_tournament, tournament),
    (bench.pack_grid, pack),
    (bench.run_grid, run),
    (calibrate.calibrate_model, calibration.calibrate),
    (data.prepare_set, prepare),
    (export.export_network, exporting.export),
    (index.build, Index.build),
    (index.clusters, Index.clusters),
    (index.duplicates, Index.near_duplicates),
    (search.search_index, Index.search),
]


@pytest.mark.parametrize(("command", "function"), DERIVED)
def test_options_are_those_of_the_function(command: Callable[..., None], function: Callable[..., Any]) -> None:
    wanted = inspect.signature(function).parameters
    options = inspect.signature(command, eval_str=True).parameters
    shared = options.keys() & wanted.keys()
    assert shared
    for name in shared - {"data", "grid", "images", "out", "runs"}:  # which commands know by themselves
        assert (options[name].default or None) == (wanted[name].default or None), name
        assert get_args(options[name].annotation)[1].help.strip(), name


def test_help_is_there_at_once():
    """Nothing large is imported to make options."""
    code = "import sys, nearfar.cli; print(*{'torch', 'numpy', 'PIL', 'rich'} & sys.modules.keys())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not ended.stdout.strip()
    assert cli.app.registered_commands
