"""Folders and files of outputs: what was there before stays."""

from pathlib import Path

import pytest

from nearfar.reports import pages
from nearfar.search.audit import Audit
from nearfar.utils.folders import FILES, MARKER, claim, claim_file, is_ours, keep_apart


def test_a_claimed_folder_is_claimed_again_by_its_kind_alone(tmp_path):
    (tmp_path / "i").mkdir()
    (tmp_path / "i" / MARKER).touch()  # of a process that was killed
    claim(tmp_path / "i", "index")
    (tmp_path / "i" / "notes.txt").write_text("mine")
    claim(tmp_path / "i", "index")
    assert is_ours(tmp_path / "i", "index")
    with pytest.raises(FileExistsError, match=r"contains '\.nearfar' and was not created as the folder of this run"):
        claim(tmp_path / "i", "run")


@pytest.mark.parametrize("name", ["notes.txt", MARKER, "index.json", ".lock"])
@pytest.mark.parametrize("link", [False, True])
def test_a_folder_with_anything_else_is_refused(tmp_path, name, link):
    (tmp_path / "real").write_text("mine")
    (tmp_path / "i").mkdir()
    file = tmp_path / "i" / name
    file.symlink_to(tmp_path / "real") if link else file.write_text("mine")
    with pytest.raises(FileExistsError, match=f"i contains '{name}'"):
        claim(tmp_path / "i", "index")
    assert [entry.name for entry in (tmp_path / "i").iterdir()] == [name]
    assert (tmp_path / "real").read_text() == file.read_text() == "mine"


@pytest.mark.parametrize("out", ["photos", "photos/jay/i", ".", "link"])
def test_a_folder_may_not_overlap_with_an_input(tmp_path, out):
    (tmp_path / "photos" / "jay").mkdir(parents=True)
    (tmp_path / "link").symlink_to("photos")
    with pytest.raises(ValueError, match="overlaps with the input"):
        keep_apart(tmp_path / out, [tmp_path / "photos", None, object()])
    keep_apart(tmp_path / "i", [tmp_path / "photos", "efficientnet_lite0"])


def test_a_file_is_replaced_only_if_it_is_ours_or_by_force(tmp_path):
    file, link = tmp_path / "page.html", tmp_path / "link.html"
    link.symlink_to(file)
    assert claim_file(link) == file.resolve()
    file.write_text("mine")
    for kind in (None, *FILES):
        with pytest.raises(FileExistsError, match=r"link\.html exists and was not written by this command"):
            claim_file(link, kind)
    assert claim_file(link, force=True) == file.resolve()
    with pytest.raises(ValueError, match=r"link\.html is an input as well"):
        claim_file(link, inputs=[file], force=True)
    with pytest.raises(ValueError, match=r"page\.html lies in an input"):
        claim_file(file, inputs=[tmp_path], force=True)
    file.write_text(pages.render("audit.html", "", audit=Audit(None, (), ()), suspects=[], groups=[]))
    assert claim_file(link, "audit", [tmp_path]) == file.resolve()
    with pytest.raises(FileExistsError, match=r"was not written by this command; name another file$"):
        claim_file(file, "clusters", force=None)
    with pytest.raises(ValueError, match="needed is a file in a folder that exists"):
        claim_file(tmp_path)


def test_a_file_that_is_none_is_written_to(tmp_path):
    assert claim_file("/dev/null") == Path("/dev/null")
    assert claim_file("/dev/stdout") == Path("/dev/stdout")
