"""State dicts in files: what is read, what is refused, and that nothing in them is ever run."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from nearfar.networks.weights.state_dict import load_into, read_state


class Small(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width))
        self.last = nn.Linear(width, 2)


def saved(content, file):
    torch.save(content, file)
    return file


def equal(network, state):
    return all(torch.equal(tensor, state[key]) for key, tensor in network.state_dict().items())


class Burglar:
    """Unpickling it creates a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


# --- reading -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before PyTorch 1.6"])
def test_checkpoints_are_read(zipped, tmp_path):
    state = Small().state_dict()
    torch.save(state, tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
    assert read_state(tmp_path / "a.pth").keys() == state.keys()


def test_safetensors_are_recognised_by_content(tmp_path):
    save_file({"a": torch.arange(3)}, tmp_path / "misnamed.pth")
    assert read_state(tmp_path / "misnamed.pth")["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("wrapper", ["state_dict", "model", "model_state_dict"])
def test_a_state_dict_may_be_wrapped(wrapper, tmp_path):
    file = saved({wrapper: {"module.a": torch.ones(1)}, "epoch": 3}, tmp_path / "a.pth")
    assert list(read_state(file)) == ["a"]


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before PyTorch 1.6"])
def test_pickled_code_is_not_run(zipped, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # not even when the environment asks for it
    proof = tmp_path / "burgled"
    file = tmp_path / "evil.pth"
    torch.save({"a": torch.ones(1), "b": Burglar(proof)}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match="executing code, which is never done"):
        read_state(file)
    assert not proof.exists()
    torch.load(file, weights_only=False)
    assert proof.exists()  # the burglar does know his trade


def test_a_bare_pickle_is_not_run(tmp_path):
    proof = tmp_path / "burgled"
    file = tmp_path / "evil.pth"
    file.write_bytes(pickle.dumps(Burglar(proof), protocol=2))
    with pytest.raises(ValueError, match=r"evil\.pth"):
        read_state(file)
    assert not proof.exists()


@pytest.mark.parametrize("content", [b"", b"<html>404</html>", b"PK\x03\x04 broken", b"\x10" + bytes(7) + b"{}"])
def test_damaged_files_are_named(content, tmp_path):
    file = tmp_path / "a.pth"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.pth (is no|cannot be read)"):
        read_state(file)


def test_a_truncated_checkpoint_is_named(tmp_path):
    file = saved(Small().state_dict(), tmp_path / "a.pth")
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(ValueError, match=r"a\.pth is not .* damaged"):
        read_state(file)


@pytest.mark.parametrize("content", [torch.ones(2), {}, {"a": 1}, {1: torch.ones(1)}, [torch.ones(1)]])
def test_only_names_and_tensors_make_a_state(content, tmp_path):
    with pytest.raises(ValueError, match="a state dict"):
        read_state(saved(content, tmp_path / "a.pth"))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"a\.pth does not exist"):
        read_state(tmp_path / "a.pth")


# --- fitting -------------------------------------------------------------------------------------------------


def test_weights_are_copied_and_the_classifier_is_left_out(tmp_path):
    state = Small().state_dict()
    file = saved({**state, "fc.weight": torch.ones(2), "fc.bias": torch.ones(2)}, tmp_path / "a.pth")
    network = Small()
    assert load_into(network, "small", file, ("fc.", "classifier.")) == []
    assert equal(network, state)


def test_keys_that_the_network_has_are_never_ignored(tmp_path):
    state = Small().state_dict()
    network = Small()
    load_into(network, "small", saved(state, tmp_path / "a.pth"), ("last.",))
    assert equal(network, state)


def test_missing_keys_are_refused_and_nothing_is_copied(tmp_path):
    state = {key: tensor for key, tensor in Small().state_dict().items() if not key.startswith("stem.1.")}
    network = Small()
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    with pytest.raises(ValueError, match=r"small: 4 keys are missing, such as stem\.1\.weight, .* and 1 more"):
        load_into(network, "small", saved(state, tmp_path / "a.pth"))
    assert equal(network, before)


def test_old_files_without_counters_fit(tmp_path):
    state = Small().state_dict()
    del state["stem.1.num_batches_tracked"]
    network = Small()
    load_into(network, "small", saved(state, tmp_path / "a.pth"))
    assert all(torch.equal(network.state_dict()[key], tensor) for key, tensor in state.items())


def test_other_shapes_are_refused(tmp_path):
    file = saved(Small(5).state_dict(), tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"shape, such as stem\.0\.weight \(\[5, 3, 3, 3\], needed is \[4, 3, 3, 3\]"):
        load_into(Small(), "small", file)


def test_foreign_keys_are_reported(tmp_path):
    file = saved({**Small().state_dict(), "embedding.weight": torch.ones(1)}, tmp_path / "a.pth")
    assert load_into(Small(), "small", file) == ["embedding.weight"]


def test_a_larger_network_of_the_same_kind_is_refused(tmp_path):
    file = saved({**Small().state_dict(), "stem.2.weight": torch.ones(1)}, tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"larger network with 1 more keys, such as stem\.2\.weight"):
        load_into(Small(), "small", file)


def test_one_by_c_is_c_in_ports_from_caffe(tmp_path):
    state = Small().state_dict()
    old = {key: tensor.unsqueeze(0) if key.startswith("stem.1.") else tensor for key, tensor in state.items()}
    old.pop("stem.1.num_batches_tracked")
    network = Small()
    load_into(network, "small", saved(old, tmp_path / "a.pth"))
    assert equal(network, state)


def test_half_precision_is_converted(tmp_path):
    network = Small()
    file = saved({key: tensor.half() for key, tensor in Small().state_dict().items()}, tmp_path / "a.pth")
    load_into(network, "small", file)
    assert {tensor.dtype for tensor in network.parameters()} == {torch.float32}
