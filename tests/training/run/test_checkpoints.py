"""Checkpoints: whole or not at all, and the same to the last bit."""

import json
import os
import random

import numpy as np
import pytest
import torch

from nearfar.training import checkpoint


def save(file, number):
    parts = {"numbers": {"one": torch.tensor([float(number)])}}
    checkpoint.write(file, parts, {"number": number, "third": 1 / 3})


def number(file):
    found = checkpoint.read(file)
    assert found.part("numbers")["one"].item() == found.values["number"]
    return int(found.values["number"])


def test_what_is_saved_is_found_again(tmp_path):
    save(tmp_path / "last", 7)
    assert number(tmp_path / "last") == 7
    assert checkpoint.values_of(tmp_path / "last")["third"] == 1 / 3


def test_a_new_one_takes_the_place_of_the_old_and_leaves_nothing_behind(tmp_path):
    save(tmp_path / "last", 1)
    save(tmp_path / "last", 2)
    assert number(tmp_path / "last") == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]


def sharded(file, number):
    """A checkpoint of three classes, saved by two processes."""
    for rank, rows in enumerate((2, 1)):
        one = {"one": torch.full((rows, 2), float(number))}
        checkpoint.write_shard(file, rank, number, {"losses": one})
    checkpoint.write(file, {}, {"number": number, "shards": [0, 2, 3], "state": {"iteration": number}})


@pytest.mark.parametrize("shards", [False, True])
def test_there_is_a_whole_one_at_every_moment_of_saving(shards, tmp_path, monkeypatch):
    """Stop at every file operation in turn: what is found is the old one or the new one, and saving works again."""

    class Killed(BaseException):
        pass

    write = sharded if shards else save

    def found(file):
        if not shards:
            return number(file)
        whole = checkpoint.read(file)
        assert torch.equal(whole.part("losses")["one"], torch.full((3, 2), float(whole.values["number"])))
        assert len(checkpoint.read(file, rows=slice(1, 3)).part("losses")["one"]) == 2
        return int(whole.values["number"])

    for moment in range(40):
        file = tmp_path / f"{moment}" / "last"
        file.parent.mkdir()
        write(file, 1)
        left = [moment]

        def counted(operation, left=left):
            def call(*arguments, **settings):
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
                return operation(*arguments, **settings)

            return call

        with monkeypatch.context() as patch:
            for name in ("replace", "fsync", "mkdir", "rmdir", "unlink"):
                patch.setattr(os, name, counted(getattr(os, name)))
            try:
                write(file, 2)
                done = True
            except Killed:
                done = False
        assert found(file) in ((2,) if done else (1, 2))
        write(file, 3)
        assert found(file) == 3
        if done:
            break
    assert done
    assert moment > 3
    assert {entry.name for entry in file.parent.glob("[!.]*")} == {
        "last",
        *(f"classes.{rank}.3.safetensors" for rank in range(2 * shards)),
    }


def test_one_that_is_replaced_while_it_is_read_is_read_to_its_end(tmp_path, monkeypatch):
    save(tmp_path / "last", 1)
    original, saved = json.loads, []

    def loads(text):
        if not saved:
            saved.append(save(tmp_path / "last", 2))
        return original(text)

    with monkeypatch.context() as patch:
        patch.setattr("nearfar.utils.atomic.json.loads", loads)
        assert number(tmp_path / "last") == 1
    assert number(tmp_path / "last") == 2


def test_a_damaged_file_is_named(tmp_path):
    save(tmp_path / "last", 1)
    file = tmp_path / "last"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(ValueError, match="last cannot be read"):
        checkpoint.read(file)


def test_a_checkpoint_of_another_version_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "VERSION", 9)
        save(tmp_path / "last", 1)
    with pytest.raises(ValueError, match="version 9; this nearfar reads version 1"):
        checkpoint.read(tmp_path / "last")


def test_tensors_that_share_memory_are_saved_each(tmp_path):
    shared = torch.arange(4.0)
    parts = {"losses": {"first": shared, "second": shared, "row": shared.view(2, 2).T}}
    checkpoint.write(tmp_path / "last", parts, {})
    found = checkpoint.read(tmp_path / "last").part("losses")
    assert torch.equal(found["first"], found["second"])
    assert torch.equal(found["row"], shared.view(2, 2).T)


def test_random_numbers_go_on(tmp_path):
    device = torch.device("cpu")
    for draw in (lambda: torch.rand(1).item(), random.random, random.gauss, np.random.rand, np.random.randn):
        arguments = (0.0, 1.0) if draw is random.gauss else ()
        draw(*arguments)
        tensors, values = checkpoint.random_states(device)
        expected = [draw(*arguments) for _ in range(3)]
        checkpoint.write(tmp_path / "last", {"random": tensors}, {"random": values})
        found = checkpoint.read(tmp_path / "last")
        checkpoint.set_random_states(found.part("random"), found.values["random"], device)
        assert [draw(*arguments) for _ in range(3)] == expected


OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9)),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimiser_goes_on(name, tmp_path):
    def made():
        torch.manual_seed(0)
        network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 4, 1))
        network = network.to(memory_format=torch.channels_last)
        groups = [{"params": list(each.parameters()), "lr": 1e-3 / (1 + i)} for i, each in enumerate(network)]
        return network, OPTIMIZERS[name](groups)

    def step(network, optimizer, number):
        torch.manual_seed(number)
        optimizer.zero_grad()
        network(torch.randn(2, 3, 5, 5)).square().sum().backward()
        optimizer.step()

    network, optimizer = made()
    for i in range(7):
        step(network, optimizer, i)
    tensors, values = checkpoint.optimizer_state(optimizer)
    checkpoint.write(tmp_path / "last", {"optimizer": tensors}, {"optimizer": values})
    other, again = made()
    other.load_state_dict(network.state_dict())
    found = checkpoint.read(tmp_path / "last")
    checkpoint.set_optimizer_state(again, found.part("optimizer"), found.values["optimizer"])
    for i in range(7, 10):
        step(network, optimizer, i)
        step(other, again, i)
    for one, two in zip(network.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    for parameter in other.parameters():
        for tensor in again.state[parameter].values():
            if tensor.shape == parameter.shape:
                assert tensor.stride() == parameter.stride()


def test_the_optimiser_of_another_network_is_refused():
    one = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    two = torch.optim.SGD([{"params": [torch.zeros(1, requires_grad=True)]} for _ in range(2)], lr=0.1)
    tensors, values = checkpoint.optimizer_state(two)
    with pytest.raises(ValueError, match="has 1 groups and the saved one 2"):
        checkpoint.set_optimizer_state(one, tensors, values)
