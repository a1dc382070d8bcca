"""Training on a GPU: a host that never waits, updates that are masked there, and runs that go on."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from training_runs import Interrupts, recipe, train, vectors, weights
from waiting import no_waiting

from nearfar import losses, networks
from nearfar.data.loader import Batch, Loader
from nearfar.data.sampling.base import create
from nearfar.data.store.store import Store
from nearfar.data.transforms.view import View
from nearfar.losses import Memory
from nearfar.training.cuda_graphs import GraphedEmbedder
from nearfar.training.evaluation import embeddings
from nearfar.training.recipe.schema import OptimizerSection
from nearfar.training.setup import create_optimizer
from nearfar.training.step import Learner, StepLog, TrainStep, prefetch
from nearfar.training.trainer import Stopped

pytestmark = pytest.mark.gpu

LABELS = np.arange(120) // 6


def network(name="resnet18", **settings):
    torch.manual_seed(0)
    model = networks.create(name, dim=32, **settings).train()
    return model.to("cuda", memory_format=torch.channels_last)


def optimizer(name, *modules):
    return create_optimizer(OptimizerSection(name=name, lr=1e-3), modules[0], nn.ModuleList(modules[1:]), "cuda")


LOSSES = {
    "pairs": lambda: losses.create("multi_similarity"),
    "proxies": lambda: losses.create("proxy_anchor", num_classes=20, dim=32),
    "group": lambda: losses.create("group", num_classes=20, dim=32),
    "random mining": lambda: losses.create("triplet", mining="distance_weighted"),
}


@pytest.mark.parametrize("optimiser", ["adamw", "sgd"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_host_never_waits_for_a_step(name, optimiser):
    rng = np.random.default_rng(0)
    store = Store.of_arrays([rng.integers(0, 256, (72, 80, 3), dtype=np.uint8) for _ in LABELS])
    model, loss = network(), LOSSES[name]().cuda()
    view = View(size=64, crop="random_resized")
    loader = Loader(store, LABELS, view=view, normalization=model.normalization, device="cuda", mode="resident")
    sampler = create("groups", LABELS, classes=8, per_class=4, steps=12)
    step = TrainStep(
        [Learner(model, {"high": loss})], optimizer(optimiser, model, loss), precision="bfloat16", clip=1.0
    )
    ledger = StepLog(torch.device("cuda"), steps=4, seconds=float("inf"))  # the first step may take long
    pages = []
    for number, batch in enumerate(prefetch(loader.epoch(sampler, 0), torch.device("cuda"))):
        if number == 5:  # kernels are loaded, and the loss is recorded
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        pages += ledger.add(number, step(batch), len(batch))
    torch.cuda.set_sync_debug_mode("default")
    pages += ledger.flush()
    assert [page.first for page in pages] == [0, 4, 8]
    assert all(np.isfinite(page.losses).all() for page in pages)


@pytest.mark.parametrize("chunk", [None, 8])
def test_the_host_waits_neither_for_a_memory_nor_for_chunks(chunk):
    model = network(freeze_batchnorm=True)
    member = Learner(model, {"high": losses.create("contrastive")}, {"high": Memory(40, dim=32, device="cuda")})
    step = TrainStep([member], optimizer("adamw", model), chunk=chunk)
    batch = Batch(torch.randn(16, 3, 64, 64, device="cuda"), torch.arange(16).cuda() // 2, torch.arange(16).cuda())
    for _ in range(6):
        step(batch)
    with no_waiting():
        for _ in range(3):
            step(batch)


@pytest.mark.parametrize("mode", ["resident", "streaming"])
def test_batches_made_ahead_are_the_same_batches(mode):
    rng = np.random.default_rng(0)
    store = Store.of_arrays([rng.integers(0, 256, (72, 80, 3), dtype=np.uint8) for _ in LABELS])
    loader = Loader(store, LABELS, view=View(size=64, crop="random_resized"), device="cuda", mode=mode)
    sampler = create("groups", LABELS, classes=8, per_class=4, steps=12)
    plain = [(batch.images.clone(), batch.labels.clone()) for batch in loader.epoch(sampler, 0)]
    busy = torch.randn(2000, 2000, device="cuda")
    found = []
    for batch in prefetch(loader.epoch(sampler, 0), torch.device("cuda")):
        for _ in range(5):
            busy = (busy @ busy).clamp(-1, 1)  # the step under way
        found.append((batch.images.clone(), batch.labels.clone()))
        del batch  # whose memory may be used again
    assert len(found) == len(plain)
    for one, two in zip(found, plain, strict=True):
        assert torch.equal(one[0], two[0])
        assert torch.equal(one[1], two[1])


class Poison(nn.Module):
    """Contrastive, but no number when told so."""

    def __init__(self):
        super().__init__()
        self.loss, self.bad = losses.create("contrastive"), False

    def forward(self, embeddings, labels):
        value = self.loss(embeddings, labels)
        return value * torch.nan if self.bad else value


@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "radam"])
def test_a_step_that_is_not_finite_leaves_parameters_and_optimiser_alone(name, bad):
    """Three steps of which one is masked are the other two."""
    model, other = network("mlp", in_dim=8), network("mlp", in_dim=8)
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(12, 8, generator=generator).cuda() for _ in range(4)]
    labels = torch.arange(12).cuda() // 3
    poison, clean = Poison(), Poison()
    step = TrainStep([Learner(model, {"high": poison})], optimizer(name, model))
    plain = TrainStep([Learner(other, {"high": clean})], optimizer(name, other))
    for number, points in enumerate(data):
        poison.bad = number == bad
        outcome = step(Batch(points, labels, labels))
        assert bool(outcome.finite) != poison.bad
        if number != bad:
            plain(Batch(points, labels, labels))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_masking_makes_no_host_wait():
    model, poison = network("mlp", in_dim=8), Poison()
    step = TrainStep([Learner(model, {"high": poison})], optimizer("adamw", model))
    batch = Batch(torch.randn(12, 8, device="cuda"), torch.arange(12).cuda() // 3, torch.arange(12).cuda())
    for poison.bad in (False, True, False, False):
        step(batch)
    with no_waiting():
        for poison.bad in (False, True):
            step(batch)


def test_chunks_give_the_gradient_of_the_whole_batch():
    model = network(freeze_batchnorm=True).double()
    other = copy.deepcopy(model)
    images = torch.randn(24, 3, 64, 64, dtype=torch.float64, device="cuda")
    batch = Batch(images, torch.arange(24).cuda() // 3, torch.arange(24).cuda())
    for each, chunk in ((model, None), (other, 5)):
        rate = torch.optim.SGD(each.parameters(), lr=0.0, fused=True)
        TrainStep([Learner(each, {"high": losses.create("multi_similarity")})], rate, chunk=chunk)(batch)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(one.grad, two.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_run_is_stopped_and_resumed(name, tmp_path):
    chosen = recipe(
        vectors(tmp_path), training__device="cuda", optimizer__name=name, training__precision="bfloat16",
        training__epochs=30,
    )  # fmt: skip
    train(chosen, tmp_path / "whole")
    with pytest.raises(Stopped):
        train(chosen, tmp_path / "cut", display=Interrupts(50))
    train(chosen, tmp_path / "cut", resume=True)
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert whole.keys() == cut.keys()
    for key in whole:
        if key.startswith("model:"):
            torch.testing.assert_close(whole[key], cut[key], rtol=1e-3, atol=1e-4)


def test_pictures_with_convolutions_resume_with_fused_optimisers(tmp_path):
    """Channels-last parameters need an optimiser's state that lies in memory alike."""
    from training_runs import pictures

    chosen = recipe(
        pictures(tmp_path), training__device="cuda", network__name="small_cnn", augmentation__size=8,
        training__epochs=30,
    )  # fmt: skip
    with pytest.raises(Stopped):
        train(chosen, tmp_path / "run", display=Interrupts(50))
    assert train(chosen, tmp_path / "run", resume=True).metrics["test"]["recall@1"] > 0.5


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "settings", [{"freeze_batchnorm": True}, {}, {"levels": ("low", "mid", "high")}], ids=["frozen", "free", "levels"]
)
def test_a_recorded_network_learns_what_the_network_learns(settings, precision):
    models = [network(**settings) for _ in range(2)]
    rng = torch.Generator().manual_seed(0)
    batches = [torch.randn(16, 3, 64, 64, generator=rng) for _ in range(9)]
    recorded = GraphedEmbedder(models[1])
    for model, embed in zip(models, (None, recorded), strict=True):
        kinds = {level: losses.create("multi_similarity") for level in model.levels}
        step = TrainStep([Learner(model, kinds, embed=embed)], optimizer("sgd", model), precision=precision)
        labels = torch.arange(16).cuda() // 2
        for number, images in enumerate(batches):
            if number == 0:
                model.freeze_backbone()
            if number == 4:
                model.unfreeze_backbone()
            assert bool(step(Batch(images.cuda(), labels, labels)).finite)
    assert recorded._recording is not None
    for (name, one), other in zip(models[0].state_dict().items(), models[1].state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3, msg=lambda text, name=name: f"{name}: {text}")


