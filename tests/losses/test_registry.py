"""Losses by name."""

import inspect

import class_oracles
import oracles
import pytest
import torch
from cases import create
from checks import assert_same, make_batch, run

import nearfar as nf
from nearfar.engine import Mean
from nearfar.losses import PairLoss, base
from nearfar.utils.validation import defaults_of

NOT_IN_THE_LOOPS = {  # how a loss compares and trains
    "triplet": {"mining": "semi_hard"},
    "margin": {"mining": "distance_weighted", "beta_lr": 5e-5},
    "nca": {"normalize": False},
}


@pytest.mark.parametrize("key", nf.losses.names())
def test_defaults_are_the_papers(key):
    """Those of the loops, which are written from the papers; and all classes take part."""
    loop = getattr(oracles, key, None) or getattr(class_oracles, key)
    papers = {name: default for name, default in defaults_of(loop).items() if default is not inspect.Parameter.empty}
    defaults = nf.losses.defaults(key)
    assert (papers | NOT_IN_THE_LOOPS.get(key, {})).items() <= defaults.items()
    assert defaults.get("sample_rate", 1.0) == 1.0


@pytest.mark.parametrize("key", nf.losses.names())
def test_a_description_has_formula_every_setting_reference_and_example(key):
    text = nf.losses.describe(key)
    assert all(section in text for section in ("Formula:", "Reference:", "Example:"))
    author, _, _ = nf.losses.get(key).source.partition(" ")
    assert author in text
    assert all(setting in text for setting in nf.losses.defaults(key))


@pytest.mark.parametrize("key", nf.losses.names())
def test_repr_shows_the_settings(key):
    assert all(f"{name}=" in repr(create(key, {})) for name in nf.losses.defaults(key))


@pytest.mark.parametrize("key", nf.losses.names())
def test_a_loss_is_made_again_from_its_settings(key):
    loss = create(key, {"beta": 0.9} if key == "margin" else {})
    again = nf.losses.create(key, **loss.settings())
    assert nf.losses.defaults(key).keys() == loss.settings().keys()
    assert repr(again) == repr(loss)


@pytest.fixture
def clean_registry():
    before = base.LOSSES.entries
    base.LOSSES.entries = dict(before)
    yield
    base.LOSSES.entries = before


def test_a_registered_loss_is_created_by_its_key(clean_registry):
    @nf.losses.register("hinge", "nowhere")
    class Hinge(PairLoss):
        """A loss of this test."""

        def __init__(self, *, limit=0.0):
            super().__init__()
            self.limit = limit

        def rows(self, sim, pos, neg):
            return torch.where(neg, (sim - self.limit).relu(), 0.0).sum(1) - torch.where(pos, sim, 0.0).sum(1)

    assert "hinge" in nf.losses.names()
    assert "A loss of this test." in nf.losses.describe("hinge")
    loss = nf.losses.create("hinge", limit=0.5)
    batch = make_batch()
    for budget in (1, loss.memory_budget):
        loss.memory_budget = budget
        assert_same(run(loss, *batch), run(nf.losses.Contrastive(), *batch), tolerance=1e-11)


def test_two_losses_cannot_share_a_key(clean_registry):
    with pytest.raises(ValueError, match=r"'raw' is taken: loss nearfar.losses.raw.Raw has it, so .*Impostor needs"):

        @nf.losses.register("raw", "nowhere")
        class Impostor(PairLoss):
            pass


def test_a_loss_needs_a_key():
    with pytest.raises(TypeError, match="register needs the key of the loss"):
        nf.losses.register(nf.losses.Raw)


def test_a_custom_loss_may_have_denominators_of_its_own():
    class PerPair(PairLoss):
        def rows(self, sim, pos, neg):
            push = torch.where(neg, (sim - 0.5).relu(), 0.0)
            pull = torch.where(pos, -sim, 0.0)
            return [Mean(pull.sum(1), pos.sum(1).to(sim)), Mean(push.sum(1), (push > 0).sum(1).to(sim))]

    loss, batch = PerPair(), make_batch()
    for budget in (1, loss.memory_budget):
        loss.memory_budget = budget
        assert_same(run(loss, *batch), run(nf.losses.Contrastive(average="pairs"), *batch), tolerance=1e-11)


@pytest.mark.parametrize("measure", ["cosine", "dot", "euclidean", "squared_euclidean", "snr"])
def test_a_custom_loss_says_how_to_compare(measure):
    class Total(PairLoss):
        normalize = measure == "cosine"

        def rows(self, sim, pos, neg):
            return torch.where(pos | neg, sim.square(), 0.0).sum(1)

    Total.measure = measure
    loss = Total().double()
    embeddings, labels = make_batch(sizes=(3, 2, 1), dim=3)
    assert torch.autograd.gradcheck(lambda leaf: loss(leaf, labels), (embeddings.requires_grad_(),))


def test_a_loss_without_rows_says_what_is_missing():
    class Empty(PairLoss):
        pass

    with pytest.raises(NotImplementedError, match="Empty must define rows"):
        Empty()(*make_batch())
