"""A folder of more than twenty kinds of odd and damaged files: each is decoded or named, none stops the others."""

import numpy as np
import pytest
from odd_files import BAD, GOOD, HEIGHT, WIDTH, colours

from nearfar.data.datasets.base import Dataset
from nearfar.data.store.decode import BadImage, decode
from nearfar.data.store.prepare import BadFilesError, prepare
from nearfar.data.store.sources import Files

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # damaged metadata, as it should be

# Of these the colours of the picture are known; the others are grey, half clear, or of another picture.
COLOURED = [
    name
    for name in GOOD
    if not any(word in name for word in ("grey", "alpha", "palette", "bit", "float", "one pixel", "thin"))
]


@pytest.fixture
def folder(tmp_path):
    files = {**GOOD, **{name: data for name, (data, _) in BAD.items()}}
    (tmp_path / "photos").mkdir()
    for name, data in files.items():
        (tmp_path / "photos" / name).write_bytes(data)
    names = sorted(files)
    labels = np.zeros(len(names), dtype=np.int64)
    return Dataset("odd", Files(tmp_path / "photos", names), labels, ("odd",), {"all": np.arange(len(names))})


@pytest.mark.parametrize("name", GOOD)
def test_odd_files_are_decoded(name):
    pixels = decode(GOOD[name])
    if name not in ("one pixel.png", "thin.png"):
        assert pixels.shape == (HEIGHT, WIDTH, 3)


@pytest.mark.parametrize("name", COLOURED)
def test_odd_files_have_the_right_colours_in_the_right_places(name):
    assert np.abs(decode(GOOD[name]).astype(float) - colours()).mean() < 4


@pytest.mark.parametrize("name", BAD)
def test_damaged_files_are_refused_with_a_reason(name):
    data, reason = BAD[name]
    with pytest.raises(BadImage) as error:
        decode(data)
    assert reason in error.value.reason
    assert "\n" not in error.value.reason


def test_there_are_more_than_twenty_kinds_of_each():
    assert len(GOOD) > 20
    assert len(BAD) > 20


def test_good_files_survive_bad_neighbors(folder, tmp_path):
    store = prepare(folder, cache=tmp_path / "cache", on_error="skip")
    assert {folder.source.name(row) for row in store.rows.tolist()} == set(GOOD)
    assert {one.name for one in store.bad} == set(BAD)
    for place, row in enumerate(store.rows.tolist()):
        assert np.array_equal(store.image(place), decode(GOOD[folder.source.name(row)], side=256))
    for one in store.bad:
        assert BAD[one.name][1] in one.reason


def test_without_leave_to_skip_the_error_counts_all_and_names_twenty(folder, tmp_path):
    with pytest.raises(BadFilesError) as error:
        prepare(folder, cache=tmp_path / "cache")
    names = sorted(BAD)
    assert str(error.value).startswith(f"{len(BAD)} of {len(BAD) + len(GOOD)} files could not be decoded: ")
    for name in names[:20]:
        assert f"{name} (" in str(error.value)
    assert f"; and {len(BAD) - 20} more. on_error=" in str(error.value)
    assert names[20] not in str(error.value)
    assert [one.name for one in error.value.bad] == names
