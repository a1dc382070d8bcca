"""Settings that are assigned later: as if the loss had been made with them, or refused in words."""

import pytest
from cases import CASES, create
from checks import assert_same, make_batch, run

import nearfar as nf
from nearfar.losses import PairLoss

CHANGES = [(case, name) for case in CASES for name in case.settings]
FIXED = [
    "form", "normalize", "num_classes", "dim", "centers", "similarity", "assignment", "num_proxies",
    "learn_temperature",
]  # fmt: skip


@pytest.mark.parametrize(("case", "name"), CHANGES, ids=lambda value: value if isinstance(value, str) else value.id)
def test_an_assigned_setting_is_that_of_a_new_loss_or_refused(case, name):
    value = case.settings[name]
    try:
        loss = create(case.key, {other: case.settings[other] for other in case.settings if other != name})
    except ValueError:
        pytest.skip(f"the other settings make no sense without {name}")
    before = loss.settings()
    if name in FIXED or name in dict(loss.named_parameters()):
        with pytest.raises((AttributeError, TypeError), match=name):
            setattr(loss, name, value)
        assert loss.settings() == before
        return
    setattr(loss, name, value)
    fresh = create(case.key, before | {name: value})
    assert repr(loss) == repr(fresh)
    if isinstance(loss, PairLoss):
        assert loss.bytes_per_pair == fresh.bytes_per_pair
    batch = make_batch()
    assert_same(run(loss.double(), *batch), run(fresh.double(), *batch), tolerance=0.0)


@pytest.mark.parametrize("key", nf.losses.names())
def test_settings_that_decide_how_a_loss_is_built_are_refused_and_no_others(key):
    loss = create(key, {})
    for name, value in loss.settings().items():
        if name in FIXED:
            words = rf"{name} of {type(loss).__name__} cannot change after construction; create a new loss with {name}="
            with pytest.raises(AttributeError, match=words):
                setattr(loss, name, value)
        elif name not in dict(loss.named_parameters()):
            setattr(loss, name, value)
    assert repr(loss) == repr(create(key, {}))


@pytest.mark.parametrize("mining", ["hard", {"name": "valid_triplet", "margin": 0.3}, nf.mining.create("semi_hard")])
def test_a_mining_may_be_assigned_as_it_may_be_given(mining):
    loss = nf.losses.Raw()
    loss.mining = mining
    assert repr(loss) == repr(nf.losses.Raw(mining=mining))
    assert isinstance(loss.mining, nf.mining.Mining)


def test_a_mining_that_makes_no_sense_is_not_assigned():
    loss = nf.losses.NPair()
    with pytest.raises(ValueError, match="'distance_weighted' makes no sense with NPair; allowed are all"):
        loss.mining = "distance_weighted"
    with pytest.raises(ValueError, match=r"mining is 'semihard'.*semi_hard"):
        loss.mining = "semihard"
    raw = nf.losses.Triplet(form="squared_distance", normalize=False)
    with pytest.raises(
        ValueError, match="'distance_weighted' needs unit vectors and Triplet does not normalize embeddings"
    ):
        raw.mining = "distance_weighted"
    assert repr(loss) == repr(nf.losses.NPair())


def test_multi_similarity_has_its_own_mining_and_epsilon_is_its_margin():
    loss = nf.losses.MultiSimilarity()
    with pytest.raises(AttributeError, match="mining of MultiSimilarity cannot change after construction"):
        loss.mining = "hard"
    loss.mining.margin = 0.3
    assert loss.epsilon == 0.3
    with pytest.raises(TypeError, match="epsilon is 'wide'; a number is needed"):
        loss.epsilon = "wide"
