"""``nearfar report RUN`` and ``nearfar evaluate RUN``."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import DIGITS, write_embedded
from training_runs import CLASSES, recipe, train, vectors

import nearfar as nf
from nearfar.bench import Run
from nearfar.networks.weights import save
from nearfar.training import verdict
from nearfar.training.evaluation.embeddings import EmbeddingSet
from nearfar.training.recipe.files import load
from nearfar.training.trainer import Trainer


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dataset = nf.data.open("digits")
    rows = dataset.parts["test"][::20]
    return write_embedded(tmp_path / "run", dataset.labels[rows], rows, evaluation={"ks": [1, 3]})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps on vectors."""
    settings = {
        **DIGITS,
        "data": {"name": "digits", "settings": {"vectors": True}},
        "sampler": {"classes": 4, "per_class": 4, "steps": 2},
        "network": {"name": "linear", "dim": 8},
        "training": {"epochs": 1, "device": "cpu"},
    }
    return Trainer(load(settings), tmp_path_factory.mktemp("runs") / "run").run().folder


def test_report_says_where_the_page_is(run, nearfar):
    out = nearfar("report", "run", "--queries", "2", "--worst", "1", "--out", "page.html").out
    assert out.strip() == "wrote page.html"
    assert Path("page.html").read_text(encoding="utf-8").count('class="hit asked"') == 3


def test_report_prints_the_verdict_and_the_classes_that_gained_and_lost(tmp_path, nearfar):
    settings = {"evaluation__before": True, "evaluation__every": 0}
    train(recipe(vectors(tmp_path), **settings), tmp_path / "run")
    run = Run(tmp_path / "run")
    changes = verdict.class_changes(run)
    lines = nearfar("report", tmp_path / "run").out.splitlines()
    assert lines[0] == verdict.text(run.metrics)
    assert lines[-1] == f"wrote {tmp_path / 'run' / 'report.html'}"
    rows = [line.split() for line in lines if line.count(" % ") == 2]
    assert [int(row[0]) for row in rows] == [change.label for change in changes]
    assert [row[-1] for row in rows] == [f"{100 * change.gain:+.1f}".replace("-", "−") for change in changes]
    assert {change.label for change in changes} == set(run.queries()["labels"].tolist())
    mean = np.mean([change.after for change in changes])  # classes of one size
    assert mean == pytest.approx(run.metrics["test"]["map@r"])


def test_evaluate_measures_what_a_run_has_tested(evaluated, run):
    found = evaluated("run", "--no-clustering")
    queries = EmbeddingSet.load(run / "embeddings.safetensors")
    assert found["retrieval"] == nf.metrics.retrieval(queries.embeddings, queries.labels, ks=(1, 3))
    assert found["files"] == {"run": "run"}
    assert found["settings"]["ks"] == [1, 3]  # the recipe's
    assert evaluated("run", "--no-clustering", "--ks", "2")["settings"]["ks"] == [2]


def test_evaluate_looks_in_the_gallery_of_a_run(evaluated, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    labels = np.repeat(np.arange(5, 10), 8)
    write_embedded(tmp_path / "run", labels, np.arange(40), gallery=True)
    assert evaluated("run", "--no-clustering")["gallery"]["vectors"] == 20


def test_embedding_anew_gives_what_the_run_found(evaluated, trained, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    stored = evaluated(str(trained), "--no-clustering")
    metrics = json.loads((trained / "metrics.json").read_text(encoding="utf-8"))
    assert stored["retrieval"]["recall@1"] == pytest.approx(metrics["test"]["recall@1"])
    (trained / "embeddings.safetensors").rename(tmp_path / "kept")
    try:
        anew = evaluated(str(trained), "--no-clustering")
    finally:
        (tmp_path / "kept").rename(trained / "embeddings.safetensors")
    assert anew["retrieval"] == stored["retrieval"]


def test_its_own_data_by_name_is_split_as_the_run_did(evaluated, trained, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    stored = evaluated(str(trained), "--no-clustering")
    assert evaluated(str(trained), "--data", "digits", "--no-clustering")["retrieval"] == stored["retrieval"]
    file = vectors(tmp_path)
    folder = train(recipe(file, training__epochs=1), tmp_path / "run").folder
    own = evaluated(str(folder), "--data", f"arrays:{file}", "--no-clustering")
    assert own["queries"]["classes"] == CLASSES // 2
    (tmp_path / "elsewhere").mkdir()
    copy = file.rename(tmp_path / "elsewhere" / file.name)
    assert evaluated(str(folder), "--data", f"arrays:{copy}", "--no-clustering")["queries"]["classes"] == CLASSES


def test_a_run_can_be_measured_on_another_data_set(evaluated, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nf.networks.create("small_cnn", dim=4, channels=1, size=8)
    save.save(model, tmp_path / "model")
    found = evaluated("model", "--data", "digits", "--no-clustering")
    dataset = nf.data.open("digits")
    assert found["queries"] == {"vectors": len(dataset.parts["test"]), "dimensions": 4, "classes": 5}
    assert found["files"] == {"run": "model", "data": "digits"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "labels.npy"], "a run knows its labels"),
        (["x.npy", "--data", "digits"], "--data goes with a run"),
        (["."], "neither a run nor a saved network"),
    ],
)
def test_what_does_not_go_together_is_refused(run, words, message, nearfar):
    assert message in nearfar("evaluate", *words, code=1).err


def test_a_network_alone_has_to_be_told_its_data(tmp_path, nearfar):
    save.save(nf.networks.create("linear", in_dim=64, dim=4), tmp_path)
    assert "data is missing" in nearfar("evaluate", str(tmp_path), code=1).err
    assert "reads vectors; digits holds images" in nearfar("evaluate", str(tmp_path), "--data", "digits", code=1).err
