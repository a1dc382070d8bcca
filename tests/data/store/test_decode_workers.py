"""Images are decoded in processes that are killed at their limits."""

import io
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from odd_files import JPEG, LONG_JPEG, PNG, many_scans
from PIL import Image
from waiting import wait_for

from nearfar.data.datasets.base import open as open_dataset
from nearfar.data.datasets.frames import pad_to_squares
from nearfar.data.store import decode as decoding
from nearfar.data.store import prepare
from nearfar.data.store.decode import BadImage, Decoder, DecoderClosed, SlowImage, decode

BOMB = many_scans(6000, 50)  # small, allowed by its headers, and seconds of work


@pytest.fixture
def decoder():
    with Decoder(1) as found:
        yield found


def test_a_worker_decodes_as_the_function_does(decoder):
    for settings in (
        {},
        {"channels": 1},
        {"side": 8},
        {"side": 8, "aspect": "squash"},
        {"box": (2, 3, 9, 8), "pad": True},
    ):
        for data in (JPEG, PNG):
            np.testing.assert_array_equal(decoder.decode(data, **settings), decode(data, **settings))
    with pytest.raises(BadImage, match="truncated"):
        decoder.decode(LONG_JPEG[:-300])


def test_an_image_that_takes_too_much_cpu_time_is_given_up():
    with Decoder(1, seconds=0.1) as decoder:
        for _ in range(2):
            with pytest.raises(SlowImage, match=r"decoding took more than 0\.1 seconds"):
                decoder.decode(BOMB)
            assert decoder.decode(PNG).shape == (24, 36, 3)  # by the next process


def test_an_image_that_takes_too_long_is_given_up():
    with Decoder(1, wall_seconds=0.2) as decoder:
        with pytest.raises(SlowImage, match=r"decoding took more than 0\.2 seconds"):
            decoder.decode(BOMB)
        assert decoder.decode(PNG).shape == (24, 36, 3)


def test_an_image_that_needs_too_much_memory_is_given_up(monkeypatch):
    monkeypatch.setattr(decoding, "PIXEL_BYTES", 0)
    monkeypatch.setattr(decoding, "BASE_BYTES", 400 << 20)
    file = io.BytesIO()
    Image.new("L", (11_000, 11_000)).save(file, "PNG", compress_level=1)
    with Decoder(1) as decoder:
        with pytest.raises(BadImage, match="not enough memory"):
            decoder.decode(file.getvalue())
        assert decoder.decode(PNG).shape == (24, 36, 3)


def test_a_decoder_that_crashes_harms_nobody_else(decoder):
    decoder.decode(PNG)
    process = decoder._workers[0]._process
    os.kill(process.pid, signal.SIGSEGV)
    with pytest.raises(BadImage, match="the decoder crashed with exit code -11"):
        decoder.decode(PNG)
    assert decoder.decode(PNG).shape == (24, 36, 3)


def test_closing_does_not_wait():
    decoder = Decoder(1)
    ended = []

    def work():
        try:
            decoder.decode(BOMB)
        except DecoderClosed as error:
            ended.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]  # one decodes, one waits
    for thread in threads:
        thread.start()
    wait_for(lambda: decoder._workers[0]._ready)
    decoder.close()
    for thread in threads:
        thread.join(30)
    assert len(ended) == 2  # neither image was decoded to its end


def test_a_worker_knows_no_secrets(decoder, monkeypatch):
    monkeypatch.setenv("NEARFAR_TOKEN", "correct-horse-battery")
    decoder.decode(PNG)
    process = decoder._workers[0]._process
    assert b"correct-horse" not in Path(f"/proc/{process.pid}/environ").read_bytes()
    assert sorted(os.listdir(f"/proc/{process.pid}/fd")) == ["0", "1", "2"]


@pytest.mark.parametrize("framed", [lambda dataset: dataset, pad_to_squares], ids=["plain", "padded"])
def test_one_bad_file_is_named_and_skipped(framed, tmp_path, monkeypatch):
    (tmp_path / "photos" / "a").mkdir(parents=True)
    for name, data in (("1.jpg", JPEG), ("2.jpg", BOMB), ("3.jpg", PNG)):
        (tmp_path / "photos" / "a" / name).write_bytes(data)
    with Decoder(2, seconds=0.1) as decoder:
        monkeypatch.setattr(prepare, "shared_decoder", lambda: decoder)
        dataset = framed(open_dataset("folder", tmp_path / "photos"))
        began = time.process_time()
        store = prepare.prepare(dataset, cache=tmp_path / "cache", on_error="skip")
        assert time.process_time() - began < 0.75  # nothing was decoded by this process
    assert [(one.name, one.reason) for one in store.bad] == [("a/2.jpg", "decoding took more than 0.1 seconds")]
    assert len(store) == 2
