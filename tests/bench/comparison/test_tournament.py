"""Tournaments: ranks added up over experiments."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_outcomes import finished

import nearfar as nf
from nearfar.bench import find, papers, tournament
from nearfar.bench.comparison.loss_ranking import compare, standings
from nearfar.bench.comparison.tournament import by_experiment, labels, scores

TABLES = [f"{number}{part}" for number in (6, 7, 8) for part in "abcd"]


def test_the_thesis_is_reproduced() -> None:
    found = tournament(papers.scores("thesis", TABLES))
    printed = papers.table("thesis", "11")
    assert [row.loss for row in found] == [row.name for row in printed.rows]
    assert [row.total for row in found] == [row.cells["total"] for row in printed.rows]
    off = {}
    for row in found:
        for column, value in (("average", row.average), ("std", row.std)):
            if f"{value:.2f}" != f"{printed.value(row.loss, column):.2f}":
                off[row.loss, column] = (round(value, 4), printed.value(row.loss, column))
    assert off == {
        ("SoftTriple", "average"): (3.1667, 3.16),  # cut off and not rounded: 38 / 12
        ("LiftedStructure", "std"): (1.8829, 1.89),  # one off in the last digit, however it is rounded
        ("Triplet", "average"): (8.5833, 8.85),  # digits exchanged: 103 / 12 is 8.58
    }


def test_ranks_are_those_of_the_text() -> None:
    found = {row.loss: row.ranks for row in tournament(papers.scores("thesis", ["8a"]))}
    assert found["ProxyAnchor"] == (1,)
    assert found["NPair"] == (10,)


def test_it_is_at_the_front_door() -> None:
    (first, second) = nf.bench.tournament({"one": {"a": 1.0, "b": 2.0}, "two": {"b": 3.0, "a": 1.0}})
    assert (first.loss, first.total, first.average, first.std) == ("b", 2, 1.0, 0.0)
    assert (second.loss, second.ranks) == ("a", (2, 2))


def test_a_row_reads_as_a_table() -> None:
    (row, _) = tournament({"one": {"a": 2.0, "b": 1.0}, "two": {"a": 2.0, "b": 1.0}})
    assert dict(row) == {"loss": "a", "total": 2, "average": 1.0, "std": 0.0, "ranks": (1, 1)}
    with pytest.raises(KeyError, match="a standing has loss, total"):
        row["rank"]


def test_equal_scores_share_the_better_rank() -> None:
    found = {row.loss: row.total for row in tournament({"one": {"a": 5.0, "b": 7.0, "c": 7.0, "d": 1.0}})}
    assert found == {"b": 1, "c": 1, "a": 3, "d": 4}


def test_the_deviation_is_that_of_a_sample() -> None:
    played = {"one": {"a": 1.0, "b": 2.0}, "two": {"a": 2.0, "b": 1.0}, "three": {"a": 2.0, "b": 1.0}}
    found = {row.loss: row.std for row in tournament(played)}
    assert found["a"] == pytest.approx(statistics.stdev([2, 1, 1]))
    assert all(math.isnan(row.std) for row in tournament({"one": played["one"]}))


def test_what_cannot_be_ranked_is_refused() -> None:
    with pytest.raises(ValueError, match="scores is empty"):
        tournament({})
    with pytest.raises(ValueError, match="scores has no loss"):
        tournament({"one": {}})
    for wrong in ([1], {"one": [1]}, {"one": 3}):
        with pytest.raises(TypeError, match="scores is not a mapping of mappings"):
            tournament(wrong)  # type: ignore[arg-type]
    for score in (True, "1", math.nan, None):
        with pytest.raises(ValueError, match="a finite number is needed"):
            tournament({"one": {"a": score}})  # type: ignore[dict-item]


def test_numbers_may_be_of_any_library() -> None:
    scores = {"a": np.float32(1), "b": np.int64(3), "c": torch.tensor(2.0)}
    assert [row.loss for row in tournament({"one": scores})] == ["b", "c", "a"]


def test_runs_of_one_name_are_told_apart_by_their_places(tmp_path: Path) -> None:
    runs = [
        finished(tmp_path / place / "first", overrides={"training.epochs": epochs})
        for place, epochs in (("x", 1), ("y", 2))
    ]
    table = compare(runs).table
    assert len(table.rows) == 2
    assert labels([[run] for run in runs]) == [f"proxy_anchor [{tmp_path / place / 'first'}]" for place in "xy"]


def test_what_to_draw_is_checked(tmp_path: Path) -> None:
    for ask in (compare, standings):
        with pytest.raises(ValueError, match="over is 'foo'; allowed are queries, classes"):
            ask([finished(tmp_path / ask.__name__)], over="foo")
    with pytest.raises(ValueError, match="experiment 'two' has no score of b"):
        tournament({"one": {"a": 1.0, "b": 2.0}, "two": {"a": 1.0}})
    with pytest.raises(ValueError, match="the score of 'a' in 'one' is nan"):
        tournament({"one": {"a": math.nan}})


def test_experiments_are_named_by_what_differs(tmp_path: Path) -> None:
    for dim in (64, 128):
        finished(tmp_path / f"{dim}", overrides={"network.dim": dim})
    assert list(by_experiment(find(tmp_path))) == ["128", "64"]
    assert list(by_experiment(find(tmp_path / "64"))) == ["cub resnet50 64"]


def test_scores_are_means_over_seeds_and_leave_baselines_out(tmp_path: Path) -> None:
    for seed, score in ((0, 0.5), (1, 0.7)):
        finished(tmp_path / f"a{seed}", score=score, overrides={"training.seed": seed})
    finished(tmp_path / "frozen", score=0.9, about={"baseline": "frozen"})
    assert scores(find(tmp_path)) == {"cub resnet50 64": {"proxy_anchor": pytest.approx(0.6)}}


def test_losses_of_one_name_are_told_apart_by_settings_sizes_and_folders(tmp_path: Path) -> None:
    groups = [
        [finished(tmp_path / "a", {"name": "raw", "alpha": 2.0})],
        [finished(tmp_path / "b", {"name": "raw", "alpha": 4.0})],
        [finished(tmp_path / "c", "nra")],
        [finished(tmp_path / "d", "nra", overrides={"network.dim": 128})],
        [finished(tmp_path / "e", "triplet")],
        [finished(tmp_path / "f", "triplet", overrides={"training.epochs": 50})],
        [finished(tmp_path / "g", {"name": "raw", "alpha": 2.0}, about={"baseline": "frozen"})],
        [finished(tmp_path / "h", "nra", about={"baseline": "frozen"}, overrides={"network.dim": 128})],
    ]
    assert labels(groups) == [
        "raw (alpha=2.0)",
        "raw (alpha=4.0)",
        "nra (dim=64)",
        "nra (dim=128)",
        "triplet [e]",
        "triplet [f]",
        "frozen (dim=64)",
        "frozen (dim=128)",
    ]


def test_a_comparison_ranks_the_best_first_and_baselines_not_at_all(tmp_path: Path) -> None:
    finished(tmp_path / "a", "nra", score=0.5)
    finished(tmp_path / "b", "proxy_anchor", score=0.7)
    finished(tmp_path / "frozen", score=0.6, about={"baseline": "frozen"})
    found = compare(find(tmp_path))
    names = [column.name for column in found.table.columns]
    assert found.ranked
    assert [row[:2] for row in found.table.rows] == [[1, "proxy_anchor"], [None, "frozen"], [2, "nra"]]
    assert [row[names.index("recall@1")] for row in found.table.rows] == [70.0, 60.0, 50.0]
    assert not {"low", "high", "p"} & set(names)
    assert any("queries.safetensors is missing" in note for note in found.table.notes)


def test_a_comparison_has_intervals_and_p_where_queries_were_kept(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    finished(tmp_path / "a", "nra", queries=rng.random(400) < 0.5)
    finished(tmp_path / "b", "proxy_anchor", queries=rng.random(400) < 0.9)
    found = compare(find(tmp_path), over="queries", samples=500)
    names = [column.name for column in found.table.columns]
    best, other = found.table.rows
    low, score, high = (best[names.index(name)] for name in ("low", "recall@1", "high"))
    assert low < score < high  # type: ignore[operator]
    assert best[names.index("p")] is None
    assert other[names.index("p")] == pytest.approx(2 / 501)


def test_an_unfair_comparison_is_shown_and_not_ranked(tmp_path: Path) -> None:
    finished(tmp_path / "a", "nra", score=0.5)
    finished(tmp_path / "b", "proxy_anchor", score=0.7, overrides={"network.dim": 128})
    found = compare(find(tmp_path))
    assert not found.ranked
    assert [row[:4] for row in found.table.rows] == [[None, "nra", 64, 50.0], [None, "proxy_anchor", 128, 70.0]]
    assert found.table.unfair == ["network.dim: 64 in a; 128 in b"]
    ranked = compare(find(tmp_path), anyway=True)
    assert [row[0] for row in ranked.table.rows] == [1, 2]
    assert ranked.table.unfair


def test_standings_judge_each_experiment_by_itself(tmp_path: Path) -> None:
    for dim in (64, 128):
        finished(tmp_path / f"a{dim}", "nra", score=0.5, overrides={"network.dim": dim})
        finished(tmp_path / f"b{dim}", "proxy_anchor", score=0.7, overrides={"network.dim": dim})
    found = standings(find(tmp_path))
    assert found.ranked
    assert [row[:3] for row in found.table.rows] == [["proxy_anchor", 2, 1.0], ["nra", 4, 2.0]]
    finished(tmp_path / "c64", "triplet", score=0.4, overrides={"training.epochs": 9})
    refused = standings(find(tmp_path))
    assert not refused.ranked
    assert refused.verdict.reasons == ["64: training.epochs: 5 in a64, b64; 9 in c64"]
    assert refused.table.rows[0] == ["nra", 50.0, 50.0]
    assert refused.table.rows[2] == ["triplet", None, 40.0]


def test_losses_that_are_not_everywhere_stay_out_of_standings(tmp_path: Path) -> None:
    for dim in (64, 128):
        for loss, score in (("nra", 0.6), ("raw", 0.5)):
            finished(tmp_path / f"{loss}{dim}", loss, score=score, overrides={"network.dim": dim})
    finished(tmp_path / "more", "triplet", score=0.9, overrides={"network.dim": 64})
    table = standings(find(tmp_path)).table
    assert [row[0] for row in table.rows] == ["nra", "raw"]
    assert "only the 2 losses take part that all experiments have" in table.notes
    finished(tmp_path / "alone", "margin", overrides={"network.dim": 32})
    with pytest.raises(ValueError, match="no loss is in all of"):
        standings(find(tmp_path))


def test_standings_count_clear_wins(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    answers = {"nra": rng.random(300) < 0.4, "triplet": rng.random(300) < 0.4, "proxy_anchor": rng.random(300) < 0.9}
    for loss, queries in answers.items():
        finished(tmp_path / loss, loss, queries=queries)
    table = standings(find(tmp_path), over="queries", samples=500).table
    names = [column.name for column in table.columns]
    found = {row[0]: (row[names.index("beats")], row[names.index("loses")]) for row in table.rows}
    assert found == {"proxy_anchor": (2, 0), "nra": (0, 1), "triplet": (0, 1)}


@pytest.mark.parametrize(("classes", "told"), [(5, True), (10, False)])
def test_few_classes_are_said_to_say_little(tmp_path: Path, classes: int, told: bool) -> None:
    queries = np.arange(40) % 3 > 0
    runs = [finished(tmp_path / name, name, queries=queries, classes=classes) for name in ("triplet", "contrastive")]
    notes = compare(runs, samples=50).table.notes
    assert any(note.startswith("the test has 5 classes: with so few") for note in notes) == told
