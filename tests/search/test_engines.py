"""Workers of a Ray cluster embed as a single process does."""

import os

import numpy as np
import pytest
from search_cases import model_folder, photos

from nearfar.networks.weights import save
from nearfar.search import Index, engines
from nearfar.search.embedding_files import embed

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and a folder of pictures of which two are damaged."""
    folder = tmp_path_factory.mktemp("embedding")
    model_folder(folder / "model")
    pictures = photos(folder / "pictures", 14)
    (pictures / "digit 0" / "broken.png").write_bytes(b"no picture")
    (pictures / "digit 1" / "cut.png").write_bytes((pictures / "digit 1" / "001.png").read_bytes()[:40])
    return folder


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def small_shares(monkeypatch):
    monkeypatch.setattr(engines, "BATCHES", 2)


def check_same(one, other):
    np.testing.assert_allclose(one.vectors, other.vectors, atol=1e-6)
    assert (one.names, one.labels, one.fingerprint) == (other.names, other.labels, other.fingerprint)
    assert one.skipped == other.skipped


def test_ray_embeds_what_one_process_does(folder, cluster, tmp_path):
    model, pictures, parts = folder / "model", folder / "pictures", tmp_path / "parts"
    local = embed(model, pictures, batch_size=3, device="cpu")
    assert len(local.names) == 14
    assert len(local.skipped) == 2
    settings = {"batch_size": 3, "device": "cpu", "engine": "ray", "jobs": 2}
    check_same(embed(model, pictures, parts=parts, **settings), local)
    # a second call computes what is missing or of other content, and nothing else
    files = sorted(parts.glob("*.npz"))
    assert len(files) == 3
    files[0].unlink()
    before = {file.name: file.stat().st_mtime_ns for file in files[1:]}
    changed = pictures / local.names[-1]
    old = changed.read_bytes()
    changed.write_bytes((pictures / local.names[0]).read_bytes())
    try:
        again = embed(model, pictures, parts=parts, **settings)
    finally:
        changed.write_bytes(old)
    np.testing.assert_allclose(again.vectors[:-1], local.vectors[:-1], atol=1e-6)
    np.testing.assert_allclose(again.vectors[-1], local.vectors[0], atol=1e-6)
    after = {file.name: file.stat().st_mtime_ns for file in sorted(parts.glob("*.npz"))}
    assert [name for name in after if after[name] != before.get(name)] == ["000000.npz", "000002.npz"]


def test_ray_builds_the_index_of_one_process(folder, cluster, tmp_path):
    indexes = []
    for engine in ("local", "ray"):
        with Index.build(
            folder / "model", folder / "pictures", out=tmp_path / engine, batch_size=3, device="cpu", engine=engine
        ) as index:
            thumbnails = [index.thumbnail(item.id) for item in index.items]
            indexes.append((list(index.items), index.skipped, thumbnails, index.vectors()))
    assert indexes[0][:3] == indexes[1][:3]
    np.testing.assert_allclose(indexes[0][3], indexes[1][3], atol=1e-6)


def test_a_worker_that_dies_is_replaced(folder, cluster, tmp_path, monkeypatch):
    class Dying(engines._Worker):
        def embed(self, number, names):
            died = tmp_path / "died"
            if number == 1 and not died.exists():
                died.touch()
                os._exit(1)
            return super().embed(number, names)

    monkeypatch.setattr(engines, "_Worker", Dying)
    settings = {"batch_size": 3, "device": "cpu"}
    found = embed(folder / "model", folder / "pictures", engine="ray", jobs=1, **settings)
    assert (tmp_path / "died").exists()
    check_same(found, embed(folder / "model", folder / "pictures", **settings))


def test_ray_needs_what_all_machines_can_read(folder):
    with pytest.raises(ValueError, match="needs the folder of a model"):
        embed(save.load(folder / "model"), folder / "pictures", engine="ray")
    with pytest.raises(ValueError, match="needs a folder or archive of images"):
        embed(folder / "model", [folder / "pictures" / "digit 0" / "000.png"], engine="ray")
    with pytest.raises(ValueError, match="engine is 'dask'; allowed are local, ray"):
        embed(folder / "model", folder / "pictures", engine="dask")
