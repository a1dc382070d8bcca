"""Which pairs each mining chooses, seen through the pair weights of a loss that weighs all of them alike."""

import math

import oracles
import pytest
import torch
from checks import SPREADS, assert_close, make_batch
from torch.nn.functional import normalize

import nearfar as nf
from nearfar.mining import Mining

DETERMINISTIC = ("all", "semi_hard", "hard", "valid_triplet")


def view_of(embeddings, labels, mining, margin=0.1):
    own = range(len(labels))
    view = oracles.View(embeddings, labels.tolist(), embeddings, labels.tolist(), own, "cosine", normalize=True)
    return view.mine(mining, margin, None)


def chosen_pairs(mining, embeddings, labels, *gallery):
    """[m, n], 1 for the pairs in the mined sets."""
    loss = nf.losses.Contrastive(margin=-1.0, mining=mining)
    return loss.pair_weights(embeddings, labels, *gallery) * len(labels)


def chosen_triplets(mining, embeddings, labels, *gallery):
    """[m, n], the share of all mined triplets that a pair is part of."""
    return nf.losses.Triplet(margin=10.0, mining=mining).pair_weights(embeddings, labels, *gallery)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("mining", DETERMINISTIC)
def test_sets_and_triplets_are_those_of_the_loops(mining, spread):
    embeddings, labels = make_batch(spread)
    view = view_of(embeddings, labels, mining)
    sets, triplets = torch.zeros(2, len(labels), len(labels), dtype=torch.float64)
    for i in view.anchors:
        sets[i, view.positives[i] + view.negatives[i]] = 1.0
        for pair in view.triplets[i]:
            triplets[i, list(pair)] += 1
    triplets /= max(1, sum(len(of_anchor) for of_anchor in view.triplets))
    assert_close(chosen_pairs(mining, embeddings, labels), sets, 1e-12)
    assert_close(chosen_triplets(mining, embeddings, labels), triplets, 1e-12)


def angles(*degrees):
    radians = torch.tensor(degrees, dtype=torch.float64) * math.pi / 180
    return torch.stack([radians.cos(), radians.sin()], dim=1)


@pytest.mark.parametrize(
    ("mining", "degrees", "labels", "shares"),
    [
        ("semi_hard", (20, 10, 30, 50), (1, 0, 0, 0), [1, 0, 1, 0]),  # the nearest of those farther than the positive
        ("semi_hard", (60, 10, 30, 50), (1, 0, 0, 0), [1, 0, 0, 1]),  # all are nearer: the farthest
        ("hard", (20, 40, 30, 50), (1, 1, 0, 0), [0, 1, 1, 0]),  # the farthest positive, the nearest negative
    ],
)
def test_triplets_of_an_anchor(mining, degrees, labels, shares):
    chosen = chosen_triplets(mining, angles(0), torch.tensor([1]), angles(*degrees), torch.tensor(labels))
    assert chosen.tolist() == [shares]


def test_valid_triplet_keeps_pairs_within_the_margin_of_the_hardest():
    # Similarities: positives 0.94 and 0.77, negatives 0.87 and 0.64.
    anchor, gallery, labels = angles(0), angles(20, 40, 30, 50), torch.tensor([1, 1, 0, 0])
    for margin, kept in ((0.0, [0, 1, 1, 0]), (0.1, [1, 1, 1, 0]), (0.2, [1, 1, 1, 1])):
        mining = nf.mining.create("valid_triplet", margin=margin)
        assert_close(chosen_pairs(mining, anchor, torch.tensor([1]), gallery, labels)[0], torch.tensor(kept), 1e-12)


@pytest.mark.parametrize("mining", [name for name in nf.mining.names() if name != "all"])
def test_an_anchor_without_positives_or_without_negatives_chooses_nothing(mining):
    embeddings, labels = make_batch(sizes=(4, 1))
    alone = labels == 1
    assert not chosen_pairs(mining, embeddings, labels)[alone].any()
    assert not chosen_pairs(mining, embeddings, torch.zeros_like(labels)).any()


