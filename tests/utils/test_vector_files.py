"""Embeddings and labels from .npy, .npz, .safetensors and .parquet files."""

import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from nearfar.utils.vector_files import read

VECTORS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 0, 1, 1, 2, 2])
WORDS = ["auk", "auk", "bee", "bee", "cat", "cat"]


def test_npy_is_mapped_and_holds_one_array(tmp_path):
    np.save(tmp_path / "vectors.npy", VECTORS.numpy())
    np.save(tmp_path / "labels.npy", np.array(WORDS))
    vectors = read(tmp_path / "vectors.npy", "embeddings")
    assert isinstance(vectors, np.memmap)
    assert vectors.tolist() == VECTORS.tolist()
    assert read(tmp_path / "labels.npy", "labels").tolist() == WORDS
    with pytest.raises(ValueError, match="holds a single array; embeddings and labels need a file each"):
        read(tmp_path / "vectors.npy", "labels", shared=True)


def test_npz_by_name(tmp_path):
    file = tmp_path / "both.npz"
    np.savez(file, embeddings=VECTORS.numpy(), labels=np.array(WORDS), other=LABELS.numpy())
    assert read(file, "embeddings", shared=True).tolist() == VECTORS.tolist()
    assert read(file, "labels", shared=True).tolist() == WORDS
    assert read(file, "labels", "other").tolist() == LABELS.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_safetensors_by_name(dtype, tmp_path):
    file = tmp_path / "both.safetensors"
    save_file({"labels": LABELS, "embeddings": VECTORS.to(dtype), "other": LABELS + 1}, file)
    found = read(file, "embeddings", shared=True)
    assert isinstance(found, torch.Tensor)
    assert found.equal(VECTORS.to(dtype))
    assert read(file, "labels", shared=True).tolist() == LABELS.tolist()
    assert read(file, "labels", "other").tolist() == [1, 1, 2, 2, 3, 3]


def test_safetensors_with_a_single_tensor(tmp_path):
    file = tmp_path / "one.safetensors"
    save_file({"features": VECTORS}, file)
    assert read(file, "embeddings").tolist() == VECTORS.tolist()
    with pytest.raises(ValueError, match="holds features; which of them are the labels must be said by a key"):
        read(file, "labels", shared=True)


@pytest.mark.parametrize("kind", ["list", "large_list", "fixed_size_list"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_parquet(kind, dtype, tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    vectors = VECTORS.numpy().astype(dtype)
    inner = pa.from_numpy_dtype(vectors.dtype)
    outer = pa.list_(inner, 4) if kind == "fixed_size_list" else getattr(pa, "list_" if kind == "list" else kind)(inner)
    file = tmp_path / "both.parquet"
    table = pa.table({"embedding": pa.array(list(vectors), type=outer), "label": WORDS, "number": LABELS.tolist()})
    parquet.write_table(table, file, row_group_size=4)
    found = read(file, "embeddings", shared=True)
    assert str(found.dtype) == dtype
    assert found.tolist() == vectors.tolist()
    assert read(file, "labels", shared=True).tolist() == WORDS
    assert read(file, "labels", "number").tolist() == LABELS.tolist()


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([[1.0, 2.0], [1.0]], "holds lists of 1 to 2 numbers in 'embeddings'; they must be alike"),
        ([[1.0, 2.0], None], "has no value in 1 of 2 rows of 'embeddings'"),
        ([1.0, 2.0], "holds double in 'embeddings'; lists of numbers are needed"),
    ],
)
def test_parquet_columns_that_will_not_do(column, message, tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.table({"embeddings": column}), tmp_path / "vectors.parquet")
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "vectors.parquet", "embeddings")


def test_an_empty_parquet_file(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.table({"embeddings": pa.array([], pa.list_(pa.float32()))}), tmp_path / "none.parquet")
    assert read(tmp_path / "none.parquet", "embeddings").shape == (0, 0)


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "vectors.parquet").touch()
    with pytest.raises(ImportError, match=r"needs pyarrow; install it with: pip install 'nearfar\[parquet\]'"):
        read(tmp_path / "vectors.parquet", "embeddings")


@pytest.fixture
def folder(tmp_path):
    """Files, most of which have something wrong with them."""
    np.save(tmp_path / "vectors.npy", VECTORS.numpy())
    np.save(tmp_path / "objects.npy", np.array([None]))
    np.savez(tmp_path / "objects.npz", embeddings=np.array([{}, {}], dtype=object))
    save_file({"a": VECTORS, "b": VECTORS + 1}, tmp_path / "two.safetensors")
    save_file({"embedding": VECTORS, "embeddings": VECTORS + 1}, tmp_path / "alike.safetensors")
    for name in ("broken.npy", "broken.npz", "broken.safetensors", "vectors.txt"):
        (tmp_path / name).write_text("no array")
    (tmp_path / "damaged.npz").write_text("PK no")
    for name in ("empty.npy", "empty.npz"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "key", "error", "message"),
    [
        ("vectors.txt", None, ValueError, r"must end in \.npy, \.npz, \.safetensors, \.parquet"),
        ("nowhere.npy", None, FileNotFoundError, r"nowhere\.npy does not exist, or is not a file"),
        ("vectors.npy", "a", ValueError, "holds a single array without a name; 'a' was asked for"),
        ("objects.npy", None, ValueError, r"objects\.npy cannot be read: .*Python objects"),
        *(
            (name, None, ValueError, f"{name} cannot be read")
            for name in ("broken.npy", "broken.npz", "broken.safetensors", "damaged.npz", "empty.npy", "empty.npz")
        ),
        ("objects.npz", None, ValueError, r"objects\.npz cannot be read"),
        ("two.safetensors", None, ValueError, "holds a and b; which of them are the embeddings must be said by a key"),
        ("two.safetensors", "c", ValueError, "has no 'c'; it holds a and b"),
        ("alike.safetensors", None, ValueError, "holds embedding and embeddings; which of them"),
    ],
)
def test_files_that_will_not_do(name, key, error, message, folder):
    with pytest.raises(error, match=message):
        read(folder / name, "embeddings", key)
