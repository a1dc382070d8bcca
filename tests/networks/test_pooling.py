"""One vector for each picture."""

import pytest
import torch

from nearfar.networks import embedder


def pooling(kind):
    return embedder.GeM() if kind == "gem" else embedder.Pooling(kind)


MAP = torch.tensor([[[[1.0, 2.0], [3.0, 6.0]], [[0.0, 0.0], [0.0, 4.0]]]])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("avg", [3.0, 1.0]),
        ("max", [6.0, 4.0]),
        ("avg+max", [9.0, 5.0]),
        ("gem", [((1 + 8 + 27 + 216) / 4) ** (1 / 3), (64 / 4) ** (1 / 3)]),
    ],
)
def test_worked_out_by_hand(kind, expected):
    torch.testing.assert_close(pooling(kind)(MAP), torch.tensor([expected]))


@pytest.mark.parametrize("kind", ["avg", "max", "avg+max", "gem"])
def test_vectors_stay_as_they_are(kind):
    vectors = torch.randn(3, 5)
    assert torch.equal(pooling(kind)(vectors), vectors)


def test_gem_goes_from_average_to_maximum():
    torch.testing.assert_close(embedder.GeM(p=1.0)(MAP), pooling("avg")(MAP), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(embedder.GeM(p=500.0)(MAP), pooling("max")(MAP), rtol=1e-2, atol=0)


def test_gem_learns_its_exponent():
    gem = embedder.GeM(p=2.5).double()
    x = MAP.double().clone().requires_grad_(True)

    def pooled(x, p):
        return torch.func.functional_call(gem, {"p": p}, (x,))

    assert torch.autograd.gradcheck(pooled, (x + 0.5, gem.p))


@pytest.mark.parametrize("scale", [1e-4, 1e30])
def test_gem_holds_for_values_whose_powers_do_not(scale):
    x = MAP[:, :1]
    torch.testing.assert_close(embedder.GeM(p=20.0)(x * scale), embedder.GeM(p=20.0)(x) * scale)


def test_gem_counts_in_float32():
    x = torch.full((1, 1, 8, 8), 200.0, dtype=torch.float16)
    torch.testing.assert_close(embedder.GeM()(x), torch.tensor([[200.0]]), rtol=1e-3, atol=0)


def test_gem_takes_negative_values_as_nothing():
    found = embedder.GeM()(torch.tensor([[[[-5.0, 2.0]]]]))
    torch.testing.assert_close(found, torch.tensor([[(8 / 2) ** (1 / 3)]]))
