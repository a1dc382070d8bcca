"""The baseline: pooled features as a network brings them, on the same test as the runs."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from training_runs import pictures, recipe, vectors

from nearfar import metrics, networks
from nearfar.bench import baseline, read
from nearfar.training.recipe.files import load


def test_random_weights_are_measured_whole_and_by_their_seed(tmp_path):
    chosen = recipe(vectors(tmp_path), split__name="fixed_validation", split__share=0.4)
    first = baseline.measure(chosen, tmp_path / "first")
    again = baseline.measure(chosen, tmp_path / "again")
    other = baseline.measure(load(chosen, overrides=["training.seed=1"]), tmp_path / "other")
    assert first["test"] == again["test"] != other["test"]
    assert set(first) >= {"test", "validation", "seconds", "memory"}
    assert load_file(tmp_path / "first" / "embeddings.safetensors")["embeddings"].shape[1] == 4


def test_a_folder_says_that_nothing_was_trained(tmp_path):
    baseline.measure(recipe(vectors(tmp_path)), tmp_path / "frozen")
    outcome = read(tmp_path / "frozen")
    assert (outcome.loss, outcome.is_baseline, outcome.dim, outcome.metrics["steps"]) == ("frozen", True, 4, 0)
    found = load_file(tmp_path / "frozen" / "queries.safetensors")
    assert found["recall@1"].double().mean().item() == pytest.approx(outcome.score())


def test_pretrained_weights_are_measured_without_a_head(tmp_path):
    torch.manual_seed(7)
    network = networks.create("small_cnn", dim=None, head="none", channels=1, size=8)
    save_file(network.backbone.state_dict(), tmp_path / "weights.safetensors")
    chosen = recipe(
        pictures(tmp_path),
        network__name="small_cnn",
        network__pretrained=str(tmp_path / "weights.safetensors"),
        augmentation__size=8,
        evaluation__crop="none",
    )
    measured = baseline.measure(chosen, tmp_path / "frozen")
    content = np.load(tmp_path / "pictures.npz")
    test = content["y"] >= 6
    images = torch.from_numpy(content["X"][test]).float().unsqueeze(1) / 255
    used = network.normalization
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (used.mean, used.std))
    with torch.no_grad():
        features = network.eval()((images - mean) / std)
    expected = metrics.retrieval(features, torch.from_numpy(content["y"][test]), ks=(1,))
    assert measured["test"]["recall@1"] == pytest.approx(expected["recall@1"], abs=0.03)
    manifest = json.loads((tmp_path / "frozen" / "manifest.json").read_text())
    assert manifest["recipe"]["network"]["dim"] == 4  # what it is compared with
    assert load_file(tmp_path / "frozen" / "embeddings.safetensors")["embeddings"].shape[1] == network.dim
