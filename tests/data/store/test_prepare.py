"""What ``prepare`` promises: decoded once, the same after a kill, safe with company, and clear about trouble."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from odd_files import saved
from PIL import Image

from nearfar.data.datasets.base import Dataset
from nearfar.data.store import prepare as drafts
from nearfar.data.store.decode import Decoder, decode
from nearfar.data.store.prepare import JOURNAL, BadFilesError, Draft, prepare, store_folder
from nearfar.data.store.sources import Arrays, Files, Vectors
from nearfar.data.store.store import INDEX, PIXELS, Store

COUNT = 150  # two blocks and a bit


def dataset_of(source):
    labels = np.zeros(len(source), dtype=np.int64)
    return Dataset("birds", source, labels, ("bird",), {"all": np.arange(len(source))})


def photos(folder, count=COUNT):
    """Small pictures, all different, in three shapes."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{number:04}.png" for number in range(count)]
    for number, name in enumerate(names):
        if not (folder / name).exists():
            image = np.full((6 + number % 3, 8, 3), number % 251, dtype=np.uint8)
            (folder / name).write_bytes(saved(Image.fromarray(image), "PNG"))
    return dataset_of(Files(folder, names))


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def birds(tmp_path_factory):
    return photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture
def decoding(monkeypatch):
    """What was decoded."""
    seen = []
    monkeypatch.setattr(Decoder, "decode", lambda _, data, **settings: (seen.append(data), decode(data, **settings))[1])
    return seen


def files_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# --- what comes out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 5])
def test_every_picture_is_in_its_place(birds, cache, workers):
    store = prepare(birds, cache=cache, workers=workers)
    assert store.rows.tolist() == list(range(COUNT))
    for place in range(COUNT):
        assert np.array_equal(store.image(place), decode(birds.source.read(place)))


def test_pictures_are_shrunk_as_asked(birds, cache):
    assert prepare(birds, cache=cache, side=4).sizes[:3].tolist() == [[4, 5], [4, 5], [4, 4]]
    assert (prepare(birds, cache=cache, side=4, aspect="squash").sizes == 4).all()
    assert prepare(birds, cache=cache, channels=1).image(7).shape == (7, 8, 1)


def test_progress_reaches_the_end(birds, cache):
    told = []
    prepare(birds, cache=cache, progress=lambda done, total: told.append((done, total)))
    assert told == [(done, COUNT) for done in range(COUNT + 1)]


# --- once ----------------------------------------------------------------------------------------------------


def test_nothing_is_decoded_twice(birds, cache, decoding):
    stores = [prepare(birds, cache=cache, **settings) for settings in ({}, {"workers": 1}, {"on_error": "skip"})]
    assert len(decoding) == COUNT
    assert len({store.folder for store in stores}) == 1
    assert np.array_equal(stores[0].pixels, stores[1].pixels)


@pytest.mark.parametrize("settings", [{"side": 5}, {"aspect": "squash"}, {"channels": 1}])
def test_other_settings_are_another_store(birds, cache, settings):
    assert prepare(birds, cache=cache).folder != prepare(birds, cache=cache, **settings).folder


def test_a_changed_file_is_another_store(tmp_path, cache):
    dataset = photos(tmp_path / "photos", 3)
    before = prepare(dataset, cache=cache)
    (tmp_path / "photos" / "0001.png").write_bytes(saved(Image.new("RGB", (5, 5), "red"), "PNG"))
    after = prepare(dataset, cache=cache)
    assert after.folder != before.folder
    assert after.image(1).shape == (5, 5, 3)


def test_the_folder_is_known_beforehand_and_holds_a_store_and_its_record(birds, cache):
    folder = store_folder(birds, cache=cache, side=7)
    assert not folder.exists()
    assert prepare(birds, cache=cache, side=7).folder == folder
    assert set(files_of(folder)) == {PIXELS, INDEX, "store.json", ".nearfar"}
    assert [entry for entry in cache.iterdir() if entry.is_dir()] == [folder]
    about = json.loads((folder / "store.json").read_text())
    assert about["source"] == birds.source.fingerprint()
    assert (about["dataset"], about["side"], about["aspect"], about["channels"]) == ("birds", 7, "keep", 3)
    assert Store.open(folder).about == about


def test_the_cache_is_where_the_environment_says(birds, tmp_path, monkeypatch):
    monkeypatch.setenv("NEARFAR_CACHE", str(tmp_path / "elsewhere"))
    folder = prepare(birds).folder
    assert folder.parent == tmp_path / "elsewhere"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NEARFAR_CACHE", "~/elsewhere")
    assert prepare(birds).folder == folder


@pytest.mark.parametrize("file", [PIXELS, INDEX, "store.json"])
def test_a_damaged_store_is_made_anew(birds, cache, file):
    folder = prepare(birds, cache=cache).folder
    whole = files_of(folder)
    (folder / file).write_bytes(whole[file][:-5])
    prepare(birds, cache=cache)
    assert files_of(folder) == whole


