"""Hundreds of malformed images and requests: each gets an error response, and the server keeps running."""

import struct
import zlib

import numpy as np
from fake_index import FakeIndex, encoded, picture
from odd_files import chunk, png
from PIL import Image

from nearfar.serve import Limits

PATH = "/api/v1/search"
KINDS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM")
RNG = np.random.default_rng(0)


def truncated():
    for kind in KINDS:
        whole = encoded(picture(1, side=48), kind)
        for share in np.linspace(0, 1, 18, endpoint=False):
            yield whole[: int(share * len(whole))]


def flipped():
    for kind in KINDS:
        whole = encoded(picture(2, side=48), kind)
        for _ in range(40):
            broken = bytearray(whole)
            for place in RNG.integers(0, len(whole), int(RNG.integers(1, 9))):
                broken[place] ^= 1 << int(RNG.integers(8))
            yield bytes(broken)


def spliced():
    wholes = [encoded(picture(number, side=32), kind) for number, kind in enumerate(KINDS)]
    for first in wholes:
        for second in wholes:
            yield first[: len(first) // 2] + second[len(second) // 2 :]
            yield first[:16] + second[16:]


def noise():
    starts = (b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"RIFF\x10\0\0\0WEBP", b"BM", b"II*\0")
    starts += (b"P6 9 9 255\n", b"\0\0\0\x1cftypavif", b"\0\0\0\x0cjP  \r\n\x87\n")
    for start in starts:
        for length in (0, 1, 7, 100, 3000):
            yield start + RNG.bytes(length)


def bombs():
    most = 2**31 - 1
    for width, height in ((50_000, 50_000), (most, most), (most, 1), (1, most), (0, 9), (4001, 2501)):
        yield png(width, height, body=bytes(3_000_000))
    text = zlib.compress(b"a" * 30_000_000, 9)  # more words than pixels
    head, rest = (small := png(4, 4, body=bytes(52)))[:33], small[33:]
    yield head + chunk(b"zTXt", b"k\0\0" + text) + chunk(b"iCCP", b"p\0\0" + text) + rest
    yield b"GIF89a\xff\xff\xff\xff\x80\0\0" + bytes(6) + b",\0\0\0\0\xff\xff\xff\xff\0\x08\0;"
    yield b"BM" + struct.pack("<IHHIIiiHH", 60, 0, 0, 54, 40, 40_000, 40_000, 1, 24) + bytes(24)
    yield b"P6 99999 99999 255\n" + bytes(100)
    yield b"P6 " + b"9" * 5000 + b" 9 255\n"
    yield encoded(Image.new("1", (3_000, 3_400)), "TIFF", compression="group4")  # above the limit, a few bytes


def wrong_kinds():
    yield from (b"", b"\0", b"\0" * 4096, b"hello", "größe".encode(), b"{}", b"null", b"%PDF-1.7\n%", b"PK\x03\x04")
    yield from (b"<html><body>404", b"#!/bin/sh\nrm -rf /\n", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"MZ\x90\0", b"GIF")
    yield from (b"\x7fELF\x02\x01\x01", b"\x1f\x8b\x08\0", b"8BPS\0\1", b"\0\0\0\x18ftypheic", b"\xff\xd8")
    yield b"<svg onload=alert(1) xmlns='http://www.w3.org/2000/svg'/>"
    yield from (b"push graphic-context\nfill 'url(http://127.0.0.1/)'", b"\x80\x04\x95cposix\nsystem\n")


CASES = (truncated, flipped, spliced, noise, bombs, wrong_kinds)


def test_malformed_pictures_are_refused_and_the_server_goes_on(client):
    served = client(FakeIndex(8), limits=Limits(pixels=10_000_000, seconds=5))
    sent, statuses = 0, set()
    for make in CASES:
        name = make.__name__
        for content in make():
            answer = served.post(PATH, files={"image": ("x.jpg", content, "image/jpeg")}, params={"k": 2})
            sent += 1
            statuses.add(answer.status_code)
            assert answer.status_code in (200, 422), (name, sent, answer.text)  # some survive a flipped bit
            if answer.status_code == 422:
                assert answer.json()["error"]["code"] == "bad_image"
                assert len(answer.json()["error"]["message"]) < 300
            elif name in ("bombs", "wrong_kinds"):
                assert len(answer.content) < 2000, "a bomb went through"
    assert sent >= 500
    assert statuses == {200, 422}
    whole = served.post(PATH, files={"image": encoded(picture(3))}, params={"k": 1})
    assert whole.json()["hits"][0]["id"] == 3


def bodies():
    """Requests that are malformed around the image."""
    image = encoded(picture(1))
    part = b'Content-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
    whole = b"--x\r\n" + part + image + b"\r\n--x--\r\n"
    form = "multipart/form-data; boundary=x"
    for length in range(0, len(whole), max(1, len(whole) // 25)):
        yield {"content-type": form}, whole[:length]
    unnamed = ("multipart/form-data", "multipart/form-data; boundary=")
    for kind in (*unnamed, "text/plain", "application/json", "image/png", ""):
        yield {"content-type": kind}, whole
    yield {"content-type": "multipart/form-data; boundary=" + "y" * 5000}, whole
    yield {"content-type": form}, b"--x\r\n" * 2000
    yield {"content-type": form}, b"--x\r\n" + b"A: b\r\n" * 3000 + b"\r\nx\r\n--x--\r\n"
    yield (
        {"content-type": form},
        b'--x\r\nContent-Disposition: form-data; name="' + b"n" * 20_000 + b'"\r\n\r\nx\r\n--x--\r\n',
    )
    yield {"content-type": form}, b"".join(b"--x\r\n" + part + image + b"\r\n" for _ in range(50)) + b"--x--\r\n"
    yield {"content-type": form}, whole.replace(b"filename", b"filename*=utf-8''%ff%fe; f")
    for _ in range(20):
        broken = bytearray(whole)
        for place in RNG.integers(0, 90, 3):
            broken[place] = int(RNG.integers(256))
        yield {"content-type": form}, bytes(broken)


def test_malformed_requests_are_refused_and_the_server_goes_on(client):
    served = client(FakeIndex(8))
    seen = []
    for headers, body in bodies():
        answer = served.post(PATH, content=body, headers=headers)
        assert answer.status_code in (200, 400, 422), (headers, body[:100], answer.text)
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"code", "message"}
        seen.append(answer.status_code)
    assert len(seen) > 50
    assert seen.count(200) < len(seen) / 2
