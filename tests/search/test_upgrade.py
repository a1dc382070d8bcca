"""Index folders of version 1 are upgraded when they are opened, and nothing in them is lost."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearfar.search import Index
from nearfar.search.storage import BadIndex, files, upgrade

pytest.importorskip("faiss")

FIXTURE = Path(__file__).parent / "index_version_1.zip"
# Written by version 1 of the format: five images, then two uploads, a removal, a moved and a changed file, an upload.
JOURNAL = "journal-000002"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    shutil.unpack_archive(FIXTURE, tmp_path / "i")
    return tmp_path / "i"


@pytest.fixture
def expected(old: Path) -> dict[str, Any]:
    return dict(json.loads((old / "expected.json").read_text()))


def check(index: Index, expected: dict[str, Any]) -> None:
    found = [[item.id, item.name, item.label, item.hash, dict(item.metadata)] for item in index.items]
    assert found == expected["items"]
    np.testing.assert_array_equal(index.vectors(), np.array(expected["vectors"], dtype=np.float32))
    assert [hashlib.sha256(index.thumbnail(item.id)).hexdigest() for item in index.items] == expected["thumbnails"]
    assert index.search(0, 5).ids == expected["neighbors"]
    assert index.info()["backend"] == "faiss:flat"


@pytest.mark.parametrize("read_only", [False, True])
def test_nothing_is_lost(
    old: Path, expected: dict[str, Any], caplog: pytest.LogCaptureFixture, read_only: bool
) -> None:
    caplog.set_level(logging.WARNING)
    with Index.open(old, read_only=read_only) as index:
        check(index, expected)
    assert [record.getMessage() for record in caplog.records] == [
        f"{old} was upgraded from index version 1 to version 2"
    ]
    assert sorted(path.name for path in old.iterdir() if ".sqlite-" not in path.suffix) == [
        ".lock", "data-000002", "expected.json", "index.json", "index.sqlite",
    ]  # fmt: skip
    assert sorted(path.name for path in (old / "data-000002").iterdir()) == [
        "faiss-ids.npy", "faiss.index", "ids.npy", "vectors.npy",
    ]  # fmt: skip
    with Index.open(old) as index:
        check(index, expected)
        assert index.add_vectors(index.vectors()[:1]) == [expected["next_id"]]
        index.compact()
        index.remove([expected["next_id"]])
        check(index, expected)
    assert len(caplog.records) == 1


def test_a_crash_leaves_the_old_index_usable(
    old: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever step is the last one: the upgrade is done again, and everything is there."""

    class Crash(BaseException):
        pass

    def crash(*_: object, **__: object) -> None:
        raise Crash

    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    for place, name in ((upgrade, "_journal"), (upgrade.Database, "write_settings"), (files, "write_card")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, crash)
            with pytest.raises(Crash):
                Index.open(old)
        assert {path: path.read_bytes() for path in before} == before
    with monkeypatch.context() as patch:
        patch.setattr(files, "sweep", crash)
        with pytest.raises(Crash):
            Index.open(old)
    with Index.open(old) as index:
        check(index, expected)
    assert not (old / JOURNAL).exists()


def test_an_old_index_that_is_in_use_is_read_as_it_is(
    old: Path, expected: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with files.write_lock(old):
        with Index.open(old, read_only=True) as index:
            check(index, expected)
            with pytest.raises(BadIndex, match="was opened read-only"):
                index.remove([0])
        with pytest.raises(BadIndex, match="is open for writing in another process"):
            Index.open(old)
    assert "cannot be upgraded now" in caplog.text
    assert (old / JOURNAL).exists()


def test_an_incomplete_last_record_is_left_out(old: Path, expected: dict[str, Any]) -> None:
    """It was never acknowledged."""
    with open(old / JOURNAL, "ab") as out:
        out.write((old / JOURNAL).read_bytes()[:300])
    with Index.open(old) as index:
        check(index, expected)


def test_a_damaged_record_costs_only_itself(
    old: Path, expected: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    data = bytearray((old / JOURNAL).read_bytes())
    data[60] ^= 0xFF  # in the first record, which added items 6 and 7
    (old / JOURNAL).write_bytes(data)
    with Index.open(old) as index:
        assert [item.id for item in index.items] == [row[0] for row in expected["items"] if row[0] != 6]
        assert index.add_vectors(index.vectors()[:1]) == [expected["next_id"]]
    assert "has 1 damaged places; the changes there are lost" in caplog.text


@pytest.mark.parametrize("name", ["ids.npy", "vectors.npy", "items.json", "thumbnails.npy"])
def test_an_empty_file_is_named(old: Path, name: str) -> None:
    (old / "data-000002" / name).write_bytes(b"")
    with pytest.raises(BadIndex, match=f"{name} is damaged"):
        Index.open(old)


def test_missing_settings_are_named(old: Path) -> None:
    (old / "index.json").write_text('{"format": "nearfar index", "version": 1, "dim": 3}')
    with pytest.raises(BadIndex, match=r"index\.json is damaged: measure, .*generation.* missing"):
        Index.open(old)
