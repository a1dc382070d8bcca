"""The pipeline on a GPU: what the CPU sees, the same in both modes, and a host that never waits."""

import numpy as np
import pytest
import torch
from waiting import no_waiting

from nearfar.data.loader import Loader
from nearfar.data.sampling.base import create
from nearfar.data.store.store import Store
from nearfar.data.transforms.view import View
from nearfar.utils import preprocessing

pytestmark = pytest.mark.gpu

LABELS = np.arange(120) // 6
VIEWS = {
    "random_resized": View(size=96, crop="random_resized"),
    "random": View(size=96, resize=112),
    "cut": View(size=96, resize=None),
    "center": View(size=(80, 96), crop="center", resize=100, flip=False),
    "effects": View(size=96, crop="random_resized", color=0.4, grey=0.2, erase=0.5, rotate=15),
    "effects, cut": View(size=96, resize=None, color=0.4, grey=0.2, erase=0.5, rotate=15),
}
all_views = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
both_modes = pytest.mark.parametrize("mode", ["resident", "streaming"])


@pytest.fixture(scope="module")
def store():
    rng = np.random.default_rng(0)
    sizes = rng.integers(100, 220, (120, 2))
    return Store.of_arrays([rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes])


@pytest.fixture
def sampler():
    return create("groups", LABELS, classes=8, per_class=4, steps=8)


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)
        assert torch.equal(one.indices, other.indices)


@all_views
@both_modes
def test_the_gpu_sees_what_the_cpu_sees(store, sampler, view, mode):
    there = Loader(store, LABELS, view=view, normalization=preprocessing.CAFFE, device="cuda", mode=mode)
    here = Loader(store, LABELS, view=view, normalization=preprocessing.CAFFE)
    for one, other in zip(there.epoch(sampler, 0), here.epoch(sampler, 0), strict=True):
        assert one.images.is_cuda
        assert one.images.is_contiguous()
        # A level of rounding, which brightness, contrast and saturation multiply.
        assert (one.images.cpu() - other.images).abs().max() <= 1.01 * (1 + (view.color or 0)) ** 3
        assert one.labels.tolist() == other.labels.tolist()
        assert one.indices.tolist() == other.indices.tolist()


@all_views
def test_modes_and_workers_do_not_matter(store, sampler, view, tmp_path):
    np.save(tmp_path / "pixels.npy", store.pixels)
    mapped = Store(np.load(tmp_path / "pixels.npy", mmap_mode="r"), store.offsets, store.sizes, 3, store.rows)
    settings = {"view": view, "normalization": preprocessing.IMAGENET, "device": "cuda"}
    resident = list(Loader(mapped, LABELS, mode="resident", **settings).epoch(sampler, 1))
    for workers in (0, 3):
        streaming = Loader(mapped, LABELS, mode="streaming", workers=workers, **settings)
        assert_same(list(streaming.epoch(sampler, 1)), resident)


@all_views
@both_modes
def test_the_host_never_waits(store, sampler, view, mode):
    loader = Loader(store, LABELS, view=view, normalization=preprocessing.IMAGENET, device="cuda", mode=mode)
    list(loader.epoch(sampler, 0))  # set up the libraries
    with no_waiting():
        batches = list(loader.epoch(sampler, 1))
    assert_same(batches, list(loader.epoch(sampler, 1)))


@both_modes
def test_the_host_never_waits_for_vectors(sampler, mode):
    vectors = np.random.default_rng(0).standard_normal((120, 8)).astype(np.float32)
    loader = Loader(vectors, LABELS, device="cuda", mode=mode)
    with no_waiting():
        batches = list(loader.epoch(sampler, 0))
    for step, batch in enumerate(batches):
        assert batch.images.tolist() == vectors[sampler.batch(0, step)].tolist()


def test_a_busy_gpu_does_not_spoil_what_is_on_its_way(store, sampler):
    # Pixels arrive on a stream of their own while the GPU has work that outlasts many batches.
    loader = Loader(store, LABELS, view=VIEWS["random"], device="cuda", mode="streaming", workers=3)
    expected = [batch.images.cpu() for batch in loader.epoch(sampler, 0)]
    large = torch.randn(4096, 4096, device="cuda")
    found = []
    for batch in loader.epoch(sampler, 0):
        for _ in range(20):
            large @ large
        found.append(batch.images.clone())
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.cpu(), other)


def test_rounding_the_rest_of_the_program_allows_is_not_used(store, sampler):
    loader = Loader(store, LABELS, view=VIEWS["random_resized"], normalization=preprocessing.LITE, device="cuda")
    expected = list(loader.epoch(sampler, 0))
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert_same(list(loader.epoch(sampler, 0)), expected)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_auto_looks_at_the_free_memory(store, monkeypatch):
    assert Loader(store, LABELS, view=VIEWS["cut"], device="cuda").mode == "resident"
    for free, mode in ((2 * store.nbytes, "resident"), (2 * store.nbytes - 2, "streaming")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 0))
        assert Loader(store, LABELS, view=VIEWS["cut"], device="cuda").mode == mode


@both_modes
def test_pixels_without_normalization(store, mode):
    plain = next(Loader(store, LABELS, view=VIEWS["center"], device="cuda", mode=mode).all())
    here = next(Loader(store, LABELS, view=VIEWS["center"]).all())
    assert plain.images.dtype == torch.uint8
    assert (plain.images.cpu().int() - here.images.int()).abs().max() <= 1
