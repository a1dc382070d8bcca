"""Images that take seconds to decode delay nobody but those who send them."""

import asyncio
import io
import itertools
import statistics
import time

import httpx
import numpy as np
import pytest
from bombs import SIZE, corpus, worst
from dearest_requests import API
from fake_index import FakeIndex, encoded, picture
from PIL import Image, features
from waiting import result_of

from nearfar.data.store.decode import FORMATS, METADATA, decode
from nearfar.serve import Limits, create
from nearfar.serve.limits import WEB_FORMATS
from nearfar.serve.uploads import PIXEL_BYTES

UPLOADERS, AT_ONCE, SEARCHES = 3, 4, 30
MUTATION_SECONDS = 8.0


@pytest.fixture(scope="module")
def bombs():
    known = list(corpus().values())
    return known[:1] + worst(known, seed=1, seconds=MUTATION_SECONDS) + known[1:]


def test_bombs_delay_no_searches_of_others(bombs):
    """Three uploaders send bombs of all formats, and those that a search for more of them has found."""
    assert all(len(bomb) <= 1.1 * SIZE for bomb in bombs)
    app = create(FakeIndex(40), limits=Limits(formats=FORMATS, pixels=50_000_000))
    thrown = []

    async def visit():
        over, sent = asyncio.Event(), itertools.count()

        def client(number):
            transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(f"203.0.113.{number}", 1))
            return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=None)

        async def throw(number):
            async with client(number % UPLOADERS) as uploader:
                while not over.is_set():
                    bomb = bombs[next(sent) // UPLOADERS % len(bombs)]  # the same of all uploaders
                    thrown.append((await uploader.post(f"{API}/search", files={"image": bomb})).status_code)

        async def search(number):
            times = []
            async with client(number) as other:
                for turn in range(SEARCHES):
                    began = time.monotonic()
                    answer = await other.post(f"{API}/search", files={"image": encoded(picture(turn))})
                    times.append(time.monotonic() - began)
                    assert answer.status_code == 200
            return times

        async with app.router.lifespan_context(app):
            quiet = await search(7)
            tasks = [asyncio.create_task(throw(number)) for number in range(UPLOADERS * AT_ONCE)]
            await asyncio.sleep(1)
            times = await search(8)
            over.set()
        await asyncio.gather(*tasks)
        return quiet, times

    quiet, times = result_of(visit())
    assert set(thrown) <= {200, 422, 503}
    assert statistics.median(times) < 1 + 5 * statistics.median(quiet)
    assert max(times) < 10


@pytest.mark.parametrize("kind", ["TIFF", "BMP", "PPM", "JPEG2000"])
def test_other_formats_are_accepted_only_on_demand(kind, client):
    if kind == "JPEG2000" and not features.check("jpg_2000"):
        pytest.skip("this Pillow has no JPEG 2000")
    image = {"image": encoded(picture(3), kind)}
    name = "JPEG 2000" if kind == "JPEG2000" else kind
    answer = client().post(f"{API}/search", files=image)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "bad_image")
    assert f"{name} is not accepted here; accepted are JPEG, PNG, WebP, GIF, AVIF" in answer.json()["error"]["message"]
    served = client(limits=Limits(formats=(*WEB_FORMATS, name)))
    assert served.post(f"{API}/search", files=image).status_code == 200


def test_formats_must_exist():
    with pytest.raises(ValueError, match="formats is 'HEIC'; allowed are JPEG, PNG, "):
        Limits(formats=("JPEG", "HEIC"))


@pytest.mark.parametrize("side", [1, 16, 64, 300])
def test_no_real_image_has_too_many_bytes_for_its_pixels(side):
    """Noise of many frames in each format, with metadata of a megabyte."""
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (side, side, 4), dtype=np.uint8)) for _ in range(20)]
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0"
    several = {"save_all": True, "append_images": images[1:]}
    kinds = {
        "PNG": {**several, "compress_level": 0, "icc_profile": bytes(1 << 20)},
        "GIF": several,
        "WEBP": {**several, "lossless": True, "icc_profile": bytes(1 << 20)},
        "JPEG": {"quality": 100, "subsampling": 0, "exif": exif, "icc_profile": bytes(1 << 20)},
        "MPO": {"quality": 100, "subsampling": 0, "save_all": True},
    }
    for kind, settings in kinds.items():
        file, first = io.BytesIO(), images[0].convert("RGB") if kind in ("JPEG", "MPO") else images[0]
        if kind == "MPO":
            settings["append_images"] = [image.convert("RGB") for image in images[1:]]
        first.save(file, kind, **settings)
        assert decode(file.getvalue(), max_pixel_bytes=PIXEL_BYTES).shape == (side, side, 3), kind


def test_many_bytes_of_few_pixels_are_refused(client):
    answer = client().post(f"{API}/search", files={"image": encoded(picture(3, side=20)) + bytes(METADATA + 256 * 400)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "bad_image")
    assert answer.json()["error"]["message"].endswith("bytes for 20 × 20 pixels")
