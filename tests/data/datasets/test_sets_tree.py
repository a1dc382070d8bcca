"""How folders and archives are listed: everything once, nothing hidden, nothing from outside, oddities named."""

import errno
import io
import os
import random
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
from PIL import Image
from trees_on_disk import add, lock, write, write_tar, write_zip

from nearfar import data
from nearfar.data.datasets.archives import open_tree
from nearfar.data.datasets.base import UnreadableError
from nearfar.data.store.prepare import prepare

FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


def test_hidden_files_and_litter_are_ignored(tmp_path):
    names = ["jay/1.jpg", "jay/._1.jpg", ".hidden/2.jpg", "__MACOSX/jay/1.jpg", "jay/Thumbs.db", "jay/.DS_Store"]
    for place, make in (("folder", write), ("a.zip", write_zip), ("a.tar", write_tar)):
        tree = open_tree(make(tmp_path / place, names))
        assert tree.names == ("jay/1.jpg",)
        assert tree.remarks == ()


def test_a_link_to_a_folder_is_followed_but_a_loop_only_once(tmp_path):
    write(tmp_path, ["far/1.jpg", "root/wren/1.jpg"])
    (tmp_path / "root/jay").symlink_to(tmp_path / "far")
    (tmp_path / "root/wren/again").symlink_to(tmp_path / "root")
    tree = open_tree(tmp_path / "root")
    assert tree.names == ("jay/1.jpg", "wren/1.jpg")
    assert tree.remarks == ("wren/again: the same folder as one visited before; skipped",)


def test_a_broken_link_is_named(tmp_path):
    write(tmp_path, ["jay/1.jpg"])
    (tmp_path / "jay/2.jpg").symlink_to(tmp_path / "nothing")
    tree = open_tree(tmp_path)
    assert tree.remarks == ("jay/2.jpg: a broken link; left out",)
    assert tree.unreadable == (("jay/2.jpg", "a broken link"),)


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_thousands_of_nested_folders_in_archives(kind, tmp_path):
    deep = "d/" * 3000
    names = [f"{deep}jay/1.jpg", f"{deep}wren/1.jpg"]
    archive = (write_zip if kind == "zip" else write_tar)(tmp_path / f"a.{kind}", names)
    assert open_tree(archive).names == tuple(names)
    assert data.open("folder", archive).classes == ("jay", "wren")


def test_thousands_of_nested_folders_on_disk(tmp_path, monkeypatch):
    root, depth = tmp_path / "root", 3000  # beyond the longest path of the system
    root.mkdir()
    monkeypatch.chdir(root)
    try:
        for level in range(depth):
            if level == 1500:
                write(Path(), ["jay/1.jpg", "wren/1.jpg"])
            os.mkdir("d")
            os.chdir("d")
        tree = open_tree(root)
        assert tree.names == ("d/" * 1500 + "jay/1.jpg", "d/" * 1500 + "wren/1.jpg")
        assert [reason for _, reason in tree.unreadable] == [os.strerror(errno.ENAMETOOLONG)]
    finally:
        os.chdir(root)
        while os.path.isdir("d"):
            os.chdir("d")
        for level in reversed(range(depth)):
            os.chdir("..")
            os.rmdir("d")
            if level == 1500:
                shutil.rmtree("jay")
                shutil.rmtree("wren")


def test_a_loop_of_links_hides_nothing_beside_it(tmp_path):
    write(tmp_path, ["jay/1.jpg", "wren/1.jpg"])
    (tmp_path / "jay/0").symlink_to("0")
    tree = open_tree(tmp_path)
    assert tree.names == ("jay/1.jpg", "wren/1.jpg")
    assert tree.unreadable == (("jay/0", "Too many levels of symbolic links"),)


