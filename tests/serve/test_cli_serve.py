"""The command ``nearfar serve`` up to the start of the server."""

import shutil
import socket

import pytest
from fastapi.testclient import TestClient

from nearfar.search import Index


def test_help_has_an_example(nearfar):
    assert "Example: nearfar serve my.index" in nearfar("serve", "--help").out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--certificate", "some.pem"], "HTTPS requires both --certificate and --key"),
        (["--token", ""], "token has 0 characters, at most 0 bits; 128 are required"),
        (["--allow-host", "photos.example", "--token", "short"], "token has 5 characters, at most 30 bits"),
        (["--max-upload", "0"], "upload_bytes is 0"),
        (["--port", "70000"], "--port"),
        (["--runs", "nowhere"], "--runs is 'nowhere'; there is no such folder"),
        (["--host", "no.such.name.invalid", "--token", "x" * 20], "no such name or address is known"),
    ],
)
def test_bad_input_ends_in_one_line(words, message, refused, small_index):
    assert message in refused("serve", small_index, "--device", "cpu", "--read-only", "--port", "0", *words)


def test_an_index_that_cannot_be_changed_leads_to_read_only(nearfar, small_index, monkeypatch):
    def refuse(*words, **settings):
        raise PermissionError(13, "Permission denied", str(small_index / ".lock"))

    monkeypatch.setattr(Index, "open", refuse)
    err = nearfar("serve", str(small_index), "--device", "cpu", "--port", "0", code=1).err
    assert err == f"nearfar: {small_index} cannot be written to; serve it with --read-only\n"


def test_an_empty_token_in_the_environment_is_refused(refused, small_index, monkeypatch):
    monkeypatch.setenv("NEARFAR_TOKEN", "")
    error = refused("serve", small_index, "--device", "cpu", "--read-only", "--port", "0")
    assert "NEARFAR_TOKEN is set and empty" in error


def test_an_index_or_a_model_that_is_gone_is_named(refused, small_index, tmp_path):
    assert str(tmp_path / "nothing") in refused("serve", tmp_path / "nothing", "--port", "0")
    place = shutil.copytree(small_index, tmp_path / "my.index")
    (place / "model" / "model.safetensors").unlink()
    error = refused("serve", place, "--device", "cpu", "--port", "0")
    assert error.startswith(f"nearfar: {place}/model/model.safetensors does not exist")


@pytest.mark.parametrize("words", [["--host", "0.0.0.0"], ["--allow-host", "photos.example"], ["--token", "new"]])
def test_a_token_is_made_where_one_is_needed(words, small_index, monkeypatch, nearfar):
    apps = []
    monkeypatch.setattr("nearfar.serve.server.run", lambda app, *_, started: apps.append(app))
    out = nearfar("serve", str(small_index), "--read-only", "--device", "cpu", "--port", "0", *words).out
    token = out.removeprefix("token: ").strip()
    client = TestClient(apps[0], base_url="http://127.0.0.1")
    assert client.get("/api/v1/info").status_code == 401
    assert client.get("/api/v1/info", headers={"authorization": f"Bearer {token}"}).status_code == 200


def test_the_page_is_opened_with_its_token(nearfar, small_index, monkeypatch):
    opened = []
    monkeypatch.setattr("nearfar.serve.server.run", lambda *_, started: started())
    monkeypatch.setattr("webbrowser.open", opened.append)
    words = ["--read-only", "--device", "cpu", "--port", "0", "--open", "--token", "a-token-of-at-least-100%25"]
    nearfar("serve", str(small_index), *words)
    assert opened[0].endswith("/#token=a-token-of-at-least-100%2525")


def test_a_port_in_use_is_told_at_once(nearfar, small_index):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        err = nearfar("serve", small_index, "--port", port, code=1).err
    assert f"cannot listen on 127.0.0.1 port {port}" in err
