"""Thresholds of runs: calibrated on validation classes, stored with the run, never on test classes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from training_runs import recipe, train, vectors

import nearfar as nf
from nearfar.networks.weights import save
from nearfar.training.evaluation.evaluate import calibrate, load_threshold
from nearfar.training.run.reader import read_json
from nearfar.training.trainer import open_model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with two validation classes."""
    folder = tmp_path_factory.mktemp("calibrated")
    settings = recipe(vectors(folder), split__name="fixed_validation", split__share=0.34)
    return train(settings, folder / "run").folder


def test_the_pairs_are_those_of_the_validation_classes(run):
    found = calibrate(run, device="cpu")
    parts = nf.training.load_recipe(run)
    with np.load(str(parts.data.root)) as file:
        points, labels = torch.from_numpy(file["X"]), torch.from_numpy(file["y"])
    dataset = nf.data.open("arrays", str(parts.data.root))
    split = nf.data.splits.fixed_validation(dataset, share=0.34, seed=0)
    rows = torch.from_numpy(np.array(split.validation))
    assert not set(labels[split.test["test"]].tolist()) & set(labels[rows].tolist())
    with torch.no_grad():
        expected = nf.metrics.calibrate(open_model(run)(points[rows]), labels[rows])
        search = nf.metrics.calibrate_search(open_model(run)(points[rows]), labels[rows])
    assert found.similarity == pytest.approx(expected.similarity, abs=1e-6)
    assert (found.positives, found.negatives) == (expected.positives, expected.negatives)
    assert found.search.similarity == pytest.approx(search.similarity, abs=1e-5)
    assert (found.search.items, found.search.known_found) == (search.items, search.known_found)
    assert found.about["data"] == "validation classes"
    assert found.about["classes"] == len(labels[rows].unique())
    assert found.about["model"] == save.fingerprint(open_model(run))
    assert found.about["run"]["data"]["fingerprint"] == read_json(run / "manifest.json")["data"]["fingerprint"]
    assert load_threshold(run) == found


def test_the_run_stays_valid_and_no_look_at_the_test_is_counted(run):
    before = (run / "test_looks.jsonl").read_text()
    calibrate(run, criterion=0.1, device="cpu")
    assert (run / "test_looks.jsonl").read_text() == before
    assert nf.evaluate(run, device="cpu")["retrieval"]["recall@1"] > 0


def test_a_run_without_validation_classes_says_that_it_knows_those_it_is_calibrated_on(tmp_path):
    folder = train(recipe(vectors(tmp_path), training__epochs=1), tmp_path / "run").folder
    root = nf.training.load_recipe(folder).data.root
    with pytest.raises(ValueError, match=r"npz is the data that it was trained and tested on; train with"):
        calibrate(folder, f"arrays:{root}", device="cpu")
    assert load_threshold(folder) is None
    found = calibrate(folder, device="cpu", items=3, unknown=0.2)
    note = "; the model was trained on these classes, so the rates look better than they are"
    for described in (found.describe(), found.search.describe()):
        assert " on training classes, " in described
        assert described.endswith(note)
    assert " for 3 items: " in found.search.describe()
    trained = nf.data.splits.standard(nf.data.open("arrays", str(root))).train
    assert found.about["vectors"] == len(trained)


def test_training_classes_of_which_nothing_is_kept_are_fair(tmp_path):
    head = {"network__name": "linear", "network__head": "residual", "network__dim": "none", "network__settings": {}}
    settings = recipe(vectors(tmp_path), **head, selection__blend=0.0, training__epochs=1)
    folder = train(settings, tmp_path / "run").folder
    about = calibrate(folder, device="cpu").about
    assert (about["data"], "note" in about) == ("training classes", False)


def test_other_data_is_used_without_its_test_part(run, tmp_path, monkeypatch):
    rng = np.random.default_rng(1)
    labels = np.repeat(np.arange(6), 5)
    points = (rng.standard_normal((6, 6))[labels] + 0.3 * rng.standard_normal((30, 6))).astype(np.float32)
    np.savez(tmp_path / "other.npz", X=points, y=labels)
    file = tmp_path / "other.npz"
    found = calibrate(run, f"arrays:{file}", device="cpu")
    assert (found.about["vectors"], found.about["data"]) == (30, "arrays:other.npz")
    whole = nf.data.open("arrays", str(file))
    parts = {"train": np.arange(20), "test": np.arange(20, 30)}
    monkeypatch.setattr(nf.data, "open", lambda *_: replace(whole, parts=parts))
    assert calibrate(run, f"arrays:{file}", device="cpu").about["vectors"] == 20


def test_the_data_of_the_run_under_another_path_is_refused(run, tmp_path):
    copy = tmp_path / "copy.npz"
    copy.write_bytes(Path(str(nf.training.load_recipe(run).data.root)).read_bytes())
    with pytest.raises(ValueError, match="which holds the data of"):
        calibrate(run, f"arrays:{copy}", device="cpu")


def test_the_threshold_of_another_model_is_refused(run, tmp_path):
    calibrate(run, device="cpu")
    for seed in range(2):
        torch.manual_seed(seed)
        save.save(nf.networks.create("mlp", in_dim=6, dim=4), tmp_path / str(seed))
        (tmp_path / str(seed) / "threshold.json").write_bytes((run / "threshold.json").read_bytes())
        with pytest.raises(ValueError, match=r"threshold\.json is of another model"):
            load_threshold(tmp_path / str(seed))
