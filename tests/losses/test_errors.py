"""Errors name the argument, its value and what is allowed."""

import inspect
import math

import pytest
import torch
from cases import create

import nearfar as nf
from nearfar.losses import ProxyLoss

EMBEDDINGS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 0, 1, 1, 2, 2])

every_loss = pytest.mark.parametrize("key", nf.losses.names())


@every_loss
@pytest.mark.parametrize(
    ("embeddings", "labels", "error", "words"),
    [
        (EMBEDDINGS[0], LABELS, ValueError, r"embeddings has shape \(4,\).*\[m, d\]"),
        (EMBEDDINGS[None], LABELS, ValueError, r"embeddings has shape \(1, 6, 4\)"),
        (EMBEDDINGS[:0], LABELS[:0], ValueError, r"embeddings has shape \(0, 4\)"),
        (EMBEDDINGS[:, :0], LABELS, ValueError, r"embeddings has shape \(6, 0\)"),
        (EMBEDDINGS, LABELS[:5], ValueError, r"labels has shape \(5,\); needed is \[6\]"),
        (EMBEDDINGS, LABELS[:, None], ValueError, r"labels has shape \(6, 1\)"),
        (EMBEDDINGS.long(), LABELS, TypeError, "embeddings is of torch.int64; floating point"),
        (EMBEDDINGS.to(torch.complex64), LABELS, TypeError, "embeddings is of torch.complex64"),
        (EMBEDDINGS, LABELS.float(), TypeError, "labels is of torch.float32; whole numbers"),
        (EMBEDDINGS, LABELS > 0, TypeError, "labels is of torch.bool"),
        (EMBEDDINGS.tolist(), LABELS, TypeError, "embeddings is a list"),
        (EMBEDDINGS, LABELS.tolist(), TypeError, "labels is a list"),
        (EMBEDDINGS.index_fill(0, torch.tensor([2]), math.nan), LABELS, ValueError, "embeddings contains NaN.* 1 of 6"),
        (EMBEDDINGS.index_fill(0, torch.tensor([2]), math.inf), LABELS, ValueError, "embeddings contains NaN or inf"),
    ],
)
def test_wrong_batches(key, embeddings, labels, error, words):
    with pytest.raises(error, match=words):
        create(key, {})(embeddings, labels)


wrong_galleries = pytest.mark.parametrize(
    ("keywords", "error", "words"),
    [
        ({"gallery": EMBEDDINGS}, ValueError, "gallery and gallery_labels must be given together"),
        ({"gallery_labels": LABELS}, ValueError, "gallery and gallery_labels must be given together"),
        ({"positions": torch.arange(6)}, ValueError, "positions .* no gallery"),
        ({"gallery": EMBEDDINGS[:, :3], "gallery_labels": LABELS}, ValueError, "gallery has 3 dimensions .* 4"),
        ({"gallery": EMBEDDINGS, "gallery_labels": LABELS[:2]}, ValueError, r"gallery_labels has shape \(2,\)"),
        ({"gallery": EMBEDDINGS * math.nan, "gallery_labels": LABELS}, ValueError, "gallery contains NaN"),
        (
            {"gallery": EMBEDDINGS, "gallery_labels": LABELS, "positions": torch.arange(5)},
            ValueError,
            r"positions has shape \(5,\).* 6 anchors",
        ),
        (
            {"gallery": EMBEDDINGS, "gallery_labels": LABELS, "positions": torch.arange(6.0)},
            ValueError,
            "positions has shape .* of torch.float32",
        ),
    ],
)


@every_loss
@wrong_galleries
def test_wrong_galleries(key, keywords, error, words):
    with pytest.raises(error, match=words):
        create(key, {})(EMBEDDINGS, LABELS, **keywords)


@wrong_galleries
def test_wrong_galleries_for_pair_weights(keywords, error, words):
    with pytest.raises(error, match=words):
        nf.losses.Raw().pair_weights(EMBEDDINGS, LABELS, **keywords)


def test_a_list_for_pair_weights():
    with pytest.raises(TypeError, match="embeddings is a list"):
        nf.losses.Raw().pair_weights(EMBEDDINGS.tolist(), LABELS)


