"""Vectors and labels of every kind that users have, and what is said of those that will not do."""

import subprocess
import sys
import warnings

import numpy as np
import pandas
import pytest
import torch

from nearfar.utils import tensors
from nearfar.utils.tensors import as_device, as_label_pair, as_labels, as_vectors, blocks, check_finite, check_vectors

VECTORS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors_stay_what_they_are(dtype):
    vectors = VECTORS.to(dtype, copy=True).requires_grad_()
    found = as_vectors("embeddings", vectors)
    assert found.dtype == dtype
    assert not found.requires_grad
    assert found.data_ptr() == vectors.data_ptr()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_arrays_are_not_copied(dtype):
    array = VECTORS.numpy().astype(dtype)
    found = as_vectors("embeddings", array)
    assert found.data_ptr() == array.ctypes.data
    np.testing.assert_array_equal(found.numpy(), array)


@pytest.mark.parametrize("view", [np.s_[:, ::2], np.s_[::-1], np.s_[:, ::-1], np.s_[1:3]])
def test_views(view):
    array = VECTORS.numpy()[view]
    assert as_vectors("embeddings", array).tolist() == array.tolist()


def test_tables_and_columns_of_pandas():
    frame = pandas.DataFrame({"height": [1, 2, 3], "width": [0.5, 0.25, 0.125]})
    assert as_vectors("X", frame).tolist() == [[1.0, 0.5], [2.0, 0.25], [3.0, 0.125]]
    for labels in (["jay", "wren", "jay"], pandas.Categorical(["jay", "wren", "jay"])):
        assert as_labels("labels", pandas.Series(labels, index=[7, 8, 9]), 3).tolist() == [0, 1, 0]
    numbers = pandas.Series([3, 1, 3])
    assert as_labels("labels", numbers).tolist() == [3, 1, 3]
    assert as_label_pair("a", numbers, 3, "b", torch.tensor([3]), 1)[0].tolist() == [3, 1, 3]


def test_columns_that_hold_no_numbers_are_named():
    frame = pandas.DataFrame({"height": [1, 2], "kind": ["a", "b"], "wide": [True, False]})
    with pytest.raises(TypeError, match="X has 'kind' of object, 'wide' of bool; all columns must hold numbers"):
        as_vectors("X", frame)
    with pytest.raises(TypeError, match="labels is of object; whole numbers or text are needed"):
        as_labels("labels", pandas.Series(["jay", None]))


def test_a_field_of_records():
    records = np.zeros(3, dtype=[("id", np.int8), ("vector", np.float32, 2)])
    assert as_vectors("embeddings", records["vector"]).shape == (3, 2)


