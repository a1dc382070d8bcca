"""All backends find the same: one battery for each of them and each measure."""

import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from search_cases import ranked_by_hand, repeated, scores_by_hand, vectors

from nearfar.search import Index
from nearfar.search.backends import Exact, check_name, choose, faiss

NAMES = ("exact", "exact:int8", "faiss:flat", "faiss:ivf", "faiss:hnsw", "milvus")
CASES = [(name, measure) for name in NAMES for measure in ("cosine", "euclidean")]
COUNT = 240
POINTS = vectors(COUNT)
QUERIES = vectors(COUNT + 50, seed=0)[[3, 44, 241]] + 0.01


@pytest.fixture(params=CASES, ids=[f"{name}-{measure}" for name, measure in CASES])
def index(request, tmp_path):
    name, measure = request.param
    with create(tmp_path / "i", name, measure) as made:
        yield made


def create(folder, backend, measure):
    labels = [str(row % 3) for row in range(COUNT)]
    return Index.from_vectors(POINTS, out=folder, labels=labels, backend=backend, measure=measure)


def nearest(index, points, rows, k=5):
    """Rows and scores that a loop finds."""
    order, scores = ranked_by_hand(points[rows], QUERIES, k, index.measure)
    return np.array(rows)[order], scores


def found(index, k=5, **settings):
    hits = index.search_vectors(QUERIES, k, **settings)
    return [[hit.id for hit in row] for row in hits], np.array([[hit.score for hit in row] for row in hits])


def test_a_backend_passes_the_battery(index):
    check_backend(index)


def check_backend(index):
    """The battery in one go, as a Milvus file takes a second to open; the index is closed."""
    everything = list(range(COUNT))
    # finds what a loop over all pairs finds
    rows, scores = nearest(index, POINTS, everything)
    ids, values = found(index)
    assert ids == rows.tolist()
    np.testing.assert_allclose(values, scores, atol=2e-5)
    # finds only what a filter allows, be that much or little
    wide = [row for row in everything if row % 3 != 1]
    assert found(index, where={"label": ["0", "2"]})[0] == nearest(index, POINTS, wide)[0].tolist()
    few = {"id": [7, 9, 200]}
    assert found(index, where=few)[0] == nearest(index, POINTS, [7, 9, 200])[0].tolist()
    # finds what was added and not what was removed
    gone = {int(row) for row in rows[:, 0]}
    index.remove(sorted(gone))
    new = index.add_vectors(QUERIES[:1], labels=["0"])
    assert new == [COUNT]
    points = np.concatenate([POINTS, QUERIES[:1]])
    left = [row for row in range(COUNT + 1) if row not in gone]
    expected, scores = nearest(index, points, left)
    ids, values = found(index)
    assert ids == expected.tolist()
    assert ids[0][0] == COUNT
    np.testing.assert_allclose(values, scores, atol=2e-5)
    # the same after the journal was folded in, and after it was opened again
    index.compact()
    assert found(index)[0] == expected.tolist()
    name = index.info()["backend"]
    index.close()
    with Index.open(index.folder, milvus=index.storage.milvus) as again:
        assert again.info()["backend"] == name
        assert found(again)[0] == expected.tolist()
        # more than there is
        assert sorted(found(again, 1000)[0][0]) == left
        assert len(again.search_vectors(QUERIES[:1], 1000, where={"label": "0"})[0]) == len(
            [item for item in again.items if item.label == "0"]
        )
        # nothing at all, and something again
        again.remove(left)
        assert found(again)[0] == [[], [], []]
        again.compact()
        assert found(again)[0] == [[], [], []]
        again.add_vectors(POINTS[:2])
        again.compact()
        assert sorted(found(again)[0][0]) == [COUNT + 1, COUNT + 2]


@pytest.mark.parametrize("name", ["exact", "exact:int8", "faiss:hnsw"])
def test_searches_go_on_during_adds(tmp_path, name):
    with Index.from_vectors(POINTS, out=tmp_path / "i", backend=name) as index:

        def ask():
            assert [row[0].id for row in index.search_vectors(POINTS[:4], 3)] == [0, 1, 2, 3]

        with repeated(ask):
            for number in range(30):
                index.add_vectors(vectors(5, seed=number + 1))
                if number == 15:
                    index.compact()
        assert len(index) == COUNT + 150


