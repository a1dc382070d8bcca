"""How a batch is laid out to be looked at."""

import numpy as np
import pytest
from PIL import Image

from nearfar.data.preview import FONT, GAP, MARGIN, grid, write


def flat(*shades, size=100, channels=3):
    return np.stack([np.full((size, size, channels), shade, dtype=np.uint8) for shade in shades])


def at(sheet, line, column, tile=100):
    """The colour in the middle of a tile."""
    left = MARGIN + column * (tile + GAP) + tile // 2
    return sheet.getpixel((left, MARGIN + line * (tile + GAP + FONT + 8) + FONT + 6 + tile // 2))


def test_each_class_has_a_line():
    sheet = grid(flat(10, 20, 30, 40, 50, 60), ["jay"] * 3 + ["wren"] * 3)
    assert [at(sheet, 0, column)[0] for column in range(3)] == [10, 20, 30]
    assert [at(sheet, 1, column)[0] for column in range(3)] == [40, 50, 60]


def test_pairs_share_lines_up_to_eight_pictures():
    sheet = grid(flat(*range(10, 130, 10)), [name for name in "abcdef" for _ in range(2)])
    assert [at(sheet, 0, column)[0] for column in range(8)] == list(range(10, 90, 10))
    assert [at(sheet, 1, column)[0] for column in range(4)] == list(range(90, 130, 10))


def test_a_caption_stands_above_its_line_and_does_not_run_over():
    sheet = np.asarray(grid(flat(0, 0, 0), ["x" * 500] * 3).convert("L"))
    above = sheet[MARGIN : MARGIN + FONT, :]
    assert (above < 128).any()
    assert (above[:, : MARGIN - 1] == 255).all()
    assert (above[:, -MARGIN + 1 :] == 255).all()


def test_small_pictures_grow_by_whole_pixels_and_large_ones_shrink():
    assert grid(flat(9, 9, 9, size=8), ["a"] * 3).width == 2 * MARGIN + 3 * 96 + 2 * GAP
    assert grid(flat(9, 9, 9, size=500), ["a"] * 3).width == 2 * MARGIN + 3 * 192 + 2 * GAP


def test_grey_pictures_are_drawn():
    assert at(grid(flat(77, 88, 99, channels=1), ["a"] * 3), 0, 1) == (88, 88, 88)


def test_no_pictures_are_an_error():
    with pytest.raises(ValueError, match="there are 0 images and 0 captions"):
        grid([], [])


@pytest.mark.parametrize("ending", [".png", ".jpg", ".webp"])
def test_the_ending_says_the_format(ending, tmp_path):
    write(grid(flat(9), ["a"]), tmp_path / f"grid{ending}")
    with Image.open(tmp_path / f"grid{ending}") as image:
        assert image.format == {".png": "PNG", ".jpg": "JPEG", ".webp": "WEBP"}[ending]
