"""Which part of a picture is shown, how large, and how often each part."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearfar.data.transforms.view import View

fuzzed = settings(derandomize=True, deadline=None, max_examples=150)
some_sizes = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=12)
some_views = st.builds(
    View,
    size=st.one_of(st.integers(1, 60), st.tuples(st.integers(1, 60), st.integers(1, 60))),
    crop=st.sampled_from(["random", "center", "random_resized", "none"]),
    resize=st.one_of(st.none(), st.integers(60, 90)),
    aspect=st.sampled_from(["keep", "squash", "shrink"]),
)


def plan_of(view, *sizes, seed=0):
    return view.plan(np.array(sizes), np.random.default_rng(seed))


def many(view, size, count=20_000):
    return plan_of(view, *[size] * count)


# --- whatever the view ----------------------------------------------------------------------------------------


@fuzzed
@given(view=some_views, sizes=some_sizes, seed=st.integers(0, 99))
def test_crops_lie_in_pictures_and_windows_in_crops(view, sizes, seed):
    plan, given = plan_of(view, *sizes, seed=seed), np.array(sizes)
    assert (plan.crops[:, :2] >= 0).all()
    assert (plan.crops[:, 2:] >= 1).all()
    assert (plan.crops[:, :2] + plan.crops[:, 2:] <= given).all()
    assert (plan.corners >= 0).all()
    assert (plan.corners + view.window <= plan.resized).all()
    touched = plan.touched()
    assert (touched[:, :2] >= plan.crops[:, :2]).all()
    assert (touched[:, 2:] >= 1).all()
    assert (touched[:, :2] + touched[:, 2:] <= plan.crops[:, :2] + plan.crops[:, 2:]).all()


@fuzzed
@given(view=some_views, sizes=some_sizes, seed=st.integers(0, 99))
def test_a_plan_depends_on_the_generator_alone(view, sizes, seed):
    one, other = plan_of(view, *sizes, seed=seed), plan_of(view, *sizes, seed=seed)
    assert one.boxes.tolist() == other.boxes.tolist()
    assert one.flips.tolist() == other.flips.tolist()


def test_half_of_the_pictures_are_mirrored():
    assert many(View(), (300, 300)).flips.mean() == pytest.approx(0.5, abs=0.02)
    assert not many(View(flip=False), (300, 300)).flips.any()


# --- resize, then crop ----------------------------------------------------------------------------------------


def test_the_shorter_side_is_resized():
    plan = plan_of(View(size=224, resize=256), (512, 768), (500, 375), (256, 341), (100, 50))
    assert plan.resized.tolist() == [[256, 384], [341, 256], [256, 341], [512, 256]]


def test_both_sides_are_squashed():
    plan = plan_of(View(size=227, resize=256, aspect="squash"), (512, 768), (100, 50))
    assert plan.resized.tolist() == [[256, 256], [256, 256]]


def test_pictures_are_left_as_they_are_or_grow_to_fit():
    plan = plan_of(View(size=40, resize=None), (40, 50), (300, 41), (20, 30), (80, 10))
    assert plan.resized.tolist() == [[40, 50], [300, 41], [40, 60], [320, 40]]


def test_larger_pictures_shrink_and_others_are_left_as_they_are_or_grow_to_fit():
    plan = plan_of(View(size=40, resize=60, aspect="shrink"), (120, 240), (60, 90), (40, 50), (20, 30))
    assert plan.resized.tolist() == [[60, 120], [60, 90], [40, 50], [40, 60]]


def test_the_middle_is_shown():
    plan = View(size=224, crop="center", resize=256, flip=False).plan(np.array([[256, 256], [512, 1024], [257, 256]]))
    assert plan.corners.tolist() == [[16, 16], [16, 144], [16, 16]]
    assert plan.boxes[1].tolist() == [32, 288, 448, 448]


def test_every_place_is_equally_likely():
    corners = many(View(size=5, resize=None), (7, 8)).corners
    for side, room in ((0, 3), (1, 4)):
        shares = np.bincount(corners[:, side], minlength=room) / len(corners)
        assert shares == pytest.approx(np.full(room, 1 / room), abs=0.015)


def test_only_the_window_is_touched_where_nothing_is_resized():
    plan = plan_of(View(size=224, resize=256), *[(256, 300)] * 50)
    assert plan.touched().tolist() == [[top, left, 224, 224] for top, left in plan.corners.tolist()]


def test_the_whole_picture_is_shown():
    plan = plan_of(View(size=(10, 20), crop="none"), (33, 44))
    assert plan.boxes.tolist() == [[0, 0, 33, 44]]
    assert plan.resized.tolist() == [[10, 20]]


# --- random-resized-crop --------------------------------------------------------------------------------------


def one_by_one(height, width, view, rng):
    """The usual loop: ten tries, then the middle."""
    for _ in range(10):
        area = height * width * rng.uniform(*view.scale)
        shape = math.exp(rng.uniform(math.log(view.ratio[0]), math.log(view.ratio[1])))
        tall, wide = round(math.sqrt(area / shape)), round(math.sqrt(area * shape))
        if 0 < tall <= height and 0 < wide <= width:
            return int(rng.integers(height - tall + 1)), int(rng.integers(width - wide + 1)), tall, wide
    tall, wide = height, width
    if width / height < view.ratio[0]:
        tall = round(width / view.ratio[0])
    elif width / height > view.ratio[1]:
        wide = round(height * view.ratio[1])
    return (height - tall) // 2, (width - wide) // 2, tall, wide


@pytest.mark.parametrize("size", [(256, 341), (300, 200), (256, 1000), (7, 5)])
@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.6, 0.9)])
def test_crops_are_distributed_as_in_the_usual_loop(size, scale):
    view, rng = View(crop="random_resized", scale=scale), np.random.default_rng(7)
    ours = many(view, size, 6000).crops
    loop = np.array([one_by_one(*size, view, rng) for _ in range(6000)])
    shares = np.linspace(0.05, 0.95, 10)
    for column, side in enumerate([size[0], size[1], size[0], size[1]]):
        found, expected = (np.quantile(boxes[:, column], shares) / side for boxes in (ours, loop))
        assert found == pytest.approx(expected, abs=0.03 + 1 / side)
    areas = [np.quantile(boxes[:, 2] * boxes[:, 3], shares) / math.prod(size) for boxes in (ours, loop)]
    assert areas[0] == pytest.approx(areas[1], abs=0.03)


@pytest.mark.parametrize(
    ("size", "piece"),
    [((10, 1000), [0, 493, 10, 13]), ((1000, 9), [494, 0, 12, 9]), ((1, 1), [0, 0, 1, 1]), ((1, 500), [0, 249, 1, 1])],
)
def test_the_middle_is_taken_where_no_piece_fits(size, piece):
    plan = many(View(crop="random_resized", scale=(0.9, 1.0)), size, 50)
    assert (plan.crops == piece).all()


# --- errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"crop": "middle"}, "crop is 'middle'; allowed are random, center"),
        ({"aspect": "stretch"}, "aspect is 'stretch'"),
        ({"size": 0}, "size is 0"),
        ({"size": (224, 2.5)}, "size is 2.5"),
        ({"size": 257}, "resize is 256; a window of size 257 needs at least 257"),
        ({"scale": (0.5, 0.2)}, "scale is"),
        ({"scale": (0.5, 1.2)}, "scale is 1.2"),
        ({"ratio": (0.0, 1.0)}, "ratio is 0.0"),
        ({"color": 1.5}, "color is 1.5; it must be > 0.0 and ≤ 1.0"),
        ({"color": 0}, "color is 0; it must be > 0.0"),
        ({"color": "strong"}, "color is 'strong'; a number is needed"),
        ({"grey": True}, "grey is True; a number is needed"),
        ({"grey": -0.1}, "grey is -0.1"),
        ({"erase": 1.01}, "erase is 1.01"),
        ({"erase": math.nan}, "erase is nan"),
        ({"rotate": 181}, "rotate is 181; it must be > 0.0 and ≤ 180.0"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        View(**settings)


def test_a_random_view_needs_a_generator():
    with pytest.raises(ValueError, match="rng is None"):
        View(crop="center").plan(np.array([[300, 300]]))


@pytest.mark.parametrize("sizes", [np.zeros((2, 3)), np.array([[0, 5]]), np.array([3, 4])])
def test_sizes_are_checked(sizes):
    with pytest.raises(ValueError, match="sizes has shape"):
        View().plan(sizes, np.random.default_rng(0))
