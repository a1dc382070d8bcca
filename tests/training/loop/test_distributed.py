"""Two processes make the update a single one makes with the same global batch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

import cases
import distributed_worker as worker
import pytest
import torch
from torch import nn

import nearfar as nf
from nearfar.training.loop.distributed import World, draws, global_loss, init_world, sharing_mode

CASES = {case.id: case for case in cases.CASES}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    surroundings = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    surroundings |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    running = []
    for rank in ("0", "1"):
        command = [sys.executable, worker.__file__, str(folder / rank)]
        process = subprocess.Popen(
            command, env=surroundings | {"RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.PIPE
        )
        running.append(process)
    try:
        for process in running:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors.decode()
    finally:
        for process in running:
            process.kill()
    return [torch.load(folder / rank) for rank in ("0", "1")]


@pytest.mark.parametrize("key", worker.TRAINED)
def test_ten_steps_lead_where_a_single_process_gets(two: list[dict[str, Any]], key: str) -> None:
    alone = worker.trained(World(), key)
    assert alone.keys() == two[0]["trained"][key].keys()
    start = worker.network().state_dict()
    for name, value in alone.items():
        torch.testing.assert_close(two[0]["trained"][key][name], value, rtol=0, atol=1e-6)
        assert torch.equal(two[0]["trained"][key][name], two[1]["trained"][key][name]), "processes have drifted apart"
        if name.startswith("0."):
            assert not torch.allclose(value, start[name[2:]], rtol=0, atol=1e-4), "nothing was learned"


@pytest.mark.parametrize("key", worker.DRAWING)
def test_what_a_step_draws_is_the_same_in_all_processes(two: list[dict[str, Any]], key: str) -> None:
    alone = worker.stepped(World(), key)
    for rank in two:
        assert alone.keys() == rank["stepped"][key].keys()
        for name, value in alone.items():
            torch.testing.assert_close(rank["stepped"][key][name], value, rtol=0, atol=1e-6)


def test_all_processes_forget_a_batch_that_is_no_number_for_one(two: list[dict[str, Any]]) -> None:
    for found in (rank["skipped"] for rank in two):
        assert bool(found["before.finite"])
        assert not bool(found["after.finite"])
        assert torch.equal(found["before.mean"], found["after.mean"])
    assert not torch.equal(two[0]["skipped"]["after.mean"], two[1]["skipped"]["after.mean"]), "each has its own"


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_are_those_of_the_global_batch(two: list[dict[str, Any]], name: str) -> None:
    alone = worker.gradients(World(), CASES[name])
    for rank in two:
        assert alone.keys() == rank["gradients"][name].keys()
        for part, value in alone.items():
            torch.testing.assert_close(rank["gradients"][name][part], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("key", ["raw", "normalized_softmax"])
def test_the_quick_ways_find_what_computing_the_whole_does(two: list[dict[str, Any]], key: str) -> None:
    assert sharing_mode(cases.create(key, {})) != "whole"
    for part, value in two[0]["whole"][key].items():
        torch.testing.assert_close(two[0]["gradients"][f"{key}()"][part], value, rtol=1e-9, atol=1e-11)


def test_what_processes_tell_each_other(two: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(found["words"] for found in two):
        assert found == {
            "weight": [1.0, 1.0],
            "mean": [1.0, 1.0],
            "any": True,
            "none": False,
            "said": {"rank": 0},
            "gathered": [0.0, 0.0, 1.0, 1.0],
            "labels": [0, 0, 1, 1],
            "positions": [2 * rank, 2 * rank + 1],
        }


def test_losses_with_other_denominators_than_anchors_are_computed_whole() -> None:
    assert sharing_mode(nf.losses.create("contrastive")) == "columns"
    assert sharing_mode(nf.losses.create("contrastive", average="pairs")) == "whole"
    assert sharing_mode(nf.losses.create("contrastive", mining="random")) == "whole"
    assert sharing_mode(nf.losses.create("ranked_list", query_weighting="violation")) == "whole"
    assert sharing_mode(nf.losses.create("softmax", num_classes=3, dim=2, sample_rate=0.5)) == "whole"


def test_a_loss_of_ones_own_is_computed_whole() -> None:
    class Mine(nf.losses.Raw):
        pass

    assert sharing_mode(Mine()) == "whole"
    assert sharing_mode(lambda embeddings, labels: embeddings.sum()) == "whole"


def test_a_loss_of_ones_own_is_shared_if_its_class_says_so() -> None:
    class Columns(nf.losses.PairLoss):
        deterministic = mean_over_anchors = True

    class Rows(nf.losses.ProxyLoss):
        deterministic = mean_over_anchors = True

    class Drawing(nf.losses.PairLoss):
        mean_over_anchors = True  # and may draw random numbers, since it does not say that it does not

    assert sharing_mode(Columns()) == "columns"
    assert sharing_mode(Rows(num_classes=3, dim=2, lr_multiplier=1.0)) == "rows"
    assert sharing_mode(Drawing()) == "whole"
    assert sharing_mode(nf.losses.PairLoss()) == "whole"


def test_a_loss_of_ones_own_may_draw_random_numbers_unless_it_says_no() -> None:
    class Silent(nf.losses.Raw):
        pass

    class Deterministic(nf.losses.Raw):
        deterministic = True

    assert draws(Silent())
    assert not draws(Deterministic())
    assert draws(Deterministic(mining="random"))
    assert draws(lambda embeddings, labels: embeddings.sum())


def test_a_world_of_one_changes_nothing() -> None:
    alone, loss = World(), nf.losses.create("raw")
    embeddings, labels = torch.randn(6, 4, requires_grad=True), torch.tensor([0, 0, 1, 1, 2, 2])
    assert torch.equal(global_loss(loss, embeddings, labels, alone), loss(embeddings, labels))
    everyone, _, positions = alone.gather(embeddings, labels)
    assert everyone is embeddings
    assert positions.tolist() == list(range(6))
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    alone.reduce_gradients(layer.parameters())
    alone.broadcast(layer)
    alone.close()
    assert layer.bias.grad is not None
    assert layer.bias.grad.tolist() == [1.0, 1.0]
    assert alone.share({"a": 1}) == {"a": 1}


def test_a_seed_decides_what_a_loss_draws_and_nothing_else() -> None:
    loss = cases.create("group", {})
    embeddings, labels = torch.randn(8, 4), torch.arange(4).repeat(2)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first, again, other = (global_loss(loss, embeddings, labels, World(), seed=seed) for seed in (5, 5, 6))
    assert first == again != other
    assert torch.equal(torch.rand(2), expected)


def test_without_torchrun_the_world_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert init_world("cpu") == World()