@pytest.mark.parametrize("key", [key for key in nf.losses.names() if nf.losses.defaults(key)])
def test_an_unknown_setting_is_named_with_the_nearest_one(key):
    known = next(iter(nf.losses.defaults(key)))
    with pytest.raises(TypeError, match=rf"{key} has no setting '{known}s' \(did you mean '{known}'\?\)"):
        nf.losses.create(key, **{f"{known}s": 1.0})


@pytest.mark.parametrize("key", [key for key in nf.losses.names() if nf.losses.defaults(key)])
def test_a_constructor_names_the_nearest_setting_as_well(key):
    loss, known = nf.losses.get(key), next(iter(nf.losses.defaults(key)))
    with pytest.raises(TypeError, match=rf"{loss.__name__} has no setting '{known}s' \(did you mean '{known}'\?\)"):
        loss(**{f"{known}s": 1.0})


def test_a_transposed_letter():
    with pytest.raises(TypeError, match=r"MultiSimilarity has no setting 'alhpa' \(did you mean 'alpha'\?\)"):
        nf.losses.MultiSimilarity(alhpa=2)


@every_loss
def test_the_signature_of_a_constructor_is_that_of_its_definition(key):
    loss = nf.losses.get(key)
    parameters = inspect.signature(loss).parameters
    assert list(parameters) == list(nf.losses.defaults(key))
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters.values())


def test_a_loss_of_ones_own_names_the_nearest_setting():
    class Mine(nf.losses.PairLoss):
        def __init__(self, *, limit=0.5):
            super().__init__()
            self.limit = limit

    with pytest.raises(TypeError, match=r"Mine has no setting 'limti' \(did you mean 'limit'\?\); it has limit"):
        Mine(limti=0.1)


def test_an_unknown_setting_where_there_are_none():
    with pytest.raises(TypeError, match="spectral_clustering has no setting 'gamma'; it has none"):
        nf.losses.create("spectral_clustering", gamma=1.0)


def test_an_unknown_loss_is_named_with_the_nearest_one():
    with pytest.raises(ValueError, match=r"'multi_similarty' \(did you mean 'multi_similarity'\?\).*contrastive"):
        nf.losses.create("multi_similarty")


def test_what_a_loss_must_be_told():
    with pytest.raises(TypeError, match="arcface needs num_classes and dim"):
        nf.losses.create("arcface")


def test_an_unknown_mining_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"mining is 'semihard'.*semi_hard"):
        nf.losses.Triplet(mining="semihard")


@pytest.mark.parametrize(
    ("key", "mining", "error", "words"),
    [
        ("n_pair", "distance_weighted", ValueError, "'distance_weighted' makes no sense with NPair; allowed are all"),
        ("lifted_structure", "hard", TypeError, "lifted_structure has no setting 'mining'"),
        ("multi_similarity", "hard", TypeError, "multi_similarity has no setting 'mining'"),
        ("ranked_list", "hard", TypeError, "ranked_list has no setting 'mining'"),
        ("nra", "all", TypeError, "nra has no setting 'mining'"),
    ],
)
def test_a_mining_that_makes_no_sense(key, mining, error, words):
    with pytest.raises(error, match=words):
        nf.losses.create(key, mining=mining)


