"""One step: what it changes, exactly, and what it leaves alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from nearfar import losses, networks
from nearfar.data.loader import Batch
from nearfar.losses import Memory
from nearfar.networks.backbones import base as batchnorm
from nearfar.training.step import Learner, StepLog, StepResult, TrainStep, autocast, seed_momentum

LABELS = torch.arange(12) // 3


def batch(seed=0, dim=6):
    generator = torch.Generator().manual_seed(seed)
    return Batch(torch.randn(12, dim, generator=generator), LABELS, torch.arange(12))


def pictures(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Batch(torch.randn(12, 1, 8, 8, generator=generator), LABELS, torch.arange(12))


def network(seed=0, **settings):
    torch.manual_seed(seed)
    return networks.create("mlp", **{"in_dim": 6, "hidden": (8,), "dim": 4, **settings})


def sgd(*modules, lr=0.1, momentum=0.9):
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=lr, momentum=momentum)


def values(*modules):
    return [p.detach().clone() for module in modules for p in module.parameters()]


def assert_same(found, expected, tolerance=0.0):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


def gradients(learner, step_batch, **settings):
    """Those of one step with a learning rate that changes nothing."""
    optimizer = sgd(learner.network, *learner.losses.values(), lr=0.0)
    TrainStep([learner], optimizer, **settings)(step_batch)
    return [p.grad.clone() for p in learner.parameters() if p.grad is not None]


# --- the plain step --------------------------------------------------------------------------------------------


def test_a_step_is_forward_loss_backward_and_update():
    model, loss = network(), losses.create("proxy_anchor", num_classes=4, dim=4)
    by_hand, loss_by_hand = copy.deepcopy(model), copy.deepcopy(loss)
    outcome = TrainStep([Learner(model, {"high": loss})], sgd(model, loss))(batch())

    optimizer = sgd(by_hand, loss_by_hand)
    value = loss_by_hand(by_hand(batch().images), LABELS)
    value.backward()
    optimizer.step()
    assert_same(values(model, loss), values(by_hand, loss_by_hand))
    assert torch.equal(outcome.loss, value.detach())
    assert bool(outcome.finite)


def test_levels_add_their_losses_up():
    torch.manual_seed(0)
    model = networks.create("small_cnn", size=8, dim=4, levels=("low", "high"))
    by_level = {"low": losses.create("contrastive"), "high": losses.create("triplet")}
    found = gradients(Learner(model, by_level), pictures())

    model.zero_grad()
    embeddings = model.levels_forward(pictures().images)
    sum(by_level[level](embeddings[level], LABELS) for level in by_level).backward()
    assert_same(found, [p.grad for p in model.parameters() if p.grad is not None], 1e-6)


def test_members_of_an_ensemble_learn_each_on_its_own():
    first, second = network(0), network(1)
    alone = [copy.deepcopy(first), copy.deepcopy(second)]
    loss = losses.create("contrastive")
    TrainStep([Learner(first, {"high": loss}), Learner(second, {"high": loss})], sgd(first, second), clip=0.01)(batch())
    for model in alone:
        TrainStep([Learner(model, {"high": loss})], sgd(model), clip=0.01)(batch())
    assert_same(values(first, second), values(*alone))


def test_the_norm_of_a_large_gradient_is_clipped():
    learner = Learner(network(), {"high": losses.create("contrastive")})
    clipped = gradients(learner, batch(), clip=0.01)
    assert torch.cat([each.flatten() for each in clipped]).norm().item() == pytest.approx(0.01, rel=1e-3)
    assert_same(gradients(learner, batch(), clip=1e6), gradients(learner, batch()))


def test_a_frozen_backbone_stays_and_the_head_moves():
    model = network()
    optimizer = sgd(model)
    model.train()
    model.freeze_backbone()
    backbone, heads = values(model.backbone), values(model.heads)
    TrainStep([Learner(model, {"high": losses.create("contrastive")})], optimizer)(batch())
    assert_same(values(model.backbone), backbone)
    assert not torch.equal(values(model.heads)[0], heads[0])


def test_bfloat16_is_for_the_network_and_float32_for_the_loss():
    seen = []

    class Asks(nn.Module):
        def forward(self, embeddings, labels):
            seen.append((embeddings.dtype, torch.is_autocast_enabled("cpu")))
            return embeddings.square().sum()

    model = network()
    hidden = []
    model.backbone.layers[0].register_forward_hook(lambda _m, _i, out: hidden.append(out.dtype))
    TrainStep([Learner(model, {"high": Asks()})], sgd(model), precision="bfloat16")(batch())
    assert hidden == [torch.bfloat16]
    assert seen == [(torch.float32, False)]


def test_float32_is_float32_within_anybody_elses_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16), autocast(torch.device("cpu"), "float32"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_independent_members_learn_from_their_own_part_of_the_batch():
    both = batch()
    images = torch.cat([both.images, batch(seed=1).images])
    double = Batch(images, torch.cat([LABELS, LABELS]), torch.arange(24))
    members = [Learner(network(seed), {"high": losses.create("contrastive")}) for seed in (0, 1)]
    expected = [gradients(copy.deepcopy(one), batch(seed=seed)) for seed, one in enumerate(members)]
    optimizer = sgd(*(one.network for one in members), lr=0.0)
    TrainStep(members, optimizer, independent=True)(double)
    for one, found in zip(members, expected, strict=True):
        assert_same([p.grad for p in one.parameters() if p.grad is not None], found, 1e-7)


# --- exact large batches ---------------------------------------------------------------------------------------

LOSSES = {
    "pairs": lambda: losses.create("multi_similarity"),
    "proxies": lambda: losses.create("proxy_anchor", num_classes=4, dim=4),
    "whole batch": lambda: losses.create("smooth_ap"),
}


@pytest.mark.parametrize("chunk", [1, 5, 6])
@pytest.mark.parametrize("name", LOSSES)
def test_chunks_give_the_gradient_of_the_whole_batch(name, chunk):
    learner = Learner(network().double(), {"high": LOSSES[name]().double()})
    data = Batch(batch().images.double(), LABELS, torch.arange(12))
    assert_same(gradients(learner, data, chunk=chunk), gradients(learner, data), 1e-6)


def test_chunks_with_levels_give_the_gradient_of_the_whole_batch():
    torch.manual_seed(0)
    model = networks.create("small_cnn", size=8, dim=4, levels=("low", "mid", "high"))
    learner = Learner(model, {level: losses.create("contrastive") for level in model.levels})
    assert_same(gradients(learner, pictures(), chunk=5), gradients(learner, pictures()), 1e-6)


def test_chunks_see_the_same_dropout_both_times():
    model = network()
    model.heads["high"] = nn.Sequential(nn.Dropout(0.5), model.heads["high"])
    embedded = []
    model.heads["high"].register_forward_hook(lambda _m, _i, out: embedded.append(out.detach()))
    TrainStep([Learner(model, {"high": losses.create("contrastive")})], sgd(model), chunk=4)(batch())
    assert len(embedded) == 6
    assert_same(embedded[:3], embedded[3:])
    assert not torch.equal(embedded[0], embedded[1])


def test_chunks_go_on_with_the_random_numbers_after_the_loss():
    model = network()
    step = TrainStep([Learner(model, {"high": losses.create("contrastive")})], sgd(model), chunk=4)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    step(batch())
    assert torch.equal(torch.rand(1), expected)


def test_a_chunk_as_large_as_the_batch_goes_through_once():
    model, count = network(), []
    model.heads["high"].register_forward_hook(lambda *_: count.append(1))
    TrainStep([Learner(model, {"high": losses.create("contrastive")})], sgd(model), chunk=12)(batch())
    assert len(count) == 1


def test_chunks_need_batch_norms_that_are_frozen():
    model = networks.create("resnet18", dim=4)
    learner = Learner(model, {"high": losses.create("contrastive")})
    with pytest.raises(ValueError, match=r"20 batch norms .*freeze_batchnorm = true"):
        TrainStep([learner], sgd(model), chunk=4)
    model.backbone.freeze_batchnorm()
    TrainStep([learner], sgd(model), chunk=4)


# --- what is no number -----------------------------------------------------------------------------------------


class Infinite(nn.Module):
    """A loss of which the value or the gradient is no number, as told."""

    def __init__(self, value: float, gradient: float) -> None:
        super().__init__()
        self.value, self.gradient = value, gradient

    def forward(self, embeddings, labels):
        total = embeddings.sum() * self.gradient
        return total - total.detach() + self.value


@pytest.mark.parametrize(("value", "gradient"), [(torch.inf, 1.0), (torch.nan, 1.0), (1.0, torch.nan)])
def test_a_step_that_is_not_finite_changes_nothing(value, gradient):
    model = network()
    optimizer = sgd(model)
    good = TrainStep([Learner(model, {"high": losses.create("contrastive")})], optimizer)
    good(batch())
    before, state = values(model), copy.deepcopy(optimizer.state_dict())
    outcome = TrainStep([Learner(model, {"high": Infinite(value, gradient)})], optimizer)(batch())
    assert not bool(outcome.finite)
    assert_same(values(model), before)
    for number, entry in state["state"].items():
        assert torch.equal(optimizer.state_dict()["state"][number]["momentum_buffer"], entry["momentum_buffer"])


def test_strange_embeddings_are_a_strange_step_and_no_error():
    model = network()
    before = values(model)
    bad = batch()
    bad.images[3, 2] = torch.nan
    outcome = TrainStep([Learner(model, {"high": losses.create("contrastive")})], sgd(model))(bad)
    assert not bool(outcome.finite)
    assert not bool(outcome.loss.isfinite())
    assert_same(values(model), before)


def normed(seed=0):
    """A network with a live batch norm."""
    torch.manual_seed(seed)
    model = networks.create("small_cnn", size=8, dim=4)
    model.heads["high"] = nn.Sequential(nn.BatchNorm1d(model.backbone.channels["high"]), model.heads["high"])
    return model.train()


def statistics(*modules):
    layers = [layer for module in modules for layer in batchnorm.batchnorm_layers(module)]
    return [each.clone() for layer in layers for each in layer.buffers()]


@pytest.mark.parametrize("members", [1, 2])
def test_nor_does_it_change_what_batch_norms_know(members):
    models = [normed(seed) for seed in range(members)]
    contrastive = losses.create("contrastive")
    step = TrainStep([Learner(model, {"high": contrastive}) for model in models], sgd(*models))
    step(pictures())
    before, places = statistics(*models), [each.data_ptr() for model in models for each in model.buffers()]
    bad = pictures(1)
    bad.images[3, 0, 2, 2] = torch.nan
    assert not bool(step(bad).finite)
    assert_same(statistics(*models), before)
    assert [each.data_ptr() for model in models for each in model.buffers()] == places  # CUDA graphs write there
    for model in models:
        assert bool(model.eval()(pictures().images).isfinite().all())


def test_members_of_an_ensemble_forget_a_batch_together():
    models = [normed(0), normed(1)]
    each = [losses.create("contrastive"), Infinite(1.0, torch.nan)]
    step = TrainStep([Learner(model, {"high": loss}) for model, loss in zip(models, each, strict=True)], sgd(*models))
    before = statistics(*models)
    assert not bool(step(pictures()).finite)
    assert_same(statistics(*models), before)


def test_a_finite_step_leaves_batch_norms_what_they_learned():
    model, by_hand = normed(), normed()
    TrainStep([Learner(model, {"high": losses.create("contrastive")})], sgd(model))(pictures())
    by_hand(pictures().images)
    assert_same(statistics(model), statistics(by_hand))
    assert not torch.equal(statistics(model)[0], statistics(normed())[0]), "nothing was learned"


def test_batch_norms_that_are_frozen_cost_nothing(monkeypatch):
    model, copies = normed(), []
    monkeypatch.setattr("nearfar.training.step._flat", lambda buffers: copies.append(buffers))
    batchnorm.freeze_batchnorms(model)
    TrainStep([Learner(model, {"high": losses.create("contrastive")})], sgd(model))(pictures())
    assert copies == []


def test_momentum_that_begins_at_zero_is_momentum_that_begins():
    model, other = network(), network()
    seeded, plain = sgd(model), sgd(other)
    seed_momentum(seeded)
    for number in range(3):
        for one, optimizer in ((model, seeded), (other, plain)):
            TrainStep([Learner(one, {"high": losses.create("contrastive")})], optimizer)(batch(number))
    assert_same(values(model), values(other))


# --- the log ------------------------------------------------------------------------------------------------


def outcome(loss, finite=True):
    return StepResult(torch.tensor(loss), torch.tensor(finite))


def test_a_page_is_given_when_it_is_full_or_time_has_gone_by():
    now = [0.0]
    log = StepLog(torch.device("cpu"), steps=3, seconds=10.0, clock=lambda: now[0])
    assert [len(log.add(number, outcome(1.0), 4)) for number in range(4)] == [0, 0, 1, 0]
    now[0] = 11.0
    page = log.add(4, outcome(3.0), 4)[0]
    assert (page.first, page.losses, page.images, page.seconds) == (3, [1.0, 3.0], 8, 11.0)


def test_steps_that_were_not_finite_are_named_and_do_not_count():
    log = StepLog(torch.device("cpu"), steps=100, seconds=1e9)
    for number, (loss, finite) in enumerate([(1.0, True), (float("nan"), False), (3.0, True)], start=7):
        log.add(number, outcome(loss, finite), 4)
    page = log.flush()[0]
    assert page.nonfinite == [8]
    assert page.loss == 2.0
    assert log.flush() == []
    log.add(10, outcome(float("inf"), False), 4)
    assert log.flush()[0].loss is None


# --- a step with a memory --------------------------------------------------------------------------------------


def test_a_memory_adds_columns_to_the_batch():
    model, loss, memory = network(), losses.create("contrastive"), Memory(20, dim=4)
    generator = torch.Generator().manual_seed(1)
    old, old_labels = torch.randn(7, 4, generator=generator), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    memory.add(old, old_labels)
    found = TrainStep([Learner(model, {"high": loss}, {"high": memory})], sgd(model, lr=0.0))(batch())

    embeddings = model(batch().images)
    gallery, labels = torch.cat([embeddings, old]), torch.cat([LABELS, old_labels])
    expected = loss(embeddings, LABELS, gallery, labels, positions=torch.arange(12))
    torch.testing.assert_close(found.loss, expected.detach())
    assert torch.equal(memory.embeddings[7:], embeddings.detach())
    assert torch.equal(memory.labels, torch.cat([old_labels, LABELS]))


# --- random numbers --------------------------------------------------------------------------------------------


def test_what_a_loss_draws_depends_on_the_seed_of_the_step_alone():
    def after(seed, elsewhere):
        model = network()
        torch.manual_seed(elsewhere)
        expected = torch.rand(3)
        torch.manual_seed(elsewhere)
        TrainStep([Learner(model, {"high": losses.create("contrastive", mining="random")})], sgd(model))(
            batch(), seed=seed
        )
        assert torch.equal(torch.rand(3), expected), "torch's own generator has moved"
        return values(model)

    assert_same(after(5, 1), after(5, 2))
    assert not torch.equal(after(5, 1)[0], after(6, 1)[0])


def test_members_and_levels_draw_each_their_own():
    drawn = []

    class Draws(nn.Module):
        def forward(self, points, labels):
            drawn.append(torch.rand(()).item())
            return points.square().sum()

    torch.manual_seed(0)
    models = [networks.create("small_cnn", size=8, dim=4, levels=("low", "high")) for _ in range(2)]
    members = [Learner(model, {"low": Draws(), "high": Draws()}) for model in models]
    step = TrainStep(members, sgd(*models))
    for seed in (0, 1, 0):
        step(pictures(), seed=seed)
    assert len(set(drawn)) == 8
    assert drawn[:4] == drawn[8:]
