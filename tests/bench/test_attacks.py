"""Attacks on a comparison: each one led to a ranking that should not exist, and is refused or marked."""

import io
import json
import math
import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from grids_for_tests import Recorder, small
from PIL import Image
from runs import finished

from nearfar import data
from nearfar.bench import Run, compare, find, judge, read, runner
from nearfar.bench import grid as grids
from nearfar.bench.comparison.ranking import experiments
from nearfar.bench.comparison.tables import csv, text
from nearfar.bench.comparison.tournament import of_rankings
from nearfar.bench.grid import GridError
from nearfar.cli import main
from nearfar.data.store.prepare import prepare
from nearfar.training.evaluation.evaluate import evaluate
from nearfar.training.run import provenance
from nearfar.training.run.folder import RunError, RunFolder, read_log
from nearfar.training.trainer import train
from nearfar.utils import plugins
from nearfar.utils.progress import Display

CLASSES = ("jay", "owl", "tit", "wren")


def photo(seed):
    """A bitmap of smooth noise; all of them have the same size."""
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((48, 48), Image.Resampling.BICUBIC).save(file, "BMP")
    return file.getvalue()


def photos(folder, first=0):
    """Two photos of each class, all with the same time."""
    for number in range(8):
        file = folder / CLASSES[number // 2] / f"{number % 2}.bmp"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(photo(first + number))
        os.utime(file, (1, 1))
    return folder


def archive(folder, kind):
    """The photos of a folder in an archive whose members have the same times and sizes, whatever their pixels."""
    file = folder.with_suffix(f".{kind}")
    if kind == "zip":
        with zipfile.ZipFile(file, "w") as made:
            for one in sorted(folder.rglob("*.bmp")):
                made.writestr(zipfile.ZipInfo(one.relative_to(folder).as_posix()), one.read_bytes())
    else:
        with tarfile.open(file, "w") as made:
            for one in sorted(folder.rglob("*.bmp")):
                made.add(one, one.relative_to(folder).as_posix())
    os.utime(file, (1, 1))
    return file


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEARFAR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# --- 1. other data under the name of the data ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "zip", "tar"])
def test_photos_with_the_sizes_and_times_of_others_are_other_data(kind, tmp_path):
    def opened(folder):
        return data.open("folder", folder if kind == "folder" else archive(folder, kind))

    real, noise = opened(photos(tmp_path / "real")), opened(photos(tmp_path / "noise", first=100))
    assert real.source.fingerprint() != noise.source.fingerprint()
    assert not np.array_equal(prepare(real).image(0), prepare(noise).image(0))


@pytest.mark.parametrize("in_place", [True, False])
def test_photos_that_replace_others_at_their_time_are_other_data(in_place, tmp_path):
    folder = photos(tmp_path / "photos")
    dataset = data.open("folder", folder)
    before, pixels = dataset.source.fingerprint(), prepare(dataset).image(0).copy()
    file = folder / "jay" / "0.bmp"
    if not in_place:
        file.unlink()
    file.write_bytes(photo(100))
    os.utime(file, (1, 1))
    assert dataset.source.fingerprint() != before
    assert not np.array_equal(prepare(dataset).image(0), pixels)


# --- 7. test images among the training images ------------------------------------------------------------------------


def leaking(folder):
    """Photos with a test image that is in a training class too, and one that is there again, darker and saved anew."""
    photos(folder)
    (folder / "wren" / "0.bmp").write_bytes((folder / "jay" / "1.bmp").read_bytes())
    again = Image.open(folder / "owl" / "1.bmp").resize((64, 64)).point(lambda value: int(0.9 * value))
    again.save(folder / "tit" / "1.jpg", quality=80)
    return folder


LEAKS = ("wren/0.bmp has the pixels of jay/1.bmp", "tit/1.jpg looks like owl/1.bmp")


def test_verify_names_test_images_that_are_trained_on(tmp_path, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["data", "verify", "folder", str(leaking(tmp_path / "photos"))])
    said = capsys.readouterr().out
    assert "2 test items are in a training class as well" in said
    assert all(line in said for line in LEAKS)


def test_a_training_names_them_before_it_starts(tmp_path):
    class Saying(Display):
        def say(self, text):
            said.append(text)

    said = []
    recipe = {
        "data": {"name": "folder", "root": str(leaking(tmp_path / "photos"))},
        "augmentation": {"size": 16},
        "sampler": {"classes": 2, "per_class": 2, "steps": 1},
        "network": {"name": "small_cnn", "dim": 4},
        "loss": {"name": "contrastive"},
        "optimizer": {"lr": 1e-3},
        "training": {"epochs": 1, "device": "cpu"},
    }
    train(recipe, out=tmp_path / "run", display=Saying())
    assert any(all(line in text for line in LEAKS) for text in said[:1])
    assert sorted(json.loads((tmp_path / "run" / "manifest.json").read_text())["data"]["duplicates"]) == sorted(LEAKS)


# --- 2. other code ---------------------------------------------------------------------------------------------------

CODE = {"package": {"engine": "e1", "cli": "c1"}, "loss": {"files": ["nra.py"], "digest": "l1"}, "used": {}}


def with_code(folder, loss, code=None, **more):
    return finished(folder, loss, about={"code": {**CODE, **(code or {})}}, **more)


def test_runs_of_another_engine_are_unfair_unless_a_reason_is_printed(tmp_path):
    with_code(tmp_path / "one", "nra")
    with_code(tmp_path / "two", "raw", {"package": {"engine": "e2", "cli": "c1"}})
    (reason,) = judge(find(tmp_path)).reasons
    assert reason == "code: version 1 in one; version 2 in two (they differ in engine)"
    verdict = judge(find(tmp_path), other_code="only comments changed")
    assert (verdict.fair, verdict.other_code) == (True, "only comments changed")
    table = compare(find(tmp_path), other_code=verdict.other_code).table
    assert "note: waived: only comments changed" in text(table)
    assert csv(table).splitlines()[1].startswith("code waived: only comments changed,")
    with pytest.raises(ValueError, match="a reason is needed"):
        compare(find(tmp_path), other_code=" ")


def test_code_that_computes_nothing_and_the_losses_own_may_differ(tmp_path):
    own = {"package": {"engine": "e1", "cli": "c2"}, "loss": {"files": ["mine.py"], "digest": "l2"}}
    runs = [with_code(tmp_path / "one", "nra"), with_code(tmp_path / "two", "raw", {**own, "used": {"mine.py": "m"}})]
    assert judge(runs).fair


def test_the_file_of_a_loss_may_be_used_by_runs_of_others_but_not_in_two_versions(tmp_path):
    own = {"loss": {"files": ["mine.py"], "digest": "l2"}, "used": {"mine.py": "m1"}}
    same, other = ({"used": {"mine.py": digest}} for digest in ("m1", "m2"))
    mine = with_code(tmp_path / "mine", "raw", own)
    assert judge([mine, with_code(tmp_path / "same", "nra", same)]).fair
    assert not judge([mine, with_code(tmp_path / "other", "nra", other)]).fair


def test_a_module_beside_a_plugin_is_code_too(tmp_path):
    used = [{"used": {"mine.py": "m", "helper.py": helper}} for helper in ("h1", "h2")]
    runs = [with_code(tmp_path / "one", "nra", used[0]), with_code(tmp_path / "two", "raw", used[1])]
    assert judge(runs).reasons == ["code: version 1 in one; version 2 in two (they differ in used.helper.py)"]


def test_seeds_of_two_versions_of_a_loss_are_not_one_loss(tmp_path):
    seed = {"training.seed": 1}
    other = {"loss": {"files": ["nra.py"], "digest": "l2"}}
    runs = [with_code(tmp_path / "a", "nra"), with_code(tmp_path / "b", "nra", other, overrides=seed)]
    assert not judge(runs).fair


def test_runs_without_a_record_of_their_code_are_compared_among_themselves(tmp_path):
    unknown = {"code": None}
    old = [finished(tmp_path / "old" / loss, loss, about=unknown) for loss in ("nra", "raw")]
    verdict = judge(old)
    assert verdict.fair
    assert "the code of nra, raw was not recorded; all are in one folder" in verdict.notes
    elsewhere = finished(tmp_path / "elsewhere" / "margin", "margin", about=unknown)
    assert judge([*old, elsewhere]).reasons == ["code: not recorded in nra, raw, margin"]
    assert judge([*old, with_code(tmp_path / "new", "margin")]).reasons == ["code: not recorded in nra, raw"]


def test_a_manifest_has_the_code_of_the_package_its_commit_and_its_date(tmp_path):
    about = json.loads((trained(tmp_path) / "manifest.json").read_text())
    assert about["code"]["package"].keys() >= {"data", "engine", "losses", "metrics", "networks", "training"}
    assert about["code"]["loss"]["files"] == ["contrastive.py"]
    assert about["began"].startswith("20")
    assert "torch" in about["versions"]


def test_a_plugin_is_hashed_with_the_modules_that_it_imports(tmp_path):
    (tmp_path / "helper_of_mine.py").write_text("import torch\nimport deeper_of_mine\n")
    (tmp_path / "deeper_of_mine.py").write_text("FACTOR = 2\n")
    (tmp_path / "mine.py").write_text("def later():\n    from helper_of_mine import torch\n")
    try:
        plugins.use(tmp_path / "mine.py")
        assert [file.name for file in plugins.SOURCES] == ["mine.py", "helper_of_mine.py", "deeper_of_mine.py"]
        before = plugins.used()[tmp_path / "mine.py"]
        plugins.forget()
        (tmp_path / "deeper_of_mine.py").write_text("FACTOR = 3\n")
        plugins.use(tmp_path / "mine.py")
        assert plugins.used()[tmp_path / "mine.py"] != before
    finally:
        plugins.forget()


def test_cells_of_other_code_are_not_reused(tmp_path, monkeypatch):
    grid = small(tmp_path, losses={"contrastive": {}}, baseline=False)
    assert [cell.state for cell in runner.run(grid, tmp_path / "out", engine="inline")] == ["finished"]
    monkeypatch.setitem(provenance.PACKAGE, "engine", "changed")
    with pytest.raises(RunError, match=r"contrastive-seed0: finished in .* with other code"):
        runner.run(grid, tmp_path / "out", engine="inline")
    (kept,) = runner.run(grid, tmp_path / "out", engine="inline", other_code="a test")
    assert kept.state == "finished"
    runner.run({**grid, "name": "other"}, tmp_path / "out", engine="inline")
    (copy,) = (tmp_path / "out" / "other" / "cells").iterdir()
    assert json.loads((copy / "manifest.json").read_text())["code"]["package"]["engine"] == "changed"


def test_a_resumed_run_records_each_version_of_the_code(tmp_path, monkeypatch):
    folder = trained(tmp_path)
    monkeypatch.setitem(provenance.PACKAGE, "engine", "changed")
    train(resume=folder)
    code = json.loads((folder / "manifest.json").read_text())["code"]
    assert code["package"]["engine"] != "changed"
    assert [each["code"]["package"]["engine"] for each in code["resumed"]] == ["changed"]
    train(resume=folder)
    assert len(json.loads((folder / "manifest.json").read_text())["code"]["resumed"]) == 1


# --- 3. settings of other grids --------------------------------------------------------------------------------------


def varied(folder, key, value, loss="nra", **more):
    cell = {"loss": loss, key: json.dumps(value), "seed": "0"}
    return finished(folder / f"{loss}-{value}", loss, overrides={key: value}, cell=cell, **more)


def test_two_grids_that_vary_the_same_key_are_not_one_experiment(tmp_path):
    runs = [varied(tmp_path / "short", "training.epochs", 5), varied(tmp_path / "long", "training.epochs", 50, "raw")]
    assert "training.epochs: 5 in nra-5; 50 in raw-50" in judge(runs).reasons


def test_a_value_that_a_loss_did_not_try_is_named(tmp_path):
    runs = [varied(tmp_path, "training.epochs", epochs) for epochs in (5, 10)]
    runs.append(varied(tmp_path, "training.epochs", 10, "raw"))
    assert judge(runs).reasons == ["settings: raw without training.epochs 5, which the grid varies"]
    runs.append(varied(tmp_path, "training.epochs", 5, "raw"))
    assert judge(runs).fair
    rows = [row.loss for row in compare(runs, intervals=False).rows]
    assert sorted(rows) == ["nra (epochs=10)", "nra (epochs=5)", "raw (epochs=10)", "raw (epochs=5)"]
    assert any("chosen on the test classes" in note for note in judge(runs).notes)


def test_a_value_of_the_grid_that_no_loss_has_is_named(tmp_path):
    (tmp_path / "grid.toml").write_text("[settings]\ntraining.epochs = [5, 10]\n")
    runs = [varied(tmp_path / "cells", "training.epochs", 5, loss) for loss in ("nra", "raw")]
    assert judge(runs).reasons == ["settings: nra, raw without training.epochs 10, which the grid varies"]


def test_the_split_of_luck_is_never_ranked(tmp_path):
    runs = [varied(tmp_path, "split.seed", seed) for seed in (0, 1)]
    assert "split.seed: 0 in nra-0; 1 in nra-1" in judge(runs).reasons
    with pytest.raises(GridError, match=r"settings.split.seed is not allowed: a seed is chance"):
        grids.load(small(tmp_path, settings={"split": {"seed": [0, 1]}}))


def test_settings_that_test_results_chose_are_marked(tmp_path):
    run = finished(tmp_path / "one", "nra", overrides={"tuning.chosen_by": "test"})
    assert "the settings of nra were chosen by test results" in judge([run]).notes


def test_a_file_of_a_grid_beside_runs_of_no_grid_is_not_theirs(tmp_path):
    (tmp_path / "grid.toml").write_text("seeds = [0, 1, 2]\n")
    run = finished(tmp_path / "runs" / "first", "nra")
    assert judge([run]).fair
    provenance.record_look(RunFolder(run.folder), "evaluate")
    assert not (tmp_path / "test_looks.jsonl").exists()


# --- 4. seeds and folds that fit -------------------------------------------------------------------------------------


def test_repetitions_are_pairs_of_seed_and_fold(tmp_path):
    def fold(loss, seed, fold):
        split = {"name": "k_fold", "folds": 2, "fold": fold}
        return finished(tmp_path / f"{loss}{seed}{fold}", loss, overrides={"split": split, "training.seed": seed})

    runs = [fold("nra", 0, 0), fold("nra", 1, 1), fold("raw", 0, 1), fold("raw", 1, 0)]
    assert judge(runs).reasons == [
        "repetitions: nra lacks seed 0 fold 1, seed 1 fold 0",
        "repetitions: raw lacks seed 0 fold 0, seed 1 fold 1",
    ]


def test_a_seed_that_counts_twice_is_named(tmp_path):
    runs = [finished(tmp_path / name, "nra") for name in ("a", "b")]
    assert judge(runs).reasons == ["repetitions: nra has seed 0 2 times, in a, b"]


def test_a_seed_of_the_grid_that_was_dropped_is_named(tmp_path):
    (tmp_path / "grid.toml").write_text("seeds = [0, 1]\n")
    runs = [finished(tmp_path / "cells" / loss, loss) for loss in ("nra", "raw")]
    assert judge(runs).reasons == ["repetitions: every loss lacks seed 1"]
    for seed in (0, 1):
        runs.append(finished(tmp_path / "cells" / f"group{seed}", "group", overrides={"training.seed": seed}))
    assert "repetitions: nra, raw lack seed 1" in judge(runs).reasons


# --- 5. more effort for one loss -------------------------------------------------------------------------------------


def test_unequal_trials_are_unfair(tmp_path):
    tuned = {"tuning": {"trials": 50, "space": "s", "seconds": 99.0, "chosen_by": "study"}}
    runs = [finished(tmp_path / "one", "nra"), finished(tmp_path / "two", "raw", overrides=tuned)]
    assert judge(runs).reasons == [
        "tuning.trials: 0 in one; 50 in two",
        "tuning.chosen_by: unknown in one; study in two",
    ]
    tuned["tuning"]["seconds"] = 100.0
    equal = [runs[1], finished(tmp_path / "three", "nra", overrides=tuned)]
    assert judge(equal).fair


def scores_of(runs):
    found = of_rankings(experiments(runs), runs)
    return {name: dict(losses) for name, losses in found.scores.items()}


def test_a_tournament_does_not_merge_a_loss_with_different_settings(tmp_path):
    def run(dim, margin, **tuning):
        overrides = {"network.dim": dim, "tuning": tuning}
        return finished(tmp_path / f"{dim}-{margin}", {"name": "triplet", "margin": margin}, overrides=overrides)

    assert list(scores_of([run(64, 0.1), run(128, 0.1)])["64"]) == ["triplet"]
    different = scores_of([run(64, 0.2), run(128, 0.3)])
    assert [list(each) for each in different.values()] == [["triplet (margin=0.2)"], ["triplet (margin=0.3)"]]
    study = {"trials": 20, "chosen_by": "study"}
    tuned = scores_of([run(64, 0.4, **study), run(128, 0.5, **study)])
    assert [list(each) for each in tuned.values()] == [["triplet"], ["triplet"]]


# --- 6. numbers that were edited -------------------------------------------------------------------------------------


def trained(folder, **more):
    recipe = small(folder)["recipe"]
    result = train({**recipe, "loss": {"name": "contrastive"}}, out=folder / "run", **more)
    return result.folder


def edit(file, *path, to):
    table = json.loads(file.read_text())
    place = table
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    file.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n")


@pytest.mark.parametrize(
    ("file", "path", "to", "named"),
    [
        ("metrics.json", ("test", "recall@1"), 0.0, "metrics.json changed after the run"),
        ("metrics.json", ("test", "mrr"), math.nan, "metrics.json has test.mrr nan; needed: a finite number"),
        ("metrics.json", ("seconds",), 1e6, "metrics.json changed after the run"),
        ("manifest.json", ("recipe", "training", "epochs"), 1, "manifest.json changed after the run"),
        ("manifest.json", ("seed",), 1, "manifest.json changed after the run"),
        ("manifest.json", ("code", "package", "engine"), "same", "manifest.json changed after the run"),
    ],
)
def test_an_edited_number_is_refused_and_named(file, path, to, named, run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "copy")
    read(folder)
    edit(folder / file, *path, to=to)
    with pytest.raises(RunError, match=named):
        read(folder)
    with pytest.raises(RunError, match=named):
        _ = Run(folder).metrics


@pytest.mark.parametrize("file", ["log.jsonl", "recipe.toml", "queries.safetensors", "digests.json"])
def test_a_file_that_was_changed_or_removed_is_named(file, run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "copy")
    if file in ("queries.safetensors", "digests.json"):
        (folder / file).unlink()
    else:
        (folder / file).write_text((folder / file).read_text() + "\n")
    with pytest.raises(RunError, match=f"{file} (changed after the run|is missing)"):
        read(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("trained"))


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("content", ["", "{}", '{"test": {"recall@1": 2.0}}', "[" * 10**5, None])
def test_a_damaged_cell_is_measured_or_trained_again_and_nothing_is_deleted(content, lean, tmp_path):
    grid = small(tmp_path, losses={"contrastive": {}}, baseline=False)
    (cell,) = runner.run(grid, tmp_path / "out", engine="inline", lean=lean)
    before, file = cell.metrics(), cell.folder / "metrics.json"
    file.write_text(json.dumps(before, indent=7) if content is None else content)
    (cell.folder / "notes.txt").write_text("mine")
    old = {path.name: path.read_bytes() for path in cell.folder.iterdir() if path.is_file()}
    display = Recorder()
    for number in (1, 2):
        assert runner.plan(grid, tmp_path / "out")[0].state == "begun"
        (again,) = runner.run(grid, tmp_path / "out", engine="inline", lean=lean, display=display)
        aside = Path(f"{cell.folder if lean else file}.damaged-{number}")
        damaged = f"{cell.name}: damaged; moved to {aside} and {'trained' if lean else 'measured'} again"
        assert damaged in display.said
        assert (aside / "metrics.json" if lean else aside).read_bytes() == old["metrics.json"]
        changing = {"seconds", "memory"} if lean else {"memory"}
        assert {**again.metrics(), **{key: before[key] for key in changing}} == before
        assert len(find(tmp_path / "out")) == 1
        file.write_bytes(old["metrics.json"])
    kept = Path(f"{cell.folder}.damaged-1") if lean else cell.folder
    assert (kept / "notes.txt").read_text() == "mine"
    assert not lean or all((kept / name).read_bytes() == old[name] for name in old)


# --- 8. looks at the test classes ------------------------------------------------------------------------------------


def test_test_classes_are_evaluated_once(run):
    assert sum("metrics" in line for line in read_log(run / "log.jsonl")) == 1
    assert json.loads((run / "manifest.json").read_text())["test_looks"] == 1


def test_looks_during_training_are_counted(tmp_path):
    folder = trained(tmp_path, evaluation={"test_every": 1})
    assert json.loads((folder / "manifest.json").read_text())["test_looks"] == 2
    assert read(folder).test_looks == 2


def test_every_evaluation_is_in_the_ledgers_and_the_report_counts_them(tmp_path):
    grid = small(tmp_path, losses={"contrastive": {}})
    _, trained = runner.run(grid, tmp_path / "out", engine="inline")
    evaluate(trained.folder, device="cpu")
    ledger = [json.loads(line) for line in (trained.grid / "test_looks.jsonl").read_text().splitlines()]
    assert [line["by"] for line in ledger] == ["baseline", "train", "evaluate"]
    assert judge(find(trained.grid)).notes[-1] == "the test classes were evaluated 3 times for these 2 runs"
