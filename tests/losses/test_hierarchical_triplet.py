"""The margins of the hierarchical triplet loss, against a tree built by hand."""

import itertools

import pytest
import torch
from checks import assert_close, make_batch
from torch.nn.functional import normalize

import nearfar as nf


def margins_by_hand(embeddings, labels, levels):
    """Mean squared distances by pairs of images, and connections by growing groups of classes."""
    points, classes = normalize(embeddings, dim=1), labels.unique().tolist()
    members = {c: [i for i, label in enumerate(labels.tolist()) if label == c] for c in classes}

    def apart(some, others):
        pairs = [(points[i] - points[j]).square().sum().item() for i in some for j in others if i != j]
        return sum(pairs) / len(pairs) if pairs else 0.0

    within = {c: apart(members[c], members[c]) for c in classes}
    spread = [within[c] for c in classes if len(members[c]) > 1]
    lowest = sum(spread) / len(spread)
    found = [[0.0] * len(classes) for _ in classes]
    for b, c in itertools.permutations(classes, 2):
        for level in range(levels + 1):
            threshold, group = lowest + level * (4 - lowest) / levels, {b}
            while more := {
                new
                for new in set(classes) - group
                if any(apart(members[new], members[old]) <= threshold for old in group)
            }:
                group |= more
            if c in group or level == levels:
                found[b][c] = threshold - within[b]
                break
    return found


@pytest.mark.parametrize("levels", [1, 4, 16])
def test_margins_are_those_of_the_tree(levels):
    embeddings, labels = make_batch("mixed", sizes=(4, 3, 3, 2, 1), seed=2)
    loss = nf.losses.HierarchicalTriplet(num_classes=5, levels=levels).double()
    loss.update(embeddings, labels)
    expected = torch.tensor(margins_by_hand(embeddings, labels, levels), dtype=torch.float64)
    off = ~torch.eye(5, dtype=torch.bool)
    assert_close(loss.margins[off], expected[off], 1e-9)


@pytest.mark.parametrize("budget", [None, 1])
def test_the_loss_has_the_margin_of_anchor_and_negative(budget):
    embeddings, labels = make_batch("mixed", seed=3)
    loss = nf.losses.HierarchicalTriplet(margin=0.2, num_classes=5).double()
    loss.update(*make_batch("touching", seed=4))
    if budget is not None:
        loss.memory_budget = budget
    leaf, other = (embeddings.clone().requires_grad_() for _ in range(2))
    value, terms, points = loss(leaf, labels), [], normalize(other, dim=1)
    for a, p, n in itertools.permutations(range(len(labels)), 3):
        if labels[a] == labels[p] != labels[n]:
            gap = (points[a] - points[p]).square().sum() - (points[a] - points[n]).square().sum()
            terms.append((gap + 0.2 + loss.margins[labels[a], labels[n]]).relu())
    expected = torch.stack(terms).mean() / 2
    assert_close(value.detach(), expected.detach(), 1e-10)
    value.backward()
    expected.backward()
    assert_close(leaf.grad, other.grad, 1e-10)


def test_classes_without_an_image_keep_the_plain_margin():
    embeddings, labels = make_batch(sizes=(3, 3))
    loss = nf.losses.HierarchicalTriplet(num_classes=4)
    loss.update(embeddings, labels)
    assert loss.margins[:2, :2].any()
    assert not loss.margins[2:].any()
    assert not loss.margins[:, 2:].any()


@pytest.mark.filterwarnings("error")
def test_classes_of_opposites_leave_no_room_for_levels():
    loss = nf.losses.HierarchicalTriplet(num_classes=2)
    loss.update(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]), torch.tensor([0, 0, 1, 1]))
    assert loss.margins.allclose(torch.zeros(2, 2))
