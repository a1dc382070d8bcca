"""Batches: the same in every mode, in order, resumable; threads end with the iterator, and their errors are seen."""

import gc
import threading

import numpy as np
import pytest
import torch
from all_fetchers import LABELS, assert_same, fetched, render, store_of

from nearfar.data.loader import Loader
from nearfar.data.sampling.base import create
from nearfar.data.store.store import Store
from nearfar.data.transforms.random_streams import stream
from nearfar.data.transforms.view import View
from nearfar.utils import preprocessing as pixels

RANDOM = View(size=16, crop="random_resized")
MIDDLE = View(size=16, crop="center", resize=20, flip=False)
EFFECTS = View(size=16, crop="random_resized", color=0.5, grey=0.4, erase=0.6, rotate=40.0)


@pytest.fixture
def store():
    return store_of()


@pytest.fixture
def sampler():
    return create("groups", LABELS, classes=4, per_class=3, steps=6, seed=3)


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("nearfar-loader")]


# --- what is in a batch ---------------------------------------------------------------------------------------


def test_a_batch_is_what_sampler_view_and_normalization_say(store, sampler):
    loader = Loader(store, LABELS, view=RANDOM, normalization=pixels.IMAGENET, seed=9)
    for step, batch in enumerate(loader.epoch(sampler, 2)):
        drawn = sampler.batch(2, step)
        plan = RANDOM.plan(store.sizes[drawn], stream(9, "views", 2, step))
        expected = pixels.IMAGENET(render([store.image(i) for i in drawn], plan))
        assert torch.equal(batch.images, expected)
        assert batch.labels.tolist() == LABELS[drawn].tolist()
        assert batch.indices.tolist() == drawn.tolist()
    assert step == 5


