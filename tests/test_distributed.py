"""Two or four processes make the update a single one makes with the same global batch."""

import cases
import distributed_worker as worker
import pytest
import torch
from ranks import made_once, run_ranks
from torch import nn

import nearfar as nf
from nearfar.distributed import World, draws, gather, global_loss, init_world, sharing_mode

CASES = {case.id: case for case in cases.CASES}


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    """What each of several processes found."""

    def make(folder):
        run_ranks(request.param, worker.__file__, str(folder))

    folder = made_once(tmp_path_factory, f"ranks-{request.param}", make)
    return [torch.load(folder / str(rank)) for rank in range(request.param)]


def check_gradients(alone, ranks):
    """Every process has the value and the gradients of a single one."""
    for found in ranks:
        assert alone.keys() == found.keys()
        for part, value in alone.items():
            torch.testing.assert_close(found[part], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("key", worker.TRAINED)
def test_ten_steps_lead_where_a_single_process_gets(ranks, key):
    alone = worker.trained(World(), key)
    assert alone.keys() == ranks[0]["trained"][key].keys()
    start = worker.network().state_dict()
    for name, value in alone.items():
        torch.testing.assert_close(ranks[0]["trained"][key][name], value, rtol=0, atol=1e-6)
        assert torch.equal(ranks[0]["trained"][key][name], ranks[-1]["trained"][key][name]), (
            "processes have drifted apart"
        )
        if name.startswith("0."):
            assert not torch.allclose(value, start[name[2:]], rtol=0, atol=1e-4), "nothing was learned"


@pytest.mark.parametrize("key", worker.DRAWING)
def test_what_a_step_draws_is_the_same_in_all_processes(ranks, key):
    alone = worker.stepped(World(), key)
    for rank in ranks:
        assert alone.keys() == rank["stepped"][key].keys()
        for name, value in alone.items():
            torch.testing.assert_close(rank["stepped"][key][name], value, rtol=0, atol=1e-6)


def test_all_processes_forget_a_batch_that_is_no_number_for_one(ranks):
    for found in (rank["skipped"] for rank in ranks):
        assert bool(found["before.finite"])
        assert not bool(found["after.finite"])
        assert torch.equal(found["before.mean"], found["after.mean"])
    assert not torch.equal(ranks[0]["skipped"]["after.mean"], ranks[-1]["skipped"]["after.mean"]), "each has its own"


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_are_those_of_the_global_batch(ranks, name):
    alone = worker.gradients(World(), CASES[name])
    assert any(key.startswith("loss.") for key in alone) == any(True for _ in CASES[name].create().parameters())
    check_gradients(alone, [rank["gradients"][name] for rank in ranks])


@pytest.mark.parametrize("kind", worker.SUPERVISIONS)
@pytest.mark.parametrize("case", worker.SUPERVISED, ids=lambda case: case.id)
def test_a_supervision_is_that_of_the_global_batch(ranks, kind, case):
    alone = worker.supervised(World(), kind, case)
    assert alone["network.0.weight"].any()
    check_gradients(alone, [rank["supervised"][kind, case.id] for rank in ranks])


@pytest.mark.parametrize("key", worker.SHARED)
def test_gathered_embeddings_give_the_gradients_of_the_global_batch(ranks, key):
    check_gradients(worker.gradients(World(), cases.Case(key)), [rank["gathered"][key] for rank in ranks])


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("key", worker.SHARED)
def test_ddp_averages_to_the_gradients_of_the_global_batch(ranks, key):
    check_gradients(worker.gradients(World(), cases.Case(key)), [rank["ddp"][key] for rank in ranks])


def test_what_processes_tell_each_other(ranks):
    for found in (found["words"] for found in ranks):
        assert found == {
            "weight": [1.0, 1.0],
            "mean": [1.0, 1.0],
            "any": True,
            "none": False,
            "said": {"rank": 0},
            "gathered": [number for rank in range(len(ranks)) for number in (rank, 10)],
        }


def test_unequal_shares_and_unequal_draws_are_refused(ranks):
    counts = ", ".join(str(2 + rank) for rank in range(len(ranks)))
    for found in (found["refused"] for found in ranks):
        assert found.keys() == {"rows", "share", "seed", "masks", "pairs", "kind", "grades"}
        for name in ("rows", "share"):
            assert found[name].startswith(f"the processes have {counts} rows; all must have the same number")
        assert found["seed"].startswith("seed is None and Group may draw random numbers")
        assert found["masks"].startswith(
            f"positives has shape (2, 2); with {len(ranks)} processes needed is [2, {2 * len(ranks)}]"
        )
        assert found["pairs"] == "right ranges from 2 to 2; allowed are the rows of embeddings, 0 to 1"
        assert found["grades"] == "grades are given in some processes only; give them in all, or in none"
        assert found["kind"].startswith("labels is a Unknown; several processes share labels, Pairs, Triplets, Masks")


class Silent(nf.losses.Raw):
    pass


class Deterministic(nf.losses.Raw):
    deterministic = True


class Columns(nf.losses.PairLoss):
    deterministic = mean_over_anchors = True


class Rows(nf.losses.ProxyLoss):
    deterministic = mean_over_anchors = True


class Drawing(nf.losses.PairLoss):
    mean_over_anchors = True  # and may draw random numbers, since it does not say that it does not


@pytest.mark.parametrize(
    ("loss", "mode"),
    [
        (nf.losses.Contrastive(), "columns"),
        (nf.losses.Contrastive(average="pairs"), "whole"),
        (nf.losses.Contrastive(mining="random"), "whole"),
        (nf.losses.RankedList(query_weighting="violation"), "whole"),
        (nf.losses.Softmax(num_classes=3, dim=2, sample_rate=0.5), "whole"),
        (Silent(), "whole"),
        (lambda embeddings, labels: embeddings.sum(), "whole"),
        (Columns(), "columns"),
        (Rows(num_classes=3, dim=2, lr_multiplier=1.0), "rows"),
        (Drawing(), "whole"),
        (nf.losses.PairLoss(), "whole"),
    ],
)
def test_a_loss_is_shared_as_its_class_says_and_otherwise_computed_whole(loss, mode):
    assert sharing_mode(loss) == mode


def test_a_loss_of_ones_own_may_draw_random_numbers_unless_it_says_no():
    assert draws(Silent())
    assert not draws(Deterministic())
    assert draws(Deterministic(mining="random"))
    assert draws(lambda embeddings, labels: embeddings.sum())


def test_a_world_of_one_changes_nothing():
    alone, loss = World(), nf.losses.create("raw")
    embeddings, labels = torch.randn(6, 4, requires_grad=True), torch.tensor([0, 0, 1, 1, 2, 2])
    assert torch.equal(global_loss(loss, embeddings, labels, world=alone), loss(embeddings, labels))
    assert gather(embeddings) is embeddings
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    alone.average_gradients(layer.parameters())
    alone.broadcast(layer)
    alone.close()
    assert layer.bias.grad.tolist() == [1.0, 1.0]
    assert alone.share({"a": 1}) == {"a": 1}


def test_a_seed_decides_what_a_loss_draws_and_nothing_else():
    loss = cases.create("group", {})
    embeddings, labels = torch.randn(8, 4), torch.arange(4).repeat(2)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first, again, other = (global_loss(loss, embeddings, labels, seed=seed) for seed in (5, 5, 6))
    assert first == again != other
    assert torch.equal(torch.rand(2), expected)


def test_without_torchrun_the_world_is_one_process(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert init_world("cpu") == World()
