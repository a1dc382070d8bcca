"""FAISS as it is installed, whoever else was tested in this process."""

import pytest


@pytest.fixture(autouse=True)
def faiss_as_it_is(request, monkeypatch):
    """Some import faiss.contrib.torch_utils, which puts other methods into FAISS; Milvus cannot do with them."""
    if "milvus" not in request.node.name:
        return
    import faiss

    for kind in [each for each in vars(faiss).values() if isinstance(each, type)]:
        for name in [name for name in vars(kind) if name.endswith("_numpy")]:
            monkeypatch.setattr(kind, name.removesuffix("_numpy"), getattr(kind, name))
