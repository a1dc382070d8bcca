"""Downloads from a server on this machine that breaks off, or sends something else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from nearfar.networks.weights.published import DownloadError, download

CONTENT = bytes(range(256)) * 400
DIGITS = hashlib.sha256(CONTENT).hexdigest()


@dataclass
class Site:
    """What a server has and how it behaves; and what it was asked for."""

    content: bytes = CONTENT
    status: int = 200
    break_after: int | None = None  # bytes it sends before it hangs up
    url: str = ""
    requests: int = 0


def handler(site):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            site.requests += 1
            if site.status != 200:
                self.send_error(site.status)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(site.content)))
            self.end_headers()
            self.wfile.write(site.content[: site.break_after])

        def log_message(self, format, *arguments):
            pass

    return Handler


@pytest.fixture
def site(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    site = Site()
    with ThreadingHTTPServer(("127.0.0.1", 0), handler(site)) as server:
        site.url = f"http://127.0.0.1:{server.server_port}/model.pth"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield site
        server.shutdown()
        thread.join()


def test_a_file_arrives_whole_and_verified(site, tmp_path):
    file = tmp_path / "weights" / "model.pth"
    assert download(site.url, file, digits=DIGITS) == file
    assert file.read_bytes() == CONTENT
    assert sorted(each.name for each in file.parent.iterdir()) == [".model.pth.lock", "model.pth"]


def test_a_file_that_is_there_is_not_fetched_again(site, tmp_path):
    file = tmp_path / "model.pth"
    file.write_bytes(b"there")
    download(site.url, file, digits=DIGITS)
    assert (file.read_bytes(), site.requests) == (b"there", 0)


@pytest.mark.parametrize("change", [{"break_after": 1000}, {"content": CONTENT[:-1] + b"!"}, {"status": 404}])
def test_what_is_not_the_file_leaves_nothing(change, site, tmp_path):
    """Of a transfer that breaks off, of a tampered file, and of an answer that is none."""
    vars(site).update(change)
    problem = "404" if "status" in change else f'expected "{DIGITS[:8]}", got '
    with pytest.raises(DownloadError, match=f"{site.url}: .*{problem}"):
        download(site.url, tmp_path / "model.pth", digits=DIGITS[:8])
    assert [file.name for file in tmp_path.iterdir() if file.suffix != ".lock"] == []
    vars(site).update(break_after=None, content=CONTENT, status=200)
    assert download(site.url, tmp_path / "model.pth", digits=DIGITS[:8]).read_bytes() == CONTENT


def test_two_at_once_share_one_transfer(site, tmp_path):
    file = tmp_path / "model.pth"
    threads = [Thread(target=download, args=(site.url, file), kwargs={"digits": DIGITS}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file.read_bytes() == CONTENT
    assert site.requests == 1
