"""Data sets by name, and what importing the room costs."""

import subprocess
import sys

import numpy as np
import pytest

from nearfar import data
from nearfar.data.datasets.base import settings_of, takes_root

NAMES = "arrays cars196 cub digits fashion_mnist folder glyphs inshop market1501 mnist pairs sop table triplets".split()  # noqa: SIM905


def test_all_data_sets_are_known():
    assert data.names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_data_set_says_what_it_is(name):
    assert data.summary(name).endswith(".") or data.summary(name).endswith(":")
    for setting in settings_of(name):
        assert setting in data.describe(name)
    assert takes_root(name) is not None or name in ("digits", "glyphs")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"name": "cubs"}, ValueError, r"dataset is 'cubs' \(did you mean 'cub'\?\); allowed are arrays, cars196"),
        ({"name": "cub"}, TypeError, "cub needs root"),
        ({"name": "digits", "root": "/somewhere"}, TypeError, "root is '/somewhere'; digits takes none"),
        ({"name": "glyphs", "clases": 3}, TypeError, r"glyphs has no setting 'clases' \(did you mean 'classes'\?\)"),
        ({"name": "cub", "root": "x", "side": 3}, TypeError, "cub has no setting 'side'; it has boxes"),
    ],
)
def test_wrong_calls_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        data.open(call.pop("name"), **call)


@pytest.mark.parametrize("name", [name for name in NAMES if takes_root(name) is not None])
def test_a_root_that_is_not_there_is_named(name, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        data.open(name, tmp_path / "nowhere")


def test_classes_of_a_single_picture_are_reported():
    assert data.problems(data.from_arrays(np.eye(3), ["jay", "jay", "wren"])) == [
        "1 classes have a single image, which has no match in its class: wren"
    ]


def test_the_room_is_imported_without_heavy_or_optional_packages():
    heavy = ["PIL", "sklearn", "scipy", "pyarrow", "torchvision", "pandas"]
    code = f"import sys, nearfar.data; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_everything_public_is_there():
    for name in data.__all__:
        assert getattr(data, name) is not None