# --- interrupted ---------------------------------------------------------------------------------------------

PROGRAM = """
import sys, time
from pathlib import Path
sys.path[:0] = {tests!r}
from nearfar.data.store.prepare import prepare
from nearfar.data.store.decode import Decoder
from test_prepare import photos
original = Decoder.decode
def slowly(self, data, **settings):
    time.sleep({pause})
    return original(self, data, **settings)
Decoder.decode = slowly
store = prepare(photos(Path({photos!r})), cache={cache!r}, workers=2)
print(store.folder)
"""


def other_process(dataset, cache, pause):
    program = PROGRAM.format(
        tests=[str(Path(__file__).parent), str(Path(__file__).parents[2] / "helpers")],
        pause=pause,
        photos=str(dataset.source.root),
        cache=str(cache),
    )
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_a_block(process, cache):
    """The draft of another process, as soon as a part of it is done."""
    for _ in range(600):
        for drafted in cache.glob(".*.draft"):
            if drafts.files_done(drafted):
                return drafted
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    raise AssertionError("nothing was prepared")


def test_a_killed_preparation_goes_on_and_ends_the_same(birds, cache, tmp_path, decoding):
    process = other_process(birds, cache, pause=0.02)
    drafted = wait_for_a_block(process, cache)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    done = drafts.files_done(drafted)
    assert 0 < done < COUNT
    assert not store_folder(birds, cache=cache).exists()

    resumed = prepare(birds, cache=cache)
    assert len(decoding) == COUNT - done
    undisturbed = prepare(birds, cache=tmp_path / "other")
    assert files_of(resumed.folder) == files_of(undisturbed.folder)
    assert not drafted.exists()


def test_two_processes_at_once_do_the_work_once(birds, cache, decoding):
    process = other_process(birds, cache, pause=0.01)
    wait_for_a_block(process, cache)
    told = []
    store = prepare(birds, cache=cache, progress=lambda done, total: told.append(done))
    printed, _ = process.communicate(timeout=60)
    assert decoding == []
    assert printed.strip() == str(store.folder)
    assert told  # how far the other is
    assert len(store) == COUNT


@pytest.fixture
def interrupted(birds, cache, monkeypatch):
    """The draft of a preparation that stopped after two blocks."""

    def stop(done, total):
        if done == 130:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(birds, cache=cache, progress=stop)
    (drafted,) = cache.glob(".*.draft")
    assert drafts.files_done(drafted) == 128
    return drafted


@pytest.mark.parametrize(
    ("file", "change", "left"),
    [
        (PIXELS, lambda data: data + b"half a picture", 22),
        (JOURNAL, lambda data: data + b'{"first": 128, "sizes": [[6, 8], [7', 22),
        (JOURNAL, lambda data: data[:-1], 86),
        (PIXELS, lambda data: data[:-1], 86),
        (PIXELS, lambda data: b"", 150),
        (JOURNAL, lambda data: b"", 150),
        (JOURNAL, lambda data: b"nonsense\n" + data, 150),
    ],
)
def test_only_whole_blocks_of_a_draft_are_taken_over(birds, cache, tmp_path, interrupted, decoding, file, change, left):
    (interrupted / file).write_bytes(change((interrupted / file).read_bytes()))
    resumed = prepare(birds, cache=cache)
    assert len(decoding) == left
    assert np.array_equal(resumed.pixels, prepare(birds, cache=tmp_path / "other").pixels)


def test_a_kill_just_before_the_end_costs_nothing(birds, cache, monkeypatch, decoding):
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(birds, cache=cache)
    decoding.clear()
    assert len(prepare(birds, cache=cache)) == COUNT
    assert decoding == []


# --- trouble -------------------------------------------------------------------------------------------------


def test_a_full_disk_is_one_line_and_what_is_done_is_kept(birds, cache, monkeypatch, decoding):
    add = Draft.add

    def full(self, results):
        if self.done:
            (self.folder / PIXELS).open("ab").write(b"part of a block")
            raise OSError(errno.ENOSPC, "No space left on device")
        add(self, results)

    with monkeypatch.context() as patch:
        patch.setattr(Draft, "add", full)
        with pytest.raises(OSError, match="No space left on device") as error:
            prepare(birds, cache=cache)
    assert str(error.value) == (
        f"cannot write to {cache}: No space left on device. "
        "64 of 150 images are done and kept: run it again to continue."
    )
    decoding.clear()
    assert len(prepare(birds, cache=cache)) == COUNT
    assert len(decoding) == COUNT - 64


