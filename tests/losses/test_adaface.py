"""The running statistics of AdaFace."""

import pytest
import torch

import nearfar as nf


def batch(length):
    """Six embeddings whose lengths are ``length`` ∓ 1."""
    points = torch.nn.functional.normalize(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    return points * (length + torch.tensor([[-1.0], [1.0]])).repeat(3, 1), torch.arange(6) % 3


def test_the_first_batch_sets_the_statistics_and_later_ones_move_them():
    loss = nf.losses.AdaFace(num_classes=3, dim=4, momentum=0.9)
    loss(*batch(10.0))
    assert loss.length_mean.item() == pytest.approx(10.0)
    assert loss.length_std.item() == pytest.approx((6 / 5) ** 0.5)  # as in the authors' code, of a sample
    loss(*batch(20.0))
    assert loss.length_mean.item() == pytest.approx(11.0)


def test_in_evaluation_mode_they_stay():
    loss = nf.losses.AdaFace(num_classes=3, dim=4)
    loss(*batch(10.0))
    loss.eval()
    value = loss(*batch(20.0))
    assert loss.length_mean.item() == pytest.approx(10.0)
    assert value.item() == pytest.approx(loss(*batch(25.0)).item())  # all are much longer than usual, so q = 1 for all


def test_statistics_are_saved():
    loss, other = (nf.losses.AdaFace(num_classes=3, dim=4) for _ in range(2))
    loss(*batch(10.0))
    other.load_state_dict(loss.state_dict())
    assert other.eval()(*batch(12.0)) == loss.eval()(*batch(12.0))


def test_a_batch_with_infinite_lengths_does_not_spoil_them():
    loss = nf.losses.AdaFace(num_classes=3, dim=4)
    loss(*batch(10.0))
    embeddings, labels = batch(10.0)
    assert loss(embeddings * 1e20, labels).isnan()
    assert loss.length_mean.item() == pytest.approx(10.0)


@pytest.mark.parametrize(("length", "peer"), [(1.0, nf.losses.ArcFace), (10.0, nf.losses.CosFace)])
def test_short_embeddings_get_the_margin_of_arcface_usual_ones_that_of_cosface(length, peer):
    loss, other = nf.losses.AdaFace(num_classes=3, dim=4, margin=0.3).eval(), peer(num_classes=3, dim=4, margin=0.3)
    loss.length_mean.fill_(10.0)
    loss.length_std.fill_(1.0)
    other.load_state_dict({"proxies": loss.proxies})
    embeddings, labels = batch(10.0)
    embeddings = length * torch.nn.functional.normalize(embeddings, dim=1)
    torch.testing.assert_close(loss(embeddings, labels), other(embeddings, labels))