@pytest.mark.parametrize(
    ("key", "settings", "error", "words"),
    [
        ("contrastive", {"form": "euclid"}, ValueError, "form is 'euclid'; allowed are cosine, distance"),
        ("contrastive", {"average": "all"}, ValueError, "average is 'all'; allowed are anchors, pairs"),
        ("contrastive", {"margin": -1.5}, ValueError, "margin is -1.5; it must be ≥ -1"),
        ("contrastive", {"form": "distance", "margin": -0.1}, ValueError, "margin is -0.1; it must be ≥ 0"),
        (
            "contrastive",
            {"normalize": False},
            ValueError,
            "normalize is False, but a cosine .* a form with distances",
        ),
        (
            "triplet",
            {"normalize": False},
            ValueError,
            "normalize is False, but a cosine .* a form with distances",
        ),
        (
            "triplet",
            {"form": "squared_distance", "normalize": False, "mining": "distance_weighted"},
            ValueError,
            "'distance_weighted' needs unit vectors and Triplet does not normalize embeddings",
        ),
        (
            "contrastive",
            {"form": "snr", "mining": "distance_weighted"},
            ValueError,
            "'distance_weighted' needs distances or cosines and Contrastive compares by 'snr'",
        ),
        ("triplet", {"form": "angle"}, ValueError, "form is 'angle'; allowed are cosine, distance, squared_distance"),
        ("triplet", {"average": "anchors"}, ValueError, "average is 'anchors'"),
        ("triplet", {"margin": "0.1"}, TypeError, "margin is '0.1'; a number"),
        ("triplet", {"margin": math.nan}, ValueError, "margin is nan; it must be finite"),
        ("lifted_structure", {"margin": math.inf}, ValueError, "margin is inf"),
        ("n_pair", {"l2": -1.0}, ValueError, "l2 is -1.0; it must be ≥ 0"),
        ("margin", {"margin": -0.2}, ValueError, "margin is -0.2"),
        ("margin", {"num_classes": 0}, ValueError, "num_classes is 0; it must be ≥ 1"),
        ("margin", {"num_classes": 2.5}, TypeError, "num_classes is 2.5; a whole number"),
        ("margin", {"beta_lr": 0.0}, ValueError, "beta_lr is 0.0; it must be > 0"),
        ("binomial_deviance", {"alpha": 0.0}, ValueError, "alpha is 0.0; it must be > 0"),
        ("raw", {"beta": -50.0}, ValueError, "beta is -50.0"),
        ("raw", {"base": True}, TypeError, "base is True; a number"),
        ("multi_similarity", {"epsilon": math.nan}, ValueError, "epsilon is nan"),
        ("ranked_list", {"temperature": -1.0}, ValueError, "temperature is -1.0"),
        ("ranked_list", {"query_weighting": "sum"}, ValueError, "query_weighting is 'sum'; allowed are mean"),
        ("nra", {"epsilon": 0.0}, ValueError, "epsilon is 0.0; it must be > 0"),
        ("circle", {"margin": 1.5}, ValueError, "margin is 1.5; it must be ≥ 0.0 and ≤ 1.0"),
        ("circle", {"scale": 0.0}, ValueError, "scale is 0.0; it must be > 0"),
        ("sup_con", {"temperature": 0.0}, ValueError, "temperature is 0.0; it must be > 0"),
        ("nt_xent", {"temperature": -0.1}, ValueError, "temperature is -0.1; it must be > 0"),
        ("angular", {"angle": 0.0}, ValueError, "angle is 0.0; it must be > 0.0 and ≤ 70.0"),
        ("angular", {"angle": 80.0}, ValueError, "angle is 80.0; it must be > 0.0 and ≤ 70.0"),
        ("histogram", {"bins": 0}, ValueError, "bins is 0; it must be ≥ 1"),
        ("histogram", {"bins": 10.5}, TypeError, "bins is 10.5; a whole number"),
        ("smooth_ap", {"temperature": 0.0}, ValueError, "temperature is 0.0; it must be > 0"),
        ("smooth_ap", {"max_positives": 0}, ValueError, "max_positives is 0; it must be ≥ 1"),
        ("fast_ap", {"bins": 0}, ValueError, "bins is 0; it must be ≥ 1"),
        ("softmax", {"num_classes": 0}, ValueError, "num_classes is 0; it must be ≥ 1"),
        ("softmax", {"dim": 2.5}, TypeError, "dim is 2.5; a whole number"),
        ("softmax", {"lr_multiplier": 0.0}, ValueError, "lr_multiplier is 0.0; it must be > 0"),
        ("softmax", {"sample_rate": 0.0}, ValueError, "sample_rate is 0.0; it must be > 0.0 and ≤ 1.0"),
        ("arcface", {"sample_rate": 1.5}, ValueError, "sample_rate is 1.5; it must be > 0.0 and ≤ 1.0"),
        ("normalized_softmax", {"temperature": 0.0}, ValueError, "temperature is 0.0; it must be > 0"),
        ("proxy_nca", {"scale": -18.0}, ValueError, "scale is -18.0; it must be > 0"),
        ("arcface", {"margin": -0.5}, ValueError, "margin is -0.5; it must be ≥ 0"),
        ("arcface", {"margin": 28.6}, ValueError, "margin is 28.6; it must be .*≤ 1.57"),
        ("arcface", {"centers": 0}, ValueError, "centers is 0; it must be ≥ 1"),
        ("arcface", {"scale": 0.0}, ValueError, "scale is 0.0; it must be > 0"),
        ("cosface", {"scale": math.inf}, ValueError, "scale is inf"),
        ("soft_triple", {"centers": 0}, ValueError, "centers is 0; it must be ≥ 1"),
        ("soft_triple", {"alpha": 0.0}, ValueError, "alpha is 0.0; it must be > 0"),
        ("soft_triple", {"tau": -0.2}, ValueError, "tau is -0.2; it must be ≥ 0"),
        ("proxy_anchor", {"alpha": 0.0}, ValueError, "alpha is 0.0; it must be > 0"),
        ("proxy_repel", {"margin": math.nan}, ValueError, "margin is nan; it must be finite"),
        ("group", {"iterations": -1}, ValueError, "iterations is -1"),
        ("group", {"temperature": 0.0}, ValueError, "temperature is 0.0; it must be > 0"),
        ("group", {"anchors_per_class": -1}, ValueError, "anchors_per_class is -1; it must be ≥ 0"),
        ("group", {"average_over": "anchors"}, ValueError, "average_over is 'anchors'; allowed are rest, all"),
        ("group", {"classification_weight": -1.0}, ValueError, "classification_weight is -1.0; it must be ≥ 0"),
        ("facility_location", {"gamma": -1.0}, ValueError, "gamma is -1.0; it must be ≥ 0"),
        ("facility_location", {"refinements": -1}, ValueError, "refinements is -1; it must be ≥ 0"),
    ],
)
def test_settings_out_of_range(key, settings, error, words):
    with pytest.raises(error, match=words):
        create(key, settings)


