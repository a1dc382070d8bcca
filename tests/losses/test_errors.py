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
GALLERY = {"gallery": EMBEDDINGS, "gallery_labels": LABELS}

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
        (GALLERY | {"positions": torch.arange(5)}, ValueError, r"positions has shape \(5,\).* 6 anchors"),
        (GALLERY | {"positions": torch.arange(6.0)}, ValueError, "positions has shape .* of torch.float32"),
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
    known, loss = next(iter(nf.losses.defaults(key))), nf.losses.get(key)
    for owner, made in ((key, lambda **given: nf.losses.create(key, **given)), (loss.__name__, loss)):
        with pytest.raises(TypeError, match=rf"{owner} has no setting '{known}s' \(did you mean '{known}'\?\)"):
            made(**{f"{known}s": 1.0})


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


POSITIVE = [
    "margin.beta_lr", "binomial_deviance.alpha", "raw.beta", "nra.epsilon", "circle.scale", "sup_con.temperature",
    "nt_xent.temperature", "smooth_ap.temperature", "softmax.lr_multiplier", "normalized_softmax.temperature",
    "proxy_nca.scale", "arcface.scale", "soft_triple.alpha", "proxy_anchor.alpha", "group.temperature",
]  # fmt: skip
NOT_NEGATIVE = [
    "n_pair.l2", "margin.margin", "ranked_list.temperature", "soft_triple.tau", "group.classification_weight",
    "facility_location.gamma",
]  # fmt: skip
COUNTS = [
    "margin.num_classes", "histogram.bins", "smooth_ap.max_positives", "fast_ap.bins", "softmax.num_classes",
    "softmax.dim", "arcface.centers", "soft_triple.centers", "group.iterations",
]  # fmt: skip
FINITE = [
    "triplet.margin",
    "lifted_structure.margin",
    "multi_similarity.epsilon",
    "proxy_repel.margin",
    "cosface.scale",
]
OUT_OF_RANGE = [
    *[(setting, value, "> 0") for setting in POSITIVE for value in (0.0, -18.0)],
    *[(setting, -0.2, "≥ 0") for setting in NOT_NEGATIVE],
    *[(setting, value, "≥ 1") for setting in COUNTS for value in (0, -1)],
    *[(setting, value, "finite|> 0") for setting in FINITE for value in (math.nan, math.inf)],
    ("contrastive.margin", -1.5, "≥ -1"),
    ("circle.margin", 1.5, "≥ 0.0 and ≤ 1.0"),
    ("angular.angle", 0.0, "> 0.0 and ≤ 70.0"),
    ("angular.angle", 80.0, "> 0.0 and ≤ 70.0"),
    ("softmax.sample_rate", 0.0, "> 0.0 and ≤ 1.0"),
    ("arcface.sample_rate", 1.5, "> 0.0 and ≤ 1.0"),
    ("arcface.margin", -0.5, "≥ 0.0 and ≤ 1.57"),
    ("arcface.margin", 28.6, "≥ 0.0 and ≤ 1.57"),
    ("group.anchors_per_class", -1, "≥ 0"),
    ("facility_location.refinements", -1, "≥ 0"),
]


@pytest.mark.parametrize(("setting", "value", "allowed"), OUT_OF_RANGE)
def test_numbers_out_of_range(setting, value, allowed):
    key, name = setting.split(".")
    with pytest.raises(ValueError, match=rf"{name} is {value}; it must be ({allowed})"):
        create(key, {name: value})


@pytest.mark.parametrize("setting", [*POSITIVE, *NOT_NEGATIVE, *COUNTS, *FINITE, "raw.base"])
@pytest.mark.parametrize("value", ["0.1", True])
def test_numbers_of_other_types(setting, value):
    key, name = setting.split(".")
    with pytest.raises(TypeError, match=rf"{name} is {value!r}; a (whole )?number is needed"):
        create(key, {name: value})


@pytest.mark.parametrize("setting", COUNTS)
def test_counts_are_whole(setting):
    key, name = setting.split(".")
    with pytest.raises(TypeError, match=f"{name} is 2.5; a whole number is needed"):
        create(key, {name: 2.5})


COSINE = "normalize is False, but a cosine .* a form with distances"


@pytest.mark.parametrize(
    ("key", "settings", "words"),
    [
        ("contrastive", {"form": "euclid"}, "form is 'euclid'; allowed are cosine, distance"),
        ("contrastive", {"average": "all"}, "average is 'all'; allowed are anchors, pairs"),
        ("contrastive", {"form": "distance", "margin": -0.1}, "margin is -0.1; it must be ≥ 0"),
        ("contrastive", {"normalize": False}, COSINE),
        ("contrastive", {"form": "snr", "mining": "distance_weighted"},
         "'distance_weighted' needs distances or cosines and Contrastive compares by 'snr'"),
        ("triplet", {"normalize": False}, COSINE),
        ("triplet", {"form": "squared_distance", "normalize": False, "mining": "distance_weighted"},
         "'distance_weighted' needs unit vectors and Triplet does not normalize embeddings"),
        ("triplet", {"form": "angle"}, "form is 'angle'; allowed are cosine, distance, squared_distance"),
        ("triplet", {"average": "anchors"}, "average is 'anchors'"),
        ("ranked_list", {"query_weighting": "sum"}, "query_weighting is 'sum'; allowed are mean"),
        ("group", {"average_over": "anchors"}, "average_over is 'anchors'; allowed are rest, all"),
    ],
)  # fmt: skip
def test_settings_that_are_not_allowed(key, settings, words):
    with pytest.raises(ValueError, match=words):
        create(key, settings)


PROXY_KEYS = [key for key in nf.losses.names() if issubclass(nf.losses.get(key), ProxyLoss)]
every_loss_with_proxies = pytest.mark.parametrize("key", PROXY_KEYS)


@pytest.mark.parametrize("key", [*PROXY_KEYS, "margin"])
@pytest.mark.parametrize("label", [-1, 5])
def test_a_label_beyond_the_classes(key, label):
    labels = torch.tensor([0, 0, 1, 1, 4, label])
    with pytest.raises(ValueError, match=rf"labels range from .*{label}.*num_classes=5 allowed are 0 to 4"):
        create(key, {"num_classes": 5})(EMBEDDINGS, labels)


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


@pytest.mark.parametrize("key", [*PROXY_KEYS, "spectral_clustering", "facility_location", "quadruplet"])
def test_a_gallery_where_there_is_none(key):
    with pytest.raises(ValueError, match=f"{nf.losses.get(key).__name__} .* and takes no gallery"):
        create(key, {})(EMBEDDINGS, LABELS, EMBEDDINGS, LABELS)


def test_settings_are_given_by_name():
    with pytest.raises(TypeError):
        nf.losses.Raw(2.0)


def test_more_positives_than_smooth_ap_was_told():
    loss = nf.losses.SmoothAP(max_positives=2)
    with pytest.raises(ValueError, match="an anchor has 3 positives, but max_positives is 2"):
        loss(torch.eye(6), torch.tensor([0, 0, 0, 0, 1, 1]))
