"""Bounding boxes and padding, before images are stored."""

import io
import pickle
from dataclasses import replace

import made_up_data
import numpy as np
import pytest
from PIL import Image

from nearfar import data
from nearfar.data.datasets.frames import BOX, Framed, box_columns, cut_to_boxes, pad_to_squares
from nearfar.data.store.prepare import BadFilesError, prepare


@pytest.fixture(scope="module")
def cub(tmp_path_factory):
    return made_up_data.make("cub", tmp_path_factory.mktemp("framed"))


def pixels(encoded):
    return np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))


def test_images_are_cut_to_the_official_boxes(cub, tmp_path):
    whole, cut = data.open("cub", cub), data.open("cub", cub, boxes=True)
    assert [whole.columns[name][0] for name in BOX] == [4, 8, 24, 30]
    assert np.array_equal(pixels(cut.source.read(3)), pixels(whole.source.read(3))[4:28, 8:38])
    assert cut.source.name(3) == whole.source.name(3)
    assert cut.source.fingerprint() != whole.source.fingerprint()
    store = prepare(cut, cache=tmp_path, side=256)
    assert store.sizes.tolist() == [[24, 30]] * len(cut)


def test_a_box_beyond_the_image_ends_at_its_edge(cub):
    whole = data.open("cub", cub)
    beyond = replace(whole, columns={**whole.columns, "box_left": np.full(len(whole), 40)})
    assert pixels(cut_to_boxes(beyond).source.read(0)).shape == (24, 4, 3)


def test_padding_makes_squares_with_the_image_in_the_middle(cub):
    whole = data.open("cub", cub)
    for dataset, inside in ((whole, (36, 44)), (data.open("cub", cub, boxes=True), (24, 30))):
        padded = pickle.loads(pickle.dumps(pad_to_squares(dataset)))
        found, height, side = pixels(padded.source.read(0)), inside[0], inside[1]
        assert found.shape == (side, side, 3)
        top = (side - height) // 2
        assert np.array_equal(found[top : top + height], pixels(dataset.source.read(0)))
        assert not found[:top].any()
        assert not found[top + height :].any()
        assert len({dataset.source.fingerprint(), whole.source.fingerprint(), padded.source.fingerprint()}) >= 2


def test_boxes_are_rounded_outward():
    assert box_columns(np.array([[1.2, 2.5, 3.1, 4.0]])) == {
        "box_top": [2],
        "box_left": [1],
        "box_height": [2],
        "box_width": [3],
    }


def test_what_cannot_be_framed_is_said(tmp_path):
    cars = made_up_data.make("cars196", tmp_path)
    with pytest.raises(ValueError, match="boxes is true; cars196 has no bounding boxes in this layout"):
        data.open("cars196", cars, boxes=True)
    with pytest.raises(ValueError, match="digits holds arrays"):
        pad_to_squares(data.open("digits"))


def test_a_damaged_file_is_named(cub, tmp_path):
    class Damaged(Framed):
        def read(self, index):
            return b"no image"

    whole = data.open("cub", cub)
    with pytest.raises(BadFilesError, match="text, not an image"):
        prepare(replace(whole, source=Framed(Damaged(whole.source), pad=True)), cache=tmp_path)
