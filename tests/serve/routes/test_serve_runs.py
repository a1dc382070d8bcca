"""Runs and leaderboard: a damaged run does not hide the others, and the tournament is that of the bench."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from served_runs import fake_run

from nearfar.bench.comparison import outcomes, tournament
from nearfar.serve.routes.runs import leaderboard, list_runs

Client = Callable[..., TestClient]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, loss, score in (("one", "nra", 0.7), ("two", "multi_similarity", 0.6), ("three", "triplet", 0.5)):
        fake_run(tmp_path / "runs" / name, loss, score)
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("manifest.json", None, "manifest.json is missing"),
        ("manifest.json", "{", "is not valid JSON"),
        ("manifest.json", '{"recipe": ["x"]}', "AttributeError"),
        (
            "manifest.json",
            '{"recipe": {"split": {"name": "magic"}}}',
            "split.name 'standard', and the manifest 'magic'",
        ),
        ("metrics.json", "[]", "holds a list"),
    ],
)
def test_a_damaged_run_is_named_and_the_others_are_shown(
    client: Client, runs: Path, file: str, content: str | None, words: str
) -> None:
    (runs / "two" / file).unlink()
    if content is not None:
        (runs / "two" / file).write_text(content)
    served = client(runs=[runs])
    for path in ("runs", "leaderboard"):
        answer = served.get(f"/api/v1/{path}")
        assert answer.status_code == 200
        (damaged,) = answer.json()["damaged"]
        assert damaged["name"] == "two"
        assert words in damaged["reason"]
        assert str(runs) not in damaged["reason"]  # the server's disk is nobody's business
    assert [run["name"] for run in served.get("/api/v1/runs").json()["runs"]] == ["one", "three"]
    rows = served.get("/api/v1/leaderboard").json()["experiments"][0]["rows"]
    assert [row["loss"] for row in rows] == ["nra", "triplet"]


def test_a_damaged_log_costs_only_the_curve(runs: Path) -> None:
    (runs / "two" / "log.jsonl").write_text('{"step": 1\n')
    shown = {run["name"]: run["curves"] for run in list_runs([runs])["runs"]}
    assert shown["two"] == {}
    assert shown["one"]["test"] == [[1, pytest.approx(0.6)], [2, pytest.approx(0.7)]]
    (runs / "two" / "log.jsonl").write_text('3\n{"epoch": 0, "metrics": [1]}\n')
    assert list_runs([runs])["damaged"] == []


def test_folders_without_finished_runs_have_none_to_show(runs: Path, tmp_path: Path) -> None:
    (runs / "one" / "metrics.json").unlink()
    (tmp_path / "empty").mkdir()
    shown = list_runs([runs, tmp_path / "empty", tmp_path / "gone"])
    assert [run["name"] for run in shown["runs"]] == ["three", "two"]
    assert (shown["unfinished"], shown["damaged"]) == (["one"], [])


def test_the_tournament_is_that_of_the_command_line(runs: Path) -> None:
    """Only losses that all experiments have take part; a third loss of one experiment changes no rank."""
    fake_run(runs / "four", "nra", 0.4, dim=16)
    fake_run(runs / "five", "multi_similarity", 0.9, dim=16)
    kept, left_out = tournament.shared(tournament.scores(outcomes.find(runs)))
    shown = leaderboard([runs])["tournament"]
    assert shown["rows"] == [{**dict(row), "ranks": list(row.ranks)} for row in tournament.tournament(kept)]
    assert {row["loss"]: row["ranks"] for row in shown["rows"]} == {"nra": [2, 1], "multi_similarity": [1, 2]}
    assert (shown["experiments"], left_out) == (list(kept), ["triplet"])
    assert "only the 2 losses take part" in shown["note"]


def test_no_tournament_without_two_losses_in_common(runs: Path) -> None:
    fake_run(runs / "four", "nra", 0.4, dim=16)
    assert leaderboard([runs])["tournament"] == {"experiments": [], "rows": [], "note": ""}
