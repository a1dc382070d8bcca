"""Search over int8 codes finds what a comparison in float64 finds, whatever the vectors are like."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from search_cases import ranked_by_hand, unit, vectors

from nearfar.search import Index
from nearfar.search.backends import Exact, Int8, int8
from nearfar.search.backends.base import NO_ID
from nearfar.search.storage import files

MEASURES = ("cosine", "euclidean")
RNG = np.random.default_rng(0)


def check(found, points, queries, k, allowed=None):
    """Compare with float64; cosines are products, as vectors have been given length one."""
    rows = np.arange(len(points)) if allowed is None else allowed
    order, expected = ranked_by_hand(points[rows], queries, k, found.measure.replace("cosine", "product"))
    missing = ((0, 0), (0, k - order.shape[1]))
    scores, ids = found.search(queries, k, allowed)
    np.testing.assert_array_equal(ids, np.pad(rows[order], missing, constant_values=NO_ID))
    expected = np.pad(expected.astype(np.float32), missing, constant_values=-np.inf)
    np.testing.assert_allclose(scores, expected, rtol=1e-6)


def normal(count, dim):
    return RNG.standard_normal((count, dim), dtype=np.float32)


KINDS = {
    "random": lambda: normal(500, 24),
    "clustered": lambda: vectors(500, 24),
    "tight clusters": lambda: np.repeat(normal(5, 24), 100, axis=0) + 1e-4 * normal(500, 24),
    "collapsed": lambda: normal(1, 24) + 1e-5 * normal(500, 24),
    "duplicated": lambda: np.repeat(normal(7, 24), 70, axis=0),
    "constant": lambda: np.ones((300, 24), dtype=np.float32),
    "zero": lambda: np.zeros((300, 24), dtype=np.float32),
    "some zero": lambda: normal(500, 24) * (RNG.random((500, 1)) < 0.5),
    "one-hot": lambda: np.eye(24, dtype=np.float32)[RNG.integers(0, 24, 500)],
    "one long dimension": lambda: normal(500, 24) * np.array([1e4] + [1] * 23, dtype=np.float32),
    "tiny": lambda: 1e-30 * normal(500, 24),
    "subnormal": lambda: 1e-42 * normal(500, 24),
    "huge": lambda: 1e30 * normal(500, 24),
    "of many lengths": lambda: normal(500, 24) * 10.0 ** RNG.integers(-30, 30, (500, 1)),
    "far from the origin": lambda: normal(500, 24) + 1e5,
}


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_nearest_are_found_whatever_the_vectors_are_like(kind, measure):
    points = KINDS[kind]().astype(np.float32)
    queries = np.concatenate([points[:5], points[:40].mean(0, keepdims=True), normal(3, 24), 0 * points[:1]])
    queries = np.concatenate([queries, 1e30 * queries[-4:]]) if measure == "euclidean" else queries
    if measure == "cosine":
        points, queries = unit(points), unit(queries)
    found = Int8(points, np.arange(len(points)), measure=measure)
    for k in (1, 10, len(points)):
        check(found, points, queries, k)
        check(found, points, queries[:1], k)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("dim", [1, 2, 3, 95, 512, 1041, 2048])
def test_any_dimension(dim, measure):
    points, queries = normal(300, dim), normal(5, dim)
    if measure == "cosine":
        points, queries = unit(points), unit(queries)
    found = Int8(points, np.arange(300), measure=measure)
    check(found, points, queries, 7)
    check(found, points, queries, 7, np.arange(0, 300, 2))
    check(found, points, queries, 7, np.arange(0, 300, 50))  # few: their codes are copied


@pytest.mark.parametrize("measure", MEASURES)
def test_tiles_of_any_width_find_the_same(monkeypatch, measure):
    points = np.concatenate([vectors(400, 24), np.repeat(vectors(4, 24, seed=1), 30, axis=0)])
    queries = points[-70:-1:7] + np.float32(0.01)
    found = Int8(points, np.arange(len(points)), measure=measure)
    for tile in (int8.GROUP * len(queries), 50 * len(queries), 2**21):
        monkeypatch.setattr(int8, "TILE", tile)
        for k in (1, 5, 100, len(points)):
            check(found, points, queries, k)


@pytest.mark.parametrize("measure", MEASURES)
@settings(deadline=None)
@given(data=st.data())
def test_ties_of_small_numbers_are_ranked_by_id(measure, data):
    count, dim = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 4))
    size = data.draw(st.integers(1, 3))
    numbers = st.lists(st.integers(-size, size), min_size=dim, max_size=dim)
    points = np.array(data.draw(st.lists(numbers, min_size=count, max_size=count)), dtype=np.float32)
    queries = np.array(data.draw(st.lists(numbers, min_size=1, max_size=3)), dtype=np.float32)
    first = data.draw(st.integers(0, count))
    removed = np.unique(data.draw(st.lists(st.integers(0, count - 1)))).astype(np.int64)
    allowed = np.unique(data.draw(st.lists(st.integers(0, count - 1)))).astype(np.int64)
    found = Int8(points[:first], np.arange(first), measure=measure)
    found.add(np.arange(first, count), points[first:])
    found.remove(removed)
    k = data.draw(st.integers(1, count))
    check(found, points, queries, k, np.setdiff1d(np.arange(count), removed))
    if not len(removed):
        check(found, points, queries, k, allowed)


@pytest.mark.parametrize("measure", MEASURES)
def test_it_finds_what_exact_finds_while_vectors_come_and_go(measure):
    points, queries = vectors(900, 32), vectors(930, 32)[900:]
    if measure == "cosine":
        points, queries = unit(points), unit(queries)
    ids = np.arange(0, 1800, 2)
    both = [kind(points[:500], ids[:500], measure=measure) for kind in (Exact, Int8)]
    for start in range(500, 900, 80):
        for found in both:
            found.add(ids[start : start + 80], points[start : start + 80])
            found.remove(ids[start - 450 : start + 40 : 3])
        for allowed in (None, ids[::2], ids[::40]):
            exact, coded = (found.search(queries, 12, allowed) for found in both)
            np.testing.assert_array_equal(coded[1], exact[1])
            np.testing.assert_allclose(coded[0], exact[0], rtol=1e-5, atol=1e-6)


def test_vectors_that_are_much_longer_than_the_first_are_compared_with_every_query():
    points = np.concatenate([1e-30 * normal(50, 8), 1e30 * normal(50, 8), normal(50, 8)])
    for measure in MEASURES:
        found = Int8(points[:50], np.arange(50), measure=measure)
        found.add(np.arange(50, 150), points[50:])
        check(
            found, points, np.concatenate([points[::20], 0 * points[:1]]) if measure == "euclidean" else normal(4, 8), 9
        )


def test_vectors_that_cannot_be_neighbors_are_not_read():
    points = unit(normal(20_000, 64))
    found = Int8(points.copy(), np.arange(20_000))
    found._parts[0].vectors[:] = torch.nan  # as if they were on a disk that was lost
    found._parts[0].vectors[:100] = torch.from_numpy(points[:100])
    scores, ids = found.search(points[7:8], 1)
    assert ids.tolist() == [[7]]
    assert scores[0, 0] == pytest.approx(1.0)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("dim", [24, 1041])
def test_without_products_of_int8_the_result_is_the_same(monkeypatch, dim, measure):
    points, queries = unit(normal(600, dim)), unit(normal(9, dim))
    quick = Int8(points, np.arange(600), measure=measure).search(queries, 20)
    one, other = (torch.randint(-127, 128, (n, dim), dtype=torch.int8) for n in (5, 70))
    products = int8._products(one, other)
    monkeypatch.setattr(int8, "_multiplies_int8", lambda dim: False)
    assert torch.equal(int8._products(one, other), products)
    slow = Int8(points, np.arange(600), measure=measure).search(queries, 20)
    for left, right in zip(quick, slow, strict=True):
        np.testing.assert_array_equal(left, right)


def saturated(one, other):
    return (one.int() @ other.int()).clamp(max=2**15 - 1)


def refused(one, other):
    raise RuntimeError("int8 is not supported")


@pytest.mark.parametrize("product", [saturated, refused, None])
def test_products_that_are_missing_or_wrong_are_not_used(monkeypatch, product):
    if product is None:
        monkeypatch.delattr(torch, "_int_mm")
    else:
        monkeypatch.setattr(torch, "_int_mm", product)
    int8._multiplies_int8.cache_clear()
    try:
        assert not int8._multiplies_int8(512)
        codes = torch.full((3, 512), 127, dtype=torch.int8)
        assert (int8._products(codes, codes) == 512 * 127**2).all()
    finally:
        int8._multiplies_int8.cache_clear()


def test_too_many_dimensions_are_refused():
    with pytest.raises(ValueError, match=r"vectors have 200000 dimensions; exact:int8 takes up to 133144, use exact"):
        Int8(np.zeros((1, 200_000), dtype=np.float32), np.arange(1))


# --- files ---------------------------------------------------------------------------------------------------


def built(folder, measure):
    points, queries = vectors(300, 24), vectors(310, 24)[300:]
    Index.from_vectors(points, out=folder, backend="exact:int8", measure=measure).close()
    return points, queries


@pytest.mark.parametrize("measure", MEASURES)
def test_an_index_is_opened_without_encoding_it_again(tmp_path, monkeypatch, caplog, measure):
    points, queries = built(tmp_path / "i", measure)
    encoded, seen = int8._encoded, []
    monkeypatch.setattr(int8, "_encoded", lambda frame, some: seen.append(len(some)) or encoded(frame, some))
    with Index.open(tmp_path / "i") as index:
        assert sum(seen) <= int8.SAMPLE
        backend = index.storage.backend
        assert isinstance(backend, Int8)
        own = unit(points) if measure == "cosine" else points
        check(backend, own, unit(queries) if measure == "cosine" else queries, 5)
        index.add_vectors(queries)
        assert sum(seen) <= int8.SAMPLE + len(queries)
        assert [row[0].id for row in index.search_vectors(queries, 1)] == list(range(300, 310))
    assert not caplog.text


@pytest.mark.parametrize("file", [int8.CODES, int8.BOUNDS])
@pytest.mark.parametrize("damage", ["missing", "empty", "short", "other vectors", "other type", "other bytes"])
def test_damaged_codes_are_made_again(tmp_path, caplog, file, damage):
    points, queries = built(tmp_path / "i", "euclidean")
    (place,) = (tmp_path / "i").rglob(file)
    content = place.read_bytes()
    if damage == "missing":
        place.unlink()
    elif damage == "empty":
        place.write_bytes(b"")
    elif damage == "short":
        place.write_bytes(content[:-100])
    elif damage == "other vectors":
        Int8(points[::-1].copy(), np.arange(300), measure="euclidean").save(place.parent, np.arange(300), points)
    elif damage == "other type":
        place.write_bytes(content.replace(b"|i1", b"|u1").replace(b'"F32"', b'"I32"'))
    else:
        place.write_bytes(content[:-50] + bytes(50))
    with Index.open(tmp_path / "i") as index:
        assert "exact:int8 is built again" in caplog.text
        assert isinstance(index.storage.backend, Int8)
        check(index.storage.backend, points, queries, 5)
        index.add_vectors(queries[:1])
        index.compact()
    caplog.clear()
    Index.open(tmp_path / "i").close()
    assert not caplog.text


def test_vectors_that_became_nan_are_named_when_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHECKED", 0)  # as for many vectors, whose digest is not compared at once
    points, _ = built(tmp_path / "i", "euclidean")
    (file,) = (tmp_path / "i").rglob("vectors.npy")
    np.lib.format.open_memmap(file, mode="r+")[7, 0] = np.nan
    with Index.open(tmp_path / "i") as index, pytest.raises(ValueError, match=r"vectors.npy contains NaN .* row 7"):
        index.search_vectors(points[7:8], 1)


def test_the_codes_are_a_quarter_of_the_vectors(tmp_path):
    built(tmp_path / "i", "cosine")
    (codes,) = (tmp_path / "i").rglob(int8.CODES)
    assert 300 * 24 <= codes.stat().st_size <= 300 * 24 + 128
