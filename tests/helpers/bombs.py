"""Small image files that take seconds to decode, and a search for more of them."""

import random
import struct
import time
import zlib
from contextlib import suppress
from io import BytesIO

from odd_files import chunk, many_scans, png
from PIL import Image, features

from nearfar.data.store.decode import BadImage, Decoder

SIDE, LARGE = 1300, 7000  # pixels of images that promise little and much work
SIZE = 1 << 19  # bytes of a file
# 7000 × 7000 pixels of one color.
LARGE_WEBP = b"RIFF\x1c\0\0\0WEBPVP8L\x10\0\0\0/W\xdb\xd5\x06\x07P\xc0\x02F\xff\x03\x11\xd1\xff\0"


def hidden_scans(data):
    """Put scans behind markers that have no length, which look as if they had one."""
    scan = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + (b"\xff\x01" + scan) * ((SIZE - len(data)) // (len(scan) + 2)) + data[-2:]


def many_chunks(data, kind, body):
    """Add as many chunks of text to a PNG as fit."""
    text = chunk(kind, body)
    return data[:33] + text * ((SIZE - len(data)) // len(text)) + data[33:]


def strips():
    """A TIFF in which all rows share one strip of compressed zeros."""
    strip = zlib.compress(bytes(3 * SIDE), 9)
    start = 8
    where, lengths = start + len(strip), start + len(strip) + 4 * SIDE
    table = lengths + 4 * SIDE
    tags = ((256, 4, 1, SIDE), (257, 4, 1, SIDE), (258, 3, 1, 8), (259, 3, 1, 8), (262, 3, 1, 2))
    tags += ((273, 4, SIDE, where), (277, 3, 1, 3), (278, 4, 1, 1), (279, 4, SIDE, lengths))
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    directory = struct.pack("<H", len(tags)) + entries + bytes(4)
    shared = struct.pack("<I", start) * SIDE + struct.pack("<I", len(strip)) * SIDE
    return b"II*\0" + struct.pack("<I", table) + strip + shared + directory


def encoded(kind, side=SIDE, **settings):
    file = BytesIO()
    Image.new("RGB", (side, side), "olive").save(file, kind, **settings)
    return file.getvalue()


def frames(kind, side=200, count=300):
    """An animation of frames of one color each."""
    file = BytesIO()
    images = [Image.new("L", (side, side), number) for number in range(count)]
    images[0].save(file, kind, save_all=True, append_images=images[1:])
    return file.getvalue()


def corpus():
    """Return a bomb of each kind; the first takes the most time."""
    scans, zeros = many_scans(SIDE, 10), png(LARGE, LARGE, body=bytes((3 * LARGE + 1) * LARGE))
    bombs = {
        "hidden scans.jpg": hidden_scans(scans),
        "scans.jpg": many_scans(LARGE, 50),
        "spaces.ppm": b"P3 " + b" " * SIZE + b"9 9 255\n",
        "numbers.ppm": b"P3 " + f"{SIDE} {SIDE} 255\n".encode() + b"0 " * (SIZE // 2),
        "strips.tif": strips(),
        "chunks.png": many_chunks(zeros, b"tEXt", b"a\0"),
        "texts.png": many_chunks(zeros, b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 16), 9)),
        "zeros.png": zeros,
        "frames.gif": frames("GIF"),
        "large.gif": encoded("GIF"),
        "frames.webp": frames("WEBP"),
        "large.webp": LARGE_WEBP,
    }
    if features.check("avif"):
        bombs["large.avif"] = encoded("AVIF", 1500, speed=10)
    return bombs


def worst(bombs, *, seed, seconds, count=3):
    """Change bombs at random for some time, and return those that took the most CPU time."""
    rng = random.Random(seed)
    end = time.monotonic() + seconds
    ranking = []
    with Decoder(1, seconds=1.0, max_pixels=LARGE * LARGE) as decoder:
        pending = list(bombs)
        while time.monotonic() < end:
            data = pending.pop() if pending else mutated(rng.choice(ranking)[1], rng)
            began = time.monotonic()
            with suppress(BadImage):
                decoder.decode(data, side=768)
            ranking.append((time.monotonic() - began, data))
            ranking.sort(key=lambda entry: -entry[0])
            del ranking[4 * count :]
    return [data for _, data in ranking[:count]]


def mutated(data, rng):
    """Repeat, remove or replace some bytes of a file."""
    start = rng.randrange(len(data))
    stop = min(len(data), start + rng.choice((1, 2, 4, 16, 256, 4096)))
    match rng.randrange(3):
        case 0:
            changed = data[:stop] + data[start:stop] * rng.choice((1, 10, 1000)) + data[stop:]
        case 1:
            changed = data[:start] + data[stop:]
        case _:
            changed = data[:start] + rng.randbytes(stop - start) + data[stop:]
    return changed if 0 < len(changed) <= SIZE else data