@pytest.mark.parametrize("measure", ["cosine", "euclidean"])
def test_what_is_added_bit_by_bit_is_found_as_if_it_came_at_once(measure):
    """To the last bit, also where some were removed between."""
    points, ids = vectors(600, 33), np.arange(600)
    whole = Exact(points[:0], ids[:0], measure=measure)
    whole.add(ids, points)
    whole.remove(np.array([5, 77, 300]))
    grown = Exact(points[:0], ids[:0], measure=measure)
    for start in range(0, 600, 7):
        grown.add(ids[start : start + 7], points[start : start + 7])
        if start == 84:
            before = grown.search(points[:9], 20)
            grown.remove(np.array([5, 77]))
    grown.remove(np.array([300]))
    for one, other in zip(whole._parts, grown._parts, strict=True):
        assert torch.equal(one.vectors, other.vectors)
        assert (one.squares is None) == (other.squares is None)
        if one.squares is not None and other.squares is not None:
            assert torch.equal(one.squares, other.squares)
    for one, other in zip(whole.search(points[:9], 20), grown.search(points[:9], 20), strict=True):
        np.testing.assert_array_equal(one, other)
    assert before[1].max() < 91


@pytest.mark.parametrize("measure", ["cosine", "euclidean"])
def test_an_add_costs_what_it_adds(monkeypatch, measure):
    seen = []
    part = Exact._part

    def counted(self, points, ids):
        seen.append(len(points))
        return part(self, points, ids)

    found, rooms = Exact(POINTS[:0], np.arange(0), measure=measure), set()
    monkeypatch.setattr(Exact, "_part", counted)
    for start in range(0, COUNT, 2):
        found.add(np.arange(start, start + 2), POINTS[start : start + 2])
        rooms.add(found._parts[1].vectors.data_ptr())
    assert seen == [2] * (COUNT // 2)
    assert len(rooms) <= 3  # the others lie where they lay, unless twice as much room is needed


def test_faiss_is_chosen_by_size():
    assert [choose("faiss", count) for count in (100, 50_000, 1_000_000)] == ["faiss:flat", "faiss:ivf", "faiss:hnsw"]
    assert choose("auto", 100) == "exact"
    assert choose("auto", 100_000) == "faiss:ivf"


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_faiss_reports_its_recall(tmp_path, kind):
    points = vectors(2000, 32)
    with Index.from_vectors(points, out=tmp_path / "i", backend=f"faiss:{kind}") as index:
        told = index.info()["recall@10"]
        truth, _ = ranked_by_hand(points, points[:20], 10, "cosine")
        hits = [{hit.id for hit in row} for row in index.search_vectors(points[:20], 10)]
    share = np.mean([len(row & set(right.tolist())) / 10 for row, right in zip(hits, truth, strict=True)])
    assert told >= faiss.WANTED
    assert share >= 0.95


def test_a_graph_that_lost_many_is_made_anew(tmp_path):
    with Index.from_vectors(POINTS, out=tmp_path / "i", backend="faiss:hnsw") as index:
        index.remove(range(0, COUNT, 2))
        index.compact()
        assert index.info()["trained"] == COUNT // 2
        assert [row[0].id for row in index.search_vectors(POINTS[1:4:2], 1)] == [1, 3]


@pytest.mark.parametrize("name", NAMES)
def test_compaction_lets_go_of_the_backend_before(tmp_path, name):
    with Index.from_vectors(POINTS, out=tmp_path / "i", backend=name) as index:
        index.add_vectors(POINTS[:1])
        before = weakref.ref(index.storage.backend)
        index.compact()
        gc.collect()
        assert before() is None


def test_a_lost_milvus_file_is_made_again(tmp_path):
    import shutil

    with Index.from_vectors(POINTS[:30], out=tmp_path / "i", backend="milvus") as index:
        expected = index.search_vectors(POINTS[:2], 3)
    shutil.rmtree(tmp_path / "i" / "milvus.db")
    with Index.open(tmp_path / "i") as index:
        assert index.search_vectors(POINTS[:2], 3) == expected


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match=r"backend is 'fais'; allowed are auto, exact"):
        check_name("fais")


