"""The centres of soft triple: what keeps them together, and how many are left."""

import math

import pytest
import torch
from cases import create
from checks import assert_close, assert_finite, assert_same, make_batch, run

import nearfar as nf

BATCH = torch.eye(4, dtype=torch.float64)[:2], torch.tensor([0, 1])


def with_centers(centers, **settings):
    """A loss whose centres, [classes, centres, dim], are these."""
    classes, count, dim = centers.shape
    loss = nf.losses.SoftTriple(num_classes=classes, dim=dim, centers=count, **settings).double()
    with torch.no_grad():
        loss.proxies.copy_(centers)
    return loss


def price(centers, tau=0.2):
    """What the distances between centres add to the loss."""
    with_price, without = (run(with_centers(centers, tau=tau), *BATCH) for tau in (tau, 0.0))
    return (with_price.value - without.value).item()


def test_centres_at_right_angles_cost_half_a_diagonal():
    """C · K(K − 1)/2 pairs at a distance of √2, divided by C · K(K − 1)."""
    centers = torch.eye(4, dtype=torch.float64).expand(2, 4, 4)
    assert price(centers) == pytest.approx(0.2 * math.sqrt(2) / 2)
    assert price(centers, tau=3.0) == pytest.approx(3.0 * math.sqrt(2) / 2)


def test_each_pair_costs_its_distance_whatever_the_lengths():
    """One class with centres at 0°, 90° and 180°, one with all on a point: √2 + √2 + 2 over 2 · 3 · 2."""
    axes = torch.eye(4, dtype=torch.float64)
    spread = torch.stack([axes[0], 5 * axes[1], -0.1 * axes[0]])
    assert price(torch.stack([spread, axes[2].expand(3, 4)])) == pytest.approx(0.2 * (2 * math.sqrt(2) + 2) / 12)


def test_equal_centres_cost_nothing_and_do_not_move_each_other():
    centers = torch.eye(4, dtype=torch.float64)[:2].unsqueeze(1).expand(2, 3, 4)
    assert price(centers) == pytest.approx(0.0, abs=1e-12)
    dear, free = (run(with_centers(centers, tau=tau), *BATCH) for tau in (100.0, 0.0))
    assert_finite(dear)
    assert_close(dear.gradients["proxies"], free.gradients["proxies"], 1e-12)


@pytest.mark.parametrize("centers", [1, 4])
def test_equal_centres_are_one_and_then_it_is_cosface(centers):
    batch = make_batch()
    plain = create("cosface", {"margin": 0.1, "scale": 20.0}).double()
    loss = with_centers(plain.proxies.detach().unsqueeze(1).expand(-1, centers, -1))
    actual, expected = run(loss, *batch), run(plain, *batch)
    actual.gradients["proxies"] = actual.gradients["proxies"].sum(dim=1)
    assert_same(actual, expected, tolerance=1e-10)


def test_a_large_gamma_takes_the_nearest_centre():
    embeddings, labels = make_batch()
    loss = create("soft_triple", {"gamma": 1e6, "tau": 0.0}).double()
    unit = torch.nn.functional.normalize
    nearest = torch.einsum("md,ckd->mck", unit(embeddings, dim=1), unit(loss.proxies.detach(), dim=2)).amax(dim=2)
    nearest[torch.arange(len(labels)), labels] -= 0.1
    assert_close(loss(embeddings, labels).detach(), torch.nn.functional.cross_entropy(20 * nearest, labels), 1e-6)


def at_angles(*degrees):
    angles = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def test_centres_near_an_earlier_one_are_not_counted():
    """At 5° unit vectors are 0.087 apart, at 6° 0.105. Lengths do not matter."""
    centers = torch.stack([at_angles(0, 5, 90), at_angles(0, 6, 90), 7 * at_angles(0, 0, 0), at_angles(0, 90, 180)])
    loss = with_centers(centers)
    assert loss.distinct_centers().tolist() == [2, 3, 1, 3]
    assert loss.distinct_centers(tolerance=0.01).tolist() == [3, 3, 1, 3]
    assert loss.distinct_centers(tolerance=1.5).tolist() == [1, 1, 1, 2]


def test_centres_are_compared_with_those_kept():
    """Of 0°, 5°, 10° the second goes with the first; the third is near the second only, and stays."""
    assert with_centers(at_angles(0, 5, 10).unsqueeze(0)).distinct_centers().tolist() == [2]


def test_counting_centres_leaves_no_trace():
    loss = create("soft_triple", {})
    before = loss.proxies.detach().clone()
    counts = loss.distinct_centers()
    assert counts.shape == (loss.num_classes,)
    assert not counts.is_floating_point()
    assert not counts.requires_grad
    assert torch.equal(loss.proxies, before)


@pytest.mark.parametrize("gamma", [1e-40, 1e-25, 1e-18, 1e-16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tiny_gamma_gives_all_centres_the_same_share(gamma, dtype):
    embeddings, labels = make_batch(sizes=(2, 2), dim=4, dtype=dtype)
    losses = [create("soft_triple", {"centers": 3, "gamma": each}, num_classes=2, dim=4) for each in (gamma, 0.0)]
    tiny, zero = (run(loss.to(dtype), embeddings, labels) for loss in losses)
    assert_same(tiny, zero, tolerance=1e-5 if dtype == torch.float32 else 1e-12)
