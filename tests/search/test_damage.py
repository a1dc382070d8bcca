"""Damaged files of an index are named, or change no answer."""

import shutil

import fake_milvus
import numpy as np
import pytest
from fake_index import threshold
from search_cases import model, photos, vectors

from nearfar.cli import main
from nearfar.search import Index
from nearfar.search.storage import BadIndex, files

FLIPS = 8  # per file
BACKENDS = ("exact", "exact:int8", "faiss:flat", "faiss:ivf", "faiss:hnsw", "milvus:http://milvus:19530")
QUERIES = vectors(8, 12, seed=1)


@pytest.fixture
def sound(tmp_path, request, monkeypatch):
    """An index of a backend, with a few changes after its compaction."""
    fake_milvus.install(monkeypatch)
    labels = [f"class {number % 7}" for number in range(200)]
    metadata = [{"year": 2000 + number % 20} for number in range(200)]
    place = tmp_path / "sound"
    with Index.from_vectors(
        vectors(200, 12), labels=labels, metadata=metadata, out=place, backend=request.param
    ) as index:
        index.add_vectors(QUERIES[:3] + 0.1, labels=["new"] * 3)
        index.remove([5, 201])
        index.set_threshold(threshold(0.5))
    return place


def check(place, *words):
    """The exit code of the command."""
    with pytest.raises(SystemExit) as stop:
        main(["index", "check", str(place), *words])
    return stop.value.code


def outcome(place):
    """What searches return, and what is said to be damaged."""
    try:
        with Index.open(place, read_only=True, device="cpu", milvus="http://milvus:19530") as index:
            rows = [index.search(query, 4) for query in QUERIES]
            rows += [index.search(QUERIES[0], 4, where={"label": "class 3"}, rerank="k_reciprocal")]
            rows += [index.search(QUERIES[0], 4, where={"year": {">=": 2015}}, expand=2)]
            hits = [([hit.item for hit in row.neighbors], np.round(row.scores, 5).tolist()) for row in rows]
            return [list(index.items), index.threshold, hits], index.check()
    except (BadIndex, OSError) as error:
        return None, [str(error)]


@pytest.mark.parametrize("sound", BACKENDS, indirect=True)
@pytest.mark.parametrize("checked", [files.CHECKED, 0])
def test_a_flipped_byte_is_named_or_changes_no_answer(sound, checked, tmp_path, monkeypatch):
    """With and without a look at the digests when the index is opened."""
    monkeypatch.setattr(files, "CHECKED", checked)
    (expected, nothing), rng = outcome(sound), np.random.default_rng(0)
    assert not nothing
    for file in sorted(path for path in sound.rglob("*") if path.is_file() and path.stat().st_size):
        content = file.read_bytes()
        for _ in range(FLIPS):
            damaged, at = bytearray(content), int(rng.integers(len(content)))
            damaged[at] ^= 1 << int(rng.integers(8))
            shutil.rmtree(tmp_path / "copy", ignore_errors=True)
            shutil.copytree(sound, tmp_path / "copy")
            (tmp_path / "copy" / file.relative_to(sound)).write_bytes(damaged)
            found, named = outcome(tmp_path / "copy")
            known = found == expected or any(f"{tmp_path / 'copy'}/" in text for text in named)
            assert known, f"byte {at} of {file.relative_to(sound)}"


@pytest.mark.parametrize("sound", ["exact:int8", "faiss:flat", "faiss:ivf", "faiss:hnsw"], indirect=True)
def test_a_damaged_backend_is_repaired_from_the_vectors(sound, monkeypatch, capsys):
    expected = outcome(sound)
    with Index.open(sound) as index:
        index.compact()
    monkeypatch.setattr(files, "CHECKED", 0)
    (data,) = sound.glob("data-*")
    for file in sorted(data.iterdir()):
        if file.name not in files.VECTORS:
            content = bytearray(file.read_bytes())
            content[-2] ^= 1
            file.write_bytes(content)
    assert check(sound) == 1
    shown, damaged = capsys.readouterr().err, [file for file in data.iterdir() if file.name not in files.VECTORS]
    assert all(f"{file} is damaged: nothing is lost" in shown for file in damaged)
    assert check(sound, "--repair") == 0
    assert check(sound) == 0
    assert outcome(sound) == expected


@pytest.mark.parametrize("sound", ["faiss:hnsw"], indirect=True)
def test_damaged_vectors_are_never_given_a_new_digest(sound, monkeypatch):
    monkeypatch.setattr(files, "CHECKED", 0)
    (file,) = sound.glob("data-*/vectors.npy")
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)
    with Index.open(sound) as index:
        assert index.check() == [f"{file} is damaged: {files.LOST}"]
        for backend in (None, "exact"):
            with pytest.raises(BadIndex, match=r"vectors\.npy is damaged"):
                index.compact(backend=backend)


@pytest.mark.parametrize("sound", ["milvus:http://milvus:19530"], indirect=True)
def test_vectors_that_changed_on_a_server_are_named_and_sent_again(sound):
    with Index.open(sound, milvus="http://milvus:19530") as index:
        assert index.check() == []
        held = index.storage.backend._client.held[index.storage.backend.collection]
        held[7] = -held[7]
        (text,) = index.check()
        assert "differs from the vectors: nothing is lost" in text
        index.compact(backend="milvus:http://milvus:19530")
        assert index.check() == []


def test_a_damaged_model_is_named(tmp_path):
    with Index.build(model(), photos(tmp_path / "photos", 3), out=tmp_path / "i", device="cpu") as index:
        assert index.check() == []
        file = tmp_path / "i" / "model" / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-3] ^= 4
        file.write_bytes(content)
        (text,) = index.check()
        assert "model.safetensors is damaged" in text
        assert "restore" in text