def draw_negatives(mining, gallery, anchor, draws):
    """How often each column of a gallery was drawn by equal anchors; column 0 is their positive."""
    torch.manual_seed(0)
    labels = torch.ones(len(gallery), dtype=torch.long)
    labels[0] = 0
    chosen = chosen_triplets(mining, anchor.expand(draws, -1), torch.zeros(draws, dtype=torch.long), gallery, labels)
    return (chosen[:, 1:] > 0).double().mean(dim=0)


def total_variation(found, expected):
    return 0.5 * (found - expected).abs().sum().item()


def test_random_draws_every_negative_alike():
    embeddings, _ = make_batch("mixed")
    share = draw_negatives("random", embeddings, embeddings[:1], 20_000)
    assert share.sum().item() == pytest.approx(1.0)
    assert total_variation(share, torch.full_like(share, 1 / len(share))) < 0.02


@pytest.mark.parametrize("dim", [2, 3, 8, 128])
def test_distance_weighted_draws_with_the_probabilities_of_the_paper(dim):
    generator = torch.Generator().manual_seed(dim)
    anchor = normalize(torch.randn(1, dim, generator=generator, dtype=torch.float64))
    aside = torch.randn(12, dim, generator=generator, dtype=torch.float64)
    aside = normalize(aside - (aside @ anchor.T) * anchor)
    distances = torch.tensor([0.3, 0.2, 0.5, 0.7, 0.9, 1.0, 1.1, 1.2, 1.25, 1.35, 1.45, 1.9], dtype=torch.float64)
    cosine = (1 - distances**2 / 2).unsqueeze(1)
    gallery = cosine * anchor + (1 - cosine**2).sqrt() * aside
    expected = torch.tensor(oracles.distance_weighted_chances(distances[1:].tolist(), dim))
    share = draw_negatives("distance_weighted", gallery, anchor, 20_000)
    assert total_variation(share, expected) < 0.02
    assert not share[-2:].any(), "drawn beyond 1.4"


def test_distance_weighted_draws_nothing_where_every_negative_is_far():
    gallery = angles(0, 120, 180, 170)
    assert not draw_negatives("distance_weighted", gallery, gallery[:1], 100).any()


def test_distance_weighted_is_finite_at_opposite_points():
    gallery = angles(0, 180, 180)
    share = draw_negatives(nf.mining.create("distance_weighted", farthest=2.0), gallery, gallery[:1], 1000)
    assert share.sum().item() == pytest.approx(1.0)


def test_positives_of_one_anchor_draw_independently():
    gallery, labels = angles(0, 5, 30, 40, 50), torch.tensor([0, 0, 1, 1, 1])
    torch.manual_seed(0)
    together = [
        (chosen_triplets("random", gallery[:1], torch.tensor([0]), gallery, labels)[0, 2:] > 0.75).any().item()
        for _ in range(1500)
    ]
    assert sum(together) / len(together) == pytest.approx(1 / 3, abs=0.04)


