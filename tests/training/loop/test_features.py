"""A frozen backbone: features are computed once, only the head is trained, and the whole network is saved."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import nearfar as nf
from nearfar.networks.weights.save import save
from nearfar.training.recipe.files import load
from nearfar.training.run.folder import RunFolder
from nearfar.training.run.provenance import count_looks


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Pictures of eight glyphs, and a small network to start from."""
    folder = tmp_path_factory.mktemp("frozen")
    glyphs = nf.data.open("glyphs", classes=8, per_class=6, side=16)
    for row, label in enumerate(glyphs.labels):
        file = folder / "photos" / glyphs.classes[label] / f"{row}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(glyphs.source.array[row]).save(file)
    torch.manual_seed(0)
    save(nf.networks.create("small_cnn", channels=3, size=16, dim=4), folder / "start")
    return folder


def recipe(place, **network):
    start = str(place / "start" / "model.safetensors")
    return {
        "data": {"name": "folder", "root": str(place / "photos"), "side": 16},
        "sampler": {"classes": 4, "per_class": 4, "steps": 3},
        "augmentation": {"size": 16, "flip": False},
        "network": {"name": "small_cnn", "dim": 4, "pretrained": start, "freeze": True, **network},
        "loss": {"name": "multi_similarity"},
        "optimizer": {"lr": 0.01},
        "training": {"epochs": 2, "device": "cpu"},
        "evaluation": {"every": 0, "before": True},
    }


def test_only_the_head_is_trained_and_the_model_reads_images(place, tmp_path):
    before = nf.load(place / "start").state_dict()
    ran = nf.train(recipe(place), out=tmp_path / "run", cache=tmp_path / "cache")
    after = nf.load(tmp_path / "run").state_dict()
    changed = {key.split(".")[0] for key in before if not torch.equal(before[key], after[key])}
    assert changed == {"heads"}
    found = nf.evaluate(tmp_path / "run", data=f"folder:{place / 'photos'}", device="cpu")  # embeds the images again
    assert found["retrieval"]["recall@1"] == pytest.approx(ran.metrics["test"]["recall@1"])
    assert found["retrieval"]["map@r"] == pytest.approx(ran.metrics["test"]["map@r"])


def test_features_are_computed_once(place, tmp_path, monkeypatch):
    first = nf.train(recipe(place), out=tmp_path / "one", cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache").rglob("features-*.npy"))) == 1
    embedded, original = [], nf.training.evaluation.embeddings.embed

    def embed(model, loader, rows, **settings):
        embedded.append(len(rows))
        return original(model, loader, rows, **settings)

    monkeypatch.setattr(nf.training.evaluation.embeddings, "embed", embed)
    again = nf.train(recipe(place), out=tmp_path / "two", cache=tmp_path / "cache")
    assert again.metrics["test"] == first.metrics["test"]
    assert embedded
    assert max(embedded) < 48  # of all images


def test_the_network_before_the_training_is_measured_beside_the_trained_one(place, tmp_path):
    ran = nf.train(recipe(place), out=tmp_path / "run", cache=tmp_path / "cache")
    kept = np.load(next((tmp_path / "cache").rglob("features-*.npy")))
    run = RunFolder(tmp_path / "run")
    tested = nf.training.evaluation.embeddings.EmbeddingSet.load(run.embeddings)
    expected = nf.metrics.retrieval(torch.from_numpy(kept)[tested.rows], tested.labels)
    assert json.loads(run.metrics.read_text())["before"]["map@r"] == pytest.approx(expected["map@r"])
    assert count_looks(run.looks.read_bytes()) == 2  # before and after
    whole = recipe(place, freeze=False)
    first = nf.train(whole, out=tmp_path / "whole", cache=tmp_path / "cache").metrics["before"]
    start = nf.evaluate(place / "start", data=f"folder:{place / 'photos'}", device="cpu")
    assert set(first) >= {"recall@1", "map@r"}
    assert start["retrieval"]["queries"] >= first["queries"]
    assert (
        "before"
        not in nf.train(
            {**whole, "evaluation": {"every": 0}}, out=tmp_path / "without", cache=tmp_path / "cache"
        ).metrics
    )
    assert ran.metrics["before"] != ran.metrics["test"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network": {"pretrained": False}}, "network.freeze is true; it needs network.pretrained"),
        ({"network": {"dim": "none"}}, "network.freeze is true; it needs network.head"),
        ({"network": {"pooling": "gem"}}, "network.pooling is 'gem', which is trained"),
        ({"network": {"members": 2}}, "it is for one network with the level 'high'"),
        ({"augmentation": {"crop": "random_resized"}}, "augmentation.crop is 'random_resized'; with network.freeze"),
        ({"augmentation": {"color": 0.1}}, "augmentation.color is 0.1; with network.freeze"),
        ({"evaluation": {"crops": 2}}, "evaluation.crops is 2; with network.freeze"),
        ({"training": {"warmup_epochs": 1}}, "training.warmup_epochs is 1; with network.freeze"),
    ],
)
def test_settings_without_effect_are_refused(place, changes, message):
    given = recipe(place)
    given = {**given, **{section: {**given[section], **values} for section, values in changes.items()}}
    with pytest.raises(ValueError, match=message):
        load(given)
