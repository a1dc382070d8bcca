"""Embedding rows and measuring parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nearfar import metrics, networks
from nearfar.data.loader import Loader
from nearfar.training.evaluation.measure import Embedded, class_means, embed, measure

LABELS = np.arange(20) // 4


@pytest.fixture
def loader() -> Loader:
    rng = np.random.default_rng(0)
    return Loader(rng.standard_normal((20, 5)).astype(np.float32), LABELS, workers=0)


def network() -> networks.Embedder:
    torch.manual_seed(0)
    return networks.create("mlp", in_dim=5, hidden=(8,), dim=3)


def test_rows_are_embedded_in_their_order_whatever_the_batch(loader: Loader) -> None:
    rows = np.array([7, 3, 19, 0, 11])
    model = network()
    found = embed(model, loader, rows, batch_size=2)
    with torch.no_grad():
        expected = model.eval()(torch.from_numpy(np.asarray(loader.store))[rows])
    assert torch.allclose(found.points, expected, atol=1e-6)
    assert found.labels.tolist() == LABELS[rows].tolist()
    assert not found.points.requires_grad


def test_the_model_is_as_it_was_afterwards(loader: Loader) -> None:
    model = network().train()
    modes = []
    model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    embed(model, loader, np.arange(4))
    assert modes == [False]
    assert model.training


def test_nothing_to_embed_is_an_error(loader: Loader) -> None:
    with pytest.raises(ValueError, match="rows is empty"):
        embed(network(), loader, np.array([], dtype=np.int64))


def test_bfloat16_gives_float32_embeddings(loader: Loader) -> None:
    found = embed(network(), loader, np.arange(4), precision="bfloat16")
    assert found.points.dtype == torch.float32


def part(seed: int) -> Embedded:
    generator = torch.Generator().manual_seed(seed)
    return Embedded(torch.randn(20, 3, generator=generator), torch.from_numpy(LABELS), np.arange(20))


def test_each_part_has_its_metrics() -> None:
    found = measure({"validation": part(0), "test": part(1)}, ks=(1, 3))
    for name, seed in (("validation", 0), ("test", 1)):
        assert found[name] == metrics.retrieval(part(seed).points, part(seed).labels, ks=(1, 3))


def test_queries_look_through_the_gallery_and_are_the_test() -> None:
    found = measure({"query": part(0), "gallery": part(1)}, ks=(1,))
    expected = metrics.retrieval(part(0).points, part(0).labels, part(1).points, part(1).labels, ks=(1,))
    assert found == {"test": expected}


def test_clusters_are_measured_when_wanted() -> None:
    assert {"nmi", "ami", "f1"} <= measure({"test": part(0)}, clustering=True)["test"].keys()
    assert "nmi" not in measure({"test": part(0)})["test"]
    found = measure({"query": part(0), "gallery": part(1)}, clustering=True)["test"]
    assert found["nmi"] == metrics.clustering(part(0).points, part(0).labels)["nmi"]  # as `nearfar evaluate` has it


def test_the_mean_of_each_class_is_in_the_order_of_its_label() -> None:
    points = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 5.0]])
    found = class_means(Embedded(points, torch.tensor([9, 9, 2]), np.arange(3)), np.array([2, 9]))
    assert found.tolist() == [[0.0, 5.0], [2.0, 0.0]]
