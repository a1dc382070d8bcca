"""Packed grids: comparisons read them like folders, and the published results are complete."""

import csv
import inspect
import json
import shutil
import statistics
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from runs import finished

from nearfar.bench import compare, find, read, unfinished
from nearfar.bench.comparison.significance import kendall_tau
from nearfar.bench.comparison.tables import text
from nearfar.cli import main
from nearfar.training.run.packed import locate, pack, run_folders

RESULTS = Path(__file__).parents[3] / "docs" / "results"
KNOWN = Path(__file__).with_name("known_results.csv")


@pytest.fixture
def grid(tmp_path):
    rng = np.random.default_rng(0)
    for loss, share in (("nra", 0.5), ("proxy_anchor", 0.9)):
        folder = tmp_path / "grid" / "cells" / loss
        finished(folder, loss, queries=rng.random(60) < share, cell={"loss": loss})
        (folder / "log.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
        (folder / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "grid" / "grid.toml").write_text('name = "grid"\n', encoding="utf-8")
    return tmp_path / "grid"


def known():
    grids = {}
    for row in csv.DictReader(KNOWN.open(encoding="utf-8")):
        grids.setdefault(row["grid"], []).append(row)
    return grids


def test_a_packed_grid_gives_the_table_of_its_folder(grid):
    file = grid.with_suffix(".zip")
    assert pack(grid, file) == 2
    before, after = find(grid), find(file)
    assert [run.name for run in after] == [run.name for run in before]
    assert text(compare(after).table) == text(compare(before).table)
    assert [run.log for run in after] == [[{"step": 1}]] * 2
    assert [dict(run.labels) for run in after] == [{"loss": "nra"}, {"loss": "proxy_anchor"}]


def test_runs_are_found_in_deeply_nested_folders(grid):
    outer = grid.parent / "/".join("d" * 300)
    outer.mkdir(parents=True)
    shutil.move(grid, outer)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 150)
    try:
        assert [run.name for run in run_folders(grid.parent)] == ["nra", "proxy_anchor"]
    finally:
        sys.setrecursionlimit(limit)


def test_weights_are_not_packed_and_the_same_files_give_the_same_bytes(grid, tmp_path):
    pack(grid, tmp_path / "a.zip")
    shutil.copytree(grid, tmp_path / "copy")
    pack(tmp_path / "copy", tmp_path / "b.zip")
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    names = zipfile.ZipFile(tmp_path / "a.zip").namelist()
    assert "grid.toml" in names
    assert not any("model" in name for name in names)


def test_a_run_in_a_packed_grid_has_a_path(grid):
    file = grid.with_suffix(".zip")
    pack(grid, file)
    folder = file / "cells" / "nra"
    assert list(run_folders(file / "cells")) == [folder, file / "cells" / "proxy_anchor"]
    assert read(folder).loss == "nra"
    assert locate(folder / "metrics.json").read_bytes() == (grid / "cells" / "nra" / "metrics.json").read_bytes()
    with pytest.raises(ValueError, match=r"holds no run: recipe.toml is missing"):
        read(file / "cells" / "margin")


def test_a_file_that_is_packed_again_is_read_again(grid):
    file = grid.with_suffix(".zip")
    pack(grid, file)
    assert len(find(file)) == 2
    (grid / "cells" / "nra" / "metrics.json").unlink()
    pack(grid, file)
    assert [run.name for run in find(file)] == ["proxy_anchor"]
    assert unfinished(file) == [file / "cells" / "nra"]


def test_what_cannot_be_packed_or_read_is_named(grid, tmp_path):
    with pytest.raises(ValueError, match=r"grid.tar'; the name of a packed file ends in .zip"):
        pack(grid, tmp_path / "grid.tar")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no run"):
        pack(tmp_path / "empty", tmp_path / "empty.zip")
    (tmp_path / "damaged.zip").write_bytes(b"PK and nothing")
    with pytest.raises(ValueError, match=r"damaged.zip is damaged"):
        find(tmp_path / "damaged.zip")
    (tmp_path / "table.csv").write_text("a,b\n")
    with pytest.raises(FileNotFoundError, match=r"table.csv is a file; needed is a run folder, .* or a packed grid"):
        find(tmp_path / "table.csv")


def test_commands_pack_and_read(grid, tmp_path, capsys):
    file = tmp_path / "packed.zip"
    for words in (
        ["bench", "pack", grid, "--out", file],
        ["bench", "compare", file],
        ["tournament", file],
        ["bench", "report", file],
    ):
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in words])
        assert stop.value.code == 0
    out = capsys.readouterr().out
    assert f"wrote {file} with 2 runs" in out
    assert f"wrote {tmp_path / 'packed.html'}" in out
    assert "<h1>packed</h1>" in (tmp_path / "packed.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("grid", known())
def test_published_results_hold_every_run_and_its_numbers(grid):
    file = RESULTS / f"{grid}.zip"
    found = {run.name: run for run in map(read, run_folders(file))}
    rows = known()[grid]
    assert sorted(found) == sorted(row["run"] for row in rows)
    for row in rows:
        run = found[row["run"]]
        for metric in ("recall@1", "map@r"):
            assert run.score(metric, row["part"]) == float(row[metric])
        queries = run.queries()
        if row["part"] == "test":  # the number of the run is the mean over its queries
            assert queries["recall@1"].mean() == pytest.approx(float(row["recall@1"]), abs=1e-6)


def test_the_agreement_of_validation_and_test_on_cars196_is_that_of_its_page():
    trials = json.loads((RESULTS / "cars196_tuning.json").read_text(encoding="utf-8"))
    validation = {loss: max(each["value"] or 0.0 for each in of["trials"]) for loss, of in trials.items()}
    runs = find(RESULTS / "cars196.zip")

    def tau(metric):
        test = {loss: statistics.fmean(run.score(metric) for run in runs if run.loss == loss) for loss in validation}
        return kendall_tau(list(validation.values()), list(test.values()))

    assert tau("map@r") == pytest.approx(0.70, abs=0.005)
    assert tau("recall@1") == pytest.approx(0.49, abs=0.005)
