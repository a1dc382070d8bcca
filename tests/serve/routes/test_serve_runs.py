"""Runs and leaderboard: a damaged run does not hide the others, and the page is that of the bench."""

import itertools
import re
from html import unescape

import pytest
from runs import write_run

from nearfar import bench
from nearfar.cli import main
from nearfar.reports import leaderboard

PLACES = (("digits", 8), ("digits", 16), ("digits", 32), ("cub", 8))


@pytest.fixture
def runs(tmp_path):
    for name, loss, score in (("one", "nra", 0.7), ("two", "multi_similarity", 0.6), ("three", "triplet", 0.5)):
        write_run(tmp_path / "runs" / name, loss, score)
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
    listed = served.get("/api/v1/runs").json()
    assert [run["name"] for run in listed["runs"]] == ["one", "three"]
    (damaged,) = listed["damaged"]
    assert damaged["name"] == "two"
    assert words in damaged["reason"]
    assert str(runs) not in damaged["reason"]  # the server's disk is nobody's business
    page = served.get("/leaderboard").text
    assert f"two cannot be read: {damaged['reason']}" in unescape(page)
    assert [loss for loss in ("nra", "multi_similarity", "triplet") if f">{loss}<" in page] == ["nra", "triplet"]


def test_runs_are_listed_with_their_scores(client, runs):
    served = client(runs=[runs])
    run, *_ = served.get("/api/v1/runs").json()["runs"]
    about = {"name": "one", "loss": "nra", "network": "resnet50", "dim": 64, "data": "digits", "seed": 0}
    scores = {"recall@1": 0.7, "recall@2": pytest.approx(0.8), "map@r": 0.35}
    assert run == about | {"protocol": "fixed_validation", "seconds": 80.0, "memory": 2048.0, "scores": scores}
    assert served.get("/api/v1/runs").json()["metrics"] == ["recall@1", "recall@2", "map@r"]


def test_the_leaderboard_page_runs_only_its_own_script(client, runs):
    served = client(runs=[runs])
    answer = served.get("/leaderboard", params={"metric": "map@r"})
    policy = answer.headers["content-security-policy"]
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert re.search(r'content="(default-src [^"]*)"', answer.text)[1] in policy
    assert "<strong>MAP@R</strong>" in answer.text
    assert '<a href="?metric=recall%401">Recall@1</a>' in answer.text
    refused = served.get("/leaderboard", params={"metric": "nmi"})
    assert refused.status_code == 422
    assert refused.json()["error"]["message"] == "metric is 'nmi'; the runs have recall@1, recall@2, map@r"


def test_folders_without_finished_runs_have_none_to_show(client, runs, tmp_path):
    (runs / "one" / "metrics.json").unlink()
    (tmp_path / "empty").mkdir()
    served = client(runs=[runs, tmp_path / "empty", tmp_path / "gone"])
    listed = served.get("/api/v1/runs").json()
    assert [run["name"] for run in listed["runs"]] == ["three", "two"]
    assert (listed["unfinished"], listed["damaged"]) == (["one"], [])
    assert "one is not finished" in served.get("/leaderboard").text
    page = client(runs=[runs / "one"]).get("/leaderboard").text
    assert "No run has finished yet. one is not finished" in page


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
            write_run(tmp_path / f"{loss}-{data}-{dim}", loss, pair[data == "cub"], dim=dim, data__name=data)
    by_hand = {"multi_similarity": (1.5, (2, 2, 2, 1)), "nra": (2.0, (1, 1, 1, 3)), "margin": (2.5, (3, 3, 3, 2))}

    def held(names, rows):
        table = {loss: (average, dict(zip(names, ranks, strict=True))) for loss, average, ranks in rows}
        places = [f"{data} {dim}" for data, dim in PLACES]
        expected = {
            loss: (average, dict(zip(places, ranks, strict=True))) for loss, (average, ranks) in by_hand.items()
        }
        assert (list(table), table) == (list(by_hand), expected)

    tournament = bench.tournament(bench.find(tmp_path))
    held(list(tournament.scores), [(row.loss, row.average, row.ranks) for row in tournament.rows])
    with pytest.raises(SystemExit, match="0"):
        main(["tournament", str(tmp_path), "--format", "csv"])
    head, *lines = [line.split(",") for line in capsys.readouterr().out.splitlines()[:4]]
    held(
        head[-4:],
        [(line[0], float(line[head.index("average")]), [float(rank) for rank in line[-4:]]) for line in lines],
    )
    for page in (leaderboard.html(bench.find(tmp_path)), client(runs=[tmp_path]).get("/leaderboard").text):
        assert [text in page for text in (">multi_similarity 1.50<", ">nra 2.00<", ">2.50 margin<")] == [True] * 3
        assert "Only the 3 losses take part that all experiments have." in page


def test_no_tournament_without_two_losses_in_common(client, runs):
    write_run(runs / "four", "nra", 0.4, dim=16)
    assert "<h2>Tournament" not in client(runs=[runs]).get("/leaderboard").text
