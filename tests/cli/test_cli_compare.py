"""Comparing on the command line: bench compare, tournament, papers compare."""

import csv
import io
from xml.etree import ElementTree

import pytest
from runs import finished


@pytest.fixture
def fair(tmp_path):
    finished(tmp_path / "runs" / "a", "nra", score=0.5)
    finished(tmp_path / "runs" / "b", "proxy_anchor", score=0.7)
    return tmp_path / "runs"


@pytest.fixture
def unfair(fair):
    finished(fair / "c", "triplet", score=0.9, overrides={"training.epochs": 50})
    return fair


@pytest.mark.parametrize("words", [["bench", "compare"], ["tournament"]])
def test_losses_are_ranked(fair, words, nearfar):
    out = nearfar(*words, fair).out
    assert out.index("proxy_anchor") < out.index("nra")
    assert "UNFAIR" not in out


@pytest.mark.parametrize("words", [["bench", "compare"], ["tournament"]])
def test_what_is_unfair_is_shown_and_refused(unfair, words, nearfar):
    said = nearfar(*words, unfair, code=1)
    assert "training.epochs: 5 in a, b; 50 in c" in said.out
    assert "90.00" in said.out
    assert "not ranked" in said.out
    assert "--anyway" in said.err


@pytest.mark.parametrize("words", [["bench", "compare"], ["tournament"]])
@pytest.mark.parametrize("format", ["text", "csv", "latex", "html"])
def test_anyway_ranks_and_marks_every_format(unfair, words, format, nearfar):
    out = nearfar(*words, unfair, "--anyway", "--format", format).out
    assert "UNFAIR" in out
    assert out.index("triplet") < out.index("nra")


def test_settings_are_chosen_by_validation_classes(tmp_path, nearfar):
    for loss, validation in (("nra", 0.9), ("triplet", 0.8)):
        finished(tmp_path / loss, loss, score=1 - validation, validation={"recall@1": validation, "map@r": 0.5})
    out = nearfar("bench", "compare", tmp_path, "--part", "validation").out
    assert "recall@1 of the validation classes" in out
    assert out.index("nra") < out.index("triplet")
    out = nearfar("bench", "compare", tmp_path).out
    assert out.index("triplet") < out.index("nra")
    err = nearfar("bench", "compare", tmp_path, "--part", "train", code=1).err
    assert "part is 'train'; allowed are test, validation" in err


def test_csv_is_read_again(unfair, nearfar):
    out = nearfar("bench", "compare", unfair, "--anyway", "--format", "csv", "--metric", "map@r").out
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [(row["verdict"], row["loss"], row["map@r"]) for row in rows] == [
        ("UNFAIR", "triplet", "45.0"),
        ("UNFAIR", "proxy_anchor", "35.0"),
        ("UNFAIR", "nra", "25.0"),
    ]


@pytest.mark.parametrize("words", [["bench", "compare"], ["tournament"]])
def test_a_chart_is_a_file(nearfar, fair, words, tmp_path):
    nearfar(*words, fair, "--format", "svg", "-o", tmp_path / "chart.svg")
    names = [each.text or "" for each in ElementTree.parse(tmp_path / "chart.svg").iter() if each.tag.endswith("text")]
    assert any("proxy_anchor" in name for name in names)


def test_totals_of_the_thesis(fair, nearfar):
    printed = nearfar("tournament", fair, "--style", "thesis").out
    assert "as in the thesis" in printed
    assert "proxy_anchor      1     1.00" in printed


def test_a_file_is_written(nearfar, fair, tmp_path):
    file = tmp_path / "table.tex"
    assert f"wrote {file}" in nearfar("tournament", fair, "--format", "latex", "-o", file).out
    assert file.read_text(encoding="utf-8").startswith(r"\begin{table}")


def test_unfinished_runs_are_told(fair, nearfar):
    (finished(fair / "later", "margin").folder / "metrics.json").unlink()
    assert "left out" in nearfar("bench", "compare", fair).err


def test_a_wrong_metric_or_format_ends_in_one_line(fair, nearfar):
    assert "has no 'nmi' of test" in nearfar("bench", "compare", fair, "--metric", "nmi", code=1).err
    err = nearfar("bench", "compare", fair, "--format", "xml", code=1).err
    assert "format is 'xml'; allowed are text, csv, latex, html, svg" in err


def test_runs_stand_beside_the_papers(fair, nearfar):
    rows = list(csv.DictReader(io.StringIO(nearfar("papers", "compare", fair, "--format", "csv").out)))
    first = next(row for row in rows if row["printed in"] == "thesis, Table 6a, row ProxyAnchor")
    assert (first["loss"], first["theirs"], float(first["difference"])) == (
        "proxy_anchor",
        "62.93",
        pytest.approx(7.07),
    )


def test_the_loss_of_the_thesis_is_its_second_form(tmp_path, nearfar):
    large = {"network.name": "bn_inception", "network.dim": 512}
    finished(tmp_path / "first", "proxy_repel", overrides=large)
    finished(tmp_path / "second", {"name": "proxy_repel", "through_batch": True}, overrides=large)
    lines = [line for line in nearfar("papers", "compare", tmp_path).out.splitlines() if "65.42" in line]
    assert [line.split()[0] for line in lines] == ["proxy_repel+batch"]


def test_papers_alone_are_listed_and_shown(nearfar):
    assert "7c" in nearfar("papers", "table").out
    assert "68.11" in nearfar("papers", "table", "thesis:7c").out
