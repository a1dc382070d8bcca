"""Downloads that break off, or bring something else."""

import hashlib
from threading import Thread

import pytest

from nearfar.networks.weights import published
from nearfar.networks.weights.published import DownloadError, download

CONTENT = bytes(range(256)) * 400
DIGITS = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def site(tmp_path):
    """A published file; its URL reads it from the disk."""
    file = tmp_path / "site" / "model.pth"
    file.parent.mkdir()
    file.write_bytes(CONTENT)
    return file


def test_a_file_arrives_whole_and_verified(site, tmp_path):
    file = tmp_path / "weights" / "model.pth"
    assert download(site.as_uri(), file, digits=DIGITS) == file
    assert file.read_bytes() == CONTENT
    assert sorted(entry.name for entry in file.parent.iterdir()) == [".model.pth.lock", "model.pth"]


def test_a_file_that_is_there_is_not_fetched_again(site, tmp_path):
    file = tmp_path / "model.pth"
    file.write_bytes(b"there")
    download(site.as_uri(), file, digits=DIGITS)
    assert file.read_bytes() == b"there"


@pytest.mark.parametrize("content", [CONTENT[:1000], CONTENT[:-1] + b"!", None], ids=["broken off", "other", "none"])
def test_what_is_not_the_file_leaves_nothing(content, site, tmp_path):
    site.unlink() if content is None else site.write_bytes(content)
    problem = "No such file" if content is None else f'expected "{DIGITS[:8]}", got '
    target = tmp_path / "weights" / "model.pth"
    with pytest.raises(DownloadError, match=f"{site.as_uri()}: .*{problem}"):
        download(site.as_uri(), target, digits=DIGITS[:8])
    assert [file.name for file in target.parent.iterdir() if file.suffix != ".lock"] == []
    site.write_bytes(CONTENT)
    assert download(site.as_uri(), target, digits=DIGITS[:8]).read_bytes() == CONTENT


def test_several_at_once_share_one_transfer(site, tmp_path, monkeypatch):
    file, urls, transfer = tmp_path / "model.pth", [], published.download_url_to_file

    def counted(url, *arguments, **settings):
        urls.append(url)
        transfer(url, *arguments, **settings)

    monkeypatch.setattr(published, "download_url_to_file", counted)
    threads = [Thread(target=download, args=(site.as_uri(), file), kwargs={"digits": DIGITS}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file.read_bytes() == CONTENT
    assert urls == [site.as_uri()]