def test_faiss_with_the_methods_of_its_torch_utils(tmp_path):
    """pytorch-metric-learning imports them, and they stay for as long as the process does."""
    program = f"""
import faiss.contrib.torch_utils
import numpy as np
from nearfar.search import Index

points = np.random.default_rng(0).normal(size=(50, 8)).astype("float32")
with Index.from_vectors(points, out={str(tmp_path / "i")!r}, labels=list("ab") * 25, backend="faiss:hnsw") as index:
    found = index.search(points[3], k=3, where={{"label": "b"}})
    print(found.labels)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("'b'") == 3


def thresholds():
    """All thresholds and sizes of blocks that FAISS names."""
    import faiss

    values = {name: getattr(faiss.cvar, name) for name in str(faiss.cvar).strip("()").split(", ")}
    return {
        name: value for name, value in values.items() if type(value) is int and not name.startswith(("IO_", "SIMD"))
    }


def both_sides(limits, units=(1,)):
    return sorted({limit // unit + side for limit in limits for unit in units for side in (-1, 1)} & {*range(1, 5000)})


MOST = {"exact:int8": 65, "milvus": 17}  # queries of these, which know no thresholds of FAISS and would take minutes


@pytest.mark.parametrize("offset", [0.0, 300.0, 1e4, 1e6])
@pytest.mark.parametrize("measure", ["cosine", "euclidean"])
@pytest.mark.parametrize("name", NAMES)
def test_neighbors_are_those_of_float64_at_any_offset_in_batches_of_any_size(tmp_path, name, measure, offset):
    """Thresholds of FAISS may be numbers of queries, of their values, or of neighbors; a filter takes other paths."""
    points, third = vectors(1500, 64) + np.float32(offset), np.arange(0, 1500, 3)
    points[7] = points[9]  # a tie
    points[11] += 3e4 * (offset == 0.0)  # far from all others
    queries = np.concatenate([points[:40], points[600:624] + np.float32(0.25)])
    scores = scores_by_hand(points, queries, measure)
    sizes = [size for size in (1, *both_sides(thresholds().values(), (1, 64))) if size <= MOST.get(name, 5000)]
    neighbors = () if name == "milvus" else both_sides([thresholds()["distance_compute_min_k_reservoir"]])
    searches = [(10, None, sizes), (10, third, [15, sizes[-3]]), *((k, None, [17]) for k in neighbors)]
    with Index.from_vectors(points[:1400], out=tmp_path / "i", backend=name, measure=measure) as index:
        for count in (1400, 1500):
            if count > len(index):
                index.add_vectors(points[len(index) :])
            for k, allowed, batches in searches:
                there = np.arange(count) if allowed is None else allowed[allowed < count]
                order = there[np.argsort(-scores[:, there].astype(np.float32), axis=1, kind="stable")[:, :k]]
                best = np.take_along_axis(scores, order, 1)
                slack = 1e-6 * (np.ones_like(best) if measure == "cosine" else np.abs(best))
                for size in batches if count == 1400 else batches[:3]:
                    rows = np.resize(np.arange(len(queries)), size)
                    found, ids = index.nearest(queries[rows], k, allowed=allowed)
                    assert np.isin(ids, there).all(), (size, k)
                    assert (np.abs(found - scores[rows[:, None], ids]) <= slack[rows] + 1e-12).all(), (size, k)
                    right = found >= best[rows] - slack[rows]
                    if name in ("faiss:ivf", "faiss:hnsw"):
                        assert right[:, :10].mean() >= 0.9, (size, k)
                    else:
                        assert right.all(), (size, k)
                        if measure == "euclidean":
                            assert (ids == order[rows]).all(), (size, k)


@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("name", ["exact", "exact:int8", "faiss:flat", "faiss:hnsw"])
def test_very_long_and_very_short_vectors_have_distances(tmp_path, name, size):
    points = (vectors(60) * size).astype(np.float32)
    ids, scores = ranked_by_hand(points, points, 5, "euclidean")
    with Index.from_vectors(points, out=tmp_path / "i", backend=name, measure="euclidean") as index:
        found = index.nearest(points, 5)
        assert found[1].tolist() == ids.tolist()
        np.testing.assert_allclose(found[0], scores, rtol=1e-6)
        # so do queries that are not at all like the vectors
        odd = np.concatenate([points[:1] * 0, (vectors(1) / size).astype(np.float32)])
        assert np.isfinite(index.nearest(odd, 5)[0]).all()


def test_more_ties_than_candidates_are_ranked_by_id():
    points = np.repeat(vectors(4), 50, axis=0)
    backend = Exact(points, np.arange(200), measure="euclidean")
    for count in (1, 30):
        _, ids = backend.search(points[75 : 75 + count], 3)
        assert {tuple(row) for row in ids.tolist()} <= {(50, 51, 52), (100, 101, 102)}