NORMALIZATIONS = {
    "ImageNet": pixels.IMAGENET,
    "Caffe": pixels.CAFFE,
    "Lite": pixels.LITE,
    "grey": pixels.GREY,
    "none": None,
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("normalization", NORMALIZATIONS.values(), ids=NORMALIZATIONS.keys())
@pytest.mark.parametrize("view", [RANDOM, MIDDLE, View(size=16, resize=None)], ids=["resized", "middle", "cut"])
def test_all_fetchers_give_the_normalised_pixels(channels, normalization, view):
    if channels == 3 and normalization is pixels.GREY:
        with pytest.raises(ValueError, match="3 channels; this normalization reads 1"):
            fetched(store_of(3), normalization, None)
        return
    store, indices = store_of(channels), np.array([5, 0, 39, 7, 7, 12])
    plan = view.plan(store.sizes[indices], np.random.default_rng(1))
    seen = render([store.image(i) for i in indices], plan)
    expected = seen if normalization is None else normalization(seen)
    level = 1.01 if normalization is None else 1.01 * normalization.range / 255 / min(normalization.std)
    found = fetched(store, normalization, plan, indices)
    assert torch.equal(found["cpu"][0], expected)
    # Batched, bit by bit the same from either side; from the host's it differs by what that rounds.
    assert torch.equal(found["resident"][0], found["streamed"][0])
    assert (found["resident"][0].float() - expected.float()).abs().max() <= (0 if view.resize is None else level)
    for images, labels, places in found.values():
        assert images.dtype == expected.dtype
        assert images.is_contiguous()
        assert labels.tolist() == LABELS[indices].tolist()
        assert places.tolist() == indices.tolist()


def test_blue_comes_first_for_caffe():
    store = Store.of_arrays([np.full((8, 8, 3), (10, 20, 30), dtype=np.uint8)])
    view = View(size=8, crop="none", flip=False)
    (batch,) = Loader(store, np.zeros(1, dtype=int), view=view, normalization=pixels.CAFFE).all()
    assert batch.images[0, :, 0, 0].tolist() == [30 - 104, 20 - 117, 10 - 128]


# --- modes, order, resuming -----------------------------------------------------------------------------------


@pytest.mark.parametrize("view", [RANDOM, EFFECTS], ids=["plain", "effects"])
def test_modes_and_workers_do_not_matter(store, sampler, view, tmp_path):
    np.save(tmp_path / "pixels.npy", store.pixels)
    mapped = Store(np.load(tmp_path / "pixels.npy", mmap_mode="r"), store.offsets, store.sizes, 3, store.rows)
    given = {"view": view, "normalization": pixels.LITE}
    first, *others = (
        list(Loader(mapped, LABELS, **given, mode=mode, workers=workers).epoch(sampler, 1))
        for mode in ("resident", "streaming")
        for workers in (0, 1, 3)
    )
    for batches in others:
        assert_same(batches, first)


@pytest.mark.parametrize("view", [RANDOM, EFFECTS], ids=["plain", "effects"])
def test_a_resumed_epoch_goes_on_where_it_stopped(store, sampler, view):
    loader = Loader(store, LABELS, view=view)
    assert_same(loader.epoch(sampler, 4, start=2), list(loader.epoch(sampler, 4))[2:])


def test_ranks_look_differently(store):
    same = Store.of_arrays([store.image(3)] * 40)
    loader, sampler = Loader(same, LABELS, view=RANDOM), create("random", LABELS, batch_size=8)
    first, second = (next(loader.epoch(sampler, 0, rank=rank, ranks=2)).images for rank in (0, 1))
    assert len(first) == 4
    assert not torch.equal(first, second)


def test_rows_say_what_positions_stand_for(store):
    rows = np.array([30, 31, 32, 8, 9, 10])
    sampler = create("pairs", LABELS[rows], classes=2)
    for batch in Loader(store, LABELS, view=RANDOM).epoch(sampler, 0, rows=rows):
        assert set(batch.indices.tolist()) <= set(rows.tolist())
        assert sorted(set(batch.labels.tolist())) == [2, 7]


def test_all_keeps_the_order(store):
    loader, wanted = Loader(store, LABELS, view=MIDDLE), np.array([9, 2, 2, 30, 4])
    batches = list(loader.all(wanted, batch_size=2))
    assert [batch.indices.tolist() for batch in batches] == [[9, 2], [2, 30], [4]]
    plan = MIDDLE.plan(store.sizes[wanted])
    assert torch.equal(torch.cat([batch.images for batch in batches]), render([store.image(i) for i in wanted], plan))
    assert len(list(loader.all(np.array([], dtype=int)))) == 0


def test_another_view_shares_the_pixels(store):
    loader = Loader(store, LABELS, view=RANDOM, normalization=pixels.LITE, mode="resident")
    middle = loader.viewed(MIDDLE)
    assert middle._data is loader._data
    assert_same(list(middle.all()), list(Loader(store, LABELS, view=MIDDLE, normalization=pixels.LITE).all()))
    assert loader.view == RANDOM


def test_vectors_go_the_same_way(sampler):
    vectors = np.random.default_rng(0).standard_normal((40, 5)).astype(np.float32)
    runs = [list(Loader(vectors, LABELS, mode=mode).epoch(sampler, 0)) for mode in ("resident", "streaming")]
    assert_same(*runs)
    for step, batch in enumerate(runs[0]):
        assert batch.images.tolist() == vectors[sampler.batch(0, step)].tolist()


def test_a_batch_that_is_kept_is_not_written_over(store, sampler):
    loader = Loader(store, LABELS, view=RANDOM, normalization=pixels.LITE)
    kept = [batch.images[3:5, :, 2:].numpy() for batch in loader.epoch(sampler, 0)]  # views of views
    gc.collect()
    for _ in range(2):
        for batch in loader.epoch(sampler, 1):
            del batch
    for images, batch in zip(kept, loader.epoch(sampler, 0), strict=True):
        assert images.tolist() == batch.images[3:5, :, 2:].tolist()


def test_memory_of_batches_is_used_again(store, sampler):
    places = set()
    for batch in Loader(store, LABELS, view=RANDOM, workers=0).epoch(sampler, 0):
        places.add(batch.images.data_ptr())
        del batch
    assert len(places) <= 2


# --- threads --------------------------------------------------------------------------------------------------


def failing(fetcher, after):
    calls = [0]

    def load(indices, *rest):
        calls[0] += 1
        if calls[0] > after:
            raise OSError("the disk is gone")
        return type(fetcher).load(fetcher, indices, *rest)

    return load


def test_an_error_in_a_thread_is_seen_in_its_turn(store, sampler, monkeypatch):
    loader = Loader(store, LABELS, view=RANDOM, workers=1)
    monkeypatch.setattr(loader._fetcher, "load", failing(loader._fetcher, after=2))
    batches = loader.epoch(sampler, 0)
    assert [len(next(batches)) for _ in range(2)] == [12, 12]
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert loader_threads() == []


@pytest.mark.parametrize("how", ["closed", "forgotten", "left", "broken"])
def test_threads_end_with_the_iterator(store, sampler, how):
    loader = Loader(store, LABELS, view=RANDOM, workers=2)
    batches = loader.epoch(sampler, 0)
    assert loader_threads() == []  # nothing begins before it is asked for
    next(batches)
    assert loader_threads() != []
    if how == "closed":
        batches.close()
    elif how == "left":
        list(batches)
    elif how == "broken":
        with pytest.raises(RuntimeError):
            batches.throw(RuntimeError("of the trainer"))
    else:
        del batches
        gc.collect()
    assert loader_threads() == []


def test_no_more_is_prepared_than_was_asked_for(store, sampler, monkeypatch):
    loader = Loader(store, LABELS, view=RANDOM, workers=1)
    seen, load = [], loader._fetcher.load
    monkeypatch.setattr(loader._fetcher, "load", lambda *given: (seen.append(1), load(*given))[1])
    batches = loader.epoch(sampler, 0)
    next(batches)
    batches.close()
    assert len(seen) <= 3


# --- errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"view": None}, "view is None; images need a View"),
        ({"mode": "fast"}, "mode is 'fast'"),
        ({"workers": -1}, "workers is -1"),
        ({"labels": LABELS[:-1]}, r"shape \(39,\); needed are 40 whole numbers"),
        ({"labels": LABELS.astype(float)}, "labels is float64"),
    ],
)
def test_settings_are_checked(store, given, message):
    labels = given.pop("labels", LABELS)
    with pytest.raises(ValueError, match=message):
        Loader(store, labels, **{"view": MIDDLE, **given})


def test_vectors_have_no_view():
    with pytest.raises(ValueError, match="are for images"):
        Loader(np.zeros((40, 3), dtype=np.float32), LABELS, view=MIDDLE)


def test_indices_are_checked(store, sampler):
    loader = Loader(store, LABELS, view=MIDDLE)
    with pytest.raises(ValueError, match="indices contains 40; the store holds 40"):
        loader.all(np.array([3, 40]))
    with pytest.raises(ValueError, match="draws from 40 items, but there are 10"):
        loader.epoch(sampler, 0, rows=np.arange(10))