def test_folders_that_cannot_be_listed_are_errors_unless_they_are_skipped(tmp_path, monkeypatch):
    for name in ("jay/1.png", "wren/1.png"):
        file = tmp_path / "photos" / name
        file.parent.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(file)
    lock(monkeypatch, tmp_path / "photos" / "wren")
    dataset = data.open("folder", tmp_path / "photos")
    assert dataset.left_out == ["wren: Permission denied; left out"]
    with pytest.raises(UnreadableError, match=r"wren \(Permission denied\); on_error=\"skip\" continues"):
        prepare(dataset, cache=tmp_path / "cache")
    assert len(prepare(dataset, cache=tmp_path / "cache", on_error="skip")) == 1
    lock(monkeypatch, tmp_path / "photos")
    with pytest.raises(PermissionError):
        open_tree(tmp_path / "photos")


def test_members_that_lead_out_of_an_archive_are_named_and_passed_over(tmp_path):
    names = ["../1.jpg", "/etc/1.jpg", "jay/../../1.jpg", "jay/1.jpg"]
    for tree in (open_tree(write_tar(tmp_path / "a.tar", names)), open_tree(write_zip(tmp_path / "a.zip", names))):
        assert tree.names == ("jay/1.jpg",)
        assert len(tree.remarks) == 3
        assert all("path outside of the archive" in remark for remark in tree.remarks)


