"""What a ``Store`` holds, in memory and in a folder."""

import json
import pickle

import numpy as np
import pytest

from nearfar.data.store.store import ABOUT, INDEX, PIXELS, BadFile, Store, finalize, offsets_of


def some(channels=3):
    rng = np.random.default_rng(0)
    shapes = [(4, 6), (1, 1), (5, 2), (3, 3)]
    return [rng.integers(0, 256, (*shape, channels), dtype=np.uint8) for shape in shapes]


def written(folder, images):
    folder.mkdir()
    (folder / PIXELS).write_bytes(b"".join(image.tobytes() for image in images))
    sizes = np.array([image.shape[:2] for image in images], dtype=np.int32)
    bad = [vars(BadFile(1, "broken.jpg", "truncated"))]
    finalize(folder, np.array([0, 2, 3, 5]), sizes, images[0].shape[2], {"bad": bad})
    return folder


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_of_different_shapes_come_back(channels):
    images = some(channels)
    store = Store.of_arrays(images)
    assert len(store) == 4
    assert store.channels == channels
    assert store.sizes.tolist() == [[4, 6], [1, 1], [5, 2], [3, 3]]
    assert store.nbytes == sum(image.size for image in images)
    for place, image in enumerate(images):
        assert np.array_equal(store.image(place), image)


def test_an_array_is_not_copied():
    images = np.zeros((3, 4, 5, 3), dtype=np.uint8)
    assert np.shares_memory(Store.of_arrays(images).pixels, images)


def test_offsets_beyond_four_gigabytes():
    sizes = np.full((3, 2), 60_000, dtype=np.int32)
    assert offsets_of(sizes, 3).tolist() == [0, 10_800_000_000, 21_600_000_000]


def test_no_pictures_at_all():
    store = Store.of_arrays([])
    assert len(store) == store.nbytes == 0
    assert store.places(np.array([0, 1])).tolist() == []


def test_places_follow_the_order_asked_for_and_leave_out_what_was_skipped():
    store = Store.of_arrays(some(), rows=np.array([0, 2, 3, 5]))
    assert store.places(np.array([5, 1, 0, 9, 3])).tolist() == [3, 0, 2]


@pytest.mark.parametrize("place", [-1, 4])
def test_a_place_beyond_the_store_is_an_error(place):
    with pytest.raises(IndexError, match=rf"place is {place}; the store holds 4 images"):
        Store.of_arrays(some()).image(place)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((2, 3, 3)), "images is of float64"),
        (np.zeros((2, 3, 3, 4), dtype=np.uint8), r"has shape \(2, 3, 3, 4\)"),
        (np.zeros((2, 0, 3), dtype=np.uint8), "height and width must be ≥ 1"),
        ([np.zeros((2, 2, 3), np.uint8), np.zeros((2, 2, 1), np.uint8)], r"images\[1\] is of uint8 and has shape"),
        ([np.zeros((2, 2, 3), np.float32)], r"images\[0\] is of float32"),
        ([np.zeros((0, 2, 3), np.uint8)], r"images\[0\] has shape \(0, 2, 3\)"),
    ],
)
def test_what_is_no_picture_is_refused(images, message):
    with pytest.raises(ValueError, match=message):
        Store.of_arrays(images)


def test_rows_must_rise():
    with pytest.raises(ValueError, match="needed are 4 increasing numbers"):
        Store.of_arrays(some(), rows=np.array([0, 2, 2, 3]))


def test_a_folder_opens_as_it_was_written(tmp_path):
    images = some()
    store = Store.open(written(tmp_path / "store", images))
    assert isinstance(store.pixels, np.memmap)
    assert store.rows.tolist() == [0, 2, 3, 5]
    assert store.bad == (BadFile(1, "broken.jpg", "truncated"),)
    for place, image in enumerate(images):
        assert np.array_equal(store.image(place), image)


def test_another_process_gets_the_map_and_not_a_copy(tmp_path):
    store = Store.open(written(tmp_path / "store", some()))
    sent = pickle.dumps(store)
    assert len(sent) < 400
    assert np.array_equal(pickle.loads(sent).pixels, store.pixels)
    held = pickle.loads(pickle.dumps(Store.of_arrays(some())))
    assert np.array_equal(held.pixels, store.pixels)


def test_a_store_cannot_be_written_to(tmp_path):
    store = Store.open(written(tmp_path / "store", some()))
    with pytest.raises(ValueError, match="read-only"):
        store.image(0)[0] = 1


@pytest.mark.parametrize(
    ("file", "change"),
    [(file, change) for file in (PIXELS, INDEX, ABOUT) for change in ("missing", "cut", "empty")]
    + [(PIXELS, "longer"), (ABOUT, "longer")],
)
def test_a_folder_with_a_damaged_file_is_no_store(file, change, tmp_path):
    folder = written(tmp_path / "store", some())
    data = (folder / file).read_bytes()
    (folder / file).unlink()
    if change != "missing":
        (folder / file).write_bytes({"cut": data[:-3], "longer": data + b"}", "empty": b""}[change])
    with pytest.raises(ValueError, match=r"is not an image store|is damaged"):
        Store.open(folder)


def test_a_store_of_another_format_is_named(tmp_path):
    folder = written(tmp_path / "store", some())
    about = json.loads((folder / ABOUT).read_text())
    (folder / ABOUT).write_text(json.dumps({**about, "format": 99}))
    with pytest.raises(ValueError, match="is a store of format 99; this version reads 3"):
        Store.open(folder)
