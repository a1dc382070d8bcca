"""Pixels as networks want them."""

from dataclasses import replace

import pytest
import torch

from nearfar.utils.preprocessing import CAFFE, GREY, IMAGENET, LITE, PLAIN, Normalization

RED = torch.tensor([255, 51, 0], dtype=torch.uint8).view(1, 3, 1, 1)


@pytest.mark.parametrize(
    ("normalization", "values"),
    [
        (IMAGENET, [(1 - 0.485) / 0.229, (0.2 - 0.456) / 0.224, -0.406 / 0.225]),  # pixels from 0 to 1
        (CAFFE, [0 - 104, 51 - 117, 255 - 128]),  # blue first, and 255 for white
        (LITE, [1.0, -76 / 128, -127 / 128]),
    ],
    ids=["imagenet", "caffe", "lite"],
)
def test_pixels_are_normalized_as_bytes_or_floats(normalization, values):
    assert normalization(RED).flatten().tolist() == pytest.approx(values)
    assert torch.equal(normalization(RED), normalization(RED.float()))


def test_grey_becomes_three_channels_where_three_are_read():
    grey = torch.full((2, 1, 4, 4), 255, dtype=torch.uint8)
    assert PLAIN(grey).shape == (2, 3, 4, 4)
    assert GREY(grey).shape == (2, 1, 4, 4)


def test_colour_for_a_network_that_reads_grey_is_refused():
    with pytest.raises(ValueError, match="pixels have 3 channels; this network reads 1"):
        GREY(RED)


def test_a_network_that_learned_from_grey_pictures_takes_no_colours():
    grey = replace(IMAGENET, grey=True)
    assert grey.channels == 1
    assert torch.equal(grey(RED[:, :1]), IMAGENET(RED[:, :1]))
    with pytest.raises(ValueError, match="pixels have 3 channels; this network reads 1"):
        grey(RED)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mean": (0.0,), "std": (1.0,), "order": "GBR"}, "order is 'GBR'; allowed are RGB, BGR"),
        ({"mean": (0.0,), "std": (1.0,) * 3}, "mean has 1 numbers and std 3"),
        ({"mean": (0.0,), "std": (0.0,)}, "std is 0.0; it must be > 0"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        Normalization(**settings)
