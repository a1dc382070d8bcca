"""Indexes under faults of disk, clock and backend, compared with a reference after each."""

import multiprocessing
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from adding_worker import vector_of
from fake_milvus import install
from search_cases import vectors

from nearfar.search import Index
from nearfar.search.storage import BadIndex, files, storage

ROUNDS = int(os.environ.get("NEARFAR_ROUNDS", "3"))
SEED = int(os.environ.get("NEARFAR_SEED", "0"))
POINTS = vectors(20)


class Reference:
    """What an index must hold: vectors by id."""

    def __init__(self):
        self.vectors = dict(enumerate(POINTS))

    def check(self, index):
        assert [item.id for item in index.items] == sorted(self.vectors)
        expected = np.stack([self.vectors[id] for id in sorted(self.vectors)])
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
        np.testing.assert_allclose(index.vectors(), expected, atol=1e-6)
        for hits, id in zip(index.search_vectors(expected, 1), sorted(self.vectors), strict=True):
            assert hits[0].id == id

    def change(self, index, rng):
        """One random change, in the index and here."""
        kind = rng.randrange(4)
        if kind == 0 and len(self.vectors) > 10:
            gone = rng.choice(sorted(self.vectors))
            index.remove([gone])
            del self.vectors[gone]
        elif kind == 1:
            index.compact()
        else:
            vector = vector_of(rng.randrange(1 << 30))
            self.vectors[index.add_vectors(vector)[0]] = vector[0]


def in_child(work):
    """Run in a forked process; its exit code."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    return child.exitcode or 0


@pytest.mark.parametrize("size", [60_000, 200_000])
def test_a_full_disk_loses_nothing_acknowledged(tmp_path, size):
    """Files that cannot grow beyond a limit, as on a full disk."""
    Index.from_vectors(POINTS, out=tmp_path / "i").close()
    told = tmp_path / "told"

    def work():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        index = Index.open(tmp_path / "i", device="cpu")
        handle = os.open(told, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        for number in range(20, 2000):
            try:
                assert index.add_vectors(vector_of(number), names=["x" * 500]) == [number]
            except OSError:
                break
            os.write(handle, b".")
        else:
            os._exit(3)  # the limit was never reached
        # what is there can still be searched
        assert index.search_vectors(vector_of(20), 1)[0][0].id == 20
        os._exit(0)

    assert in_child(work) == 0
    acknowledged = told.stat().st_size
    with Index.open(tmp_path / "i") as index:
        assert [item.id for item in index.items] == list(range(20 + acknowledged))
        index.add_vectors(vector_of(1))
        index.compact()
        assert len(index) == 21 + acknowledged


@pytest.mark.parametrize("filled", ["before it is opened", "while it is open", "by adds"])
def test_items_can_be_removed_from_a_full_disk(tmp_path, filled):
    """On a file system of 8 MiB, in a process that sees it alone."""
    apart = ("unshare", "--map-root-user", "--mount", "sh", "-c")
    mount = f"mount -t tmpfs -o size=8m none {tmp_path}"
    if not shutil.which("unshare") or subprocess.run([*apart, mount], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    program = f"""
import os, sys
from contextlib import suppress
from pathlib import Path
import numpy as np
from nearfar.search import Index

place, points = Path({str(tmp_path)!r}), np.eye(300, 16, dtype=np.float32) + 1

def fill():
    with suppress(OSError), open(place / "other", "ab", buffering=0) as file:
        while file.write(bytes(4096)):
            pass

Index.from_vectors(points, out=place / "i").close()
if {filled!r} == "before it is opened":
    fill()
with Index.open(place / "i", device="cpu") as index:
    if {filled!r} == "while it is open":
        fill()
    with suppress(OSError):
        while {filled!r} == "by adds":
            index.add_vectors(points, names=["x" * 300] * 300)
    fill()
    count = len(index)
    for number in range(100):
        index.remove([number])
    index.remove(range(100, 250))
    assert len(index) == count - 250
with Index.open(place / "i", read_only=True) as index:
    assert len(index) == count - 250 and 249 not in index
