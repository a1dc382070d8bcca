"""Checkpoints: whole or not at all, and the same to the last bit."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from nearfar import networks
from nearfar.networks.weights import save as saving
from nearfar.training.run import checkpoints
from nearfar.training.run.checkpoints import NoCheckpoint


def model(seed: int = 0) -> networks.Embedder:
    torch.manual_seed(seed)
    return networks.create("linear", in_dim=3, dim=2)


def save(place: Path, number: int) -> None:
    parts = {"numbers": {"one": torch.tensor([float(number)])}}
    checkpoints.save(place, model(number), parts=parts, values={"number": number, "third": 1 / 3})


def number(place: Path) -> int:
    return int(checkpoints.load(place).values["number"])


def test_what_is_saved_is_found_again(tmp_path: Path) -> None:
    save(tmp_path / "last", 7)
    found = checkpoints.load(tmp_path / "last")
    assert found.values["third"] == 1 / 3
    assert found.part("numbers")["one"].item() == 7.0
    for name, tensor in model(7).state_dict().items():
        assert torch.equal(found.model[name], tensor)


def test_the_network_of_a_checkpoint_opens_on_its_own(tmp_path: Path) -> None:
    save(tmp_path / "last", 1)
    assert isinstance(saving.load(tmp_path / "last"), networks.Embedder)


def test_a_new_one_takes_the_place_of_the_old_and_leaves_nothing_behind(tmp_path: Path) -> None:
    save(tmp_path / "last", 1)
    save(tmp_path / "last", 2)
    assert number(tmp_path / "last") == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]


def test_there_is_a_whole_one_at_every_moment_of_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop at every file operation in turn: what is found is the old one or the new one, and saving works again."""

    class Killed(BaseException):
        pass

    for moment in range(40):
        place = tmp_path / f"{moment}" / "last"
        save(place, 1)
        left = [moment]

        def counted(operation, left=left):  # type: ignore[no-untyped-def]
            def call(*arguments, **settings):  # type: ignore[no-untyped-def]
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
                return operation(*arguments, **settings)

            return call

        with monkeypatch.context() as patch:
            for name in ("replace", "fsync", "mkdir", "rmdir", "unlink"):
                patch.setattr(os, name, counted(getattr(os, name)))
            try:
                save(place, 2)
                done = True
            except Killed:
                done = False
        assert number(place) in ((2,) if done else (1, 2))
        checkpoints.recover(place)
        assert number(place) in ((2,) if done else (1, 2))
        assert place.exists()
        save(place, 3)
        assert number(place) == 3
        if done:
            break
    assert done
    assert moment > 5


