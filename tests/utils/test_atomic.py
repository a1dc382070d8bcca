"""Files that are there whole or not at all."""

import errno
import json
import os
import stat
import threading

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from nearfar.utils.atomic import read_tensors, whole_file, write_json, write_tensors


def test_json_is_read_back(tmp_path):
    write_json(tmp_path / "a.json", {"ö": [1, 2.5]})
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"ö": [1, 2.5]}


@pytest.mark.parametrize("value", [object(), float("nan")])
def test_json_that_fails_leaves_the_old_file(tmp_path, value):
    file = tmp_path / "report.json"
    file.write_text("old")
    with pytest.raises((TypeError, ValueError)):
        write_json(file, {"no": value})
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_failure_while_writing_leaves_nothing_behind(tmp_path):
    def fail(draft):
        draft.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), whole_file(tmp_path / "new") as draft:
        fail(draft)
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_replaced_and_not_followed(tmp_path):
    link, real = tmp_path / "link.json", tmp_path / "real.json"
    real.write_text("mine")
    link.symlink_to(real)
    write_json(link, 1)
    assert (link.is_symlink(), link.read_text(), real.read_text()) == (False, "1\n", "mine")


def test_threads_may_write_one_file(tmp_path):
    file = tmp_path / "shared.json"
    with whole_file(file) as one, whole_file(file) as other:
        one.write_text("first")
        other.write_text("second")
    assert file.read_text() == "first"  # the outer one ended last
    assert list(tmp_path.iterdir()) == [file]


def test_who_may_read_a_file_stays_as_it_is(tmp_path):
    file = tmp_path / "secret.json"
    write_json(file, 1)
    file.chmod(0o600)
    with whole_file(file) as draft:
        assert stat.S_IMODE(draft.stat().st_mode) == 0o600, "while it is written, too"
        draft.unlink()
        draft.write_text("2")  # as those do that make a new file
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_json(pipe, [1])
    reader.join(10)
    assert json.loads(read[0]) == [1]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_full_disk_says_which_file(tmp_path):
    with pytest.raises(OSError, match=r"No space left on device: .*one\.json"), whole_file(tmp_path / "one.json"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_tensors_on_a_full_disk_say_which_file(tmp_path, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match=r"one\.safetensors cannot be written: No space left on device"):
        write_tensors(tmp_path / "one.safetensors", {"a": torch.zeros(4)})
    assert list(tmp_path.iterdir()) == []


def test_every_flipped_bit_of_tensors_is_found(tmp_path):
    tensors = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.zeros(2), "count": torch.tensor(3)}
    file = tmp_path / "a.safetensors"
    write_tensors(file, tensors, {"about": "me"})
    again, about = read_tensors(file)
    assert about == {"about": "me"}
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for place in range(start, len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 4
        file.write_bytes(flipped)
        with pytest.raises(ValueError, match="is damaged: its tensors do not have the SHA-256"):
            read_tensors(file)
    save_file(tensors, file)  # of an older version
    assert read_tensors(file)[0].keys() == tensors.keys()
