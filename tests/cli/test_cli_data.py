"""``nearfar data`` as its users meet it."""

import numpy as np
import pytest
from odd_files import saved
from PIL import Image

from nearfar import data


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEARFAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "cache"


@pytest.fixture
def photos(tmp_path):
    """Four classes of three pictures, each class in a colour of its own."""
    folder = tmp_path / "photos"
    for name, colour in (("jay", "blue"), ("robin", "red"), ("siskin", "yellow"), ("wren", "brown")):
        (folder / name).mkdir(parents=True)
        for number in range(3):
            (folder / name / f"{number}.png").write_bytes(saved(Image.new("RGB", (80, 60), colour), "PNG"))
    return folder


@pytest.fixture
def damaged(photos):
    (photos / "jay" / "0.png").write_bytes(b"")
    (photos / "wren" / "2.png").write_bytes(b"<html>gone</html>")
    return photos


def test_without_a_command_there_is_help(nearfar):
    assert "Usage: nearfar data" in nearfar("data").out


def test_the_list_has_every_data_set(nearfar):
    lines = nearfar("data", "list").out.splitlines()
    for name in data.names():
        (line,) = [line for line in lines if line.split()[:1] == [name]]
        assert data.summary(name)[:60] in line


# --- info ----------------------------------------------------------------------------------------------------


def test_a_data_set_is_described(nearfar):
    assert nearfar("data", "info", "cub").out == data.describe("cub") + "\n"


def test_what_a_folder_holds(photos, nearfar):
    printed = nearfar("data", "info", "folder", photos).out
    assert "folder: 12 images of 4 classes" in printed
    assert ["all", "12", "4", "3", "–", "3"] in [line.split() for line in printed.splitlines()]
    assert f"To prepare it, run: nearfar data prepare folder {photos}" in printed


def test_the_command_that_prepares_has_the_settings_and_is_quoted(photos, tmp_path, nearfar):
    table = tmp_path / "my table.csv"
    file = next(photos.glob("*/*.png"))
    table.write_text(f"file,label\n{file.relative_to(photos)},jay\n")
    said = nearfar("data", "info", "table", table, "--set", "path=file", "--set", f"images={photos}").out
    assert f"run: nearfar data prepare table '{table}' --set path=file --set images={photos}" in said


def test_what_was_prepared_and_what_was_skipped(damaged, cache, nearfar):
    nearfar("data", "prepare", "folder", damaged, "--on-error", "skip", "--side", "32")
    printed = nearfar("data", "info", "folder", damaged).out
    assert f"prepared: 10 images (41.28 kB), side 32, aspect keep, in {cache}" in printed
    assert "2 of 12 files could not be decoded:" in printed
    assert [line.split() for line in printed.splitlines() if ".png" in line] == [
        ["jay/0.png", "an", "empty", "file"],
        ["wren/2.png", "an", "HTML", "page,", "not", "an", "image"],
    ]


def test_arrays_need_no_preparing(nearfar):
    assert "The dataset is in memory; no preparation is needed." in nearfar("data", "info", "digits").out


def test_settings_reach_the_data_set(nearfar):
    out = nearfar("data", "info", "glyphs", "--set", "classes=6", "--set", "per_class=3").out
    assert "glyphs: 18 images of 6 classes" in out


# --- verify --------------------------------------------------------------------------------------------------


def test_a_data_set_in_order(photos, nearfar):
    out = nearfar("data", "verify", "folder", photos, "--images").out
    assert "folder: complete, no differences, all images can be decoded." in out


def test_differences_are_listed_and_are_an_exit_code(tmp_path, nearfar):
    for number in range(1, 4):
        folder = tmp_path / "cub" / f"{number:03}.Bird_{number}"
        folder.mkdir(parents=True)
        (folder / "a.jpg").write_bytes(b"not looked at")
    printed = nearfar("data", "verify", "cub", tmp_path / "cub", "--all", code=1).out
    problems = data.problems(data.open("cub", tmp_path / "cub"))
    assert f"{len(problems):,} differences:" in printed
    for problem in problems:
        assert problem in printed