@pytest.mark.parametrize("label", [-1, 5])
def test_a_label_beyond_the_classes_of_margin(label):
    labels = torch.tensor([0, 0, 1, 1, 4, label])
    with pytest.raises(ValueError, match=rf"labels range from .*{label}.*num_classes=5 allowed are 0 to 4"):
        nf.losses.Margin(num_classes=5)(EMBEDDINGS, labels)


every_loss_with_proxies = pytest.mark.parametrize(
    "key", [key for key in nf.losses.names() if issubclass(nf.losses.get(key), ProxyLoss)]
)


@every_loss_with_proxies
@pytest.mark.parametrize("label", [-1, 5])
def test_a_label_beyond_the_classes(key, label):
    labels = torch.tensor([0, 0, 1, 1, 4, label])
    with pytest.raises(ValueError, match=rf"labels range from .*{label}.*num_classes=5 allowed are 0 to 4"):
        create(key, {}, num_classes=5)(EMBEDDINGS, labels)


@every_loss_with_proxies
def test_embeddings_longer_than_the_proxies(key):
    with pytest.raises(ValueError, match="embeddings have 4 dimensions and proxies 3"):
        create(key, {}, dim=3)(EMBEDDINGS, LABELS)


@every_loss_with_proxies
def test_sizes_have_no_default(key):
    with pytest.raises(TypeError, match=f"{key} needs num_classes and dim"):
        nf.losses.create(key)
    with pytest.raises(TypeError, match=f"{key} needs num_classes"):
        nf.losses.create(key, dim=4)


@pytest.mark.parametrize("key", ["spectral_clustering", "facility_location"])
def test_a_gallery_to_cluster(key):
    name = nf.losses.get(key).__name__
    with pytest.raises(ValueError, match=f"{name} clusters the batch and takes no gallery"):
        nf.losses.create(key)(EMBEDDINGS, LABELS, EMBEDDINGS, LABELS)


def test_settings_are_given_by_name():
    with pytest.raises(TypeError):
        nf.losses.Raw(2.0)


def test_more_positives_than_smooth_ap_was_told():
    loss = nf.losses.SmoothAP(max_positives=2)
    with pytest.raises(ValueError, match="an anchor has 3 positives, but max_positives is 2"):
        loss(torch.eye(6), torch.tensor([0, 0, 0, 0, 1, 1]))
