"""What ``decode`` makes of picture files: upright RGB or grey of 8 bits, shrunk as asked."""

import os
import warnings

import numpy as np
import pytest
from odd_files import BAD, HEIGHT, JPEG, NOISE, PNG, WIDTH, colours, grey16, picture, png, saved, transparent, turned
from PIL import Image, ImageFile, features

from nearfar.data.store.decode import BadImage, decode, shrink

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # damaged metadata, as it should be


def far(one, other):
    """The mean difference of two pictures."""
    assert one.shape == other.shape
    return float(np.abs(one.astype(float) - other.astype(float)).mean())


# --- colours -------------------------------------------------------------------------------------------------


def test_a_plain_picture_keeps_its_pixels():
    pixels = decode(PNG)
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert np.array_equal(pixels, colours())


def test_channels_are_as_many_as_asked_for():
    grey = np.asarray(picture("L"))[:, :, None]
    assert np.array_equal(decode(PNG, channels=1), grey)
    assert np.array_equal(decode(saved(picture("L"), "PNG")), grey.repeat(3, axis=2))


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_what_is_clear_becomes_white(mode):
    pixels = decode(saved(transparent(mode), "PNG"))
    assert (pixels[:, : WIDTH // 2] == 255).all()
    assert np.array_equal(pixels[:, WIDTH // 2 :], np.asarray(picture(mode).convert("RGB"))[:, WIDTH // 2 :])


def test_what_is_half_clear_is_half_white():
    image = Image.new("RGBA", (2, 2), (100, 0, 200, 128))
    assert decode(saved(image, "PNG"))[0, 0].tolist() == pytest.approx([177, 127, 227], abs=1)


def test_grey_of_16_bits_is_scaled_and_not_clipped():
    for kind in ("PNG", "TIFF"):
        pixels = decode(saved(grey16(), kind), channels=1)[:, :, 0]
        assert np.abs(pixels - np.asarray(grey16()) / 257).max() <= 0.5


def test_grey_of_16_bits_in_the_other_byte_order():
    values = np.array([[0, 257], [65535, 32896]], dtype=">u2")
    tags = {256: 2, 257: 2, 258: 16, 259: 1, 262: 1, 273: 200, 277: 1, 278: 2, 279: 8}
    entries = b"".join(
        tag.to_bytes(2, "big") + b"\0\4\0\0\0\1" + value.to_bytes(4, "big") for tag, value in sorted(tags.items())
    )
    file = (b"MM\0*\0\0\0\x08" + len(tags).to_bytes(2, "big") + entries + b"\0" * 4).ljust(
        200, b"\0"
    ) + values.tobytes()
    assert decode(file, channels=1)[:, :, 0].tolist() == [[0, 1], [255, 128]]


def test_floating_point_from_0_to_1_is_stretched():
    image = Image.fromarray(np.array([[0.0, 0.5], [1.0, 0.25]], dtype=np.float32))
    assert decode(saved(image, "TIFF"), channels=1)[:, :, 0].tolist() == [[0, 128], [255, 64]]


def test_cmyk_is_neither_inverted_nor_swapped():
    assert far(decode(saved(picture("CMYK"), "JPEG", quality=95)), colours()) < 3


@pytest.mark.parametrize(("kind", "feature"), [("AVIF", "avif"), ("JPEG2000", "jpg_2000")])
def test_kinds_that_not_every_pillow_reads(kind, feature):
    if not features.check(feature):
        pytest.skip(f"this Pillow has no {kind}")
    data = saved(picture(), kind)
    for file in (data, data.replace(b"ftypavif", b"ftypmif1", 1)):  # an AVIF may be something else first
        assert far(decode(file), colours()) < 3


# --- upright -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_heeded(orientation):
    assert far(decode(turned(orientation)), colours()) < 3


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_exif_orientation_of_other_kinds_is_heeded_once(kind):
    settings = {"lossless": True} if kind == "WEBP" else {}
    for orientation, image in ((6, picture().transpose(Image.Transpose.ROTATE_90)), (77, picture())):  # 77 is none
        exif = Image.Exif()
        exif[0x0112] = orientation
        assert np.array_equal(decode(saved(image, kind, exif=exif, **settings)), colours())


def test_a_turned_picture_is_shrunk_by_its_shorter_side():
    assert decode(turned(6), side=12).shape == (12, 18, 3)


# --- sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "side", "aspect", "expected"),
    [
        ((300, 600), 100, "keep", (100, 200)),
        ((600, 300), 100, "keep", (200, 100)),
        ((301, 299), 100, "keep", (101, 100)),
        ((50, 600), 100, "keep", (50, 600)),
        ((300, 600), 100, "squash", (100, 100)),
        ((20, 30), 100, "squash", (100, 100)),
        ((1, 5), 1, "keep", (1, 5)),
    ],
)
def test_sizes(shape, side, aspect, expected):
    image = np.zeros((*shape, 3), dtype=np.uint8)
    assert shrink(image, side, aspect).shape == (*expected, 3)
    assert decode(saved(Image.fromarray(image), "PNG"), side=side, aspect=aspect).shape == (*expected, 3)


def test_shrinking_is_antialiased():
    board = np.indices((64, 64)).sum(axis=0) % 2 * np.uint8(255)
    assert np.abs(shrink(board.astype(np.uint8)[:, :, None], 8).astype(int) - 127).max() < 10


def test_large_jpegs_come_out_the_same_without_being_decoded_in_full(monkeypatch):
    data = saved(Image.fromarray(colours(800, 1200)), "JPEG", quality=95)
    loaded = []
    load = ImageFile.ImageFile.load
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: (loaded.append(self.size), load(self))[1])
    small = decode(data, side=50)
    assert loaded[-1] == (150, 100)  # of 1200 × 800, by libjpeg's scale of 1/8
    assert small.shape == (50, 75, 3)
    assert far(small, shrink(decode(data), 50)) < 1


# --- refused -------------------------------------------------------------------------------------------------


def test_a_bomb_is_refused_before_it_is_decoded(monkeypatch):
    def load(self):
        pytest.fail("it was decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("bomb.png", "bomb.gif"):
            with pytest.raises(BadImage, match="pixels; at most 134,217,728 are decoded"):
                decode(BAD[name][0])


def test_the_limit_of_pixels_is_ours_and_not_the_one_pillow_keeps_for_the_process(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    for settings in ({}, {"max_pixels": HEIGHT * WIDTH}):
        assert decode(PNG, **settings).shape == (HEIGHT, WIDTH, 3)
    with pytest.raises(BadImage, match="36 × 24 pixels; at most 863 are decoded"):
        decode(PNG, max_pixels=HEIGHT * WIDTH - 1)


def test_settings_of_pillow_stay_as_they_are():
    before = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
    for data in (JPEG, png(50_000, 50_000)):
        try:
            decode(data)
        except BadImage:
            continue
    assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)


def test_any_cut_of_any_file_is_refused_or_whole_and_never_anything_else():
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"):
        data = saved(Image.fromarray(NOISE[:16, :16]), kind)
        for length in range(0, len(data), 7):
            try:
                pixels = decode(data[:length])
            except BadImage:
                continue
            # Only what follows the pixels may be missing.
            assert np.array_equal(pixels, decode(data)), (kind, length)


def test_bytes_turned_at_random_never_raise_anything_else():
    rng = np.random.default_rng(0)
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"):
        data = np.frombuffer(saved(Image.fromarray(NOISE[:16, :16]), kind), dtype=np.uint8)
        for _ in range(60):
            broken = data.copy()
            broken[rng.integers(0, len(data), 4)] = rng.integers(0, 256, 4)
            try:
                pixels = decode(broken.tobytes(), max_pixels=1 << 20)
            except BadImage:
                continue
            assert pixels.dtype == np.uint8
            assert pixels.ndim == 3


def test_random_bytes_are_no_picture():
    with pytest.raises(BadImage):
        decode(b"\xfe" + os.urandom(1000))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"channels": 4}, "channels is 4; allowed are 1 and 3"),
        ({"side": 0}, "side is 0; it must be ≥ 1"),
        ({"aspect": "crop"}, "aspect is 'crop'; allowed are keep, squash"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        decode(PNG, **settings)
    assert not isinstance(error.value, BadImage)
