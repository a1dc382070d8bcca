"""What a source promises: names, bytes, a fingerprint that changes with the pictures, threads and processes."""

import os
import pickle
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from trees_on_disk import add, write, write_tar, write_zip

from nearfar.data.datasets.archives import open_tree
from nearfar.data.store import fingerprint
from nearfar.data.store.sources import Arrays, Files, Vectors

NAMES = [f"{bird}/{at}.jpg" for bird in ("jay", "wren") for at in range(10)]
KINDS = ("files", "zip", "tar", "tar.gz", "tar.bz2", "tar.xz")


def make(kind, root, names=NAMES):
    if kind == "files":
        return open_tree(write(root / "folder", names)).files
    if kind == "zip":
        return open_tree(write_zip(root / "a.zip", names)).files
    return open_tree(write_tar(root / f"a.{kind}", names, "w:" + kind.partition(".")[2])).files


@pytest.fixture(params=KINDS)
def source(request, tmp_path):
    return make(request.param, tmp_path)


def test_pictures_have_names_and_bytes(source):
    assert len(source) == 20
    assert [source.name(index) for index in range(20)] == NAMES
    assert [source.read(index).decode() for index in reversed(range(20))] == NAMES[::-1]


def test_some_pictures_can_be_taken_in_any_order(source):
    some = source.take([3, 17, 3])
    assert [some.name(index) for index in range(len(some))] == [NAMES[3], NAMES[17], NAMES[3]]
    assert some.read(1).decode() == NAMES[17]


def test_many_threads_may_read_at_once(source):
    order = list(np.random.default_rng(0).integers(20, size=400))
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(source.read, order)) == [NAMES[index].encode() for index in order]


def test_a_source_can_be_sent_to_another_process(source):
    source.read(0)
    sent = pickle.loads(pickle.dumps(source))
    assert sent.read(5) == source.read(5)
    assert sent.fingerprint() == source.fingerprint()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz"])
def test_a_forked_process_does_not_disturb_its_parent(kind, tmp_path):
    source = make(kind, tmp_path)
    source.read(10)
    child = os.fork()
    if child == 0:
        for index in range(20):
            source.read(index)
        os._exit(0)
    assert [source.read(index).decode() for index in range(20)] == NAMES
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_fingerprint_is_that_of_the_pictures_not_of_the_place(kind, tmp_path):
    first, second = make(kind, tmp_path / "a"), make(kind, tmp_path / "b")
    assert first.fingerprint() == second.fingerprint()
    assert first.fingerprint() != make(kind, tmp_path / "c", NAMES[1:]).fingerprint()
    assert first.fingerprint() != first.take([1, 0]).fingerprint()


def test_the_fingerprint_of_files_is_that_of_their_content(tmp_path):
    source = Files(write(tmp_path, NAMES), NAMES)
    before, file = source.fingerprint(), tmp_path / NAMES[3]
    os.utime(file, (1, 1))
    assert source.fingerprint() == before
    file.write_bytes(file.read_bytes()[::-1])
    assert source.fingerprint() != before
    file.unlink()
    assert source.fingerprint() != before


@pytest.mark.parametrize("kind", KINDS)
def test_images_are_read_only_once_for_their_fingerprint(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("NEARFAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprint, "SETTLED", 0)
    source = make(kind, tmp_path / "birds")
    known = source.fingerprint()
    monkeypatch.setattr(type(source), "read", None)
    assert source.fingerprint() == known


def test_a_folder_and_its_archives_have_one_fingerprint(tmp_path):
    found = {make(kind, tmp_path / kind).fingerprint() for kind in KINDS}
    assert len(found) == 1


def test_a_missing_file_is_an_os_error_of_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="gone"):
        Files(tmp_path, ["jay/gone.jpg"]).read(0)


@pytest.mark.parametrize("path", ["../1.jpg", "/etc/passwd", "jay/../../1.jpg", "", "C:/1.jpg", "..\\1.jpg"])
def test_a_path_that_leads_out_of_the_root_is_refused(path, tmp_path):
    with pytest.raises(ValueError, match="not a path below"):
        Files(tmp_path, [path])


def test_a_damaged_zip_member_is_an_os_error_that_names_it(tmp_path):
    file = tmp_path / "a.zip"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("jay/1.jpg", b"seen" * 100)
        archive.writestr("jay/2.jpg", b"good" * 100)
    file.write_bytes(file.read_bytes().replace(b"seenseen", b"soonsoon"))
    source = open_tree(file).files
    with pytest.raises(OSError, match=r"jay/1\.jpg in a\.zip.*CRC"):
        source.read(0)
    assert source.read(1) == b"good" * 100


def test_a_tar_that_shrinks_later_is_an_os_error_that_names_the_member(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        add(archive, "jay/1.jpg", b"x" * 5000)
    source = open_tree(tmp_path / "a.tar").files
    os.truncate(tmp_path / "a.tar", 3000)
    with pytest.raises(OSError, match=r"jay/1\.jpg in a\.tar: \d+ bytes of 5000"):
        source.read(0)


@pytest.mark.parametrize("shape", [(5, 4, 3), (5, 4, 6, 3)])
def test_arrays_are_pictures_in_memory(shape):
    images = np.random.default_rng(0).integers(256, size=shape).astype(np.uint8)
    source = Arrays(images)
    assert len(source) == 5
    assert source.name(4) == "4"
    assert source.array is images
    with pytest.raises(TypeError, match=r"use \.array"):
        source.read(0)


def test_the_fingerprint_of_arrays_is_that_of_their_content_and_not_of_strides():
    images = np.zeros((3, 4, 4), dtype=np.uint8)
    other = images.copy()
    other[2, 3, 3] = 1
    prints = [Arrays(array).fingerprint() for array in (images, other, images.reshape(3, 2, 8))]
    assert len(set(prints)) == 3
    assert Arrays(np.asfortranarray(other)).fingerprint() == prints[1]


@pytest.mark.parametrize(
    ("kind", "array", "message"),
    [
        (Arrays, np.zeros((5, 4, 4), dtype=np.float32), "needed is uint8 of shape"),
        (Arrays, np.zeros((5, 4), dtype=np.uint8), "needed is uint8 of shape"),
        (Arrays, np.zeros((5, 4, 4, 2), dtype=np.uint8), "needed is uint8 of shape"),
        (Arrays, np.zeros((0, 4, 4), dtype=np.uint8), "needed is uint8 of shape"),
        (Vectors, np.zeros((2, 3)), r"float64 of shape \[2, 3\]; needed is float32"),
    ],
)
def test_arrays_of_another_kind_are_refused(kind, array, message):
    with pytest.raises(ValueError, match=message):
        kind(array)
