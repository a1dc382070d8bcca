"""Options that are made of functions: their defaults and texts are those of the function."""

import inspect
import subprocess
import sys
from typing import get_args

import pytest

from nearfar import cli
from nearfar.bench import compare, pack, run, tournament, tune
from nearfar.cli import bench, data, search, train
from nearfar.data.preview import first_batch
from nearfar.data.store.prepare import prepare
from nearfar.networks.weights.export import export
from nearfar.reports import leaderboard, run_report
from nearfar.search import Index
from nearfar.search.audit import audit
from nearfar.search.embedding_files import embed
from nearfar.training import calibrate
from nearfar.training.evaluation.evaluate import evaluate_embeddings

DERIVED = [
    (bench.compare_runs, compare),
    (bench.hold_tournament, tournament),
    (bench.pack_grid, pack),
    (bench.report_runs, leaderboard.write),
    (bench.run_grid, run),
    (bench.tune_recipe, tune),
    (data.audit_images, audit),
    (data.prepare_set, prepare),
    (data.show, first_batch),
    (search.build, Index.build),
    (search.calibrate_model, calibrate),
    (search.clusters, Index.clusters),
    (search.duplicates, Index.near_duplicates),
    (search.embed_images, embed),
    (search.search_index, Index.search),
    (train.evaluate_files, evaluate_embeddings),
    (train.export_network, export),
    (train.report_run, run_report.report),
]


@pytest.mark.parametrize(("command", "function"), DERIVED)
def test_options_are_those_of_the_function(command, function):
    wanted = inspect.signature(function).parameters
    options = inspect.signature(command, eval_str=True).parameters
    shared = options.keys() & wanted.keys()
    assert shared
    for name in shared - {"data", "grid", "images", "ks", "measure", "out", "runs", "view"}:  # commands know these
        assert (options[name].default or None) == (wanted[name].default or None), name
        assert get_args(options[name].annotation)[1].help.strip(), name


def test_help_is_there_at_once():
    """Nothing large is imported to make options."""
    code = "import sys, nearfar.cli; print(*{'torch', 'numpy', 'PIL', 'rich'} & sys.modules.keys())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not ended.stdout.strip()
    assert cli.app.registered_commands
