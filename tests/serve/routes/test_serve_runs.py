"""Runs and leaderboard: a damaged run does not hide the others, and the tournament is that of the bench."""

import itertools
from collections.abc import Callable

import pytest
from fastapi.testclient import TestClient
from served_runs import fake_run

from nearfar import bench
from nearfar.cli import main
from nearfar.reports import leaderboard as leaderboard_page
from nearfar.serve.routes.runs import leaderboard, list_runs

Client = Callable[..., TestClient]

PLACES = (("digits", 8), ("digits", 16), ("digits", 32), ("cub", 8))


@pytest.fixture
def runs(tmp_path):
    for name, loss, score in (("one", "nra", 0.7), ("two", "multi_similarity", 0.6), ("three", "triplet", 0.5)):
        fake_run(tmp_path / "runs" / name, loss, score)
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("manifest.json", None, "manifest.json is missing"),
        ("manifest.json", "{", "is not valid JSON"),
        ("manifest.json", '{"recipe": ["x"]}', "recipe ['x']; needed: a valid dictionary"),
        ("manifest.json", '{"recipe": {"split": {"name": "magic"}}}', "split.name 'magic'; known are standard, fixed_"),
        ("metrics.json", "[]", "content []; needed: a valid dictionary"),
    ],
)
def test_a_damaged_run_is_named_and_the_others_are_shown(client, runs, file, content, words):
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


def test_a_damaged_log_costs_only_the_curve(runs):
    (runs / "two" / "log.jsonl").write_text('{"step": 1\n')
    shown = {run["name"]: run["curves"] for run in list_runs([runs])["runs"]}
    assert shown["two"] == {}
    assert shown["one"]["test"] == [[1, pytest.approx(0.6)], [2, pytest.approx(0.7)]]
    (runs / "two" / "log.jsonl").write_text('3\n{"epoch": 0, "metrics": [1]}\n')
    assert list_runs([runs])["damaged"] == []


def test_folders_without_finished_runs_have_none_to_show(runs, tmp_path):
    (runs / "one" / "metrics.json").unlink()
    (tmp_path / "empty").mkdir()
    shown = list_runs([runs, tmp_path / "empty", tmp_path / "gone"])
    assert [run["name"] for run in shown["runs"]] == ["three", "two"]
    assert (shown["unfinished"], shown["damaged"]) == (["one"], [])


def test_command_api_server_and_report_hold_one_tournament(client, tmp_path, capsys):
    """nra wins all three sizes of one dataset and loses the other dataset: datasets count, and not experiments.

    Ranks by hand, with triplet missing from one experiment and therefore left out::

                          digits 8, 16, 32    cub 8    mean rank over both datasets
        multi_similarity  2         2   2     1        (2 + 1) / 2 = 1.5
        nra               1         1   1     3        (1 + 3) / 2 = 2.0
        margin            3         3   3     2        (3 + 2) / 2 = 2.5
    """
    scores = {"nra": (0.9, 0.1), "multi_similarity": (0.8, 0.3), "margin": (0.7, 0.2), "triplet": (0.95, 0.95)}
    for (loss, pair), (data, dim) in itertools.product(scores.items(), PLACES):
        if (loss, dim) != ("triplet", 32):
            fake_run(tmp_path / f"{loss}-{data}-{dim}", loss, pair[data == "cub"], dim=dim, data=data)
    by_hand = {"multi_similarity": (1.5, (2, 2, 2, 1)), "nra": (2.0, (1, 1, 1, 3)), "margin": (2.5, (3, 3, 3, 2))}

    def held(names, rows):
        table = {loss: (average, dict(zip(names, ranks, strict=True))) for loss, average, ranks in rows}
        places = [f"{data} {dim}" for data, dim in PLACES]
        expected = {
            loss: (average, dict(zip(places, ranks, strict=True))) for loss, (average, ranks) in by_hand.items()
        }
        assert (list(table), table) == (list(by_hand), expected)

    shown = client(runs=[tmp_path]).get("/api/v1/leaderboard").json()["tournament"]
    held(shown["experiments"], [(row["loss"], row["average"], row["ranks"]) for row in shown["rows"]])
    assert shown["note"] == "only the 3 losses take part that all experiments have"
    tournament = bench.tournament(bench.find(tmp_path))
    held(list(tournament.scores), [(row.loss, row.average, row.ranks) for row in tournament.rows])
    with pytest.raises(SystemExit, match="0"):
        main(["tournament", str(tmp_path), "--format", "csv"])
    head, *lines = [line.split(",") for line in capsys.readouterr().out.splitlines()[:4]]
    held(
        head[-4:],
        [(line[0], float(line[head.index("average")]), [float(rank) for rank in line[-4:]]) for line in lines],
    )
    page = leaderboard_page.html(bench.find(tmp_path))
    assert [text in page for text in (">multi_similarity 1.50<", ">nra 2.00<", ">2.50 margin<")] == [True] * 3


def test_no_tournament_without_two_losses_in_common(runs):
    fake_run(runs / "four", "nra", 0.4, dim=16)
    assert leaderboard([runs])["tournament"] == {"experiments": [], "rows": [], "note": ""}
