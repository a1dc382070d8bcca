"""Several embedders as one."""

import pytest
import torch
import torch.nn.functional as F
from network_cases import pictures, tiny

from nearfar import networks


@pytest.mark.parametrize("count", [1, 2, 5])
def test_it_equals_a_concatenation_by_hand(count):
    members = [tiny(seed=seed, dim=4 + seed) for seed in range(count)]
    model = networks.Ensemble(members).eval()
    by_hand = torch.cat([member(pictures()) for member in members], dim=1)
    torch.testing.assert_close(model(pictures()), F.normalize(by_hand, dim=1))
    assert model(pictures()).shape == (3, model.dim)


def test_every_member_counts_the_same_however_long_its_embeddings_are():
    members = [tiny(seed=seed, normalize=False) for seed in range(2)]
    model = networks.Ensemble(members).eval()
    by_hand = [F.normalize(member(pictures()), dim=1) for member in members]
    torch.testing.assert_close(model(pictures()), F.normalize(torch.cat(by_hand, dim=1), dim=1))


def test_without_normalisation_embeddings_are_only_put_side_by_side():
    members = [tiny(seed=0), tiny(seed=1, normalize=False)]
    model = networks.Ensemble(members, normalize=False).eval()
    assert torch.equal(model(pictures()), torch.cat([member(pictures()) for member in members], dim=1))


def test_members_may_have_several_levels():
    model = networks.Ensemble([tiny(levels=networks.LEVELS), tiny(seed=1)]).eval()
    assert model(pictures()).shape == (3, 28)


def test_groups_hold_every_parameter_once_under_a_name_of_its_own():
    model = networks.Ensemble([tiny(0), tiny(1)])
    groups = model.param_groups(0.1, head_multiplier=2, weight_decay=0.5)
    assert [group["name"] for group in groups] == ["0.backbone", "0.head", "1.backbone", "1.head"]
    assert [group["lr"] for group in groups] == [0.1, 0.2, 0.1, 0.2]
    assert {group["weight_decay"] for group in groups} == {0.5}
    held = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())


def test_backbones_are_frozen_and_unfrozen_together():
    model = networks.Ensemble([tiny(0), tiny(1)]).train()
    model.freeze_backbone()
    assert [group["name"] for group in model.param_groups(0.1)] == ["0.head", "1.head"]
    model.unfreeze_backbone()
    assert len(model.param_groups(0.1)) == 4


def test_frozen_batch_norms_stay_so_in_an_ensemble():
    model = networks.Ensemble([tiny(0, freeze_batchnorm=True), tiny(1)]).train()
    before = {key: value.clone() for key, value in model.state_dict().items() if "running_mean" in key}
    model(pictures())
    changed = {key for key, value in before.items() if not torch.equal(model.state_dict()[key], value)}
    assert changed == {key for key in before if key.startswith("members.1.")}


def test_it_knows_what_to_feed_it():
    model = networks.Ensemble([tiny(0), tiny(1)])
    assert (model.normalization, model.input_size) == (tiny().normalization, 224)


def test_members_must_read_the_same_input():
    with torch.device("meta"):
        caffe = networks.create("bn_inception")
        with pytest.raises(ValueError, match=r"members\[1\] \(bn_inception\) reads other input than members\[0\]"):
            networks.Ensemble([tiny(), caffe])
    with pytest.raises(ValueError, match=r"members\[1\] \(linear\) reads 4 channels and members\[0\] \(linear\) 3"):
        networks.Ensemble([networks.create("linear", in_dim=3), networks.create("linear", in_dim=4)])


def test_it_needs_members_of_their_own():
    with pytest.raises(ValueError, match="members is empty"):
        networks.Ensemble([])
    with pytest.raises(ValueError, match="the same embedder twice"):
        networks.Ensemble([member := tiny(), member])
