"""Models that read vectors: indexes of them, and DataFrames as vectors, labels and metadata."""

import numpy as np
import pandas
import pytest
import torch

from nearfar import data, networks
from nearfar.search import Index
from nearfar.search.embedding_files import embed

VECTORS = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
LABELS = ["jay", "wren", "owl"] * 3


@pytest.fixture
def model():
    torch.manual_seed(0)
    return networks.create("mlp", in_dim=5, dim=3, hidden=[8])


def test_an_index_embeds_the_vectors_it_is_built_and_searched_with(model, tmp_path):
    np.savez(tmp_path / "v.npz", X=VECTORS, y=LABELS, names=[f"bird {row}" for row in range(9)])
    with Index.build(model, tmp_path / "v.npz", out=tmp_path / "my.index", device="cpu") as index:
        np.testing.assert_allclose(index.vectors(), model.embed(VECTORS), atol=1e-6)
        assert (index.item(4).name, index.item(4).label, index.thumbnail(4)) == ("bird 4", "wren", b"")
    with Index.open(tmp_path / "my.index", device="cpu") as index:  # the model is loaded from the folder
        for query in (VECTORS[4], torch.from_numpy(VECTORS[4]), pandas.Series(VECTORS[4]), VECTORS[4].astype(float)):
            assert index.search(query, 1)[0].item.id == 4
        assert index.search(4, 2).names == index.search(VECTORS[4], 3).names[1:]
        added = index.add_images([("new", VECTORS[0] + 1, "owl", {})])
        assert index.search(VECTORS[0] + 1, 1)[0].item.id == added[0]
        with pytest.raises(TypeError, match="the model reads vectors of 5 numbers"):
            index.search(np.ones(3), 1)


def test_an_index_of_a_dataset_of_vectors(model, tmp_path):
    dataset = data.from_arrays(VECTORS, LABELS)
    with Index.build(model, dataset, out=tmp_path / "my.index", device="cpu") as index:
        assert [item.label for item in index.items] == LABELS


def test_images_are_refused_by_a_model_of_vectors(model, tmp_path):
    with pytest.raises(TypeError, match="the model reads vectors of 5 numbers; the input is uint8"):
        embed(model, data.open("digits"), device="cpu")
    with pytest.raises(ValueError, match="must be uint8"):
        embed(networks.create("small_cnn", dim=2, size=8), data.from_arrays(VECTORS, LABELS), device="cpu")


def test_embeddings_of_vectors_without_labels(model, tmp_path):
    np.save(tmp_path / "v.npy", VECTORS)
    found = embed(model, tmp_path / "v.npy", device="cpu", batch_size=4)
    np.testing.assert_allclose(found.vectors, model.embed(VECTORS), atol=1e-6)
    assert (found.names[:2], set(found.labels)) == (("0", "1"), {None})


def test_tables_and_columns_of_pandas(tmp_path):
    frame, labels = pandas.DataFrame(VECTORS), pandas.Series([*LABELS[:-1], None])
    about = pandas.DataFrame({"year": range(2000, 2009), "place": ["garden"] * 9})
    with Index.from_vectors(frame, out=tmp_path / "my.index", labels=labels, metadata=about) as index:
        assert [item.label for item in index.items] == [*LABELS[:-1], None]
        assert [hits[0].id for hits in index.search_vectors(frame, 1)] == list(range(9))
        assert {each.item.id for each in index.search(frame.iloc[0], 9, where={"year": {">=": 2006}})} == {6, 7, 8}
        assert index.add_vectors(frame.iloc[:2], names=pandas.Series(["a", "b"])) == [9, 10]
        assert index.item(10).name == "b"
