"""Files that are there whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nearfar.writing import whole_file, write_json


def test_json_is_read_back(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"ö": [1, 2.5]})
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"ö": [1, 2.5]}


@pytest.mark.parametrize("value", [object(), float("nan")])
def test_json_that_fails_leaves_the_old_file(tmp_path: Path, value: object) -> None:
    file = tmp_path / "report.json"
    file.write_text("old")
    with pytest.raises((TypeError, ValueError)):
        write_json(file, {"no": value})
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_failure_while_writing_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(draft: Path) -> None:
        draft.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), whole_file(tmp_path / "new") as draft:
        fail(draft)
    assert list(tmp_path.iterdir()) == []
