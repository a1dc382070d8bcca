"""``nearfar data`` as its users meet it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from odd_files import saved
from PIL import Image

import nearfar.cli.data  # noqa: F401  (makes the command known)
from nearfar import data
from nearfar.cli import main


def call(*words: str | Path) -> int:
    """Run a command in this process; its exit code."""
    with pytest.raises(SystemExit) as stop:
        main(["data", *map(str, words)])
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEARFAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "cache"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Four classes of three pictures, each class in a colour of its own."""
    folder = tmp_path / "photos"
    for name, colour in (("jay", "blue"), ("robin", "red"), ("siskin", "yellow"), ("wren", "brown")):
        (folder / name).mkdir(parents=True)
        for number in range(3):
            (folder / name / f"{number}.png").write_bytes(saved(Image.new("RGB", (80, 60), colour), "PNG"))
    return folder


@pytest.fixture
def damaged(photos: Path) -> Path:
    (photos / "jay" / "0.png").write_bytes(b"")
    (photos / "wren" / "2.png").write_bytes(b"<html>gone</html>")
    return photos


@pytest.mark.parametrize("words", [[], ["list"], ["info"], ["verify"], ["prepare"], ["show"]])
def test_help_has_an_example(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*words, "--help") == 0
    assert "Example: nearfar data " in capsys.readouterr().out


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 0
    assert "Usage: nearfar data" in capsys.readouterr().out


def test_the_list_has_every_data_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("list") == 0
    lines = capsys.readouterr().out.splitlines()
    for name in data.names():
        (line,) = [line for line in lines if line.split()[:1] == [name]]
        assert data.summary(name)[:60] in line


# --- info ----------------------------------------------------------------------------------------------------


def test_a_data_set_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("info", "cub") == 0
    assert capsys.readouterr().out == data.describe("cub") + "\n"


