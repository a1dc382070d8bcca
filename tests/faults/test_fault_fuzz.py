"""Parsers and damaged input: an answer or one clear error, never another exception, and never code that runs.

A few dozen inputs per parser here, and ``NEARFAR_FUZZ`` of them with ``make soak``, which also changes the seed.
"""

import io
import os
import random
import shutil
import tarfile
import zipfile
from contextlib import suppress

import faiss
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import mutated
from PIL import Image
from safetensors.numpy import save as safetensors
from search_cases import model, photos, vectors

from nearfar.data.datasets.archives import open_tree
from nearfar.data.store.decode import BadImage, decode
from nearfar.networks.weights import save
from nearfar.search import Index, filters, metadata
from nearfar.search.storage import BadIndex
from nearfar.utils import vector_files

COUNT = int(os.environ.get("NEARFAR_FUZZ", "40"))
SEED = int(os.environ.get("NEARFAR_SEED", "0"))
QUICK = settings(
    max_examples=COUNT, deadline=None, derandomize=not SEED, suppress_health_check=[HealthCheck.too_slow], database=None
)


def one_line(error, path):
    assert str(path) in str(error), f"the file is not named: {error!r}"
    assert "\n" not in str(error)


def files_of(kinds, parse, folder):
    """Mutate one file of each kind in turn; ``parse`` returns, or raises a ValueError that names the file."""
    rng, corpus = random.Random(SEED), list(kinds.values())
    for number in range(COUNT):
        name = list(kinds)[number % len(kinds)]
        file = folder / name
        file.write_bytes(mutated(kinds[name], rng, corpus))
        try:
            parse(file)
        except ValueError as error:
            one_line(error, file)


# --- images --------------------------------------------------------------------------------------------------


def test_damaged_images_are_decoded_or_refused():
    rng = random.Random(SEED)
    pixels = np.random.default_rng(0).integers(0, 256, (24, 20, 3), dtype=np.uint8)
    corpus = []
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "JPEG2000"):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, kind, **({"progressive": True} if kind == "JPEG" else {}))
        corpus.append(file.getvalue())
    for number in range(COUNT):
        data = mutated(corpus[number % len(corpus)], rng, corpus)
        try:
            found = decode(data, max_pixels=1 << 20)
        except BadImage:
            continue
        else:
            assert found.dtype == np.uint8
            assert found.ndim == 3
            assert found.shape[2] == 3


# --- indexes -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def indexes(tmp_path_factory):
    """Indexes with changes that are not compacted, and one with a model."""
    root = tmp_path_factory.mktemp("indexes")
    faiss.omp_set_num_threads(1)  # its threads wait for each other where others compute, too
    for name in ("exact", "exact:int8", "faiss:flat", "faiss:ivf"):
        with Index.from_vectors(vectors(120), out=root / name, backend=name, measure="euclidean") as index:
            index.add_vectors(vectors(5, seed=2))
            index.remove([3, 121])
            index.map()
    Index.build(model(), photos(root / "photos", 4), out=root / "model", device="cpu").close()
    return [root / name for name in ("exact", "exact:int8", "faiss:flat", "faiss:ivf", "model")]


def test_damaged_index_files_end_in_an_index_or_in_one_clear_line(indexes, tmp_path):
    rng, place = random.Random(SEED), tmp_path / "i"
    for number in range(COUNT):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(indexes[number % len(indexes)], place)
        files = sorted(file for file in place.rglob("*") if file.is_file() and file.name != ".lock")
        file, kind = rng.choice(files), rng.random()
        if kind < 0.05:
            file.unlink()
        else:
            corpus = [other.read_bytes() for other in files]
            file.write_bytes(b"" if kind < 0.1 else mutated(file.read_bytes(), rng, corpus))
        try:
            with Index.open(place, device="cpu") as index:
                index.search_vectors(vectors(2)[:, : index.dim], 3)
                index.thumbnails(range(5))
                index.map()
                if index.storage.settings["model"]:
                    assert index.encoder
                index.add_vectors(vectors(1)[:, : index.dim])
                index.compact()
        except (BadIndex, FileNotFoundError, ValueError) as error:
            one_line(error, place)


# --- other files ---------------------------------------------------------------------------------------------


def test_damaged_models_are_loaded_or_refused(tmp_path):
    save.save(model(), tmp_path / "whole")
    rng = random.Random(SEED)
    names = ("model.safetensors", "model.json")
    whole = {name: (tmp_path / "whole" / name).read_bytes() for name in names}
    (tmp_path / "m").mkdir()
    for number in range(COUNT):
        for name, data in whole.items():
            (tmp_path / "m" / name).write_bytes(data)
        name = names[number % 2]
        (tmp_path / "m" / name).write_bytes(mutated(whole[name], rng))
        try:
            save.load(tmp_path / "m")
        except ValueError as error:
            one_line(error, tmp_path / "m")


def test_damaged_vector_files_are_read_or_refused(tmp_path):
    points, labels = vectors(12), np.arange(12)
    plain, both = io.BytesIO(), io.BytesIO()
    np.save(plain, points)
    np.savez(both, embeddings=points, labels=labels)
    kinds = {
        "a.npy": plain.getvalue(),
        "a.npz": both.getvalue(),
        "a.safetensors": safetensors({"embeddings": points, "labels": labels}),
    }
    files_of(kinds, lambda file: np.asarray(vector_files.read(file, "embeddings")), tmp_path)


def test_damaged_archives_are_listed_or_refused(tmp_path):
    packed, tarred = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for number in range(4):
            archive.writestr(f"jay/{number}.jpg", b"picture" * number)
    with tarfile.open(fileobj=tarred, mode="w") as archive:
        for number in range(4):
            member = tarfile.TarInfo(f"wren/{number}.jpg")
            member.size = 7
            archive.addfile(member, io.BytesIO(b"picture"))

    def read(file):
        tree = open_tree(file)
        for place in range(len(tree.names)):
            with suppress(OSError):
                tree.read(place)

    files_of({"a.zip": packed.getvalue(), "a.tar": tarred.getvalue()}, read, tmp_path)


def test_damaged_tables_of_metadata_are_read_or_refused(tmp_path):
    kinds = {
        "a.csv": b"name,label,year\njay/1.jpg,jay,2019\nwren/2.jpg,,1e3\n",
        "a.jsonl": b'{"name": "jay/1.jpg", "label": "jay", "year": 2019}\n{"name": "2", "deep": [1, {"a": null}]}\n',
    }
    files_of(kinds, metadata.read, tmp_path)


# --- filters -------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(["id", "name", "label", "year", ""]) | st.text(max_size=5)


@QUICK
@given(st.text(max_size=30))
def test_any_text_is_a_filter_or_refused(text):
    with suppress(ValueError):
        filters.parse(text)


@QUICK
@given(
    where=st.dictionaries(KEYS, VALUES | st.dictionaries(st.sampled_from([">=", "<", "=", "~"]), VALUES), max_size=3)
)
def test_any_filter_selects_items_or_is_refused(where, indexes):
    with Index.open(indexes[0], read_only=True, device="cpu") as index, suppress(ValueError, TypeError):
        ids = index.select(where)
        assert set(ids.tolist()) <= {item.id for item in index.items}
