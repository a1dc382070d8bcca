"""Files as folders of pictures really hold them: odd, damaged, misnamed, or no pictures at all."""

import struct
import zlib
from io import BytesIO

import numpy as np
from PIL import Image

HEIGHT, WIDTH = 24, 36


def colours(height=HEIGHT, width=WIDTH):
    """Smooth, and different in every corner: a turn, a flip or a swap of channels shows."""
    down, right = np.linspace(40, 220, height)[:, None], np.linspace(30, 200, width)[None]
    return np.stack([down + 0 * right, 0 * down + right, (down + right) / 2], axis=2).astype(np.uint8)


def picture(mode="RGB"):
    return Image.fromarray(colours()).convert(mode)


def saved(image, kind, **settings):
    file = BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def chunk(name, body, crc=None):
    return (
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body) if crc is None else crc)
    )


def png(width, height, *, depth=8, kind=2, body=b"", crc=None):
    """A PNG whose header says whatever it is told to."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0), crc)
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


def turned(orientation):
    """A JPEG that is upright only when its EXIF orientation is heeded."""
    ways = ["FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_90", "TRANSVERSE", "ROTATE_270"]
    image = picture() if orientation == 1 else picture().transpose(Image.Transpose[ways[orientation - 2]])
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(image, "JPEG", quality=95, subsampling=0, exif=exif)


def transparent(mode):
    """The picture with its left half clear."""
    image = picture(mode)
    alpha = np.full((HEIGHT, WIDTH), 255, dtype=np.uint8)
    alpha[:, : WIDTH // 2] = 0
    image.putalpha(Image.fromarray(alpha))
    return image


def clear_palette():
    """A palette picture with the left half in a colour that is clear."""
    image = Image.new("P", (WIDTH, HEIGHT))
    image.putpalette([200, 0, 0, 0, 0, 200])
    image.paste(1, (WIDTH // 2, 0, WIDTH, HEIGHT))
    image.info["transparency"] = 0
    return image


def grey16():
    return Image.fromarray(np.linspace(0, 65535, HEIGHT * WIDTH).astype(np.uint16).reshape(HEIGHT, WIDTH))


def frames():
    return [picture(), Image.new("RGB", (WIDTH, HEIGHT), "black"), Image.new("RGB", (WIDTH, HEIGHT), "white")]


def moving(kind, **settings):
    first, *rest = frames()
    return saved(first, kind, save_all=True, append_images=rest, **settings)


def ycck():
    """A JPEG as Photoshop writes CMYK: cyan, magenta and yellow turned like red, green and blue into YCbCr."""
    inks = np.asarray(picture("CMYK"))
    turned_inks = np.asarray(Image.fromarray(inks[:, :, :3].copy()).convert("YCbCr"))
    # Pillow stores inverted values, the way Adobe does; the black ones are inverted already.
    stored = np.concatenate([255 - turned_inks, inks[:, :, 3:]], axis=2)
    data = saved(Image.frombytes("CMYK", (WIDTH, HEIGHT), stored.tobytes()), "JPEG", quality=95)
    start = data.index(b"Adobe\0")
    return data[: start + 11] + b"\x02" + data[start + 12 :]  # which says: YCCK


def many_scans(side, scans):
    """A progressive JPEG that repeats its last scan."""
    data = saved(Image.new("RGB", (side, side), "olive"), "JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * (scans - data.count(b"\xff\xda")) + data[-2:]


JPEG = saved(picture(), "JPEG", quality=95, subsampling=0)
PNG = saved(picture(), "PNG")
NOISE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)  # long enough to be cut anywhere
LONG_JPEG, LONG_PNG = (saved(Image.fromarray(NOISE), kind) for kind in ("JPEG", "PNG"))

GOOD = {
    "plain.jpg": JPEG,
    "plain.png": PNG,
    "plain.webp": saved(picture(), "WEBP", lossless=True),
    "plain.bmp": saved(picture(), "BMP"),
    "plain.tiff": saved(picture(), "TIFF"),
    "packed.tif": saved(picture(), "TIFF", compression="tiff_lzw"),
    "plain.ppm": saved(picture(), "PPM"),
    "plain.gif": saved(picture(), "GIF"),
    "grey.jpg": saved(picture("L"), "JPEG"),
    "grey with alpha.png": saved(transparent("L"), "PNG"),
    "alpha.png": saved(transparent("RGB"), "PNG"),
    "alpha.webp": saved(transparent("RGB"), "WEBP", lossless=True),
    "palette.png": saved(picture("P"), "PNG"),
    "clear palette.png": saved(clear_palette(), "PNG"),
    "clear palette.gif": saved(clear_palette(), "GIF", transparency=0),
    "colour key.png": saved(picture(), "PNG", transparency=(1, 2, 3)),
    "one bit.png": saved(picture("1"), "PNG"),
    "one bit.tif": saved(picture("1"), "TIFF", compression="group4"),
    "16 bit.png": saved(grey16(), "PNG"),
    "16 bit.tif": saved(grey16(), "TIFF"),
    "float.tif": saved(picture("F"), "TIFF"),
    "cmyk.jpg": saved(picture("CMYK"), "JPEG", quality=95),
    "ycck.jpg": ycck(),
    "cmyk.tif": saved(picture("CMYK"), "TIFF"),
    "progressive.jpg": saved(picture(), "JPEG", progressive=True),
    "rotated.jpg": turned(6),
    "mirrored.jpg": turned(2),
    "broken exif.jpg": JPEG[:2] + b"\xff\xe1\x00\x10Exif\0\0MM\0*\xff\xff\xff\xff" + JPEG[2:],
    "a png named.jpg": PNG,
    "a jpeg named.png": JPEG,
    "no ending": JPEG,
    "moving.gif": moving("GIF"),
    "moving.webp": moving("WEBP", lossless=True),
    "moving.png": moving("PNG"),
    "pages.tif": moving("TIFF"),
    "stereo.mpo": moving("MPO"),
    "tail.jpg": JPEG + b"\0garbage after the end" * 40,
    "tail.png": PNG + b"garbage",
    "one pixel.png": saved(Image.new("RGB", (1, 1), "red"), "PNG"),
    "thin.png": saved(Image.new("RGB", (50, 1), "red"), "PNG"),
}

BAD = {
    "empty.jpg": (b"", "an empty file"),
    "text.jpg": (b"not a picture at all\n", "text, not an image"),
    "error page.jpg": (b"<!DOCTYPE html>\n<html><body>404</body></html>", "an HTML page, not an image"),
    "late page.jpg": (b"<!-- proxy -->\n<html><body>404</body></html>", "an HTML page, not an image"),
    "drawing.png": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "an SVG or XML document"),
    "zeros.jpg": (b"\0" * 5000, "only zero bytes"),
    "document.jpg": (b"%PDF-1.7\n", "a PDF document"),
    "archive.jpg": (b"PK\x03\x04\x14\0", "a zip archive"),
    "phone.jpg": (b"\0\0\0\x18ftypheic\0\0\0\0", "an HEIC image"),
    "pointer.jpg": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer"),
    "noise.jpg": (bytes(range(128, 256)) + bytes(range(256)), "not a known image format"),
    "half.jpg": (LONG_JPEG[: len(LONG_JPEG) // 2], "truncated"),
    "no end.jpg": (LONG_JPEG[:-300], "truncated"),
    "header only.jpg": (JPEG[:20], "JPEG: a broken header"),
    "half.png": (LONG_PNG[: len(LONG_PNG) // 2], "truncated"),
    "half.webp": (saved(Image.fromarray(NOISE), "WEBP")[:700], "WebP: "),
    "half.gif": (saved(Image.fromarray(NOISE), "GIF")[:1500], "truncated"),
    "half.bmp": (saved(Image.fromarray(NOISE), "BMP")[:1500], "truncated"),
    "half.tif": (saved(Image.fromarray(NOISE), "TIFF", compression="tiff_lzw")[:900], "TIFF: "),
    "wrong crc.png": (png(8, 8, crc=1, body=b"\0" * 25 * 8), "PNG: "),
    "no pixels.png": (png(8, 8), "truncated"),
    "bomb.png": (png(50_000, 50_000), "50000 × 50000 pixels; at most 134,217,728 are decoded"),
    "bomb.gif": (
        b"GIF89a\xff\xff\xff\xff\x80\0\0" + bytes(6) + b",\0\0\0\0\xff\xff\xff\xff\0\x08\0;",
        "65535 × 65535 pixels",
    ),
    "strip.png": (saved(Image.new("RGB", (51, 1)), "PNG"), "one side is more than 50 times as long as the other"),
    "no size.png": (png(0, 8), "PNG: a broken header"),
    "no size.gif": (b"GIF89a\0\0\0\0\x80\0\0" + bytes(6) + b",\0\0\0\0\0\0\0\0\0\x02\0;", "GIF: a broken header"),
    "wild float.tif": (saved(Image.fromarray(np.full((4, 4), 1e9, dtype=np.float32)), "TIFF"), "floating-point values"),
    "wild ints.tif": (saved(Image.fromarray(np.full((4, 4), -5, dtype=np.int32)), "TIFF"), "32-bit grayscale"),
}