@pytest.mark.parametrize("file", [checkpoints.STATE, saving.NAME, checkpoints.TENSORS])
def test_all_that_is_read_is_of_one_checkpoint(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training puts a new one there before one of its files is read."""
    place, saved = tmp_path / "last", [1]
    save(place, 1)

    def before(read):  # type: ignore[no-untyped-def]
        def call(found: Path, *arguments, **settings):  # type: ignore[no-untyped-def]
            if found.name == file and len(saved) < 3:
                saved.append(saved[-1] + 1)
                save(place, saved[-1])
            return read(found, *arguments, **settings)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "read_tensors", before(checkpoints.read_tensors))
        patch.setattr(Path, "read_text", before(Path.read_text))
        found = checkpoints.load(place)
    assert saved == [1, 2, 3]
    assert (found.values["number"], found.part("numbers")["one"].item()) == (3, 3.0)
    for name, tensor in model(3).state_dict().items():
        assert torch.equal(found.model[name], tensor)


def test_one_that_goes_away_while_it_is_read_is_none(tmp_path: Path) -> None:
    """Found beside its place, between two moves of a process that saves, and then taken apart."""
    place = tmp_path / "last"
    save(place, 1)
    old, read = place.rename(tmp_path / ".last.old"), []

    def reader(folder: Path) -> bytes:
        read.append(folder)
        if len(read) == 1:
            (old / checkpoints.TENSORS).unlink()
            save(tmp_path / "new", 2)
            (tmp_path / "new").rename(place)
        return (folder / checkpoints.TENSORS).read_bytes()

    assert checkpoints.read(place, reader)
    assert read == [old, place]


def test_one_that_changes_all_the_time_is_not_read_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "TRIES", 3)
    place, read = tmp_path / "last", []
    save(place, 0)
    with pytest.raises(NoCheckpoint, match="last is replaced faster than it can be read"):
        checkpoints.read(place, lambda folder: (read.append(folder), save(place, len(read))))
    assert len(read) == 3


def test_a_place_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    assert not checkpoints.exists(tmp_path / "last")
    with pytest.raises(NoCheckpoint, match="last does not exist"):
        checkpoints.load(tmp_path / "last")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    save(tmp_path / "last", 1)
    file = tmp_path / "last" / checkpoints.TENSORS
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(NoCheckpoint, match=r"last/training\.safetensors is damaged"):
        checkpoints.load(tmp_path / "last")


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "last", 1)
    file = tmp_path / "last" / checkpoints.STATE
    file.write_text(file.read_text().replace('"version": 1', '"version": 9'))
    with pytest.raises(NoCheckpoint, match="version 9; this nearfar reads version 1"):
        checkpoints.load(tmp_path / "last")


def test_tensors_that_share_memory_are_saved_each(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    parts = {"losses": {"first": shared, "second": shared, "row": shared.view(2, 2).T}}
    checkpoints.save(tmp_path / "last", model(), parts=parts, values={})
    found = checkpoints.load(tmp_path / "last").part("losses")
    assert torch.equal(found["first"], found["second"])
    assert torch.equal(found["row"], shared.view(2, 2).T)


def test_random_numbers_go_on(tmp_path: Path) -> None:
    device = torch.device("cpu")
    for draw in (lambda: torch.rand(1).item(), random.random, random.gauss, np.random.rand, np.random.randn):
        arguments = (0.0, 1.0) if draw is random.gauss else ()
        draw(*arguments)  # type: ignore[operator]
        tensors, values = checkpoints.random_states(device)
        expected = [draw(*arguments) for _ in range(3)]  # type: ignore[operator]
        checkpoints.save(tmp_path / "last", model(), parts={"random": tensors}, values={"random": values})
        found = checkpoints.load(tmp_path / "last")
        checkpoints.set_random_states(found.part("random"), found.values["random"], device)
        assert [draw(*arguments) for _ in range(3)] == expected  # type: ignore[operator]


OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9)),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimiser_goes_on(name: str, tmp_path: Path) -> None:
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 4, 1))
        network = network.to(memory_format=torch.channels_last)
        groups = [{"params": list(each.parameters()), "lr": 1e-3 / (1 + i)} for i, each in enumerate(network)]
        return network, OPTIMIZERS[name](groups)

    def step(network: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        torch.manual_seed(number)
        optimizer.zero_grad()
        network(torch.randn(2, 3, 5, 5)).square().sum().backward()
        optimizer.step()

    network, optimizer = made()
    for i in range(7):
        step(network, optimizer, i)
    tensors, values = checkpoints.optimizer_state(optimizer)
    checkpoints.save(tmp_path / "last", model(), parts={"optimizer": tensors}, values={"optimizer": values})
    other, again = made()
    other.load_state_dict(network.state_dict())
    found = checkpoints.load(tmp_path / "last")
    checkpoints.set_optimizer_state(again, found.part("optimizer"), found.values["optimizer"])
    for i in range(7, 10):
        step(network, optimizer, i)
        step(other, again, i)
    for one, two in zip(network.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    for parameter in other.parameters():
        for tensor in again.state[parameter].values():
            if tensor.shape == parameter.shape:
                assert tensor.stride() == parameter.stride()


def test_the_optimiser_of_another_network_is_refused() -> None:
    one = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    two = torch.optim.SGD([{"params": [torch.zeros(1, requires_grad=True)]} for _ in range(2)], lr=0.1)
    tensors, values = checkpoints.optimizer_state(two)
    with pytest.raises(ValueError, match="has 1 groups and the saved one 2"):
        checkpoints.set_optimizer_state(one, tensors, values)
