"""Tournaments: ranks added up over experiments."""

import math
import statistics

import numpy as np
import pytest
import torch
from runs import finished
from scipy import stats

import nearfar as nf
from nearfar.bench import compare, find, papers, tournament
from nearfar.bench.comparison.ranking import by_experiment, labels

TABLES = [f"{number}{part}" for number in (6, 7, 8) for part in "abcd"]


def test_the_thesis_is_reproduced():
    found = tournament(papers.scores("thesis", TABLES), style="thesis").rows
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


def test_ranks_are_those_of_the_text():
    found = {row.loss: row.ranks for row in tournament(papers.scores("thesis", ["8a"])).rows}
    assert found["ProxyAnchor"] == (1,)
    assert found["NPair"] == (10,)


def test_it_is_at_the_front_door():
    (first, second) = nf.bench.tournament({"one": {"a": 1.0, "b": 2.0}, "two": {"b": 3.0, "a": 1.0}}).rows
    assert (first.loss, first.total, first.average, first.std) == ("b", 2, 1.0, 0.0)
    assert (second.loss, second.ranks) == ("a", (2, 2))


def test_equal_scores_share_the_middle_or_in_the_thesis_the_better_rank():
    scores = {"one": {"a": 5.0, "b": 7.0, "c": 7.0, "d": 1.0}}
    assert {row.loss: row.total for row in tournament(scores).rows} == {"b": 1.5, "c": 1.5, "a": 3, "d": 4}
    assert {row.loss: row.total for row in tournament(scores, style="thesis").rows} == {"b": 1, "c": 1, "a": 3, "d": 4}


def test_sizes_of_one_dataset_count_once():
    scores = {"cub 64": {"a": 2.0, "b": 1.0}, "cub 512": {"a": 2.0, "b": 1.0}, "sop": {"a": 1.0, "b": 2.0}}
    data = {"cub 64": "cub", "cub 512": "cub", "sop": "sop"}
    assert [row.average for row in tournament(scores, data=data).rows] == [1.5, 1.5]
    assert [row.average for row in tournament(scores, style="thesis", data=data).rows] == pytest.approx([4 / 3, 5 / 3])
    found = tournament(scores, data=data)
    assert (found.datasets, len(found.rows), found.statistic, found.p) == (2, 2, 0.0, 1.0)
    assert tournament({"cub 64": scores["cub 64"]}, data=data).p is None
    assert tournament(scores, data=dict.fromkeys(data, "cub")).p is None


def test_the_friedman_test_is_that_of_scipy():
    table = np.random.default_rng(0).integers(0, 6, (12, 5)) + np.arange(5)  # with ties
    found = tournament({f"{row}": dict(zip("abcde", map(float, own), strict=True)) for row, own in enumerate(table)})
    expected = stats.friedmanchisquare(*table.T)
    assert found.statistic == pytest.approx(expected.statistic)
    assert found.p == pytest.approx(expected.pvalue, abs=0.01)


def test_the_critical_difference_is_that_of_the_printed_tables():
    """Demšar 2006, Table 5: q of 2.343 for three and 3.164 for ten classifiers at 0.05."""
    for losses, q in ((3, 2.343), (10, 3.164)):
        scores = {f"{row}": {f"{loss}": float(loss) for loss in range(losses)} for row in range(14)}
        found = tournament(scores)
        assert found.critical == pytest.approx(q * math.sqrt(losses * (losses + 1) / (6 * 14)), abs=1e-3)
        assert found.p < 0.001


def test_the_deviation_is_that_of_a_sample():
    played = {"one": {"a": 1.0, "b": 2.0}, "two": {"a": 2.0, "b": 1.0}, "three": {"a": 2.0, "b": 1.0}}
    found = {row.loss: row.std for row in tournament(played).rows}
    assert found["a"] == pytest.approx(statistics.stdev([2, 1, 1]))
    assert all(math.isnan(row.std) for row in tournament({"one": played["one"]}).rows)


def test_what_cannot_be_ranked_is_refused():
    with pytest.raises(ValueError, match="scores is empty"):
        tournament({})
    with pytest.raises(ValueError, match="scores has no loss"):
        tournament({"one": {}})
    for wrong in ([1], {"one": [1]}, {"one": 3}):
        with pytest.raises(TypeError, match="mapping"):
            tournament(wrong)
    for score in (True, "1", math.nan, None):
        with pytest.raises(ValueError, match="a finite number is needed"):
            tournament({"one": {"a": score}})


def test_numbers_may_be_of_any_library():
    scores = {"a": np.float32(1), "b": np.int64(3), "c": torch.tensor(2.0)}
    assert [row.loss for row in tournament({"one": scores}).rows] == ["b", "c", "a"]


