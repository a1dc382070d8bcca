"""Run folders as comparisons read them."""

import json

import numpy as np
import pytest
from runs import finished

from nearfar.bench import Run, find, read, repetitions, unfinished
from nearfar.bench.comparison.runs import repetition


def test_a_run_says_what_it_is(tmp_path):
    run = finished(tmp_path / "one", "nra", score=0.625, overrides={"training.seed": 3})
    assert (run.name, run.loss, run.network, run.dim, run.data) == ("one", "nra", "resnet50", 64, "cub")
    assert (run.seed, run.fold, run.protocol, run.epochs) == (3, None, "fixed_validation", 5)
    assert (run.seconds, run.memory, run.score()) == (12.5, 900.0, 0.625)
    assert not run.is_baseline


@pytest.mark.parametrize("name", ["standard", "fixed_validation", "k_fold", "closed_set", "train_only"])
def test_its_split_is_its_protocol(tmp_path, name):
    run = finished(tmp_path / "one", overrides={"split": {"name": name}, "selection.metric": "map@r"})
    assert run.protocol == name
    assert run.selected_by == (None if name in ("standard", "closed_set") else "map@r")  # no validation classes


@pytest.mark.parametrize(
    ("loss", "label"),
    [
        ({"name": "raw"}, "raw"),
        ({"name": "raw", "mining": "all"}, "raw"),
        ({"name": "raw", "mining": {"name": "valid_triplet", "margin": 0.1}}, "raw+valid_triplet"),
        ({"name": "raw", "mining": "semi_hard"}, "raw+semi_hard"),
        ({"name": "triplet", "mining": "semi_hard"}, "triplet"),
        ({"name": "triplet", "mining": "hard"}, "triplet+hard"),
    ],
)
def test_a_mining_that_is_not_the_usual_one_is_in_its_name(tmp_path, loss, label):
    assert finished(tmp_path / "one", loss).loss == label


def test_what_a_grid_calls_it_goes_first(tmp_path):
    run = finished(tmp_path / "one", "raw", cell={"loss": "my raw", "network": "lite", "data": "birds"})
    assert (run.loss, run.network, run.data) == ("my raw", "lite", "birds")


def test_a_baseline_has_the_place_of_its_cell(tmp_path):
    plain = {"network": {"model": {"name": "resnet50", "dim": None, "levels": ["high"]}}, "baseline": "frozen"}
    run = finished(tmp_path / "one", about=plain, overrides={"network.levels": ["low", "mid", "high"]})
    assert run.is_baseline
    assert (run.loss, run.dim) == ("frozen", 192)


def test_levels_and_members_make_embeddings_longer(tmp_path):
    member = {"name": "resnet50", "dim": 64, "levels": ["low", "mid", "high"]}
    run = finished(
        tmp_path / "one", about={"network": {"model": {"ensemble": [member, member]}}}, overrides={"network.members": 2}
    )
    assert (run.network, run.dim) == ("resnet50×2", 384)


def test_a_score_that_is_not_there_names_those_that_are(tmp_path):
    run = finished(tmp_path / "one")
    with pytest.raises(ValueError, match=r"no 'nmi' of test; it has recall@1, map@r"):
        run.score("nmi")
    with pytest.raises(ValueError, match="not measured on validation classes, but on test"):
        run.score(part="validation")


def test_what_queries_found_is_there_or_none(tmp_path):
    assert finished(tmp_path / "one").queries() is None
    found = finished(tmp_path / "two", queries=np.array([1, 0, 1, 1])).queries()
    assert found["recall@1"].tolist() == [1, 0, 1, 1]


def test_its_log_is_its_history(tmp_path):
    run = finished(tmp_path / "one")
    assert run.log == []
    (run.folder / "log.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st', encoding="utf-8")
    assert Run(run.folder).log == [{"step": 1}, {"step": 2}]


def test_runs_are_found_at_any_depth_and_once(tmp_path):
    for name in ("grid/cells/a", "grid/cells/b", "c"):
        finished(tmp_path / name)
    found = find(tmp_path / "grid", tmp_path / "c", tmp_path / "grid" / "cells" / "a")
    assert [run.name for run in found] == ["a", "b", "c"]


def test_unfinished_runs_are_left_out_and_named(tmp_path):
    finished(tmp_path / "a")
    begun = finished(tmp_path / "b").folder
    (begun / "metrics.json").unlink()
    assert [run.name for run in find(tmp_path)] == ["a"]
    assert unfinished(tmp_path) == [begun]
    with pytest.raises(ValueError, match=r"b is not finished: metrics.json is missing"):
        find(begun)


def test_what_is_no_run_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"holds no run: recipe.toml is missing"):
        read(tmp_path)
    with pytest.raises(ValueError, match="holds no finished run"):
        find(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        find(tmp_path / "nowhere")


def test_a_split_that_is_not_known_is_named(tmp_path):
    run = finished(tmp_path / "run")
    run.tables["split"]["name"] = "thirds"
    with pytest.raises(ValueError, match=r"has split.name 'thirds'; known are standard, fixed_validation, k_fold"):
        _ = run.protocol


def test_runs_that_differ_in_seed_or_fold_alone_are_repetitions(tmp_path):
    for seed in (1, 0):
        finished(tmp_path / f"a{seed}", overrides={"training.seed": seed, "data.root": f"/data/{seed}"})
    finished(tmp_path / "alpha", {"name": "proxy_anchor", "alpha": 16.0})
    finished(tmp_path / "wide", overrides={"network.dim": 128})
    groups = repetitions(find(tmp_path))
    assert sorted([run.name for run in runs] for runs in groups.values()) == [["a0", "a1"], ["alpha"], ["wide"]]


def test_folds_are_repetitions(tmp_path):
    for fold in range(3):
        finished(tmp_path / f"{fold}", overrides={"split": {"name": "k_fold", "folds": 3, "fold": fold}})
    (runs,) = repetitions(find(tmp_path)).values()
    assert [run.fold for run in runs] == [0, 1, 2]


def test_a_manifest_of_another_order_is_the_same_repetition(tmp_path):
    one, two = finished(tmp_path / "a"), finished(tmp_path / "b", overrides={"training.seed": 1})
    turned = dict(reversed(list(two.manifest.items())))
    (two.folder / "manifest.json").write_text(json.dumps(turned), encoding="utf-8")
    assert repetition(one) == repetition(read(two.folder))
