"""Colours, grey, erased parts and rotations: as a plain loop over pictures does them, and the same everywhere."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from all_fetchers import LABELS, assert_same, fetched, render, store_of
from PIL import Image

from nearfar.data import from_arrays, preview
from nearfar.data.loader import Loader, Normalizer
from nearfar.data.sampling.base import create
from nearfar.data.store.store import Store
from nearfar.data.transforms.effects import Effects
from nearfar.data.transforms.random_streams import PURPOSES, stream
from nearfar.data.transforms.view import LIMITS, View
from nearfar.utils import preprocessing as pixels

PLAIN = View(size=(17, 22), crop="none", flip=False)
ALL = {"color": 0.5, "grey": 0.4, "erase": 0.6, "rotate": 40.0}
EACH = {name: {name: value} for name, value in ALL.items()} | {"all": ALL}
each_effect = pytest.mark.parametrize("settings", EACH.values(), ids=EACH.keys())


def effects_of(view, count, seed=3, **share):
    return view.effects(count, lambda name: stream(seed, f"views {name}", 0), **share)


# --- one picture at a time ------------------------------------------------------------------------------------


def grey_of(picture):
    """[1, h, w] of [c, h, w]."""
    return picture if len(picture) == 1 else np.tensordot([0.299, 0.587, 0.114], picture, 1)[None]


def turned(picture, angle):
    """Pixel by pixel, against the clock; beyond the edge the picture goes on as in a mirror."""
    _, height, width = picture.shape
    cosine, sine = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    found = np.empty_like(picture)

    def at(row, column):
        row, column = row % (2 * height), column % (2 * width)
        return picture[:, min(row, 2 * height - 1 - row), min(column, 2 * width - 1 - column)]

    for row in range(height):
        for column in range(width):
            x, y = column - (width - 1) / 2, row - (height - 1) / 2
            across = cosine * x - sine * y + (width - 1) / 2
            down = sine * x + cosine * y + (height - 1) / 2
            left, top = math.floor(across), math.floor(down)
            upper = (left + 1 - across) * at(top, left) + (across - left) * at(top, left + 1)
            lower = (left + 1 - across) * at(top + 1, left) + (across - left) * at(top + 1, left + 1)
            found[:, row, column] = (top + 1 - down) * upper + (down - top) * lower
    return found


def by_hand(window, effects, i, normalization):
    """What effects make of a window, uint8 [c, h, w] in RGB, and the network of that."""
    picture = window.double().numpy()
    if effects.angles is not None:
        picture = turned(picture, effects.angles[i])
    if effects.factors is not None:
        brightness, contrast, saturation = effects.factors[i]
        picture = np.clip(picture * brightness, 0, 255)
        mean = grey_of(picture).mean()
        picture = np.clip(mean + contrast * (picture - mean), 0, 255)
        grey = grey_of(picture)
        picture = np.clip(grey + saturation * (picture - grey), 0, 255)
    if effects.greys is not None and effects.greys[i]:
        picture = np.repeat(grey_of(picture), len(picture), axis=0)
    image = normalization(torch.from_numpy(picture)[None])[0]
    if effects.erased is not None:
        top, left, height, width = effects.erased[i]
        image[:, top : top + height, left : left + width] = 0
    return image.float()


@each_effect
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("normalization", [pixels.IMAGENET, pixels.CAFFE], ids=["RGB", "BGR"])
def test_all_fetchers_do_what_the_loop_does(settings, channels, normalization):
    store, indices, view = store_of(channels), np.arange(12), replace(PLAIN, **settings)
    plan, effects = view.plan(store.sizes[indices]), effects_of(view, 12)
    windows = render([store.image(i) for i in indices], plan)
    expected = torch.stack([by_hand(window, effects, i, normalization) for i, window in enumerate(windows)])
    found = {name: batch[0] for name, batch in fetched(store, normalization, plan, indices, effects).items()}
    level = normalization.range / 255 / min(normalization.std)
    assert (found["cpu"] - expected).abs().max() <= 0.01 * level
    # Batched, bit by bit the same from either side; from the host's it differs by what that rounds, times the factors.
    assert torch.equal(found["resident"], found["streamed"])
    assert (found["resident"] - expected).abs().max() <= 1.5**3 * 1.01 * level
    assert found["resident"].is_contiguous()


def test_a_rotation_is_pillows():
    rng = np.random.default_rng(1)
    picture = rng.random((1, 21, 30)).astype(np.float32) * 255
    for angle in (-70.0, 12.5, 90.0):
        effects = Effects(angles=np.array([angle]))
        numbers = torch.from_numpy(effects.table(1)).float()
        found = effects.recolor(torch.from_numpy(picture)[None], numbers)[0, 0].numpy()
        there = np.array(Image.fromarray(picture[0]).rotate(angle, Image.Resampling.BILINEAR, fillcolor=-1.0))
        inside = there >= 0  # what lies wholly within the picture
        assert inside.mean() > 0.4
        assert np.abs(found - there)[inside].max() < 0.1


def test_a_full_turn_changes_nothing():
    picture = torch.rand(1, 3, 9, 14) * 255
    effects = Effects(angles=np.array([360.0]))
    assert (effects.recolor(picture, torch.from_numpy(effects.table(1)).float()) - picture).abs().max() < 1e-3


def test_colours_stay_between_black_and_white():
    whites = Store.of_arrays([np.full((8, 8, 3), 255, dtype=np.uint8)] * 40)
    (batch,) = Loader(whites, LABELS, view=replace(PLAIN, color=1.0), workers=0, seed=5).all()
    brightness = stream(5, "evaluation color", 0).uniform(0, 2, (40, 3))[:, 0]
    assert batch.images.dtype == torch.uint8
    expected = np.rint(255 * np.minimum(brightness, 1))
    assert np.abs(batch.images.double().numpy() - expected[:, None, None, None]).max() <= 1


def test_grey_pictures_of_one_channel_stay_as_they_are():
    store = store_of(1)
    plain, grey = (next(Loader(store, LABELS, view=view).all()) for view in (PLAIN, replace(PLAIN, grey=1.0)))
    assert torch.equal(plain.images, grey.images)


def test_one_channel_has_no_saturation():
    store, view = store_of(1), replace(PLAIN, color=0.8)
    plan, effects = view.plan(store.sizes), effects_of(view, 40)
    paler = replace(effects, factors=effects.factors * [1.0, 1.0, 0.1])
    images, others = (fetched(store, pixels.GREY, plan, effects=given) for given in (effects, paler))
    for name in images:
        assert torch.equal(images[name][0], others[name][0])


@pytest.mark.parametrize(("normalization", "channels"), [(pixels.LITE, 1), (pixels.IMAGENET, 3), (None, 3)])
def test_what_is_erased_is_zero(normalization, channels):
    store, view = store_of(channels), replace(PLAIN, erase=1.0)
    plan, effects = view.plan(store.sizes), effects_of(view, 40)
    for name, (plain, *_) in fetched(store, normalization, plan).items():
        images = fetched(store, normalization, plan, effects=effects)[name][0]
        assert images.dtype == plain.dtype
        for image, whole, (top, left, height, width) in zip(images, plain, effects.erased.tolist(), strict=True):
            assert (image[:, top : top + height, left : left + width] == 0).all()
            whole[:, top : top + height, left : left + width] = 0
            assert torch.equal(image, whole)


# --- what is drawn --------------------------------------------------------------------------------------------


def test_nothing_happens_unless_told():
    assert View().effects(5, lambda name: pytest.fail("no random numbers are needed")) is None
    # The very crops and flips of earlier versions.
    view = View(size=16, crop="random_resized")
    plan = view.plan(np.array([[40, 60], [33, 20], [64, 64]]), stream(9, "views", 2, 1))
    assert plan.crops.tolist() == [[19, 17, 17, 13], [16, 1, 16, 18], [22, 6, 41, 46]]
    assert plan.flips.tolist() == [True, True, False]


@each_effect
def test_crops_and_flips_are_the_same_with_and_without(settings, monkeypatch):
    sampler, seen = create("groups", LABELS, classes=4, per_class=3, steps=3), []
    for given in ({}, settings):
        loader = Loader(store_of(), LABELS, view=View(size=16, crop="random_resized", **given), workers=0)
        load = loader._fetcher.load
        monkeypatch.setattr(loader._fetcher, "load", lambda *a, load=load: (seen.append(a[1]), load(*a))[1])
        list(loader.epoch(sampler, 1))
    for plain, other in zip(seen[:3], seen[3:], strict=True):
        assert plain.boxes.tolist() == other.boxes.tolist()
        assert plain.flips.tolist() == other.flips.tolist()


def test_an_effect_does_not_depend_on_the_others():
    together = effects_of(replace(PLAIN, **ALL), 9)
    for name, field in (("color", "factors"), ("grey", "greys"), ("erase", "erased"), ("rotate", "angles")):
        alone = effects_of(replace(PLAIN, **EACH[name]), 9)
        assert getattr(alone, field).tolist() == getattr(together, field).tolist()
        assert sum(getattr(alone, one) is not None for one in ("factors", "greys", "erased", "angles")) == 1


def test_every_purpose_has_a_stream_of_its_own():
    assert PURPOSES[:4] == ("batches", "order", "views", "evaluation")  # keys of streams that runs were begun with
    assert {f"{of} {name}" for of in ("views", "evaluation") for name in LIMITS} == set(PURPOSES[4:])
    assert len({stream(0, purpose, 1, 2).random() for purpose in PURPOSES}) == len(PURPOSES) == 12


def test_numbers_are_spread_as_told():
    effects = effects_of(View(size=(100, 80), **ALL), 20_000)
    for low, high, values in ((0.5, 1.5, effects.factors), (-40, 40, effects.angles)):
        assert values.min() == pytest.approx(low, abs=0.01 * (high - low))
        assert values.max() == pytest.approx(high, abs=0.01 * (high - low))
        assert values.mean() == pytest.approx((low + high) / 2, abs=0.01 * (high - low))
    assert np.abs(np.corrcoef(effects.factors.T) - np.eye(3)).max() < 0.03
    assert effects.greys.mean() == pytest.approx(0.4, abs=0.02)
    wiped = effects.erased[effects.erased[:, 2] > 0]
    assert len(wiped) / 20_000 == pytest.approx(0.6, abs=0.02)
    assert (effects.erased[effects.erased[:, 2] == 0] == 0).all()
    area, shape = wiped[:, 2] * wiped[:, 3] / 8000, wiped[:, 3] / wiped[:, 2]
    assert 0.018 < area.min() < 0.022
    assert 0.32 < area.max() < 0.34
    assert area.mean() == pytest.approx(0.17, abs=0.01)
    assert 0.27 < shape.min() < 0.33
    assert 3.0 < shape.max() < 3.7
    assert np.median(shape) == pytest.approx(1.0, abs=0.05)
    assert (wiped[:, :2] >= 0).all()
    assert (wiped[:, :2] + wiped[:, 2:] <= [100, 80]).all()


def test_nothing_is_erased_where_no_rectangle_fits():
    effects = effects_of(View(size=(1, 1), resize=None, erase=1.0), 200)
    assert {tuple(row) for row in effects.erased.tolist()} <= {(0, 0, 0, 0), (0, 0, 1, 1)}


# --- the same everywhere --------------------------------------------------------------------------------------

EVERYTHING = View(size=16, crop="random_resized", **ALL)


@pytest.mark.parametrize(
    "view",
    [View(size=16, crop="random_resized"), *(replace(PLAIN, **settings) for settings in EACH.values())],
    ids=["crops", *EACH],
)
def test_epochs_steps_and_seeds_differ(view):
    store = Store.of_arrays([store_of().image(3)] * 40)
    sampler, seen = create("random", LABELS, batch_size=20), set()
    for seed in (0, 1):
        loader = Loader(store, LABELS, view=view, seed=seed)
        for epoch in (0, 1):
            seen |= {batch.images.numpy().tobytes() for batch in loader.epoch(sampler, epoch)}
    assert len(seen) == 8


def test_ranks_do_not_matter():
    store, view = store_of(), replace(PLAIN, **ALL)
    loader = Loader(store, LABELS, view=view, normalization=pixels.IMAGENET)
    sampler = create("random", LABELS, batch_size=12)
    whole = [batch.images for batch in loader.epoch(sampler, 2)]
    for ranks in (2, 3):
        shares = [[batch.images for batch in loader.epoch(sampler, 2, rank=rank, ranks=ranks)] for rank in range(ranks)]
        for step, expected in enumerate(whole):
            assert torch.equal(torch.cat([share[step] for share in shares]), expected)


def test_the_number_of_threads_does_not_matter():
    store = Store.of_arrays(np.random.default_rng(0).integers(0, 256, (2, 256, 256, 3), dtype=np.uint8))
    view, threads, found = View(size=256, crop="none", **ALL), torch.get_num_threads(), []
    try:
        for number in (1, 2, 4):
            torch.set_num_threads(number)
            found.append(next(Loader(store, np.arange(2), view=view, normalization=pixels.LITE, workers=0).all()))
    finally:
        torch.set_num_threads(threads)
    assert_same(found[1:], [found[0]] * 2)


def test_the_rest_of_the_program_does_not_matter():
    store = store_of()
    plan, effects = EVERYTHING.plan(store.sizes, np.random.default_rng(0)), effects_of(EVERYTHING, 40)
    expected = fetched(store, pixels.IMAGENET, plan, effects=effects)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = fetched(store, pixels.IMAGENET, plan, effects=effects)
    finally:
        torch.set_default_dtype(torch.float32)
    for name in expected:
        assert torch.equal(found[name][0], expected[name][0])


@pytest.mark.parametrize("normalization", [pixels.CAFFE, None], ids=["normalised", "pixels"])
def test_the_device_is_never_asked_for_a_number(normalization):
    # Tensors without numbers: where the host would have to wait for one, this fails.
    effects, finish = effects_of(EVERYTHING, 40), Normalizer(normalization, 3, torch.device("meta"))
    numbers = torch.from_numpy(effects.table(40)).to("meta", torch.float32)
    windows = torch.empty(40, 3, 16, 16, device="meta")
    images = effects.erase(finish(effects.recolor(windows, numbers, reverse=finish.reverse)), numbers)
    assert images.is_meta
    assert images.shape == (40, 3, 16, 16)


def test_a_batch_can_be_drawn_with_effects():
    rng = np.random.default_rng(0)
    dataset = from_arrays(rng.integers(0, 256, (24, 30, 30, 3), dtype=np.uint8), np.arange(24) // 4)
    view = View(size=24, resize=28, **ALL)
    images, labels = preview.first_batch(dataset, view=view, classes=3)
    assert images.shape == (12, 24, 24, 3)
    assert images.dtype == np.uint8
    assert (images == 0).all(axis=3).any()  # something was erased
    assert preview.grid(images, [str(label) for label in labels]).width > 0
