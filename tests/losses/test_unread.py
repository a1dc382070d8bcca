"""What is not looked at on a GPU, since that would stop the host, still shows."""

import math
from importlib import import_module

import pytest
import torch
from cases import CASES, DEFAULTS, create
from checks import make_batch, make_gallery

from nearfar.losses import PairLoss


@pytest.fixture(autouse=True)
def unread(monkeypatch):
    """Numbers on the CPU are passed over, as those on a GPU are."""
    for module in ("utils.tensors", "engine.measures", "losses.base", "losses.smooth_ap"):
        monkeypatch.setattr(import_module(f"nearfar.{module}"), "readable", lambda tensor: False)


WITH_GALLERIES = [case for case in DEFAULTS if case.family in ("pair", "triple")]


@pytest.mark.parametrize("strange", [math.nan, math.inf])
@pytest.mark.parametrize("case", WITH_GALLERIES, ids=lambda case: case.key)
def test_nan_in_the_batch_or_in_a_gallery_shows_in_the_loss(case, strange):
    loss = case.create()
    embeddings, labels, gallery, gallery_labels, positions = make_gallery(torch.float32)
    for budget in (loss.memory_budget, 1) if isinstance(loss, PairLoss) else (None,):
        if budget is not None:
            loss.memory_budget = budget
        for row in (0, 3, len(gallery) - 1):
            for tensor in (embeddings, gallery):
                broken = tensor.clone()
                broken[row % len(tensor), 0] = strange
                batch = (broken, labels, gallery) if tensor is embeddings else (embeddings, labels, broken)
                assert loss(*batch, gallery_labels, positions=positions).isnan()
        assert loss(embeddings, labels, gallery, gallery_labels, positions=positions).isfinite()


@pytest.mark.parametrize("label", [-1, 5, 10**9])
@pytest.mark.parametrize("case", [case for case in CASES if case.family == "proxy"], ids=lambda case: case.id)
def test_a_label_beyond_the_classes_is_an_error_or_shows_in_the_loss(case, label):
    loss = case.create(num_classes=5)
    embeddings, labels = make_batch(dtype=torch.float32)
    labels[4] = label
    for budget in (1, None):
        if budget is not None:
            loss.memory_budget = budget
        try:
            value = loss(embeddings, labels)
        except (IndexError, RuntimeError):
            continue  # a GPU stops the process
        assert value.isnan()


@pytest.mark.parametrize(("key", "settings"), [("arcface", {}), ("proxy_nca", {"assignment": "dynamic"})])
def test_gradients_of_a_label_beyond_the_classes_show_it(key, settings):
    loss = create(key, settings, num_classes=5)
    loss.memory_budget = 1
    embeddings, labels = make_batch(dtype=torch.float32)
    labels[4] = 5
    leaf = embeddings.requires_grad_()
    loss(leaf, labels).backward()
    assert leaf.grad[4].isnan().all()


@pytest.mark.parametrize("budget", [1, 1 << 28])
def test_more_positives_than_smooth_ap_was_told_show_in_loss_and_gradient(budget):
    embeddings, labels = make_batch(sizes=(4, 3, 1), dtype=torch.float32)
    embeddings.requires_grad_()
    for most, expected in ((3, create("smooth_ap", {})(embeddings, labels)), (2, torch.tensor(math.nan))):
        loss = create("smooth_ap", {"max_positives": most})
        loss.memory_budget = budget
        value = loss(embeddings, labels)
        torch.testing.assert_close(value, expected, equal_nan=True)
        (gradient,) = torch.autograd.grad(value, embeddings)
        assert gradient[:4].isnan().all() == (most == 2)