def test_links_in_a_tar_are_named_and_never_followed_out_of_it(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        add(archive, "jay/1.jpg", b"one")
        add(archive, "jay/2.jpg", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(archive, "jay/3.jpg", type=tarfile.LNKTYPE, linkname="/etc/passwd")
        add(archive, "jay/4.jpg", type=tarfile.LNKTYPE, linkname="jay/1.jpg")
        add(archive, "jay/5.jpg", type=tarfile.FIFOTYPE)
    tree = open_tree(tmp_path / "a.tar")
    assert tree.names == ("jay/1.jpg", "jay/4.jpg")
    assert tree.read(1) == b"one"
    assert tree.remarks == (
        "jay/2.jpg in a.tar: a link; skipped",
        "jay/3.jpg in a.tar: a link; skipped",
        "jay/5.jpg in a.tar: not a regular file; skipped",
    )


def test_encrypted_members_of_a_zip_are_named(tmp_path):
    file = write_zip(tmp_path / "a.zip", ["jay/1.jpg"])
    data = bytearray(file.read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1
    file.write_bytes(data)
    assert open_tree(file).remarks == ("jay/1.jpg in a.zip: encrypted; skipped",)


def test_of_two_members_with_one_name_the_later_counts(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        add(archive, "jay/1.jpg", b"old")
        add(archive, "./jay/1.jpg", b"new")
    tree = open_tree(tmp_path / "a.tar")
    assert tree.read(0) == b"new"
    assert tree.remarks == ("jay/1.jpg in a.tar: occurs twice; the later one counts",)


def test_a_folder_of_archives_is_read_as_one(tmp_path):
    write(tmp_path, {"README.md": "about"})
    write_tar(tmp_path / "b-1.tar", ["birds/wren/1.jpg"])
    write_tar(tmp_path / "b-0.tar", ["birds/jay/1.jpg"], "w:gz")  # whatever its ending says
    tree = open_tree(tmp_path)
    assert tree.names == ("birds/jay/1.jpg", "birds/wren/1.jpg")
    assert [tree.read(index).decode() for index in (0, 1)] == list(tree.names)


def test_archives_can_be_given_as_a_list_and_beside_pictures_are_left_alone(tmp_path):
    files = [write_tar(tmp_path / f"{at}.tar", [f"jay/{at}.jpg"]) for at in range(3)]
    assert open_tree(files[:2]).names == ("jay/0.jpg", "jay/1.jpg")
    write(tmp_path, ["wren/1.jpg"])
    assert [name for name in open_tree(tmp_path).names if name.endswith(".jpg")] == ["wren/1.jpg"]


def test_a_member_of_a_zip_may_have_no_name(tmp_path):
    file = write_zip(tmp_path / "a.zip", ["jay/1.jpg", "x"])
    file.write_bytes(file.read_bytes().replace(b"x", b"\0"))  # a name ends at its first zero
    assert open_tree(file).names == ("jay/1.jpg",)


def test_zip_and_tar_files_together_are_refused(tmp_path):
    write_tar(tmp_path / "a.tar", ["jay/1.jpg"])
    write_zip(tmp_path / "b.zip", ["jay/2.jpg"])
    with pytest.raises(ValueError, match="both zip and tar files"):
        open_tree(tmp_path)


def test_archives_named_like_parts_are_parts(tmp_path):
    write_tar(tmp_path / "train.tar", ["jay/1.jpg"])
    write_tar(tmp_path / "test.tar", ["test/wren/1.jpg"])
    assert open_tree(tmp_path).names == ("test/wren/1.jpg", "train/jay/1.jpg")


def test_what_is_not_there_or_no_archive_is_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_tree(tmp_path / "nowhere")
    write(tmp_path, {"a.tar": b"no tar file " * 100, "empty.tar": b"", "b.tar.gz": b"\x1f\x8bno"})
    for name in ("a.tar", "empty.tar", "b.tar.gz"):
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            open_tree(tmp_path / name)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_a_tar_that_is_cut_short_is_refused(mode, tmp_path):
    file = tmp_path / "a.tar"
    with tarfile.open(file, mode) as archive:
        for at in range(3):
            add(archive, f"jay/{at}.jpg", random.Random(at).randbytes(3000))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2 if mode != "w" else 5000])
    with pytest.raises(ValueError, match=r"a\.tar cannot be read"):
        open_tree(file)


def test_long_names_are_read_in_every_format(tmp_path):
    name = "/".join(["directory" * 7] * 2) + "/image.jpg"
    for form in FORMATS:
        file = tmp_path / f"{form}.tar"
        with tarfile.open(file, "w", format=form) as archive:
            add(archive, name, b"data")
            add(archive, "short.jpg", b"more")
        tree = open_tree(file)
        assert tree.names == (name, "short.jpg")
        assert [tree.read(index) for index in (0, 1)] == [b"data", b"more"]


def damaged(tmp_path, place, value):
    """An archive of two members, with a long name, in which bytes are replaced."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        add(archive, "jay/" + "a" * 120 + ".jpg", b"data")
        add(archive, "jay/2.jpg", b"data")
    data = bytearray(stream.getvalue())
    data[place : place + len(value)] = value
    (tmp_path / "a.tar").write_bytes(data)
    return tmp_path / "a.tar"


def test_damaged_headers_give_members_or_one_kind_of_error(tmp_path):
    rng, messages = random.Random(0), []
    for _ in range(200):
        file = damaged(tmp_path, rng.randrange(3000), rng.randbytes(1))
        try:
            tree = open_tree(file)
        except ValueError as error:
            messages.append(str(error))
        else:
            assert all(tree.read(index) == b"data" for index in range(len(tree.files)))
    assert messages
    assert all(message.startswith(f"{file} cannot be read") for message in messages)


def test_no_member_behind_a_damaged_header_is_lost_in_silence(tmp_path):
    for member in (0, 2):  # 512 bytes each: extended header, its records, header and data of the first member
        with pytest.raises(ValueError, match=r"a\.tar cannot be read"):
            open_tree(damaged(tmp_path, 4 * 512 - 512 * member + 40, b"broken"))


def test_thousands_of_long_names_in_a_row_are_refused(tmp_path):
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 4
    (tmp_path / "a.tar").write_bytes((header.tobuf() + b"name".ljust(512, b"\0")) * 3000)
    with pytest.raises(ValueError, match=r"a\.tar cannot be read"):
        open_tree(tmp_path / "a.tar")


def test_a_member_cannot_have_a_negative_size(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        add(archive, "jay/1.jpg", pax_headers={"size": "-512"})
    with pytest.raises(ValueError, match=r"a\.tar cannot be read"):
        open_tree(tmp_path / "a.tar")


def test_a_zip_may_be_damaged_at_its_end(tmp_path):
    file = write_zip(tmp_path / "a.zip", ["jay/1.jpg", "jay/2.jpg"])
    data = bytearray(file.read_bytes())
    data[data.index(b"PK\x01\x02")] = 0
    file.write_bytes(data)
    assert zipfile.is_zipfile(file)
    with pytest.raises(ValueError, match=r"a\.zip cannot be read as a zip file"):
        open_tree(file)
