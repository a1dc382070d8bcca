"""Downloads from a server on this machine that breaks off, knows no ranges, or sends something else."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from nearfar.networks.weights import download as downloads
from nearfar.networks.weights.download import ChecksumError, DownloadError, download, sha256

CONTENT = bytes(range(256)) * 400
DIGITS = hashlib.sha256(CONTENT).hexdigest()


@dataclass
class Site:
    """What a server has and how it behaves; and what it was asked for."""

    content: bytes = CONTENT
    status: int = 200
    break_after: list[int] = field(default_factory=list)  # bytes it sends of its next answers before it hangs up
    url: str = ""
    asked: list[str | None] = field(default_factory=list)  # the Range of each request


def handler(site: Site) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            site.asked.append(wanted)
            if site.status != 200:
                self.send_error(site.status)
                return
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
            total = len(site.content)
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
            self.send_header("Content-Length", str(total - start))
            self.end_headers()
            sent = site.break_after.pop(0) if site.break_after else total
            self.wfile.write(site.content[start : start + sent])

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    return Handler


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("no_proxy", "*")
    site = Site()
    with ThreadingHTTPServer(("127.0.0.1", 0), handler(site)) as server:
        site.url = f"http://127.0.0.1:{server.server_port}/model.pth"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield site
        server.shutdown()
        thread.join()


def test_a_file_arrives_whole_and_verified(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "weights" / "model.pth"
    assert download(site.url, file, digits=DIGITS) == file
    assert file.read_bytes() == CONTENT
    assert sorted(each.name for each in file.parent.iterdir()) == [".model.pth.lock", "model.pth"]


def test_the_first_digits_of_the_checksum_are_enough(site: Site, tmp_path: Path) -> None:
    assert sha256(download(site.url, tmp_path / "model.pth", digits=DIGITS[:8].upper())) == DIGITS


def test_progress_is_told_in_bytes(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "PIECE", 60_000)
    told: list[tuple[int, int]] = []
    download(site.url, tmp_path / "model.pth", progress=lambda done, total: told.append((done, total)))
    assert told == [(60_000, 102_400), (102_400, 102_400)]


def test_a_file_that_is_there_is_not_fetched_again(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "model.pth"
    file.write_bytes(b"there")
    download(site.url, file)
    assert (file.read_bytes(), site.asked) == (b"there", [])


def test_a_transfer_that_breaks_off_begins_again(site: Site, tmp_path: Path) -> None:
    site.break_after = [1000, 2000]
    file = download(site.url, tmp_path / "model.pth")
    assert file.read_bytes() == CONTENT
    assert site.asked == [None] * 3


def test_two_versions_of_a_file_are_never_joined(site: Site, tmp_path: Path) -> None:
    """The first call gives up on one version, and the next one gets another of the same length."""
    file = tmp_path / "model.pth"
    site.break_after = [1000, 2000, 3000]
    with pytest.raises(DownloadError, match=r"interrupted after \d,000"):
        download(site.url, file)
    site.content = CONTENT[::-1]
    assert download(site.url, file).read_bytes() == site.content


def test_a_tampered_file_is_removed_and_named(site: Site, tmp_path: Path) -> None:
    site.content = CONTENT[:-1] + b"!"
    found = hashlib.sha256(site.content).hexdigest()[:8]
    with pytest.raises(ChecksumError, match=rf"model\.pth has the SHA-256 {found}…; expected is {DIGITS[:8]}"):
        download(site.url, tmp_path / "model.pth", digits=DIGITS[:8])
    assert [file.name for file in tmp_path.iterdir() if file.suffix != ".lock"] == []


def test_what_the_server_refuses_is_not_asked_for_twice(site: Site, tmp_path: Path) -> None:
    site.status = 404
    with pytest.raises(DownloadError, match="the server answered 404 Not Found"):
        download(site.url, tmp_path / "model.pth")
    assert len(site.asked) == 1


def test_a_server_in_trouble_is_asked_again(site: Site, tmp_path: Path) -> None:
    site.status = 503
    with pytest.raises(DownloadError, match="503"):
        download(site.url, tmp_path / "model.pth")
    assert len(site.asked) == downloads.TRIES


def test_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as closed:  # bound, but nobody listens
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/model.pth"
        with pytest.raises(DownloadError, match=f"{url}: .*refused"):
            download(url, tmp_path / "model.pth")


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://example.org/model.pth", "model.pth"])
def test_only_the_web_is_a_source(url: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must begin with http:// or https://"):
        download(url, tmp_path / "model.pth")


def test_two_at_once_share_one_transfer(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "model.pth"
    threads = [Thread(target=download, args=(site.url, file), kwargs={"digits": DIGITS}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file.read_bytes() == CONTENT
    assert site.asked == [None]