def test_what_a_recorded_network_draws_is_drawn_anew():
    recorded = GraphedEmbedder(network("efficientnet_lite0", drop_path=0.9, freeze_batchnorm=True))
    images = torch.randn(8, 3, 64, 64, device="cuda")
    found = [recorded(images)["high"].detach().clone() for _ in range(5)]
    assert recorded._recording is not None
    assert not torch.equal(found[3], found[4])


def test_a_short_last_batch_is_filled_and_embeds_as_alone():
    rng = np.random.default_rng(0)
    store = Store.of_arrays([rng.integers(0, 256, (64, 64, 3), dtype=np.uint8) for _ in range(11)])
    model = network(freeze_batchnorm=True)
    view = View(size=64, crop="none", flip=False)
    loader = Loader(store, LABELS[:11], view=view, normalization=model.normalization, device="cuda")
    rows = np.arange(11)
    found = embeddings.embed(model, loader, rows, batch_size=4)
    assert found.embeddings.shape == (11, 32)
    assert found.labels.tolist() == LABELS[:11].tolist()
    alone = embeddings.embed(model, loader, rows[8:], batch_size=4)
    # Batches of other sizes are convolved by other algorithms, in TF32.
    torch.testing.assert_close(found.embeddings[8:], alone.embeddings, rtol=1e-2, atol=1e-3)


def test_what_cannot_be_recorded_is_computed_as_usual():
    model = network()
    forward = model.levels_forward

    def curious(images):
        float(images.sum())  # the host waits, which no recording can do
        return forward(images)

    model.levels_forward = curious
    recorded = GraphedEmbedder(model)
    images = torch.randn(8, 3, 64, 64, device="cuda")
    recorded(images), recorded(images)
    with pytest.warns(UserWarning, match="without a CUDA graph"):
        recorded(images)
    assert recorded(images)["high"].requires_grad
    assert len(torch.rand(3, device="cuda").unique()) == 3  # no longer taken for a part of it