@pytest.mark.parametrize("mining", ["random", "distance_weighted"])
def test_draws_follow_the_seed_and_differ_from_call_to_call(mining):
    embeddings, labels = make_batch(sizes=(8, 8, 8), dim=8)
    torch.manual_seed(3)
    first, second = (chosen_triplets(mining, embeddings, labels) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(chosen_triplets(mining, embeddings, labels), first)
    assert not torch.equal(first, second)


def test_distances_are_mined_like_similarities():
    """On unit vectors the order is the same, so are the triplets."""
    embeddings, labels = make_batch()
    for mining in DETERMINISTIC[:3]:
        by_distance = nf.losses.Triplet(form="squared_distance", margin=100.0, mining=mining)
        expected = chosen_triplets(mining, embeddings, labels)
        assert_close(by_distance.pair_weights(embeddings, labels), expected, 1e-12)


def test_create_passes_a_mining_on():
    mining = nf.mining.create("valid_triplet", margin=0.3)
    assert nf.mining.create(mining) is mining
    assert nf.losses.Raw(mining=mining).mining is mining


def test_a_table_has_name_and_settings():
    table = {"name": "valid_triplet", "margin": 0.3}
    assert repr(nf.losses.Raw(mining=table).mining) == "ValidTriplet(margin=0.3)"
    assert table == {"name": "valid_triplet", "margin": 0.3}


class Nearest(Mining):
    """A mining of somebody's own: the nearest negative, and every positive."""

    def select(self, tile):
        sim = tile.similarity.masked_fill(~tile.negatives, -math.inf)
        return tile.positives, tile.negatives & (sim == sim.amax(dim=1, keepdim=True))


def test_a_mining_of_ones_own():
    embeddings, labels = make_batch()
    hard, own = (chosen_pairs(mining, embeddings, labels) for mining in ("hard", Nearest()))
    alike = labels.unsqueeze(1) == labels
    paired = alike.sum(dim=1) > 1  # without a positive, hard has no negative either
    assert_close(own[paired].masked_fill(alike[paired], 0.0), hard[paired].masked_fill(alike[paired], 0.0), 1e-12)
    assert own[alike].sum() == alike.sum() - len(labels)


def test_a_mining_of_ones_own_may_need_unit_vectors():
    class Near(Nearest):
        unit_only = True

    with pytest.raises(ValueError, match="mining 'own' needs unit vectors and NPair does not normalize embeddings"):
        nf.losses.NPair(mining=Near())


@pytest.mark.parametrize(
    ("name", "settings", "error", "words"),
    [
        ("semihard", {}, ValueError, "mining is 'semihard'.*semi_hard"),
        ("valid_triplet", {"epsilon": 0.1}, TypeError, "epsilon"),
        ("valid_triplet", {"margin": math.nan}, ValueError, "margin is nan; it must be finite"),
        ("valid_triplet", {"margin": "0.1"}, TypeError, "margin is '0.1'; a number is needed"),
        ("hard", {"margin": 0.1}, TypeError, "mining hard has no setting 'margin'; it has none"),
        ("distance_weighted", {"nearst": 1.0}, TypeError, r"no setting 'nearst' \(did you mean 'nearest'\?\)"),
        ("distance_weighted", {"nearest": True}, TypeError, "nearest is True; a number is needed"),
        ({"margin": 0.1}, {}, ValueError, "mining is {'margin': 0.1}; a table must contain a name"),
        ({"name": "all", "margin": 0.1}, {}, TypeError, "mining all has no setting 'margin'; it has none"),
        (nf.mining.ValidTriplet(), {"margin": 0.5}, TypeError, r"ValidTriplet\(margin=0.1\), which has.*; margin is"),
        ("distance_weighted", {"nearest": 1.5}, ValueError, "nearest=1.5, farthest=1.4"),
        ("distance_weighted", {"farthest": 3.0}, ValueError, "farthest=3.0"),
    ],
)
def test_wrong_minings(name, settings, error, words):
    with pytest.raises(error, match=words):
        nf.mining.create(name, **settings)


@pytest.mark.parametrize(
    ("name", "wrong", "nearest"), [("valid_triplet", "magrin", "margin"), ("distance_weighted", "neerest", "nearest")]
)
def test_a_constructor_names_the_nearest_setting(name, wrong, nearest):
    mining = type(nf.mining.create(name))
    with pytest.raises(TypeError, match=rf"{mining.__name__} has no setting '{wrong}' \(did you mean '{nearest}'\?\)"):
        mining(**{wrong: 1.0})


def test_a_mining_of_ones_own_names_the_nearest_setting():
    class Mine(nf.mining.All):
        def __init__(self, *, limit=0.5):
            self.limit = limit

    with pytest.raises(TypeError, match=r"Mine has no setting 'limti' \(did you mean 'limit'\?\)"):
        Mine(limti=0.1)
