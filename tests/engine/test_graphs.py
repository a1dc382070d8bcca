"""When a step is recorded and replayed, told without a GPU: what stands for a recording computes again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import create
from checks import assert_same, make_batch, run

import nearfar as nf
from nearfar.engine import autograd, cuda_graphs
from nearfar.engine.autograd import LossComputation, differentiable

STEPS = 12
NOT_RECORDED = ("hierarchical_triplet", "quadruplet", "smooth_ap", "spectral_clustering")


class Replayed:
    """In place of a CUDA graph: computes from the buffers of a recording what the step would."""

    recording: cuda_graphs.Recording

    def __init__(self, again):
        self.again = again

    def pool(self): ...

    def replay(self):
        self.recording.loss, self.recording.gradients = self.again()


@pytest.fixture
def recorded(monkeypatch):
    """The static inputs of each recording that is made."""
    made = []

    def record(computation, tensors, static, inputs, needed, current, pool, number):
        made.append(static)
        copies = [
            None if tensor is None else tensor.detach() if number in static else tensor.detach().clone()
            for number, tensor in enumerate(tensors)
        ]
        graph = Replayed(lambda: computation.compute(copies[:inputs], copies[inputs:], needed))
        graph.recording = cuda_graphs.Recording(graph, copies, static, torch.zeros(()), [], number)
        return graph.recording

    monkeypatch.setattr(cuda_graphs, "_record", record)
    monkeypatch.setattr(autograd, "RECORDED", {"cpu"})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def check_steps(loss, dtype=torch.float32):
    """Every step has the value and gradients of one that is not recorded, while parameters learn."""
    for step in range(STEPS):
        batch = make_batch(seed=step, dtype=dtype)
        loss.cuda_graph = True
        actual = run(loss, *batch)
        loss.cuda_graph = False
        assert_same(actual, run(loss, *batch), tolerance=1e-6)
        with torch.no_grad():
            for parameter in loss.parameters():
                parameter.add_(0.01)


with_proxies = pytest.mark.parametrize(
    ("key", "settings", "recordings"),
    # Nothing is really captured, so that a step within a step has a recording of its own.
    [("arcface", {}, 1), ("group", {}, 1), ("proxy_repel", {"through_batch": True}, 3)],
)


@with_proxies
def test_parameters_are_read_where_they_stand(recorded, key, settings, recordings):
    check_steps(nf.losses.create(key, num_classes=5, dim=4, **settings))
    assert len(recorded) == recordings
    assert any(recorded)


@with_proxies
@pytest.mark.parametrize(("kept", "given"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)])
def test_parameters_in_another_precision_are_recorded_once(recorded, key, settings, recordings, kept, given):
    check_steps(nf.losses.create(key, num_classes=5, dim=4, **settings).to(kept), given)
    assert recorded == [()] * recordings


class Counting(nf.mining.ValidTriplet):
    """Keeps more than its settings."""

    def __init__(self):
        super().__init__()
        self._calls = 0

    def select(self, tile):
        self._calls += 1
        return super().select(tile)


def test_a_mining_of_ones_own_is_asked_in_every_step(recorded):
    mining = Counting()
    check_steps(nf.losses.Raw(mining=mining))
    assert mining._calls == 2 * STEPS
    assert not recorded


def test_a_setting_changed_between_steps_is_respected(recorded):
    loss, batch = nf.losses.Raw(mining="valid_triplet"), make_batch(dtype=torch.float32)
    mining = loss.mining
    for value in (0.1, np.float32(0.2), torch.tensor(0.3), 0.4):
        loss.base = value
        for margin in (0.5, np.float32(0.01)):
            mining.margin = margin
            fresh = nf.losses.Raw(base=float(value), mining={"name": "valid_triplet", "margin": float(margin)})
            fresh.cuda_graph = False
            for _ in range(4):
                assert_same(run(loss, *batch), run(fresh, *batch), tolerance=1e-5)
    assert recorded


def test_settings_are_told_apart_by_name():
    loss = nf.losses.Triplet()
    one = loss.graph_key()
    assert hash(one) is not None
    del loss.margin
    loss.limit = 0.1
    assert loss.graph_key() != one


@pytest.mark.parametrize("value", [np.float32(2), torch.tensor(2.0), [2.0], (2.0,), lambda: 2.0])
def test_what_may_change_unseen_is_not_recorded(value):
    loss = nf.losses.Raw()
    assert loss.graph_key() is not None
    loss.alpha = value
    assert loss.graph_key() is None
    mined = nf.losses.Raw(mining="valid_triplet")
    mined.mining.margin = value
    assert mined.graph_key() is None


@pytest.mark.parametrize("key", nf.losses.names())
def test_every_loss_of_the_registry_is_recorded_but_for_four(key):
    loss = create(key, {})
    assert loss.cuda_graph == (key not in NOT_RECORDED)
    assert (loss.graph_key() is not None) == loss.cuda_graph


@pytest.mark.parametrize("key", [key for key in nf.losses.names() if key not in NOT_RECORDED])
def test_every_number_that_is_assigned_needs_another_recording(key):
    loss = create(key, {})
    for name, value in loss.settings().items():
        if isinstance(value, float) and name not in loss.fixed and isinstance(getattr(loss, name), float):
            before = loss.graph_key()
            setattr(loss, name, 0.5 * value + 0.0123)
            assert loss.graph_key() != before, name


def test_the_steps_of_a_search_are_recorded(recorded):
    check_steps(nf.losses.FacilityLocation())
    assert len(recorded) == 2  # the greedy search and a swap


def test_smooth_ap_is_recorded_if_it_knows_the_number_of_positives(recorded):
    check_steps(nf.losses.SmoothAP(max_positives=8))
    assert len(recorded) == 1


class Hinge(nf.losses.PairLoss):
    """A loss of a user that declares nothing."""

    calls = 0

    def rows(self, sim, pos, neg):
        type(self).calls += 1
        return torch.where(neg, sim.relu(), 0.0).sum(1) - torch.where(pos, sim, 0.0).sum(1)


class RecordedHinge(Hinge):
    """The same loss, which allows CUDA graphs."""

    cuda_graph = True


class RecordedMining(nf.mining.ValidTriplet):
    """A mining of a user that allows CUDA graphs."""

    cuda_graph = True


def test_a_loss_of_ones_own_is_recorded_if_its_class_says_so(recorded):
    check_steps(RecordedHinge())
    assert len(recorded) == 1


def test_a_loss_of_ones_own_that_says_nothing_is_not_recorded(recorded):
    loss = Hinge()
    batch = make_batch(dtype=torch.float32)
    before = Hinge.calls
    for _ in range(STEPS):
        run(loss, *batch)
    assert Hinge.calls == before + STEPS
    assert not recorded


def test_a_subclass_does_not_inherit_the_permission():
    class Mine(nf.losses.Raw):
        pass

    class Further(RecordedHinge):
        pass

    assert Mine().graph_key() is None
    assert Further().graph_key() is None
    assert nf.losses.Raw(mining=Counting()).graph_key() is None
    assert nf.losses.Raw(mining=RecordedMining()).graph_key() is not None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_graph_no_gradient_is_computed(mode):
    asked = []

    def compute(inputs, constants, needed):
        asked.append(needed)
        return inputs[0].detach().sum(), [torch.ones(3) if needed[0] else None, None]

    leaf = torch.ones(3, requires_grad=True)
    with mode():
        assert differentiable(LossComputation(compute), (leaf, None)) == 3.0
    assert differentiable(LossComputation(compute), (leaf, None)).requires_grad
    assert asked == [(False, False), (True, False)]