def test_runs_of_one_name_are_told_apart_by_their_places(tmp_path):
    runs = [
        finished(tmp_path / place / "first", overrides={"training.epochs": epochs})
        for place, epochs in (("x", 1), ("y", 2))
    ]
    table = compare(runs).table
    assert len(table.rows) == 2
    assert labels([[run] for run in runs]) == [f"proxy_anchor [{tmp_path / place / 'first'}]" for place in "xy"]


def test_what_is_asked_for_is_checked(tmp_path):
    with pytest.raises(ValueError, match="style is 'foo'; allowed are friedman, thesis"):
        tournament([finished(tmp_path / "a")], style="foo")
    with pytest.raises(ValueError, match="experiment 'two' has no score of b"):
        tournament({"one": {"a": 1.0, "b": 2.0}, "two": {"a": 1.0}})
    with pytest.raises(ValueError, match="the score of 'a' in 'one' is nan"):
        tournament({"one": {"a": math.nan}})


def test_experiments_are_named_by_what_differs(tmp_path):
    for dim in (64, 128):
        finished(tmp_path / f"{dim}", overrides={"network.dim": dim})
    assert list(by_experiment(find(tmp_path))) == ["128", "64"]
    assert list(by_experiment(find(tmp_path / "64"))) == ["cub resnet50 64"]


def test_scores_are_means_over_seeds_and_leave_baselines_out(tmp_path):
    for seed, score in ((0, 0.5), (1, 0.7)):
        finished(tmp_path / f"a{seed}", score=score, overrides={"training.seed": seed})
    finished(tmp_path / "frozen", score=0.9, about={"baseline": "frozen"})
    assert tournament(find(tmp_path)).scores == {"cub resnet50 64": {"proxy_anchor": pytest.approx(0.6)}}


def test_losses_of_one_name_are_told_apart_by_settings_sizes_and_folders(tmp_path):
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


def test_a_comparison_without_queries_is_ordered_and_has_no_ranks(tmp_path):
    finished(tmp_path / "a", "nra", score=0.5)
    finished(tmp_path / "b", "proxy_anchor", score=0.7)
    finished(tmp_path / "frozen", score=0.6, about={"baseline": "frozen"})
    found = compare(find(tmp_path))
    names = [column.name for column in found.table.columns]
    assert found.ranked
    assert [row[:2] for row in found.table.rows] == [["proxy_anchor", 0.7], ["frozen", 0.6], ["nra", 0.5]]
    assert not {"rank", "low", "high", "group", "p"} & set(names)
    assert any("queries.safetensors is missing" in note for note in found.table.notes)


def write_losses(folder, levels, seeds, classes=10):
    """Runs of losses that find this share of 400 queries."""
    rng = np.random.default_rng(0)
    return [
        finished(
            folder / f"{loss}{seed}",
            loss,
            queries=rng.random(400) < level,
            classes=classes,
            overrides={"training.seed": seed},
            validation={"recall@1": level},
        )
        for loss, level in levels.items()
        for seed in range(seeds)
    ]


def test_a_comparison_has_ranks_groups_and_p_where_losses_can_be_tested(tmp_path):
    runs = write_losses(tmp_path, {"nra": 0.5, "proxy_anchor": 0.9, "raw": 0.5}, seeds=3)
    found = compare(runs)
    names = [column.name for column in found.table.columns]
    best, *others = found.table.rows
    low, score, high = (best[names.index(name)] for name in ("low", "recall@1", "high"))
    assert low < score < high
    assert (best[0], best[1], best[names.index("group")], best[names.index("p")]) == (1, "proxy_anchor", "a", None)
    for other in others:
        assert (other[0], other[names.index("group")]) == (2, "b")
        assert other[names.index("p")] < 0.001
    notes = " ".join(found.table.notes)
    assert "over 10 classes and 3 seeds" in notes
    assert "smallest detectable difference: " in notes
    assert "corrected for 3 pairs" in notes


def test_one_seed_has_an_interval_over_classes_and_no_p(tmp_path):
    found = compare(write_losses(tmp_path, {"nra": 0.5, "proxy_anchor": 0.9}, seeds=1))
    names = [column.name for column in found.table.columns]
    assert {"low", "high"} <= set(names)
    assert not {"rank", "group", "p"} & set(names)
    notes = " ".join(found.table.notes)
    assert "95 % interval over 10 classes ONLY; other seeds may differ by more" in notes
    assert "no ranks and no p: too few seeds: 1, and at least 3 are needed" in notes


