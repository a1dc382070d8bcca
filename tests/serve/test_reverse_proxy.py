"""The configuration of nginx in docs/serve.md, in front of a real server."""

import re
import shutil
import socket
import ssl
import subprocess
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from fake_index import encoded, picture
from serve_process import process
from waiting import wait_for

NGINX = shutil.which("nginx")
API = "/api/v1"
HOST, TOKEN = "photos.example", "a-token-of-some-length"

pytestmark = pytest.mark.skipif(NGINX is None, reason="needs nginx")


@contextmanager
def nginx(folder, certificate, upstream):
    """Start nginx with the documented configuration, on a free port and with a certificate of our own."""
    assert NGINX is not None
    text = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    documented = re.search(r"```nginx\n(.*?)```", text, re.DOTALL)
    assert documented is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    changes = {
        "listen 443": f"listen 127.0.0.1:{port}",
        "/etc/ssl/photos.example.pem": str(certificate[0]),
        "/etc/ssl/photos.example.key": str(certificate[1]),
        "http://127.0.0.1:8000": upstream,
    }
    site = documented[1]
    for old, new in changes.items():
        assert old in site
        site = site.replace(old, new)
    paths = "".join(
        f"{name}_temp_path {folder / name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    file = folder / "nginx.conf"
    file.write_text(
        f"daemon off; pid {folder / 'pid'}; error_log {folder / 'error.log'};\n"
        f"events {{}}\nhttp {{ access_log off;\n{paths}{site}}}\n"
    )
    with subprocess.Popen([NGINX, "-c", str(file)], stderr=subprocess.PIPE, text=True) as child:
        try:
            wait_for(lambda: _answers(port) or child.poll() is not None)
            assert child.poll() is None, child.stderr and child.stderr.read()
            yield f"https://127.0.0.1:{port}"
        finally:
            child.terminate()


def _answers(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_the_documented_proxy(small_index, tmp_path, certificate, monkeypatch):
    monkeypatch.setenv("NEARFAR_TOKEN", TOKEN)
    place, log = shutil.copytree(small_index, tmp_path / "my.index"), tmp_path / "access.log"
    options = ("--allow-host", HOST, "--proxy", "127.0.0.1", "--access-log", str(log))
    trust = ssl.create_default_context(cafile=certificate[0])
    with (
        process(place, *options) as (_, upstream),
        nginx(tmp_path, certificate, upstream) as address,
        httpx.Client(base_url=address, verify=trust, headers={"host": HOST}, timeout=20) as client,
    ):
        assert client.get(f"{API}/info").status_code == 401
        assert client.get(f"{API}/info", headers={"host": "other.example"}).status_code == 403
        signed = {"authorization": f"Bearer {TOKEN}"}
        # The proxy overwrites an address that a client claims to come from.
        claimed, image = {**signed, "x-forwarded-for": "203.0.113.9"}, ("q.png", encoded(picture(1)))
        answer = client.post(f"{API}/search", files={"image": image}, headers=claimed)
        assert answer.status_code == 200, answer.text
        assert answer.json()["hits"]
        assert "Secure" in client.post(f"{API}/session", json={"token": TOKEN}).headers["set-cookie"]
        too_large = client.post(f"{API}/search", files={"image": ("q.png", b"x" * (21 << 20))}, headers=signed)
        assert too_large.status_code == 413
    assert {line.split()[2].partition(":")[0] for line in log.read_text().splitlines()} == {"127.0.0.1"}
    assert TOKEN not in log.read_text()
