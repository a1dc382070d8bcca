"""Accepted and refused inputs of ``retrieval``."""

import tracemalloc
import warnings

import numpy as np
import pytest
import torch
from checks import Watch

import nearfar as nf

retrieval = nf.metrics.retrieval


def some(count=40, classes=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 6, generator=generator), torch.randint(classes, (count,), generator=generator)


QUERIES, QUERY_LABELS = some()
GALLERY, GALLERY_LABELS = some(50, seed=1)


@pytest.fixture(scope="module")
def alone():
    return retrieval(QUERIES, QUERY_LABELS)


@pytest.fixture(scope="module")
def shop():
    return retrieval(QUERIES, QUERY_LABELS, GALLERY, GALLERY_LABELS)


# --- containers ----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_warnings():
    """Valid inputs, such as read-only arrays, cause no warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def saved(array, path):
    """The same array on disk, read-only."""
    np.save(path, array)
    return np.load(path, mmap_mode="r")


def test_arrays_and_read_only_memory_maps(tmp_path, alone, shop):
    arrays = [given.numpy() for given in (QUERIES, QUERY_LABELS, GALLERY, GALLERY_LABELS)]
    maps = [saved(array, tmp_path / f"{place}.npy") for place, array in enumerate(arrays)]
    assert isinstance(maps[0], np.memmap)
    for given in (arrays, maps, [QUERIES, *arrays[1:3], GALLERY_LABELS]):
        assert retrieval(*given[:2]) == alone
        assert retrieval(*given) == shop


@pytest.mark.parametrize("mode", ["r", "c"])
def test_a_memory_map_of_half_precision(tmp_path, mode):
    np.save(tmp_path / "half.npy", QUERIES.half().numpy())
    half = np.load(tmp_path / "half.npy", mmap_mode=mode)
    assert retrieval(half, QUERY_LABELS) == retrieval(QUERIES.half(), QUERY_LABELS)


def test_a_network_s_output_needs_no_detach(alone):
    assert retrieval(QUERIES.clone().requires_grad_(), QUERY_LABELS) == alone


def test_any_strides(alone):
    wide = torch.randn(80, 12)
    wide[1::2, 2:8] = QUERIES
    assert retrieval(wide[1::2, 2:8], QUERY_LABELS) == alone
    assert retrieval(QUERIES.T.contiguous().T, QUERY_LABELS) == alone
    backwards = QUERIES.flip(0).numpy()[::-1]  # strides that tensors do not have
    assert retrieval(backwards, QUERY_LABELS.flip(0).numpy()[::-1]) == alone


def test_nothing_given_is_changed():
    given = [tensor.clone() for tensor in (QUERIES, QUERY_LABELS, GALLERY, GALLERY_LABELS)]
    for measure in ("cosine", "euclidean"):
        retrieval(*given, measure=measure)
        retrieval(*given[:2], measure=measure)
    for now, before in zip(given, (QUERIES, QUERY_LABELS, GALLERY, GALLERY_LABELS), strict=True):
        assert torch.equal(now, before)


# --- kinds of numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", ["cosine", "euclidean"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_precision_is_that_of_the_numbers_and_not_of_their_type(dtype, measure):
    rounded, gallery = (40 * QUERIES).to(dtype), (40 * GALLERY).to(dtype)  # squares in float16 would overflow
    for asked in ((rounded, QUERY_LABELS), (rounded, QUERY_LABELS, gallery, GALLERY_LABELS)):
        in_double = [given.double() if given.is_floating_point() else given for given in asked]
        assert retrieval(*asked, measure=measure) == retrieval(*in_double, measure=measure)


def test_queries_and_gallery_may_be_of_different_types():
    queries, gallery = QUERIES.half(), GALLERY.bfloat16()
    assert retrieval(queries, QUERY_LABELS, gallery, GALLERY_LABELS) == retrieval(
        queries.double(), QUERY_LABELS, gallery.double(), GALLERY_LABELS
    )


@pytest.mark.parametrize("length", [1e-300, 1e-160, 1e-20, 1e20, 1e160, 1e300])
def test_cosines_of_very_short_and_very_long_vectors(length, alone):
    queries = QUERIES.double()
    queries[::3] *= length
    assert retrieval(queries, QUERY_LABELS) == alone


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_labels_of_any_whole_type(dtype, alone, shop):
    assert retrieval(QUERIES, QUERY_LABELS.to(dtype)) == alone
    assert retrieval(QUERIES, QUERY_LABELS.to(dtype), GALLERY, GALLERY_LABELS.numpy()) == shop


@pytest.mark.parametrize("dtype", [str, bytes, object])
def test_labels_may_be_words(dtype, alone, shop):
    names = np.array(["wren", "jay", "tit", "owl", "rook", "crane", "stork"]).astype(dtype)
    words, gallery_words = names[QUERY_LABELS.numpy()], names[GALLERY_LABELS.numpy()]
    assert retrieval(QUERIES, words) == alone
    assert retrieval(QUERIES, words, GALLERY, gallery_words) == shop


@pytest.mark.parametrize("ks", [np.array([1, 2]), [np.int64(1), np.uint8(2)], torch.tensor([1, 2]), range(1, 3)])
def test_whole_numbers_of_any_kind_are_neighbors(ks):
    assert retrieval(QUERIES, QUERY_LABELS, ks=ks) == retrieval(QUERIES, QUERY_LABELS, ks=(1, 2))


@pytest.mark.parametrize("k", [3, np.int32(3), np.array(3), torch.tensor(3)])
def test_one_number_of_neighbors(k):
    assert retrieval(QUERIES, QUERY_LABELS, ks=k) == retrieval(QUERIES, QUERY_LABELS, ks=(3,))


# --- memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", ["cosine", "euclidean"])
@pytest.mark.parametrize("per_class", [5, 300])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "gallery"])
def test_no_tensor_holds_all_pairs(per_class, measure, alone):
    count, budget = 1200, 2**20  # all pairs are five times that, and more
    embeddings = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(count) % (count // per_class)
    gallery = () if alone else (embeddings.clone(), labels)
    with Watch():
        retrieval(GOOD, LABELS)  # what is imported the first time is no array
    tracemalloc.start()
    with Watch() as watch:
        retrieval(embeddings, labels, *gallery, measure=measure, memory_budget=budget)
    arrays = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert watch.largest <= budget
    assert arrays <= budget


# --- what is refused -----------------------------------------------------------------------------------------

GOOD, LABELS = torch.eye(4), torch.tensor([0, 0, 1, 1])
STRANGE = GOOD.clone()
STRANGE[1, 2], STRANGE[3, 0] = float("nan"), -float("inf")


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"embeddings": GOOD.tolist()}, TypeError, "embeddings is a list"),
        ({"embeddings": STRANGE}, ValueError, "embeddings contains NaN or infinity in 2 of 4 rows"),
        ({"embeddings": STRANGE.numpy()}, ValueError, "embeddings contains NaN or infinity in 2 of 4 rows"),
        ({"labels": [0, 0, 1, 1]}, TypeError, "labels is a list"),
        ({"labels": LABELS[:3]}, ValueError, r"labels has shape \(3,\); needed is \[4\]"),
        ({"labels": torch.arange(4)}, ValueError, "nothing to retrieve"),
        ({"ks": ()}, ValueError, "ks is empty"),
        ({"ks": (1, 0)}, ValueError, "ks contains 0"),
        ({"ks": (-3,)}, ValueError, "ks contains -3"),
        ({"ks": (1.5,)}, ValueError, "ks contains 1.5"),
        ({"ks": (True,)}, ValueError, "ks contains True"),
        ({"ks": True}, ValueError, "ks contains True"),
        ({"ks": 0}, ValueError, "ks contains 0"),
        ({"ks": np.array([1.0])}, ValueError, "ks contains 1.0"),
        ({"ks": [[1, 2]]}, ValueError, r"ks contains \[1, 2\]"),
        ({"ks": 1.5}, TypeError, "ks is 1.5; integers of at least 1 are required"),
        ({"ks": "12"}, TypeError, "ks is '12'"),
        ({"ks": None}, TypeError, "ks is None"),
        ({"at_k": ("mrr",)}, ValueError, "at_k is 'mrr'; allowed are recall, precision, map"),
        ({"positions": LABELS}, ValueError, "positions are indices into a gallery"),
        ({"gallery_groups": LABELS}, ValueError, "gallery_groups require a gallery"),
        ({"groups": LABELS, "gallery_groups": LABELS}, ValueError, "gallery_groups require a gallery"),
        ({"groups": LABELS[:3]}, ValueError, r"groups has shape \(3,\); needed is \[4\]"),
        ({"groups": LABELS.float()}, TypeError, "groups is of torch.float32"),
        ({"groups": LABELS}, ValueError, "no class has two members except excluded items"),
        ({"measure": "manhattan"}, ValueError, "measure is 'manhattan'.*cosine.*euclidean"),
        ({"memory_budget": 0}, ValueError, "memory_budget is 0"),
        ({"memory_budget": -1}, ValueError, "memory_budget is -1"),
        ({"gallery": GOOD}, (TypeError, ValueError), "gallery_labels"),
        ({"gallery_labels": LABELS}, (TypeError, ValueError), "gallery"),
    ],
)
def test_errors_name_the_argument(changed, error, message):
    with pytest.raises(error, match=message):
        retrieval(**({"embeddings": GOOD, "labels": LABELS} | changed))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"gallery": GOOD.tolist()}, TypeError, "gallery is a list"),
        ({"gallery": STRANGE}, ValueError, "gallery contains NaN or infinity in 2 of 4 rows"),
        ({"gallery": GOOD[:, :3]}, ValueError, "gallery has .*3.*embeddings.*4"),
        ({"gallery_labels": (0, 0, 1, 1)}, TypeError, "gallery_labels is a tuple"),
        ({"gallery_labels": LABELS[:3]}, ValueError, r"gallery_labels has shape \(3,\); needed is \[4\]"),
        ({"gallery_labels": np.array(list("aabb"))}, TypeError, "labels holds whole numbers and gallery_labels text"),
        ({"gallery_labels": LABELS + 2}, ValueError, "nothing to retrieve"),
        ({"groups": LABELS}, ValueError, "groups and gallery_groups must be given together"),
        ({"gallery_groups": LABELS}, ValueError, "groups and gallery_groups must be given together"),
        ({"groups": LABELS, "gallery_groups": LABELS[:2]}, ValueError, r"gallery_groups has shape \(2,\)"),
        ({"groups": LABELS, "gallery_groups": LABELS}, ValueError, "except excluded items, so there is nothing"),
        ({"positions": [0, 1, 2, 3]}, TypeError, "positions is a list"),
        ({"positions": np.array(list("abcd"))}, TypeError, "positions is of <U1; integers are required"),
        ({"positions": LABELS[:2]}, ValueError, r"positions has shape \(2,\)"),
        ({"positions": LABELS - 2}, ValueError, "positions range from -2 to -1; allowed are 0 to 3"),
        ({"positions": LABELS + 3}, ValueError, "positions range from 3 to 4"),
        (
            {"positions": torch.tensor([-1, 2, 3, -1])},
            ValueError,
            "positions has 2 for query 1, which is of another class",
        ),
    ],
)
def test_errors_name_the_argument_of_the_gallery(changed, error, message):
    good = {"embeddings": GOOD, "labels": LABELS, "gallery": GOOD, "gallery_labels": LABELS}
    retrieval(**good)
    with pytest.raises(error, match=message):
        retrieval(**(good | changed))