def test_few_classes_have_no_p(tmp_path):
    found = compare(write_losses(tmp_path, {"nra": 0.5, "proxy_anchor": 0.9}, seeds=3, classes=4))
    assert any("too few classes: 4" in note for note in found.table.notes)
    assert all(row.rank is None and row.p is None for row in found.rows)


def test_the_agreement_of_validation_and_test_is_told(tmp_path):
    found = compare(write_losses(tmp_path, {"nra": 0.5, "proxy_anchor": 0.9, "raw": 0.7}, seeds=1))
    assert (found.agreement_metric, found.agreement) == ("recall@1", 1.0)
    note = "agreement of validation recall@1 and test recall@1 on the order of losses: τ = 1.00 (Kendall)"
    assert note in found.table.notes
    assert compare([finished(tmp_path / "other", score=0.5)]).agreement is None


def test_an_unfair_comparison_is_shown_and_not_ranked(tmp_path):
    finished(tmp_path / "a", "nra", score=0.5)
    finished(tmp_path / "b", "proxy_anchor", score=0.7, overrides={"network.dim": 128})
    found = compare(find(tmp_path))
    assert not found.ranked
    assert [row[:3] for row in found.table.rows] == [["nra", 64, 0.5], ["proxy_anchor", 128, 0.7]]
    assert found.table.unfair == ["network.dim: 64 in a; 128 in b"]
    ranked = compare(find(tmp_path), anyway=True)
    assert [row[0] for row in ranked.table.rows] == ["proxy_anchor", "nra"]
    assert ranked.table.unfair


def test_tournaments_judge_each_experiment_by_itself(tmp_path):
    for dim in (64, 128):
        finished(tmp_path / f"a{dim}", "nra", score=0.5, overrides={"network.dim": dim})
        finished(tmp_path / f"b{dim}", "proxy_anchor", score=0.7, overrides={"network.dim": dim})
    found = tournament(find(tmp_path))
    assert found.ranked
    assert [row[:3] for row in found.table.rows] == [["proxy_anchor", 2, 1.0], ["nra", 4, 2.0]]
    finished(tmp_path / "c64", "triplet", score=0.4, overrides={"training.epochs": 9})
    refused = tournament(find(tmp_path))
    assert not refused.ranked
    assert refused.verdict.reasons == ["64: training.epochs: 5 in a64, b64; 9 in c64"]
    assert refused.table.rows[0] == ["nra", 0.5, 0.5]
    assert refused.table.rows[2] == ["triplet", None, 0.4]


def test_losses_that_are_not_everywhere_stay_out_of_tournament(tmp_path):
    for dim in (64, 128):
        for loss, score in (("nra", 0.6), ("raw", 0.5)):
            finished(tmp_path / f"{loss}{dim}", loss, score=score, overrides={"network.dim": dim})
    finished(tmp_path / "more", "triplet", score=0.9, overrides={"network.dim": 64})
    table = tournament(find(tmp_path)).table
    assert [row[0] for row in table.rows] == ["nra", "raw"]
    assert "only the 2 losses take part that all experiments have" in table.notes
    finished(tmp_path / "alone", "margin", overrides={"network.dim": 32})
    with pytest.raises(ValueError, match="no loss is in all of"):
        tournament(find(tmp_path))


def test_tournaments_count_clear_wins(tmp_path):
    write_losses(tmp_path, {"nra": 0.4, "triplet": 0.4, "proxy_anchor": 0.9}, seeds=3)
    table = tournament(find(tmp_path)).table
    names = [column.name for column in table.columns]
    found = {row[0]: (row[names.index("beats")], row[names.index("loses")]) for row in table.rows}
    assert found == {"proxy_anchor": (2, 0), "nra": (0, 1), "triplet": (0, 1)}


def test_tournaments_test_the_order_over_datasets_alone(tmp_path):
    for dim in (64, 128):
        for loss, score in (("nra", 0.5), ("proxy_anchor", 0.7)):
            finished(tmp_path / "cub" / f"{loss}{dim}", loss, score=score, overrides={"network.dim": dim})
    one = tournament(find(tmp_path / "cub"))
    assert one.p is None
    assert any("sizes of one dataset do not count" in note for note in one.table.notes)
    for loss, score in (("nra", 0.5), ("proxy_anchor", 0.7)):
        finished(tmp_path / "sop" / loss, loss, score=score, overrides={"data.name": "sop", "network.dim": 64})
    two = tournament(find(tmp_path))
    assert two.p is not None
    assert two.datasets == 2
    assert any(note.startswith("Friedman test over 2 datasets") for note in two.table.notes)
    thesis = tournament(find(tmp_path), style="thesis")
    assert thesis.p is None
    assert [row.total for row in thesis.rows] == [3, 6]
