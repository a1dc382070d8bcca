"""What becomes of pixels: like Pillow's, on the CPU and batched; nothing leaks in from outside a piece."""

import numpy as np
import pytest
import torch
from all_fetchers import render
from PIL import Image

from nearfar.data.store.store import Store
from nearfar.data.transforms import gpu
from nearfar.data.transforms import view as views
from nearfar.data.transforms.gpu import Layout
from nearfar.data.transforms.view import View

SIZES = [(64, 64), (40, 90), (113, 37), (30, 31), (250, 17), (64, 65), (9, 200), (97, 101)]
VIEWS = {
    "random": View(size=24, resize=32),
    "random, squashed": View(size=(20, 28), resize=32, aspect="squash"),
    "random, not resized": View(size=8, resize=None),
    "center": View(size=30, crop="center", resize=30, flip=False),
    "random_resized": View(size=24, crop="random_resized"),
    "random_resized, wide": View(size=(16, 40), crop="random_resized", scale=(0.02, 0.2)),
    "enlarged": View(size=224, crop="random_resized", scale=(0.05, 0.1)),
    "none": View(size=(21, 33), crop="none", flip=False),
}
all_views = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
all_channels = pytest.mark.parametrize("channels", [1, 3])


def photographs(channels=3, sizes=SIZES, seed=0):
    """Some smooth, some as rough as can be."""
    rng = np.random.default_rng(seed)
    pictures = []
    for i, (height, width) in enumerate(sizes):
        picture = rng.integers(0, 256, (height, width, channels), dtype=np.uint8)
        if i % 2:
            small = Image.fromarray(picture.squeeze()).resize((5, 4))
            picture = np.array(small.resize((width, height), Image.Resampling.BICUBIC)).reshape(picture.shape)
        pictures.append(picture)
    return pictures


def planned(view, pictures, seed=0):
    return view.plan(np.array([picture.shape[:2] for picture in pictures]), np.random.default_rng(seed))


def by_pillow(pictures, plan):
    """Cut the piece, resize what the window shows of it, mirror: Pillow's ``resize`` with a box."""
    shown = []
    for i, picture in enumerate(pictures):
        (top, left, height, width), box = plan.crops[i], plan.boxes[i]
        cut = picture[top : top + height, left : left + width]
        piece = Image.fromarray(cut[..., 0] if cut.shape[2] == 1 else cut)
        x, y = box[1] - left, box[0] - top
        corners = (x, y, min(x + box[3], width), min(y + box[2], height))
        seen = piece.resize(plan.size[::-1], Image.Resampling.BILINEAR, box=corners)
        if plan.flips[i]:
            seen = seen.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        shown.append(np.array(seen).reshape(*plan.size, -1).transpose(2, 0, 1))
    return torch.from_numpy(np.stack(shown))


def on_device(pictures, plan, reverse=False):
    """The batched way, here on the CPU, out of a store."""
    store = Store.of_arrays(pictures)
    touched, pitch = plan.touched(), store.sizes[:, 1].astype(np.int64) * store.channels
    starts = store.offsets + touched[:, 0] * pitch + touched[:, 1] * store.channels
    layout = Layout.of(plan, touched, starts, pitch, store.channels)
    return layout.render(torch.from_numpy(store.pixels), torch.from_numpy(layout.table), reverse=reverse)


def largest(difference):
    return difference.abs().max().item()


@all_views
@all_channels
def test_both_ways_see_what_pillow_sees(view, channels):
    pictures = photographs(channels)
    for seed in range(3):
        plan = planned(view, pictures, seed)
        alone, batched, expected = render(pictures, plan), on_device(pictures, plan), by_pillow(pictures, plan).float()
        assert (alone.dtype, batched.dtype) == (torch.uint8, torch.float32)
        assert alone.shape == batched.shape == (len(pictures), channels, *view.window)
        assert largest(alone - expected) <= 1
        # Pillow rounds after each of the two sides, the batched way not at all.
        assert largest(batched - expected) <= 1.01


def test_what_is_not_resized_is_copied_exactly():
    pictures = photographs(sizes=[(40, 50), (60, 33), (32, 32)])
    plan = planned(View(size=32, resize=None), pictures)
    assert plan.flips.any()
    assert not plan.flips.all()
    expected = []
    for picture, (top, left), flip in zip(pictures, plan.corners, plan.flips, strict=True):
        shown = picture[top : top + 32, left : left + 32]
        expected.append((shown[:, ::-1] if flip else shown).transpose(2, 0, 1))
    assert render(pictures, plan).numpy().tolist() == np.stack(expected).tolist()
    assert on_device(pictures, plan).numpy().tolist() == np.stack(expected).tolist()


@pytest.mark.parametrize("crop", ["random_resized", "none"])
def test_nothing_outside_a_piece_is_seen(crop):
    # Pieces of one grey value in pictures of noise, beside pictures of other sizes that need padding.
    pictures = photographs(sizes=[(50, 70), (20, 24), (90, 30), (64, 64)])
    plan = planned(View(size=16, crop=crop, scale=(0.1, 0.5)), pictures)
    for picture, (top, left, height, width) in zip(pictures, plan.crops, strict=True):
        picture[top : top + height, left : left + width] = 77
    assert (render(pictures, plan) == 77).all()
    assert largest(on_device(pictures, plan) - 77) < 1e-3


@all_views
@all_channels
def test_a_window_alone_looks_like_a_window_of_the_whole(view, channels, monkeypatch):
    pictures = photographs(channels)
    plan = planned(view, pictures)
    whole = render(pictures, plan)
    monkeypatch.setattr(views, "LARGE", 0)
    assert largest(render(pictures, plan).int() - whole.int()) <= 1


def test_a_very_long_picture_is_not_resized_as_a_whole(monkeypatch):
    line = np.repeat(np.arange(256, dtype=np.uint8), 156).reshape(1, -1, 1)
    monkeypatch.setattr(views, "_resize", None)  # as a whole it would be 224 × 8,945,664
    plan = View(size=224, crop="center", resize=224, flip=False).plan(np.array([line.shape[:2]]))
    assert set(render([line], plan).unique().tolist()) <= {127, 128}


def test_white_stays_white():
    pictures = [np.full_like(picture, 255) for picture in photographs()]
    plan = planned(View(size=50, crop="random_resized"), pictures)
    assert (render(pictures, plan) == 255).all()
    assert largest(on_device(pictures, plan) - 255) < 1e-3


def test_a_large_batch_goes_in_parts(monkeypatch):
    pictures = photographs()
    plan = planned(VIEWS["random_resized"], pictures)
    whole = on_device(pictures, plan)
    for limit in (1, 50_000):
        monkeypatch.setattr(gpu, "LIMIT", limit)
        assert largest(on_device(pictures, plan) - whole) < 1e-3


@all_views
def test_channels_turn_round(view):
    pictures = photographs()
    plan = planned(view, pictures)
    assert torch.equal(on_device(pictures, plan, reverse=True), on_device(pictures, plan).flip(1))


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_settings_of_the_program_change_no_pixel(precision):
    pictures = photographs()
    plan = planned(VIEWS["random_resized"], pictures)
    expected = on_device(pictures, plan)
    torch.set_float32_matmul_precision(precision)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = on_device(pictures, plan)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)
