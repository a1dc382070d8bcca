"""nearfar bench: the whole experiment on the digits, as CI runs it."""

import re
import signal
from pathlib import Path

from nearfar.bench import executors, runner

GRID = Path(__file__).parents[2] / "recipes" / "grids" / "digits.toml"
QUICK = ["--set", "training.epochs=2", "--set", "sampler.steps=5"]


def test_digits_from_a_grid_to_a_page(tmp_path, monkeypatch, nearfar):
    """Grid, interrupted and resumed, comparison, tournament, page."""
    execute, done = executors.execute, []

    def interrupted(cell, device, **settings):
        if len(done) == 3:
            signal.raise_signal(signal.SIGINT)  # while the third cell is finished and the fourth not begun
        done.append(cell.name)
        return execute(cell, device, **settings)

    monkeypatch.setattr(runner, "execute", interrupted)
    bench = ["bench", "run", GRID, "--out", tmp_path, "--engine", "inline", "--quiet", "--device", "cpu", *QUICK]
    told = nearfar(*bench, code=130).out
    assert "stopped after 4 of 8 cells; resume with the same command" in told
    told = nearfar(*bench).out
    assert "8 of 8 cells are finished" in told
    assert "Next: " not in told
    out = nearfar(*[word for word in bench if word != "--quiet"]).out
    assert f"Next: nearfar bench compare {tmp_path / 'digits'}, or nearfar bench report " in out
    assert len(done) == len(set(done)) == 8
    place = tmp_path / "digits"
    assert "proxy_anchor" in nearfar("bench", "compare", place).out
    out = nearfar("tournament", place, "--format", "csv").out
    assert {"contrastive", "proxy_anchor", "raw+valid_triplet"} <= words(out)
    nearfar("bench", "report", place, "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert all(loss in page for loss in ("contrastive", "proxy_anchor", "raw+valid_triplet", "frozen"))


def test_what_is_not_tested_tells_of_validation(tmp_path, nearfar):
    words = ["--out", tmp_path, "--engine", "inline", "--device", "cpu", *QUICK, "--set", "evaluation.test=false"]
    said = nearfar("bench", "run", GRID, *words, "--only", "contrastive", "--only", "seed0")
    assert re.search(r"contrastive-seed0 +\d+\.\d\d \(validation\)", said.out)
    assert re.search(r"finished: contrastive-seed0  recall@1 \d+\.\d\d \(validation\)", said.err)
    err = nearfar("bench", "compare", tmp_path / "digits", code=1).err
    assert "was not measured on test classes, but on validation" in err


def words(text):
    return {word.strip('"') for line in text.splitlines() for word in line.split(",")}


def test_a_dry_run_lists_the_cells(tmp_path, nearfar):
    told = nearfar("bench", "run", GRID, "--out", tmp_path, "--dry-run", "--only", "proxy_anchor").out
    assert "proxy_anchor-seed0" in told
    assert "2 cells" in told
    assert not list(tmp_path.iterdir())


def test_failed_cells_have_a_line_each(tmp_path, monkeypatch, nearfar):
    def wild(cell, device, **settings):
        print("ValueError: nothing goes")
        return 1

    monkeypatch.setattr(runner, "execute", wild)
    out = nearfar(
        "bench", "run", GRID, "--out", tmp_path, "--engine", "inline", "-q", "--only", "contrastive", code=1
    ).out
    lines = [line for line in out.splitlines() if line.startswith("failed: ")]
    assert [line.split(" (")[0] for line in lines] == [
        "failed: contrastive-seed0: ValueError: nothing goes",
        "failed: contrastive-seed1: ValueError: nothing goes",
    ]


def test_progress_is_told_in_lines_without_a_terminal(tmp_path, monkeypatch, nearfar):
    monkeypatch.setattr(runner, "prepare", lambda *arguments, **settings: None)

    def nothing(cell, device, **settings):
        cell.folder.mkdir(parents=True)
        (cell.folder / "metrics.json").write_text('{"seconds": 2.5, "test": {"recall@1": 0.75}}')
        return 0

    monkeypatch.setattr(runner, "execute", nothing)
    printed = nearfar(
        "bench", "run", GRID, "--out", tmp_path, "--engine", "inline", "--only", "contrastive", "--only", "0"
    )
    told = printed
    assert told.err.splitlines() == [
        "started: contrastive-seed0",
        "[1/1] finished: contrastive-seed0  recall@1 75.00  2.5 s",
    ]
    assert [line.split() for line in told.out.splitlines() if "contrastive" in line] == [
        ["contrastive-seed0", "75.00", "2.5"]
    ]
