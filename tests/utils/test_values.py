"""Arrays without a value in every place are refused by name, wherever they come in."""

import numpy as np
import pytest
import torch

from nearfar import data, losses, metrics
from nearfar.search import Index

VECTORS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8) % 2

ODD = {
    "meta": (VECTORS.to("meta"), "is on the meta device; a tensor with values is needed"),
    "sparse": (VECTORS.to_sparse(), "is a tensor of layout torch.sparse_coo; a dense tensor is needed"),
    "masked": (np.ma.masked_array(VECTORS.numpy(), mask=VECTORS.numpy() > 0), "is a masked array"),
}


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("values")
    return Index.from_vectors(VECTORS.numpy(), out=folder / "i")


@pytest.mark.parametrize("kind", ODD)
def test_arrays_without_values_are_refused(kind, index):
    odd, words = ODD[kind]
    calls = {
        "vectors": lambda: index.add_vectors(odd),
        "query": lambda: index.search(odd[0]),
        "embeddings": lambda: metrics.retrieval(odd, LABELS),
        "X": lambda: data.from_arrays(odd, LABELS),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"{name} {words}"):
            call()
    if isinstance(odd, torch.Tensor):
        with pytest.raises(TypeError, match=f"embeddings {words}"):
            losses.create("contrastive")(odd, LABELS)
        with pytest.raises(TypeError, match=f"labels {words}"):
            losses.create("contrastive")(VECTORS, LABELS.to_sparse() if kind == "sparse" else LABELS.to("meta"))
    else:
        with pytest.raises(TypeError, match=f"labels {words}"):
            metrics.retrieval(VECTORS, np.ma.masked_array(LABELS.numpy(), mask=LABELS.numpy() > 0))


@pytest.mark.parametrize("id", [4.7, True, "3", np.float64(3), None])
def test_ids_are_whole_numbers(id, index):
    for call in (lambda: index.remove([0, id]), lambda: index.item(id), lambda: index.vector(id)):
        with pytest.raises(TypeError, match=r"id is .*; a whole number is needed"):
            call()
    assert len(index) == 8