def test_short_writes_are_carried_on(birds, tmp_path):
    class Slow:
        data = b""

        def write(self, data):
            self.data += bytes(data[:7])
            return min(7, len(data))

    slow = Slow()
    drafts._write(slow, bytes(range(100)))
    assert slow.data == bytes(range(100))


def test_a_cache_that_cannot_be_made_is_one_line(birds, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match=r"cannot write to .*file/cache: Not a directory\.$"):
        prepare(birds, cache=tmp_path / "file" / "cache")


class Flaky(Files):
    """Files of which some cannot be read."""

    broken: frozenset[int] = frozenset()

    def read(self, index):
        if index in self.broken:
            raise PermissionError(errno.EACCES, "Permission denied")
        return super().read(index)


def test_files_that_cannot_be_read_are_named_and_tried_again(tmp_path, cache):
    plain = photos(tmp_path / "photos", 6).source
    source = Flaky(plain.root, plain.paths)
    source.broken = frozenset({2, 4})
    dataset = dataset_of(source)
    store = prepare(dataset, cache=cache, on_error="skip")
    assert store.rows.tolist() == [0, 1, 3, 5]
    assert [(one.index, one.name, one.reason) for one in store.bad] == [
        (2, "0002.png", "cannot be read: Permission denied"),
        (4, "0004.png", "cannot be read: Permission denied"),
    ]
    source.broken = frozenset({4})
    assert prepare(dataset, cache=cache, on_error="skip").rows.tolist() == [0, 1, 2, 3, 5]
    with pytest.raises(
        BadFilesError, match=r"^1 of 6 files could not be decoded: 0004\.png \(cannot be read: Permission denied"
    ):
        prepare(dataset, cache=cache)


def test_bad_files_are_an_error_at_once_the_second_time(tmp_path, cache, decoding):
    dataset = photos(tmp_path / "photos", 5)
    (tmp_path / "photos" / "0001.png").unlink()
    (tmp_path / "photos" / "0003.png").write_bytes(b"")
    message = (
        r"^2 of 5 files could not be decoded: 0001\.png \(cannot be read: No such file or directory\); "
        r"0003\.png \(an empty file\)\. on_error="
    )
    for _ in range(2):
        with pytest.raises(BadFilesError, match=message):
            prepare(dataset, cache=cache)
    assert len(prepare(dataset, cache=cache, on_error="skip")) == 3
    assert len(decoding) == 4


def test_no_picture_at_all_is_an_error_even_when_skipping(tmp_path, cache):
    dataset = photos(tmp_path / "photos", 2)
    for name in ("0000.png", "0001.png"):
        (tmp_path / "photos" / name).write_bytes(b"text")
    with pytest.raises(BadFilesError, match=r"^2 of 2 files could not be decoded: .*\(text, not an image\)$"):
        prepare(dataset, cache=cache, on_error="skip")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"side": 0}, "side is 0; it must be ≥ 1"),
        ({"aspect": "crop"}, "aspect is 'crop'; allowed are keep, squash"),
        ({"channels": 0}, "channels is 0; allowed are 1 and 3"),
        ({"on_error": "ignore"}, "on_error is 'ignore'; allowed are fail, skip"),
        ({"workers": 0}, "workers is 0; it must be ≥ 1"),
    ],
)
def test_settings_are_checked(birds, cache, settings, message):
    with pytest.raises(ValueError, match=message):
        prepare(birds, cache=cache, **settings)
    assert not cache.exists()


# --- arrays --------------------------------------------------------------------------------------------------


def test_pictures_in_an_array_are_neither_copied_nor_written(cache):
    images = np.random.default_rng(0).integers(0, 256, (4, 8, 9), dtype=np.uint8)
    store = prepare(dataset_of(Arrays(images)), cache=cache)
    assert np.shares_memory(store.pixels, images)
    assert not cache.exists()


def test_large_pictures_in_an_array_are_shrunk():
    images = np.zeros((4, 40, 60, 3), dtype=np.uint8)
    assert prepare(dataset_of(Arrays(images)), side=20).sizes.tolist() == [[20, 30]] * 4
    assert prepare(dataset_of(Arrays(images)), side=20, aspect="squash").sizes.tolist() == [[20, 20]] * 4


def test_channels_of_an_array_can_be_chosen():
    colour = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    grey = prepare(dataset_of(Arrays(colour)), channels=1)
    assert np.abs(grey.image(1)[:, :, 0] - np.asarray(Image.fromarray(colour[1]).convert("L")).astype(int)).max() <= 1
    assert np.array_equal(
        prepare(dataset_of(Arrays(colour[..., 0])), channels=3).image(0), colour[0, :, :, [0] * 3].T.swapaxes(0, 1)
    )


def test_vectors_are_not_pictures():
    with pytest.raises(ValueError, match="dataset birds holds vectors; only images are prepared"):
        prepare(dataset_of(Vectors(np.ones((3, 2), dtype=np.float32))))
