"""nearfar tune and nearfar bench report: arguments in, files and one readable line out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from board_runs import write_board, write_run
from training_runs import recipe, vectors

from nearfar.cli import main
from nearfar.training.recipe.files import load, to_toml

pytest.importorskip("optuna")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    told = capsys.readouterr()
    code = ended.value.code
    return int(code or 0), told.out, told.err


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A recipe and a space."""
    one, other = tmp_path / "recipe.toml", tmp_path / "space.toml"
    chosen: dict[str, Any] = {"split__name": "fixed_validation", "split__share": 0.34, "training__epochs": 1}
    one.write_text(to_toml(recipe(vectors(tmp_path), **chosen)))
    other.write_text('"loss.margin" = {low = 0.0, high = 0.5, step = 0.5}\n')
    return one, other


def test_tune_writes_a_recipe_that_trains(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tuned"
    command = ["tune", files[0], "--space", files[1], "--sampler", "grid", "--out", out, "--set", "optimizer.lr=0.02"]
    code, said, told = run(capsys, *command)
    assert code == 0
    assert "trial 2: " in told
    assert f"wrote {out / 'best.toml'}" in said
    assert f"test them once with: nearfar train {out / 'best.toml'}" in said
    assert "<svg" in (out / "tuning.html").read_text()
    best = load(out / "best.toml")
    assert best.optimizer.lr == 0.02
    assert f"loss.margin={best.loss.settings['margin']:g}" in said
    code, said, told = run(capsys, *command, "--quiet")
    assert (code, told) == (0, ""), "nothing is left to do"
    code, said, _ = run(capsys, "train", out / "best.toml", "--out", tmp_path / "run", "--quiet")
    assert code == 0
    assert "test recall@1" in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--sampler", "magic"], "sampler is 'magic'; allowed are tpe, random, grid, in_turn"),
        (["--trials", "0"], "trials is 0; it must be ≥ 1"),
        (["--jobs", "0"], "jobs is 0; it must be ≥ 1"),
        (["--set", "split.name=standard"], "--set split.name=fixed_validation"),
        (["--set", "evaluation.test=false", "--set", "split.name=standard"], "evaluation.test is false"),
        (["--storage", "nonsense"], "the storage 'nonsense' cannot be opened"),
    ],
)
def test_tune_says_what_is_wrong_in_a_line(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], change: list[str], words: str
) -> None:
    code, _, told = run(capsys, "tune", files[0], "--space", files[1], "--out", tmp_path / "tuned", *change)
    assert code != 0
    assert words in told
    assert len(told.strip().splitlines()) == 1


def test_tune_says_that_nothing_can_be_pruned(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, rare = tmp_path / "tuned", "evaluation.every=0"
    _, _, told = run(capsys, "tune", files[0], "--space", files[1], "--out", out, "--trials", 1, "--set", rare)
    assert "--set evaluation.every=1" in told


def test_report_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_board(tmp_path / "birds", {"triplet": 0.5, "margin": 0.6}, {"resnet50": 0.0}, [64], seeds=1)
    code, said, _ = run(capsys, "bench", "report", tmp_path / "birds")
    assert code == 0
    file = tmp_path / "birds" / "leaderboard.html"
    assert f"wrote {file}" in said
    assert "<h1>birds</h1>" in file.read_text()
    other = tmp_path / "other.html"
    arguments = ["bench", "report", tmp_path / "birds", "-o", other, "--title", "Ours", "--metric", "map@r"]
    assert run(capsys, *arguments)[0] == 0
    assert "<h1>Ours</h1>" in other.read_text()
    assert "MAP@R" in other.read_text()


def test_report_says_what_is_wrong_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, told = run(capsys, "bench", "report", tmp_path / "nowhere")
    assert code == 1
    assert "nowhere does not exist; needed is a run folder" in told
    write_run(tmp_path / "one", "triplet", 0.5)
    code, _, told = run(capsys, "bench", "report", tmp_path / "one", "--metric", "nmi")
    assert code == 1
    assert "'nmi'" in told


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["tune"], ["bench", "report"]):
        code, said, _ = run(capsys, *words, "--help")
        assert code == 0
        assert f"Example: nearfar {' '.join(words)}" in said
