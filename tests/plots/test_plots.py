"""The weight curves are those of the unified view, the ranks those of NRA, and the pictures are pictures."""

import sys

import pytest
import torch
from cases import create

import nearfar as nf
from nearfar import plots
from nearfar.plots.nra_ranks import LABELS, POINTS, ranked

STILL_POSITIVE, STILL_NEGATIVE = 0.5, 0.3


def close(found, expected):
    return bool(torch.allclose(found, expected.to(found.dtype), atol=1e-6))


def test_contrastive_weighs_one_or_nothing():
    similarity, positive, negative = plots.curves(nf.losses.create("contrastive", margin=0.25), steps=9)
    assert close(positive, torch.ones(9))
    assert close(negative, similarity > 0.25 + 1e-9)


def test_triplet_is_a_step_at_the_margin():
    # Two triplets, averaged: the moved pair is in one of them.
    similarity, positive, negative = plots.curves(nf.losses.create("triplet", margin=0.1, mining="all"), steps=41)
    away = ((similarity - 0.4).abs() > 1e-6).double()
    assert close(positive * away, 0.5 * (similarity < STILL_NEGATIVE + 0.1) * away)
    assert close(negative * away, 0.5 * (similarity > STILL_POSITIVE - 0.1) * away)


def test_binomial_deviance_is_a_pair_of_sigmoids():
    similarity, positive, negative = plots.curves(nf.losses.create("binomial_deviance"), steps=41)
    assert close(positive, 2 * torch.sigmoid(2 * (0.5 - similarity)) / 2)
    assert close(negative, 50 * torch.sigmoid(50 * (similarity - 0.5)) / 2)


def test_raw_weighs_by_the_pair_and_by_the_others():
    similarity, positive, negative = plots.curves(nf.losses.create("raw"), steps=41)
    pull = 1 + (2 * (similarity - STILL_POSITIVE)).exp() + (2 * (similarity - 0.5)).exp()
    push = 1 + (-50 * (similarity - STILL_NEGATIVE)).exp() + (-50 * (similarity - 0.5)).exp()
    assert close(positive, 1 / pull)
    assert close(negative, 1 / push)


def test_a_softmax_weighs_proxies_by_their_chances():
    similarity, own, other = plots.curves(plots.create("normalized_softmax", temperature=0.1), steps=41)
    pull, push, third = (10 * similarity).exp(), torch.tensor(3.0).exp(), torch.tensor(3.0).exp()
    assert close(own, 10 * (1 - pull / (pull + push + third)))
    still = torch.tensor(5.0).exp()
    assert close(other, 10 * pull / (still + pull + third))


def test_proxy_repel_pushes_no_sample_away():
    found = plots.curves(plots.create("proxy_repel"), steps=9)
    assert close(found.negative, torch.zeros(9))
    assert float(found.positive.abs().sum()) > 0


def test_proxies_need_room_to_stand_in():
    for classes, dim in ((1, 8), (8, 8)):
        loss = nf.losses.create("proxy_anchor", num_classes=classes, dim=dim)
        with pytest.raises(ValueError, match="at least two classes, and more dimensions than classes"):
            plots.curves(loss)


@pytest.mark.parametrize("alpha", [1.0, 4.0])
def test_the_ranks_that_are_drawn_give_the_loss(alpha):
    loss = nf.losses.NRA(alpha=alpha)
    found = [ranked(loss, POINTS, LABELS, anchor) for anchor in range(len(POINTS))]
    assert sum(one.loss for one in found) / len(found) == pytest.approx(float(loss(POINTS, LABELS)))
    assert all((one.rank.min(), one.rank.max()) == (0, 1) for one in found)


OF_PAIRS = [key for key in nf.losses.names() if plots.has_weights(nf.losses.get(key))]


@pytest.mark.parametrize("key", [key for key in OF_PAIRS if key not in ("center", "proxy_repel")])  # push no sample
def test_every_loss_of_pairs_has_finite_curves_that_repeat(key):
    loss = plots.create(key)
    steps = 161  # finer than the bins of a histogram: a pair weighs only next to a pair of the other kind there
    first, second = plots.curves(loss, steps=steps), plots.curves(loss, steps=steps)
    for one, other in zip(first, second, strict=True):
        assert one.shape == (steps,)
        assert bool(one.isfinite().all())
        assert torch.equal(one, other)
    assert float(first.positive.abs().sum()) > 0
    assert float(first.negative.abs().sum()) > 0


@pytest.mark.parametrize("key", sorted(set(nf.losses.names()) - set(OF_PAIRS)))
def test_other_losses_have_no_weights_to_draw(key):
    with pytest.raises(ValueError, match=f"{key} is not a loss of pairs"):
        plots.curves(create(key, {}))


def test_drawing_leaves_the_random_numbers_alone():
    drawn = nf.losses.create("margin"), plots.create("softmax", sample_rate=0.7)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    for loss in drawn:
        plots.curves(loss, steps=3)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")])
def test_the_file_is_what_its_name_says(name, start, tmp_path):
    path = plots.draw_weights({"mine": nf.losses.create("contrastive")}, tmp_path / name)
    assert path.read_bytes().startswith(start)


@pytest.mark.parametrize("draw", [plots.draw_transfer, plots.draw_ranks])
def test_a_picture_of_ranks_repeats(draw, tmp_path):
    first, second = (draw(nf.losses.NRA(), tmp_path / name).read_bytes() for name in ("first.svg", "second.svg"))
    assert first == second


def test_an_svg_names_every_loss_and_repeats(tmp_path):
    chosen = {key: nf.losses.create(key) for key in ("raw", "triplet")}
    first = plots.draw_weights(chosen, tmp_path / "first.svg").read_text()
    assert ">raw<" in first
    assert ">triplet<" in first
    assert first == plots.draw_weights(chosen, tmp_path / "second.svg").read_text()


def test_errors_come_before_the_work(tmp_path):
    loss = nf.losses.create("raw")
    with pytest.raises(ValueError, match=r"must end in \.png, \.svg, \.pdf"):
        plots.draw_weights({"raw": loss}, tmp_path / "raw.gif")
    with pytest.raises(ValueError, match="in a folder that exists"):
        plots.draw_weights({"raw": loss}, tmp_path / "nowhere" / "raw.png")
    with pytest.raises(ValueError, match="there is no loss to draw"):
        plots.draw_weights({}, tmp_path / "raw.png")


def test_without_matplotlib_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'nearfar\[plot\]'"):
        plots.draw_weights({"raw": nf.losses.create("raw")}, tmp_path / "raw.png")