def test_a_long_list_is_cut_unless_all_is_wanted(tmp_path, nearfar):
    (tmp_path / "jay").mkdir()
    (tmp_path / "jay" / "0.png").write_bytes(saved(Image.new("RGB", (8, 8)), "PNG"))
    for number in range(30):
        (tmp_path / "jay" / f"{number:02}.txt").write_text("a note")
    count = len(data.problems(data.open("folder", tmp_path)))
    printed = nearfar("data", "verify", "folder", tmp_path, code=1).out
    assert f"… and {count - 20} more; --all lists them" in printed
    assert printed.count("jay/") == 20
    assert nearfar("data", "verify", "folder", tmp_path, "--all", code=1).out.count(".txt") == 30


def test_damaged_pictures_are_found_on_demand(damaged, cache, nearfar):
    nearfar("data", "verify", "folder", damaged, "--no-images")
    printed = nearfar("data", "verify", "folder", damaged, code=1).out
    assert "2 of 12 files could not be decoded:" in printed
    assert "jay/0.png" in printed
    assert not cache.exists()


# --- prepare -------------------------------------------------------------------------------------------------


def test_prepared_once(photos, cache, nearfar):
    assert nearfar("data", "prepare", "folder", photos).out.startswith("prepared 12 images (172.80 kB) in ")
    out = nearfar("data", "prepare", "folder", photos).out
    assert out.startswith(f"12 images (172.80 kB) were prepared before: {cache}")


def test_files_that_are_no_pictures_are_listed_and_one_line_says_what_to_do(damaged, nearfar):
    printed = nearfar("data", "prepare", "folder", damaged, code=1)
    assert "wren/2.png" in printed.out
    assert printed.err == "nearfar: 2 of 12 files could not be decoded; --on-error skip continues without them\n"


def test_another_cache(nearfar, photos, tmp_path, cache):
    nearfar("data", "prepare", "folder", photos, "--cache", tmp_path / "other")
    assert (tmp_path / "other").exists()
    assert not list(cache.glob("folder-*"))


# --- show ----------------------------------------------------------------------------------------------------


def test_the_first_batch_is_drawn(photos, tmp_path, nearfar):
    file = tmp_path / "grid.png"
    out = nearfar(
        "data", "show", "folder", photos, "--out", file, "--per-class", "3", "--size", "64", "--resize", "64"
    ).out
    assert "6 images of 2 classes of train, random view, 64 × 64 pixels" in out
    with Image.open(file) as image:
        seen = {colour for _, colour in image.convert("RGB").getcolors(1 << 20)}
    assert {(0, 0, 255), (255, 0, 0)} <= seen  # jay and robin, the first half of the classes
    assert (255, 255, 0) not in seen


def test_the_picture_is_the_same_before_and_after_preparing(nearfar, photos, tmp_path):
    rng = np.random.default_rng(0)
    for file in photos.rglob("*.png"):
        file.write_bytes(saved(Image.fromarray(rng.integers(0, 256, (80, 90, 3), dtype=np.uint8)), "PNG"))
    words = ("show", "folder", photos, "--size", "48", "--resize", "64", "--seed", "3")
    nearfar("data", *words, "--out", tmp_path / "before.png")
    nearfar("data", "prepare", "folder", photos)
    nearfar("data", *words, "--out", tmp_path / "after.png")
    assert (tmp_path / "before.png").read_bytes() == (tmp_path / "after.png").read_bytes()
    nearfar("data", *words[:-1], "4", "--out", tmp_path / "other.png")
    assert (tmp_path / "other.png").read_bytes() != (tmp_path / "after.png").read_bytes()


def test_a_damaged_picture_in_the_batch_is_named(photos, tmp_path, nearfar):
    for file in (photos / "jay").iterdir():
        file.write_bytes(b"")
    words = ("show", "folder", photos, "--out", tmp_path / "grid.png", "--per-class", "3", "--size", "64")
    assert "jay/0.png (an empty file)" in nearfar("data", *words, code=1).err
    nearfar("data", "prepare", "folder", photos, "--on-error", "skip")
    nearfar("data", *words)  # with what is left


def test_small_pictures_are_shown_as_they_are(tmp_path, nearfar):
    out = nearfar("data", "show", "digits", "--out", tmp_path / "digits.webp", "--part", "test").out
    assert "20 images of 5 classes of test, none view, 8 × 8 pixels" in out
