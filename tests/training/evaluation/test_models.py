"""Levels of a network one by one, and several runs as one: ``nearfar evaluate --levels`` and ``--ensemble``."""

import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from runs import write_embedded
from training_runs import DIM, pictures, recipe, train, vectors

import nearfar as nf
from nearfar.networks.weights.save import save
from nearfar.training.evaluation.embeddings import EmbeddingSet, embed_parts
from nearfar.training.evaluation.evaluate import concatenate
from nearfar.training.setup import build

LEVELS = ["low", "mid", "high"]
SMALL = {"network__settings": {}, "training__epochs": 1, "sampler__steps": 2, "network__name": "small_cnn"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Runs on pictures: of three levels, of one, and of two members; runs on vectors: of two seeds and of two folds."""
    place = tmp_path_factory.mktemp("tested")
    images, points = pictures(place), vectors(place)
    cache = {"cache": place / "cache"}
    train(recipe(images, **SMALL, network__levels=LEVELS), place / "levels", **cache)
    train(recipe(images, **SMALL, network__levels=["mid"]), place / "mid", **cache)
    train(recipe(images, **SMALL, network__members=2), place / "members", **cache)
    for seed in range(2):
        train(recipe(points, training__epochs=1, training__seed=seed), place / f"seed{seed}")
        train(recipe(points, training__epochs=1, training__seed=seed, network__normalize=False), place / f"raw{seed}")
        fold = {"split__name": "k_fold", "split__folds": 2, "split__fold": seed, "sampler__classes": 3}
        train(recipe(points, training__epochs=1, **fold), place / f"fold{seed}")
    return place


def held_out(file):
    """The data of the test classes, the last six of twelve."""
    with np.load(file) as content:
        held = content["y"] >= 6
        return torch.from_numpy(content["X"][held]), torch.from_numpy(content["y"][held])


@pytest.mark.parametrize("pad", [False, True])
def test_a_saved_model_preprocesses_images_as_evaluation_does(tmp_path, pad):
    rng, shapes = np.random.default_rng(0), [(40, 60), (60, 40), (40, 40)]
    for number in range(12):
        (tmp_path / f"photos/{number // 3}").mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(256, size=(*shapes[number % 3], 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"photos/{number // 3}/{number}.png")
    changes = {"data__name": "folder", "data__root": str(tmp_path / "photos"), "data__pad": pad, "data__side": 28}
    changes |= {"sampler__classes": 2, "sampler__per_class": 2}
    built = build(recipe(tmp_path, **SMALL, **changes), cache=tmp_path / "cache")
    save(built.model, tmp_path / "model", preprocessing=built.preprocessing)
    found = embed_parts(built)["test"]
    assert found.rows is not None
    files = [tmp_path / "photos" / built.dataset.source.name(int(row)) for row in found.rows]
    embeddings = nf.load(tmp_path / "model").embed(files)
    np.testing.assert_allclose(embeddings, found.embeddings, atol=1e-5)


@torch.no_grad()
def test_each_level_is_measured_as_if_the_network_had_no_other(place):
    found = nf.evaluate(place / "levels", levels=True, device="cpu")
    model, (images, labels) = nf.load(place / "levels"), held_out(place / "pictures.npz")
    by_hand = model.levels_forward(model.normalization(images[:, None]))
    assert list(found["alone"]) == LEVELS
    for level, report in found["alone"].items():
        assert report["retrieval"] == pytest.approx(nf.metrics.retrieval(by_hand[level], labels, ks=(1, 2)))
        assert report["queries"]["dimensions"] == 4
    together = nf.evaluate(place / "levels", device="cpu")
    assert {name: value for name, value in found.items() if name != "alone"} == together
    assert together["queries"]["dimensions"] == 12


def test_levels_are_cut_out_of_embeddings_that_are_made_anew(place, monkeypatch):
    monkeypatch.setenv("NEARFAR_CACHE", str(place / "cache"))
    kept = nf.evaluate(place / "levels", levels=True, device="cpu")
    anew = nf.evaluate(place / "levels", f"{place}/pictures.npz", levels=True, device="cpu")
    for level in LEVELS:
        assert anew["alone"][level]["retrieval"] == pytest.approx(kept["alone"][level]["retrieval"])


def test_members_of_an_ensemble_are_told_apart_as_well(place):
    found = nf.evaluate(place / "members", levels=True, device="cpu")
    assert list(found["alone"]) == ["0_high", "1_high"]


def test_a_network_of_one_level_has_none_to_tell_apart(place, nearfar):
    printed = nearfar("evaluate", str(place / "mid"), "--levels", code=1)
    assert printed.out == ""
    assert printed.err == (
        f"nearfar: the network in {place / 'mid'} has one level, mid; levels are measured separately if network.levels "
        'has several, such as ["low", "mid", "high"]\n'
    )


def test_independent_members_are_trained_and_concatenated_with_length_one(tmp_path):
    settings = {"network__members": 2, "network__independent": True, "network__normalize": False}
    train(recipe(vectors(tmp_path), training__epochs=1, **settings), tmp_path / "run")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["batch"]["pictures"] == 2 * 12
    with torch.no_grad():
        found = nf.load(tmp_path / "run").eval()(torch.randn(3, DIM))
    assert torch.allclose(found.view(3, 2, -1).norm(dim=2), torch.tensor(0.5).sqrt())


def test_runs_that_are_to_be_concatenated_raw_are_an_ensemble_as_they_are(tmp_path):
    file = vectors(tmp_path)
    raw = {"network__normalize": False, "network__concatenation": "raw", "evaluation__measure": "euclidean"}
    for seed in range(2):
        train(recipe(file, training__epochs=1, training__seed=seed, **raw), tmp_path / f"{seed}")
    runs = [tmp_path / "0", tmp_path / "1"]
    ensemble = nf.networks.Ensemble([nf.load(run) for run in runs], normalize=False).eval()
    points, labels = held_out(file)
    with torch.no_grad():
        expected = nf.metrics.retrieval(ensemble(points), labels, ks=(1, 2), measure="euclidean")
    assert nf.evaluate(runs, device="cpu")["retrieval"] == pytest.approx(expected)


@torch.no_grad()
def test_an_ensemble_of_runs_is_that_of_their_networks(place):
    runs = [place / "seed0", place / "seed1"]
    found = nf.evaluate(runs, device="cpu")
    ensemble = nf.networks.Ensemble([nf.load(run) for run in runs]).eval()
    points, labels = held_out(place / "vectors.npz")
    assert found["retrieval"] == pytest.approx(nf.metrics.retrieval(ensemble(points), labels, ks=(1, 2)))
    assert found["queries"]["dimensions"] == ensemble.dim
    assert found["alone"] == {str(run): nf.evaluate(run, device="cpu") for run in runs}


@torch.no_grad()
def test_runs_count_the_same_though_one_has_longer_embeddings(place):
    runs = [place / "raw0", place / "raw1"]
    points, labels = held_out(place / "vectors.npz")
    by_hand = torch.cat([F.normalize(nf.load(run)(points), dim=1) for run in runs], dim=1)
    found = nf.evaluate(runs, device="cpu")
    assert found["retrieval"] == pytest.approx(nf.metrics.retrieval(by_hand, labels, ks=(1, 2)))


def test_copies_of_the_data_are_tested_anew_in_one_place(place, tmp_path):
    runs = [place / "seed0", tmp_path / "elsewhere"]
    shutil.copytree(place / "seed1", runs[1])
    manifest = json.loads((runs[1] / "manifest.json").read_text(encoding="utf-8"))
    manifest["data"]["source"] = "a copy"
    (runs[1] / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(ValueError, match=r"elsewhere and .*seed0 are runs of different data"):
        nf.evaluate(runs, device="cpu")
    anew = nf.evaluate(runs, f"{place}/vectors.npz", device="cpu")
    expected = nf.evaluate([place / "seed0", place / "seed1"], device="cpu")
    assert anew["retrieval"] == pytest.approx(expected["retrieval"])


def test_folds_of_one_split_may_stand_together(place):
    assert nf.evaluate([place / "fold0", place / "fold1"], device="cpu")["queries"]["vectors"] == 72


def test_galleries_stand_side_by_side_like_queries(tmp_path):
    labels = np.repeat(np.arange(5), 8)
    runs = [write_embedded(tmp_path / name, labels, np.arange(40), gallery=True) for name in ("one", "two")]
    found = nf.evaluate(runs, device="cpu")
    assert found["gallery"] == {"vectors": 20, "dimensions": 16, "classes": 5}
    assert found["retrieval"] == pytest.approx(found["alone"][str(runs[0])]["retrieval"])  # twice the same


def test_the_table_has_a_column_for_each_and_the_file_everything(nearfar, place, monkeypatch, tmp_path):
    monkeypatch.chdir(place)
    file = tmp_path / "found.json"
    out = nearfar("evaluate", "seed0", "seed1", "--ensemble", "--no-clustering", "--json", str(file)).out
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["files"] == {"runs": ["seed0", "seed1"]}
    reports = [found["alone"]["seed0"], found["alone"]["seed1"], found]
    lines = [line.split() for line in out.splitlines()]
    assert ["metric,", "%", "seed0", "seed1", "together"] in lines
    assert ["dimensions", "4", "4", "8"] in lines
    for metric in ("recall@1", "recall@2", "map@r", "mrr"):
        assert [metric, *(f"{100 * report['retrieval'][metric]:.2f}" for report in reports)] in lines


def test_intervals_stand_beside_each(place, monkeypatch, nearfar):
    monkeypatch.setenv("COLUMNS", "200")
    lines = nearfar("evaluate", str(place / "levels"), "--levels", "--intervals").out.splitlines()
    (recall,), (nmi,) = ([line for line in lines if line.split()[:1] == [name]] for name in ("recall@1", "nmi"))
    assert (recall.count("–"), nmi.count("–")) == (4, 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seed0", "--ensemble"], "runs are seed0; an ensemble needs two at least"),
        (
            ["seed0", "seed1", "seed0", "--ensemble"],
            "runs are seed0, seed1, seed0; each may be in an ensemble only once",
        ),
        (["seed0", "seed1"], "several go with --ensemble"),
        (["seed0", "mid", "--ensemble"], "mid and seed0 are runs of different data"),
        (["seed0", "vectors.npz", "--ensemble"], "vectors.npz is neither a run nor a saved network"),
        (["seed0", "seed1", "--ensemble", "--levels"], "--levels goes with one run, and --ensemble with several"),
        (["vectors.npz", "--levels"], "--levels goes with a run or a network, and vectors.npz is neither"),
        (["vectors.npz", "seed0", "--ensemble"], "--ensemble goes with a run or a network, and vectors.npz"),
        (["a.npy", "b.npy", "c.npy"], "3 files are given; EMBEDDINGS and LABELS, or one with both, are needed"),
    ],
)
def test_what_cannot_be_measured_together_is_refused_in_one_line(place, words, message, monkeypatch, nearfar):
    monkeypatch.chdir(place)
    printed = nearfar("evaluate", *words, code=1)
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert message in printed.err


def test_levels_of_several_runs_are_refused(place):
    with pytest.raises(ValueError, match="levels are those of one run; where has 2"):
        nf.evaluate([place / "seed0", place / "seed1"], levels=True)


@pytest.mark.parametrize("changed", ["labels", "rows", "gallery"])
def test_only_embeddings_of_the_same_pictures_are_joined(changed):
    labels, rows = torch.arange(DIM) // 2, torch.arange(DIM)
    one = EmbeddingSet(torch.eye(DIM), labels, rows)
    other = EmbeddingSet(
        torch.eye(DIM),
        labels.flip(0) if changed == "labels" else labels,
        rows + 1 if changed == "rows" else rows,
        gallery=one if changed == "gallery" else None,
    )
    with pytest.raises(ValueError, match="two and one are not tested on the same images; an ensemble needs one split"):
        concatenate({"one": one, "two": other})