def test_a_memory_map_is_neither_read_nor_warned_of(tmp_path):
    np.save(tmp_path / "vectors.npy", VECTORS.numpy())
    # In a fresh process: PyTorch warns only once.
    code = """if True:
        import sys, warnings
        import numpy as np
        from nearfar.utils.tensors import as_vectors, check_finite
        warnings.simplefilter("error")
        array = np.load(sys.argv[1], mmap_mode="r")
        vectors = as_vectors("embeddings", array)
        check_finite("embeddings", vectors)
        print(vectors.data_ptr() == array.ctypes.data)
    """
    run = subprocess.run([sys.executable, "-c", code, tmp_path / "vectors.npy"], capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("True\n", "")


def test_other_warnings_are_let_through():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        as_vectors("embeddings", VECTORS.numpy())
        warnings.warn("of something else", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["of something else"]


@pytest.mark.parametrize(
    ("array", "error", "message"),
    [
        ([[1.0]], TypeError, "embeddings is a list; a torch.Tensor or NumPy array is needed"),
        (None, TypeError, "embeddings is a NoneType"),
        (VECTORS[0], ValueError, r"embeddings has shape \(4,\); needed is \[n, d\] with n ≥ 1 and d ≥ 1"),
        (VECTORS.numpy()[None], ValueError, r"embeddings has shape \(1, 6, 4\)"),
        (VECTORS[:0], ValueError, r"embeddings has shape \(0, 4\)"),
        (VECTORS.numpy()[:, :0], ValueError, r"embeddings has shape \(6, 0\)"),
        (VECTORS.long(), TypeError, "embeddings is of torch.int64; floating point of 16, 32 or 64 bits is needed"),
        (VECTORS.to(torch.complex64), TypeError, "embeddings is of torch.complex64"),
        (VECTORS.to(torch.float8_e4m3fn), TypeError, "embeddings is of torch.float8_e4m3fn"),
        (VECTORS.numpy().astype(np.int32), TypeError, "embeddings is of int32; floating point of 16"),
        (VECTORS.numpy().astype(">f4"), TypeError, "embeddings is of >f4"),
        (np.array([["a"]]), TypeError, "embeddings is of <U1"),
    ],
)
def test_vectors_that_will_not_do(array, error, message):
    with pytest.raises(error, match=message):
        as_vectors("embeddings", array)


@pytest.mark.parametrize(
    "array",
    [
        torch.tensor([3, -1, 3]),
        torch.tensor([3, -1, 3], dtype=torch.int8),
        np.array([3, -1, 3], dtype=np.int16),
        np.array([3, -1, 3], dtype=">i8"),
    ],
)
def test_whole_numbers(array):
    found = as_labels("labels", array, 3)
    assert found.dtype == torch.int64
    assert found.tolist() == [3, -1, 3]


def test_unsigned_numbers_stay_different():
    array = np.array([0, 2**64 - 1, 2**63, 0], dtype=np.uint64)
    assert len(as_labels("labels", array, 4).unique()) == 3


@pytest.mark.parametrize("kind", ["U5", "S5", "object"])
def test_words_become_their_places(kind):
    assert as_labels("labels", np.array(["wren", "auk", "wren"], dtype=kind)).tolist() == [1, 0, 1]


def test_the_same_label_is_the_same_number_in_both():
    words = as_label_pair("labels", np.array(["b", "c"]), 2, "gallery_labels", np.array(["a", "longer", "b"]), 3)
    assert [labels.tolist() for labels in words] == [[1, 2], [0, 3, 1]]
    numbers = as_label_pair("labels", np.array([4]), 1, "gallery_labels", torch.tensor([5, 4]), 2)
    assert [labels.tolist() for labels in numbers] == [[4], [5, 4]]
    with pytest.raises(TypeError, match="labels holds text and gallery_labels whole numbers; both must hold the same"):
        as_label_pair("labels", np.array(["a"]), 1, "gallery_labels", torch.tensor([1]), 1)


@pytest.mark.parametrize(
    ("array", "count", "error", "message"),
    [
        ([0, 1], 2, TypeError, "labels is a list; a torch.Tensor or NumPy array is needed"),
        (torch.tensor([0, 1]), 3, ValueError, r"labels has shape \(2,\); needed is \[3\], one for each vector"),
        (np.array([0, 1]), 1, ValueError, r"labels has shape \(2,\); needed is \[1\]"),
        (torch.tensor([[0], [1]]), 2, ValueError, r"labels has shape \(2, 1\)"),
        (torch.tensor(0), 1, ValueError, r"labels has shape \(\)"),
        (torch.tensor([]), None, ValueError, r"labels has shape \(0,\); needed is \[n\] with n ≥ 1"),
        (torch.tensor([0.0, 1.0]), 2, TypeError, "labels is of torch.float32; whole numbers are needed"),
        (torch.tensor([False, True]), 2, TypeError, "labels is of torch.bool"),
        (np.array([0.0, 1.0]), 2, TypeError, "labels is of float64; whole numbers or text are needed"),
        (np.array([False, True]), 2, TypeError, "labels is of bool"),
        (np.array(["a", None], dtype=object), 2, TypeError, "labels is of object"),
    ],
)
def test_labels_that_will_not_do(array, count, error, message):
    with pytest.raises(error, match=message):
        as_labels("labels", array, count)


@pytest.mark.parametrize("size", [1, 16, 40, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("strange", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_are_counted(size, dtype, strange, monkeypatch):
    monkeypatch.setattr(tensors, "BLOCK_BYTES", size)
    vectors = VECTORS.to(dtype, copy=True)
    check_finite("embeddings", vectors)
    vectors[2, 3] = vectors[4, 0] = vectors[4, 1] = strange
    with pytest.raises(ValueError, match=r"^embeddings contains NaN or infinity in 2 of 6 rows; the first is row 2$"):
        check_finite("embeddings", vectors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_sum_that_overflows_is_no_reason_to_refuse(dtype):
    check_finite("embeddings", torch.full((8, 8), torch.finfo(dtype).max, dtype=dtype))


def test_blocks_cover_all_rows_once():
    vectors = torch.zeros(10, 3)
    for size in (1, 12, 24, 50, 10_000):
        rows = [row for some in blocks(vectors, size) for row in range(10)[some]]
        assert rows == list(range(10))
        assert all(some.stop - some.start <= max(1, size // 12) for some in blocks(vectors, size))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_losses_get_tensors_of_at_least_float32_with_their_graph(dtype):
    vectors, labels = check_vectors("embeddings", VECTORS.to(dtype), "labels", torch.arange(6))
    assert vectors.dtype == torch.float32
    assert labels.tolist() == list(range(6))
    leaf = VECTORS.clone().requires_grad_()
    assert check_vectors("embeddings", leaf, "labels", torch.arange(6))[0] is leaf
    with pytest.raises(TypeError, match="labels is a ndarray"):
        check_vectors("embeddings", VECTORS, "labels", np.arange(6))


# --- devices -------------------------------------------------------------------------------------------------


def test_a_device_is_one_of_few_words():
    assert as_device("device", "cpu") == torch.device("cpu")
    assert as_device("device", "auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for word in ("tpu", "gpu", "CPU", "cuda:", "cuda:-1", "cuda:x", ""):
        with pytest.raises(ValueError, match=f"^training.device is '{word}'; allowed are auto, cpu, cuda and"):
            as_device("training.device", word)


def test_gpus_are_counted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert as_device("device", "auto") == as_device("device", "cuda") == torch.device("cuda")
    assert [as_device("device", "cuda", local=local).index for local in range(3)] == [0, 1, 0]
    assert as_device("device", "cuda:1", local=0) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="device is 'cuda:2'; the number of GPUs that PyTorch finds is 2"):
        as_device("device", "cuda:2")


def test_without_a_gpu_none_is_given(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for word in ("cuda", "cuda:0"):
        with pytest.raises(ValueError, match=f"device is '{word}'; the number of GPUs that PyTorch finds is 0"):
            as_device("device", word)
