"""Comparing on the command line: bench compare, tournament, report --papers."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fake_outcomes import finished

from nearfar.cli import main


def call(*words: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.fixture
def fair(tmp_path: Path) -> Path:
    finished(tmp_path / "runs" / "a", "nra", score=0.5)
    finished(tmp_path / "runs" / "b", "proxy_anchor", score=0.7)
    return tmp_path / "runs"


@pytest.fixture
def unfair(fair: Path) -> Path:
    finished(fair / "c", "triplet", score=0.9, overrides={"training.epochs": 50})
    return fair


@pytest.mark.parametrize("words", [["bench", "compare"], ["tournament"]])
def test_losses_are_ranked(fair: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*words, fair) == 0
    out = capsys.readouterr().out
    assert out.index("proxy_anchor") < out.index("nra")
    assert "UNFAIR" not in out


@pytest.mark.parametrize("words", [["bench", "compare"], ["tournament"]])
def test_what_is_unfair_is_shown_and_refused(
    unfair: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*words, unfair) == 1
    said = capsys.readouterr()
    assert "training.epochs: 5 in a, b; 50 in c" in said.out
    assert "90.00" in said.out
    assert "not ranked" in said.out
    assert "--anyway" in said.err


@pytest.mark.parametrize("words", [["bench", "compare"], ["tournament"]])
@pytest.mark.parametrize("format", ["text", "csv", "latex", "html"])
def test_anyway_ranks_and_marks_every_format(
    unfair: Path, words: list[str], format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*words, unfair, "--anyway", "--format", format) == 0
    out = capsys.readouterr().out
    assert "UNFAIR" in out
    assert out.index("triplet") < out.index("nra")


def test_settings_are_chosen_by_validation_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for loss, validation in (("nra", 0.9), ("triplet", 0.8)):
        finished(tmp_path / loss, loss, score=1 - validation, validation={"recall@1": validation, "map@r": 0.5})
    assert call("bench", "compare", tmp_path, "--part", "validation") == 0
    out = capsys.readouterr().out
    assert "recall@1 of the validation classes" in out
    assert out.index("nra") < out.index("triplet")
    assert call("bench", "compare", tmp_path) == 0
    out = capsys.readouterr().out
    assert out.index("triplet") < out.index("nra")
    assert call("bench", "compare", tmp_path, "--part", "train") == 1
    assert "part is 'train'; allowed are test, validation" in capsys.readouterr().err


def test_csv_is_read_again(unfair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("bench", "compare", unfair, "--anyway", "--format", "csv", "--metric", "map@r") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["verdict"], row["loss"], row["map@r"]) for row in rows] == [
        ("UNFAIR", "triplet", "45.0"),
        ("UNFAIR", "proxy_anchor", "35.0"),
        ("UNFAIR", "nra", "25.0"),
    ]


@pytest.mark.parametrize("words", [["bench", "compare"], ["tournament"]])
def test_a_chart_is_a_file(fair: Path, words: list[str], tmp_path: Path) -> None:
    assert call(*words, fair, "--format", "svg", "-o", tmp_path / "chart.svg") == 0
    names = [each.text or "" for each in ElementTree.parse(tmp_path / "chart.svg").iter() if each.tag.endswith("text")]
    assert any("proxy_anchor" in name for name in names)


def test_totals_of_the_thesis(fair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("tournament", fair, "--style", "thesis") == 0
    printed = capsys.readouterr().out
    assert "as in the thesis" in printed
    assert "proxy_anchor      1     1.00" in printed


def test_a_file_is_written(fair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "table.tex"
    assert call("tournament", fair, "--format", "latex", "-o", file) == 0
    assert file.read_text(encoding="utf-8").startswith(r"\begin{table}")
    assert f"wrote {file}" in capsys.readouterr().out


def test_unfinished_runs_are_told(fair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (finished(fair / "later", "margin").folder / "metrics.json").unlink()
    assert call("bench", "compare", fair) == 0
    assert "left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "compare", "nowhere"], "nowhere does not exist"),
        (["tournament", "nowhere"], "nowhere does not exist"),
        (["report"], "0 run folders are given"),
        (["report", "--papers", "--table", "thesis:77"], "thesis has no table '77'"),
    ],
)
def test_bad_input_ends_in_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*words) == 1
    said = capsys.readouterr()
    assert said.err.startswith("nearfar: ")
    assert message in said.err
    assert said.err.count("\n") == 1


def test_a_wrong_metric_or_format_ends_in_one_line(fair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("bench", "compare", fair, "--metric", "nmi") == 1
    assert "has no 'nmi' of test" in capsys.readouterr().err
    assert call("bench", "compare", fair, "--format", "xml") == 1
    assert "format is 'xml'; allowed are text, csv, latex, html, svg" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["bench", "compare"], ["tournament"], ["report"]])
def test_help_has_an_example(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*words, "--help") == 0
    assert "Example: nearfar " in capsys.readouterr().out


def test_runs_stand_beside_the_papers(fair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("report", "--papers", fair, "--format", "csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    first = next(row for row in rows if row["printed in"] == "thesis, Table 6a, row ProxyAnchor")
    assert (first["loss"], first["theirs"], float(first["difference"])) == (
        "proxy_anchor",
        "62.93",
        pytest.approx(7.07),
    )


def test_the_loss_of_the_thesis_is_its_second_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = {"network.name": "bn_inception", "network.dim": 512}
    finished(tmp_path / "first", "proxy_repel", overrides=large)
    finished(tmp_path / "second", {"name": "proxy_repel", "through_batch": True}, overrides=large)
    assert call("report", "--papers", str(tmp_path)) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "65.42" in line]
    assert [line.split()[0] for line in lines] == ["proxy_repel+batch"]


def test_papers_alone_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("report", "--papers") == 0
    assert "7c" in capsys.readouterr().out
    assert call("report", "--papers", "--table", "thesis:7c") == 0
    assert "68.11" in capsys.readouterr().out