"""
    done = subprocess.run(
        [*apart, f'{mount} && exec "$0" "$@"', sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def left_behind(tmp_path):
    """An index whose process was killed after 30 changes, of which all are in the write-ahead log."""
    Index.from_vectors(POINTS, out=tmp_path / "i").close()

    def work():
        index = Index.open(tmp_path / "i", device="cpu")
        for number in range(20, 50):
            index.add_vectors(vector_of(number))
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(work) == -signal.SIGKILL
    return tmp_path / "i"


def test_a_torn_log_leaves_the_changes_before_the_tear(tmp_path):
    place, rng = left_behind(tmp_path), random.Random(SEED)
    size = (place / "index.sqlite-wal").stat().st_size
    for number in range(ROUNDS):
        torn = shutil.copytree(place, tmp_path / str(number))
        with open(torn / "index.sqlite-wal", "rb+") as file:
            file.truncate(rng.randrange(32, size))
        with Index.open(torn, read_only=True) as index:
            ids = [item.id for item in index.items]
            assert ids == list(range(len(ids)))
            assert 20 <= len(ids) < 50
            for id in ids[20:]:
                assert index.search_vectors(vector_of(id), 1)[0][0].id == id


def test_changes_in_the_log_of_a_killed_process_are_there(tmp_path):
    left_behind(tmp_path)
    with Index.open(tmp_path / "i") as index:
        assert len(index) == 50


@pytest.mark.parametrize("name", ["faiss.index", "faiss-ids.npy"])
def test_damaged_files_of_faiss_are_built_again(tmp_path, name, caplog):
    Index.from_vectors(POINTS, out=tmp_path / "i", backend="faiss:hnsw").close()
    (file,) = (tmp_path / "i").rglob(name)
    file.write_bytes(file.read_bytes()[:-20])
    with Index.open(tmp_path / "i") as index:
        assert "faiss:hnsw is built again, because its files are damaged" in caplog.text
        Reference().check(index)
        index.add_vectors(vector_of(1))
        index.compact()
    caplog.clear()
    Index.open(tmp_path / "i").close()
    assert not caplog.text


@pytest.mark.parametrize("backend", ["exact", "exact:int8", "faiss:flat", "faiss:ivf"])
def test_vectors_that_became_nan_are_named(tmp_path, backend, monkeypatch):
    monkeypatch.setattr(files, "CHECKED", 0)  # as in a large index, whose digests are not compared at once
    Index.from_vectors(POINTS, out=tmp_path / "i", backend=backend, measure="euclidean").close()
    (file,) = (tmp_path / "i").rglob("vectors.npy")
    np.lib.format.open_memmap(file, mode="r+")[7, 0] = np.nan
    with pytest.raises(BadIndex, match=r"NaN or infinity in 1 of .* rows; the first is row 7"):
        Index.open(tmp_path / "i")


@pytest.mark.parametrize("damage", ["id = 'x'", "vector = 'x'", "vector = x'00'"])
def test_damaged_changes_are_named(tmp_path, damage):
    with Index.from_vectors(POINTS, out=tmp_path / "i") as index:
        index.add_vectors(POINTS[:2])
    file = tmp_path / "i" / "index.sqlite"
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("CREATE TABLE copied AS SELECT * FROM changes")
        database.execute(f"UPDATE copied SET {damage}")
        database.execute("DROP TABLE changes")
        database.execute("ALTER TABLE copied RENAME TO changes")
    with pytest.raises(BadIndex, match=rf"{file.name} is damaged: a row is not what was written"):
        Index.open(tmp_path / "i")


@pytest.mark.parametrize(("value", "said"), [(np.nan, "contains NaN"), (-3e38, r"contains a value of 3e\+38")])
@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_a_map_of_vectors_that_became_nan_or_huge_is_refused(tmp_path, value, said, method, monkeypatch):
    monkeypatch.setattr(files, "CHECKED", 0)
    Index.from_vectors(POINTS, out=tmp_path / "i").close()
    (file,) = (tmp_path / "i").rglob("vectors.npy")
    np.lib.format.open_memmap(file, mode="r+")[7, 0] = value
    with Index.open(tmp_path / "i") as index, pytest.raises(ValueError, match=rf"vectors.npy of .* {said}"):
        index.map(method)


def test_a_clock_that_jumps_changes_nothing_but_dates(tmp_path, monkeypatch):
    rng, reference = random.Random(SEED), Reference()
    start = datetime(2026, 1, 1, tzinfo=UTC)

    def jump():
        return (start + timedelta(days=rng.uniform(-9000, 9000))).isoformat(timespec="seconds")

    monkeypatch.setattr(storage, "_now", jump)
    monkeypatch.setattr("time.time", lambda: start.timestamp() + rng.uniform(-1e9, 1e9))
    Index.from_vectors(POINTS, out=tmp_path / "i").close()
    for _ in range(ROUNDS):
        with Index.open(tmp_path / "i") as index, Index.open(tmp_path / "i", read_only=True) as reader:
            for _ in range(10):
                reference.change(index, rng)
            reference.check(index)
            reference.check(reader)


def test_a_server_of_milvus_that_comes_and_goes_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("NEARFAR_MILVUS", "http://far:19530")
    monkeypatch.setattr("nearfar.search.backends.milvus.REST", 0.0)
    servers, rng, reference = install(monkeypatch), random.Random(SEED), Reference()
    with Index.from_vectors(POINTS, out=tmp_path / "i", backend="milvus:http://far:19530") as index:
        for _ in range(10 * ROUNDS):
            servers.dead = rng.random() < 0.4
            try:
                reference.change(index, rng)
            except (RuntimeError, TimeoutError):  # a compaction; it changes nothing
                assert servers.dead
            reference.check(index)
        servers.dead = False
    with Index.open(tmp_path / "i") as index:
        reference.check(index)
        (held,) = servers.collections["http://far:19530"].values()
        assert held.keys() == reference.vectors.keys()