def test_what_a_folder_holds(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("info", "folder", photos) == 0
    printed = capsys.readouterr().out
    assert "folder: 12 images of 4 classes" in printed
    assert ["all", "12", "4", "3", "–", "3"] in [line.split() for line in printed.splitlines()]
    assert f"To prepare it, run: nearfar data prepare folder {photos}" in printed


def test_the_command_that_prepares_has_the_settings_and_is_quoted(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "my table.csv"
    file = next(photos.glob("*/*.png"))
    table.write_text(f"file,label\n{file.relative_to(photos)},jay\n")
    assert call("info", "table", table, "--set", "path=file", "--set", f"images={photos}") == 0
    said = capsys.readouterr().out
    assert f"run: nearfar data prepare table '{table}' --set path=file --set images={photos}" in said


def test_what_was_prepared_and_what_was_skipped(damaged: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("prepare", "folder", damaged, "--on-error", "skip", "--side", "32") == 0
    capsys.readouterr()
    assert call("info", "folder", damaged) == 0
    printed = capsys.readouterr().out
    assert f"prepared: 10 images (41.28 kB), side 32, aspect keep, in {cache}" in printed
    assert "2 of 12 files could not be decoded:" in printed
    assert [line.split() for line in printed.splitlines() if ".png" in line] == [
        ["jay/0.png", "an", "empty", "file"],
        ["wren/2.png", "an", "HTML", "page,", "not", "an", "image"],
    ]


def test_arrays_need_no_preparing(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("info", "digits") == 0
    assert "The dataset is in memory; no preparation is needed." in capsys.readouterr().out


def test_settings_reach_the_data_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("info", "glyphs", "--set", "classes=6", "--set", "per_class=3") == 0
    assert "glyphs: 18 images of 6 classes" in capsys.readouterr().out


# --- verify --------------------------------------------------------------------------------------------------


def test_a_data_set_in_order(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("verify", "folder", photos, "--pictures") == 0
    assert "folder: complete, no differences, all images can be decoded." in capsys.readouterr().out


def test_differences_are_listed_and_are_an_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(1, 4):
        folder = tmp_path / "cub" / f"{number:03}.Bird_{number}"
        folder.mkdir(parents=True)
        (folder / "a.jpg").write_bytes(b"not looked at")
    assert call("verify", "cub", tmp_path / "cub", "--all") == 1
    printed = capsys.readouterr().out
    problems = data.problems(data.open("cub", tmp_path / "cub"))
    assert f"{len(problems):,} differences:" in printed
    for problem in problems:
        assert problem in printed


def test_a_long_list_is_cut_unless_all_is_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "jay").mkdir()
    (tmp_path / "jay" / "0.png").write_bytes(saved(Image.new("RGB", (8, 8)), "PNG"))
    for number in range(30):
        (tmp_path / "jay" / f"{number:02}.txt").write_text("a note")
    count = len(data.problems(data.open("folder", tmp_path)))
    assert call("verify", "folder", tmp_path) == 1
    printed = capsys.readouterr().out
    assert f"… and {count - 20} more; --all lists them" in printed
    assert printed.count("jay/") == 20
    assert call("verify", "folder", tmp_path, "--all") == 1
    assert capsys.readouterr().out.count(".txt") == 30


def test_damaged_pictures_are_found_on_demand(damaged: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("verify", "folder", damaged, "--no-pictures") == 0
    assert call("verify", "folder", damaged) == 1
    printed = capsys.readouterr().out
    assert "2 of 12 files could not be decoded:" in printed
    assert "jay/0.png" in printed
    assert not cache.exists()


# --- prepare -------------------------------------------------------------------------------------------------


def test_prepared_once(photos: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("prepare", "folder", photos) == 0
    assert capsys.readouterr().out.startswith("prepared 12 images (172.80 kB) in ")
    assert call("prepare", "folder", photos) == 0
    assert capsys.readouterr().out.startswith(f"12 images (172.80 kB) were prepared before: {cache}")


def test_files_that_are_no_pictures_are_listed_and_one_line_says_what_to_do(
    damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("prepare", "folder", damaged) == 1
    printed = capsys.readouterr()
    assert "wren/2.png" in printed.out
    assert printed.err == "nearfar: 2 of 12 files could not be decoded; --on-error skip continues without them\n"


def test_another_cache(photos: Path, tmp_path: Path, cache: Path) -> None:
    assert call("prepare", "folder", photos, "--cache", tmp_path / "other") == 0
    assert (tmp_path / "other").exists()
    assert not list(cache.glob("folder-*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prepare", "folders", "x"], "dataset is 'folders' (did you mean 'folder'?)"),
        (["prepare", "folder"], "folder needs root"),
        (["prepare", "folder", "no such place"], "no such place"),
        (["prepare", "PHOTOS", "--on-error", "ignore"], "on_error is 'ignore'; allowed are fail, skip"),
        (["prepare", "PHOTOS", "--side", "0"], "side is 0; it must be ≥ 1"),
        (["prepare", "PHOTOS", "--aspect", "crop"], "aspect is 'crop'; allowed are keep, squash"),
        (["prepare", "digits", "--set", "vectors=True"], "holds vectors; only images are prepared"),
        (["show", "PHOTOS", "--out", "grid.txt"], "needed is a file that ends with .png, .jpg, .jpeg, .webp"),
        (["show", "PHOTOS", "--out", "no/such/grid.png"], "needed is a file in a folder that exists"),
        (["show", "PHOTOS", "--part", "query"], "part is 'query'; folder has all, train, test"),
        (["show", "PHOTOS", "--view", "zoom"], "view is 'zoom'; allowed are auto, random"),
        (["show", "PHOTOS", "--classes", "9"], "9 × 4 needs 36"),
        (["show", "digits", "--set", "vectors=True"], "digits holds vectors; there are no images to show"),
        (["show", "digits", "--set", "vectors"], "--set is 'vectors'; NAME=VALUE is needed"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], message: str, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(photos.parent)
    given = [part for word in words for part in (["folder", "photos"] if word == "PHOTOS" else [word])]
    assert call(*given) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("nearfar: ")
    assert printed.count("\n") == 1
    assert message in printed


# --- show ----------------------------------------------------------------------------------------------------


def test_the_first_batch_is_drawn(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "grid.png"
    assert call("show", "folder", photos, "--out", file, "--per-class", "3", "--size", "64", "--resize", "64") == 0
    assert "6 images of 2 classes of train, random view, 64 × 64 pixels" in capsys.readouterr().out
    with Image.open(file) as image:
        seen = {colour for _, colour in image.convert("RGB").getcolors(1 << 20)}
    assert {(0, 0, 255), (255, 0, 0)} <= seen  # jay and robin, the first half of the classes
    assert (255, 255, 0) not in seen


def test_the_picture_is_the_same_before_and_after_preparing(photos: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for file in photos.rglob("*.png"):
        file.write_bytes(saved(Image.fromarray(rng.integers(0, 256, (80, 90, 3), dtype=np.uint8)), "PNG"))
    words = ("show", "folder", photos, "--size", "48", "--resize", "64", "--seed", "3")
    assert call(*words, "--out", tmp_path / "before.png") == 0
    assert call("prepare", "folder", photos) == 0
    assert call(*words, "--out", tmp_path / "after.png") == 0
    assert (tmp_path / "before.png").read_bytes() == (tmp_path / "after.png").read_bytes()
    assert call(*words[:-1], "4", "--out", tmp_path / "other.png") == 0
    assert (tmp_path / "other.png").read_bytes() != (tmp_path / "after.png").read_bytes()


def test_a_damaged_picture_in_the_batch_is_named(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (photos / "jay").iterdir():
        file.write_bytes(b"")
    words = ("show", "folder", photos, "--out", tmp_path / "grid.png", "--per-class", "3", "--size", "64")
    assert call(*words) == 1
    assert "jay/0.png (an empty file)" in capsys.readouterr().err
    assert call("prepare", "folder", photos, "--on-error", "skip") == 0
    assert call(*words) == 0  # with what is left


def test_small_pictures_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("show", "digits", "--out", tmp_path / "digits.webp", "--part", "test") == 0
    assert "20 images of 5 classes of test, none view, 8 × 8 pixels" in capsys.readouterr().out
