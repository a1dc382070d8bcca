"""The command ``nearfar serve`` up to the start of the server."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from nearfar.cli import main
from nearfar.search import Index


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("serve", "--help") == 0
    assert "Example: nearfar serve my.index" in capsys.readouterr().out


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
def test_bad_input_ends_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], small_index: Path
) -> None:
    assert call("serve", str(small_index), "--device", "cpu", "--read-only", "--port", "0", *words) != 0
    printed = capsys.readouterr()
    assert printed.err.startswith("nearfar: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


def test_an_index_that_cannot_be_changed_leads_to_read_only(
    capsys: pytest.CaptureFixture[str], small_index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*words: object, **settings: object) -> None:
        raise PermissionError(13, "Permission denied", str(small_index / ".lock"))

    monkeypatch.setattr(Index, "open", refuse)
    assert call("serve", str(small_index), "--device", "cpu", "--port", "0") == 1
    assert capsys.readouterr().err == f"nearfar: {small_index} cannot be written to; serve it with --read-only\n"


def test_an_empty_token_in_the_environment_is_refused(
    capsys: pytest.CaptureFixture[str], small_index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEARFAR_TOKEN", "")
    assert call("serve", str(small_index), "--device", "cpu", "--read-only", "--port", "0") == 1
    assert "NEARFAR_TOKEN is set and empty" in capsys.readouterr().err


def test_a_folder_that_is_no_index_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert call("serve", str(tmp_path / "nothing"), "--port", "0") == 1
    assert str(tmp_path / "nothing") in capsys.readouterr().err


def test_a_model_that_is_gone_ends_in_one_line(
    capsys: pytest.CaptureFixture[str], small_index: Path, tmp_path: Path
) -> None:
    place = shutil.copytree(small_index, tmp_path / "my.index")
    (place / "model" / "model.safetensors").unlink()
    assert call("serve", str(place), "--device", "cpu", "--port", "0") == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"nearfar: {place}/model/model.safetensors does not exist")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("words", [["--host", "0.0.0.0"], ["--allow-host", "photos.example"], ["--token", "new"]])
def test_a_token_is_made_where_one_is_needed(
    words: list[str], small_index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    apps = []
    monkeypatch.setattr("nearfar.serve.server.run", lambda app, *_, started: apps.append(app))
    assert call("serve", str(small_index), "--read-only", "--device", "cpu", "--port", "0", *words) == 0
    token = capsys.readouterr().out.removeprefix("token: ").strip()
    client = TestClient(apps[0], base_url="http://127.0.0.1")
    assert client.get("/api/v1/info").status_code == 401
    assert client.get("/api/v1/info", headers={"authorization": f"Bearer {token}"}).status_code == 200


def test_the_page_is_opened_with_its_token(small_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("nearfar.serve.server.run", lambda *_, started: started())
    monkeypatch.setattr("webbrowser.open", opened.append)
    words = ["--read-only", "--device", "cpu", "--port", "0", "--open", "--token", "a-token-of-at-least-100%25"]
    assert call("serve", str(small_index), *words) == 0
    assert opened[0].endswith("/#token=a-token-of-at-least-100%2525")


def test_a_port_in_use_is_told_at_once(capsys: pytest.CaptureFixture[str], small_index: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert call("serve", str(small_index), "--port", str(port)) == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err
