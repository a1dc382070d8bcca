"""Losses by name."""

from __future__ import annotations

import pytest
import torch
from cases import create
from checks import assert_same, make_batch, run

import nearfar as nf
from nearfar.engine import Mean
from nearfar.losses import PairLoss, base

PAPER_DEFAULTS = {
    "contrastive": {"form": "cosine"},
    "triplet": {"form": "cosine", "mining": "semi_hard", "soft_margin": False},
    "lifted_structure": {"margin": 1.0, "squared": True},
    "lifted_structure_generalized": {"margin": 0.5},
    "n_pair": {"l2": 0.02},
    "margin": {"margin": 0.2, "beta": 1.2, "num_classes": None, "nu": 0.0, "beta_lr": 5e-5},
    "binomial_deviance": {"alpha": 2.0, "beta": 50.0, "base": 0.5},
    "raw": {"alpha": 2.0, "beta": 50.0, "base": 0.5},
    "multi_similarity": {"alpha": 2.0, "beta": 50.0, "base": 0.5, "epsilon": 0.1},
    "ranked_list": {"alpha": 1.2, "margin": 0.4, "temperature": 10.0, "balance": 1.0, "query_weighting": "mean"},
    "nra": {"alpha": 4.0, "epsilon": 1e-4},
    "circle": {"margin": 0.4, "scale": 80.0},
    "sup_con": {"temperature": 0.1},
    "nt_xent": {"temperature": 0.07, "symmetric": False, "learn_temperature": False},
    "nca": {"form": "log", "scale": 1.0, "normalize": False},
    "tuplet_margin": {"slack": 0.1, "scale": 64.0},
    "threshold_consistent_margin": {"positive_margin": 0.9, "negative_margin": 0.5},
    "cosent": {"scale": 20.0, "graded": False},
    "vicreg": {"invariance": 25.0, "variance": 25.0, "covariance": 1.0},
    "barlow_twins": {"redundancy": 0.005},
    "angular": {"angle": 40.0},
    "hierarchical_triplet": {"margin": 0.1, "levels": 16},
    "quadruplet": {"margin": 1.0, "second_margin": 0.5},
    "histogram": {"bins": 100},
    "smooth_ap": {"temperature": 0.01, "max_positives": None},
    "fast_ap": {"bins": 10},
    "softmax": {"sample_rate": 1.0},
    "normalized_softmax": {"temperature": 0.05, "sample_rate": 1.0},
    "proxy_nca": {
        "measure": "squared_euclidean",
        "normalize": True,
        "scale": 18.0,
        "include_positive": False,
        "assignment": "static",
        "sample_rate": 1.0,
    },
    "arcface": {"centers": 1, "margin": 0.5, "scale": 64.0, "sample_rate": 1.0},
    "cosface": {"margin": 0.35, "scale": 64.0, "sample_rate": 1.0},
    "sphereface": {"margin": 4, "scale": None, "sample_rate": 1.0},
    "adaface": {"margin": 0.4, "concentration": 0.333, "scale": 64.0, "momentum": 0.99, "sample_rate": 1.0},
    "center": {},
    "soft_triple": {"centers": 10, "alpha": 20.0, "gamma": 10.0, "tau": 0.2, "margin": 0.1, "sample_rate": 1.0},
    "proxy_anchor": {"alpha": 32.0, "margin": 0.1},
    "proxy_repel": {"alpha": 32.0, "margin": 0.1, "through_batch": False},
    "group": {
        "iterations": 2,
        "temperature": 1.0,
        "anchors_per_class": 1,
        "similarity": "correlation",
        "keep_diagonal": False,
        "average_over": "rest",
        "classification_weight": 0.0,
    },
    "spectral_clustering": {},
    "facility_location": {"gamma": 1.0},
}


@pytest.mark.parametrize("key", nf.losses.names())
def test_defaults_are_the_papers(key):
    assert PAPER_DEFAULTS[key].items() <= nf.losses.defaults(key).items()


@pytest.mark.parametrize("key", nf.losses.names())
def test_a_description_has_formula_every_setting_reference_and_example(key):
    text = nf.losses.describe(key)
    assert all(section in text for section in ("Formula:", "Reference:", "Example:"))
    author, _, _ = nf.losses.get(key).source.partition(" ")
    assert author in text
    assert all(setting in text for setting in nf.losses.defaults(key))


@pytest.mark.parametrize("key", nf.losses.names())
def test_repr_shows_the_settings(key):
    assert all(name in repr(create(key, {})) for name in PAPER_DEFAULTS[key] if name != "beta" or key != "margin")


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

        def __init__(self, *, limit: float = 0.0) -> None:
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
