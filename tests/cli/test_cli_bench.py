"""nearfar bench: the whole experiment on the digits, as CI runs it."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from nearfar.bench.executors import inline
from nearfar.bench.executors.job import Job
from nearfar.bench.grid import runner
from nearfar.cli import main

GRID = Path(__file__).parents[2] / "recipes" / "grids" / "digits.toml"
QUICK = ["--set", "training.epochs=2", "--set", "sampler.steps=5"]


def run(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0)


def test_digits_from_a_grid_to_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Grid, interrupted and resumed, comparison, tournament, page."""
    execute, done = inline.execute, []

    def interrupted(job: Job) -> int:
        if len(done) == 3:
            signal.raise_signal(signal.SIGINT)  # while the third cell is finished and the fourth not begun
        done.append(job.name)
        return execute(job)

    monkeypatch.setattr(inline, "execute", interrupted)
    bench = ["bench", "run", GRID, "--out", tmp_path, "--engine", "inline", "--quiet", "--device", "cpu", *QUICK]
    assert run(*bench) == 130
    told = capsys.readouterr().out
    assert "stopped after 4 of 8 cells; resume with the same command" in told
    assert run(*bench) == 0
    told = capsys.readouterr().out
    assert "8 of 8 cells are finished" in told
    assert "Next: " not in told
    assert run(*[word for word in bench if word != "--quiet"]) == 0
    assert f"Next: nearfar bench compare {tmp_path / 'digits'}, or nearfar bench report " in capsys.readouterr().out
    assert len(done) == len(set(done)) == 8
    place = tmp_path / "digits"
    assert run("bench", "compare", place) == 0
    assert "proxy_anchor" in capsys.readouterr().out
    assert run("tournament", place, "--format", "csv") == 0
    assert {"contrastive", "proxy_anchor", "raw+valid_triplet"} <= words(capsys.readouterr().out)
    assert run("bench", "report", place, "-o", tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert all(loss in page for loss in ("contrastive", "proxy_anchor", "raw+valid_triplet", "frozen"))


def test_what_is_not_tested_tells_of_validation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--out", tmp_path, "--engine", "inline", "--device", "cpu", *QUICK, "--set", "evaluation.test=false"]
    assert run("bench", "run", GRID, *words, "--only", "contrastive", "--only", "seed0") == 0
    said = capsys.readouterr()
    assert re.search(r"contrastive-seed0 +\d+\.\d\d \(validation\)", said.out)
    assert re.search(r"finished: contrastive-seed0  recall@1 \d+\.\d\d \(validation\)", said.err)
    assert run("bench", "compare", tmp_path / "digits") == 1
    assert "was not measured on test classes, but on validation" in capsys.readouterr().err


def words(text: str) -> set[str]:
    return {word.strip('"') for line in text.splitlines() for word in line.split(",")}


def test_a_dry_run_lists_the_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "run", GRID, "--out", tmp_path, "--dry-run", "--only", "proxy_anchor") == 0
    told = capsys.readouterr().out
    assert "proxy_anchor-seed0" in told
    assert "2 cells" in told
    assert not list(tmp_path.iterdir())


def test_failed_cells_have_a_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wild(job: Job) -> int:
        print("ValueError: nothing goes")
        return 1

    monkeypatch.setattr(inline, "execute", wild)
    assert run("bench", "run", GRID, "--out", tmp_path, "--engine", "inline", "-q", "--only", "contrastive") == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("failed: ")]
    assert [line.split(" (")[0] for line in lines] == [
        "failed: contrastive-seed0: ValueError: nothing goes",
        "failed: contrastive-seed1: ValueError: nothing goes",
    ]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--engine", "slurm"], "engine is 'slurm'; allowed are local, inline, ray"),
        (["--only", "proxy_anchr"], "did you mean 'proxy_anchor'"),
        (["--set", "training.epohs=1"], "unknown key training.epohs"),
        (["--set", "loss.alpha=2"], "cell contrastive-seed0: unknown key loss.alpha"),
    ],
)
def test_bad_input_is_one_line(more: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "run", GRID, "--out", tmp_path, *more) == 1
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_a_grid_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "run", tmp_path / "no.toml") == 1
    assert "no.toml does not exist; a grid is needed" in capsys.readouterr().err


def test_progress_is_told_in_lines_without_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "prepare", lambda *arguments, **settings: None)

    def nothing(job: Job) -> int:
        os.makedirs(job.folder)
        (Path(job.folder) / "metrics.json").write_text('{"seconds": 2.5, "test": {"recall@1": 0.75}}')
        return 0

    monkeypatch.setattr(inline, "execute", nothing)
    run("bench", "run", GRID, "--out", tmp_path, "--engine", "inline", "--only", "contrastive", "--only", "0")
    told: Any = capsys.readouterr()
    assert told.err.splitlines() == [
        "started: contrastive-seed0",
        "[1/1] finished: contrastive-seed0  recall@1 75.00  2.5 s",
    ]
    assert [line.split() for line in told.out.splitlines() if "contrastive" in line] == [
        ["contrastive-seed0", "75.00", "2.5"]
    ]
