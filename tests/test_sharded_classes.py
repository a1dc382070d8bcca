"""Processes that hold a share of the classes each make the update of a single process."""

import signal

import pytest
import sharded_worker as worker
import torch
from ranks import made_once, run_ranks
from torch import Tensor
from training_runs import recipe, train, vectors

import nearfar as nf
from nearfar.distributed import World, class_bounds, shard_classes
from nearfar.training import checkpoint
from nearfar.training.recipe.files import to_toml

Found = dict[int, list[dict[str, dict[str, Tensor]]]]
RUN = {"loss__name": "arcface", "loss__sample_rate": 0.7, "optimizer__name": "sgd", "training__clip": 0.5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What four and two processes wrote; the two resume the training that the four began."""

    def make(folder):
        file = folder / "recipe.toml"
        file.write_text(to_toml(recipe(vectors(folder), training__shard_classes=True, **RUN)))
        for ranks, how, step in ((4, "new", 7), (2, "resume", 15)):
            there = folder / str(ranks)
            there.mkdir()
            arguments = (str(there), str(file), str(folder / "run"), how, str(step))
            run_ranks(ranks, worker.__file__, *arguments, code=128 + signal.SIGTERM)

    return made_once(tmp_path_factory, "sharded-classes", make)


@pytest.fixture(scope="module")
def found(folder):
    """What each of four and of two processes found."""
    return {ranks: [torch.load(folder / str(ranks) / str(rank)) for rank in range(ranks)] for ranks in (4, 2)}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", worker.CASES)
def test_steps_lead_where_a_single_process_gets(found, case, ranks):
    alone = worker.trained(World(), *worker.CASES[case], sharded=False)
    for rank, here in enumerate(each[case] for each in found[ranks]):
        start, stop = class_bounds(worker.CLASSES, ranks)[rank : rank + 2]
        for name, value in alone.items():
            expected = value[start:stop] if name in ("proxies", "exp_avg") else value
            torch.testing.assert_close(here[name], expected, rtol=0, atol=1e-10)


def test_a_run_is_resumed_with_other_numbers_of_processes(found, folder):
    run = folder / "run"
    assert checkpoint.values_of(run / "checkpoint.safetensors")["shards"] == class_bounds(6, 2)
    shared = recipe(folder / "vectors.npz", training__shard_classes=True, **RUN)
    resumed = train(shared, run, resume=True)
    whole = train(recipe(folder / "vectors.npz", **RUN), folder / "whole")
    assert resumed.metrics["test"] == pytest.approx(whole.metrics["test"], abs=1e-6)
    one, other = (checkpoint.read(place / "checkpoint.safetensors") for place in (run, folder / "whole"))
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in other.tensors.items():
        torch.testing.assert_close(one.tensors[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["group", "proxy_repel", "contrastive"])
def test_losses_that_need_all_classes_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match=f"shard_classes is true and loss.name is '{name}'"):
        recipe(tmp_path, loss__name=name, training__shard_classes=True)


def test_a_loss_that_needs_all_classes_says_so():
    loss = nf.losses.ProxyNCA(num_classes=4, dim=2, assignment="dynamic")
    with pytest.raises(ValueError, match="ProxyNCA needs all classes in every process"):
        shard_classes(loss)


def test_every_process_needs_a_class():
    with pytest.raises(ValueError, match="num_classes is 3; each of the 4 processes needs a class"):
        shard_classes(nf.losses.Softmax(num_classes=3, dim=2), world=World(0, 4))


@pytest.mark.parametrize("centers", [1, 3])
def test_shares_are_drawn_as_the_whole(centers, monkeypatch):
    monkeypatch.setattr("nearfar.losses.proxies.DRAWN", 3)

    def create():
        torch.manual_seed(5)
        return nf.losses.ArcFace(num_classes=10, dim=2, centers=centers)

    pieces = []
    for rank in range(3):
        with torch.device("meta"):
            loss = create()
        shard_classes(loss, world=World(rank, 3))
        cut = create()
        shard_classes(cut, world=World(rank, 3))
        assert torch.equal(cut.proxies, loss.proxies)
        pieces.append(loss.proxies)
    assert torch.equal(torch.cat(pieces), create().proxies)
