"""Embedding rows and measuring parts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nearfar import metrics, networks
from nearfar.data import Store, View
from nearfar.data.loader import Loader
from nearfar.training.evaluation.embeddings import EmbeddingSet, class_means, embed, measure_embeddings

LABELS = np.arange(20) // 4


@pytest.fixture
def loader():
    rng = np.random.default_rng(0)
    return Loader(rng.standard_normal((20, 5)).astype(np.float32), LABELS, workers=0)


def network():
    torch.manual_seed(0)
    return networks.create("mlp", in_dim=5, hidden=(8,), dim=3)


def test_rows_are_embedded_in_their_order_whatever_the_batch(loader):
    rows = np.array([7, 3, 19, 0, 11])
    model = network()
    found = embed(model, loader, rows, batch_size=2)
    with torch.no_grad():
        expected = model.eval()(torch.from_numpy(np.asarray(loader.store))[rows])
    assert torch.allclose(found.embeddings, expected, atol=1e-6)
    assert found.labels.tolist() == LABELS[rows].tolist()
    assert not found.embeddings.requires_grad


def test_the_model_is_as_it_was_afterwards(loader):
    model = network().train()
    modes = []
    model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    embed(model, loader, np.arange(4))
    assert modes == [False]
    assert model.training


def test_nothing_to_embed_is_an_error(loader):
    with pytest.raises(ValueError, match="rows is empty"):
        embed(network(), loader, np.array([], dtype=np.int64))


def test_bfloat16_gives_float32_embeddings(loader):
    found = embed(network(), loader, np.arange(4), precision="bfloat16")
    assert found.embeddings.dtype == torch.float32


def part(seed, gallery=None):
    generator = torch.Generator().manual_seed(seed)
    return EmbeddingSet(torch.randn(20, 3, generator=generator), torch.from_numpy(LABELS), gallery=gallery)


def test_embeddings_are_searched_in_each_other():
    found = measure_embeddings(part(0), ks=(1, 3))
    assert found.retrieval == metrics.retrieval(part(0).embeddings, part(0).labels, ks=(1, 3))
    assert len(found.per_query["recall@1"]) == 20


def test_queries_are_searched_in_the_gallery():
    one, two = part(0), part(1)
    expected = metrics.retrieval(one.embeddings, one.labels, two.embeddings, two.labels, ks=(1,))
    assert measure_embeddings(part(0, gallery=two), ks=(1,)).retrieval == expected


def test_clusters_are_measured_when_wanted():
    assert {"nmi", "ami", "f1"} <= measure_embeddings(part(0), clustering=True).clustering.keys()
    assert measure_embeddings(part(0)).clustering == {}
    found = measure_embeddings(part(0, gallery=part(1)), clustering=True).clustering
    assert found["nmi"] == metrics.clustering(part(0).embeddings, part(0).labels)["nmi"]  # those of the queries


def test_a_file_holds_embeddings_labels_rows_and_gallery(tmp_path):
    rows = torch.arange(20)
    one = replace(part(0), rows=rows, gallery=replace(part(1), rows=rows + 20))
    one.save(tmp_path / "embeddings.safetensors")
    again = EmbeddingSet.load(tmp_path / "embeddings.safetensors")
    assert again.gallery is not None
    for found, expected in ((again, one), (again.gallery, one.gallery)):
        for name in ("embeddings", "labels", "rows"):
            assert torch.equal(getattr(found, name), getattr(expected, name))


def test_nan_in_the_gallery_is_not_finite():
    assert part(0, gallery=part(1)).is_finite()
    assert not part(0, gallery=EmbeddingSet(torch.full((2, 3), torch.nan), torch.arange(2))).is_finite()


def test_the_mean_of_each_class_is_in_the_order_of_its_label():
    points = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 5.0]])
    found = class_means(EmbeddingSet(points, torch.tensor([9, 9, 2])), np.array([2, 9]))
    assert found.tolist() == [[0.0, 5.0], [2.0, 0.0]]


def test_several_crops_are_averaged():
    images = np.random.default_rng(0).integers(256, size=(5, 12, 12)).astype(np.uint8)
    view = View(size=8, crop="random", resize=12, flip=True)
    model, rows = networks.create("small_cnn", dim=3, normalize=False, size=8), np.arange(5)
    store = Store.of_arrays(images)
    loader = Loader(store, rows, view=view, normalization=model.normalization, workers=0)
    draws = []
    for draw in range(4):
        (batch,) = loader.all(rows, draw=draw)
        with torch.no_grad():
            draws.append(model.eval()(batch.images))
    assert not torch.equal(draws[0], draws[1])
    found = embed(model, loader, rows, crops=4)
    torch.testing.assert_close(found.embeddings, torch.stack(draws).mean(dim=0))
    assert found.labels.tolist() == [0, 1, 2, 3, 4]
