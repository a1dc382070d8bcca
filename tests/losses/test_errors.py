"""Wrong use is told in words that name what is wrong and what is allowed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import nearfar as nf

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
def test_wrong_batches(key: str, embeddings: Any, labels: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        nf.losses.create(key)(embeddings, labels)


wrong_galleries = pytest.mark.parametrize(
    ("keywords", "error", "words"),
    [
        ({"gallery": EMBEDDINGS}, ValueError, "gallery and gallery_labels go together"),
        ({"gallery_labels": LABELS}, ValueError, "gallery and gallery_labels go together"),
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
def test_wrong_galleries(key: str, keywords: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        nf.losses.create(key)(EMBEDDINGS, LABELS, **keywords)


@wrong_galleries
def test_wrong_galleries_for_pair_weights(keywords: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        nf.losses.Raw().pair_weights(EMBEDDINGS, LABELS, **keywords)


def test_a_list_for_pair_weights() -> None:
    with pytest.raises(TypeError, match="embeddings is a list"):
        nf.losses.Raw().pair_weights(EMBEDDINGS.tolist(), LABELS)


@every_loss
def test_an_unknown_setting_is_named_with_the_nearest_one(key: str) -> None:
    known = next(iter(nf.losses.defaults(key)))
    with pytest.raises(TypeError, match=rf"{key} has no setting '{known}s' \(did you mean '{known}'\?\)"):
        nf.losses.create(key, **{f"{known}s": 1.0})


def test_an_unknown_loss_is_named_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"'multi_similarty' \(did you mean 'multi_similarity'\?\).*contrastive"):
        nf.losses.create("multi_similarty")


def test_an_unknown_mining_is_named_with_the_known_ones() -> None:
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
def test_a_mining_that_makes_no_sense(key: str, mining: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        nf.losses.create(key, mining=mining)


@pytest.mark.parametrize(
    ("key", "settings", "error", "words"),
    [
        ("contrastive", {"form": "euclid"}, ValueError, "form is 'euclid'; allowed are cosine, distance"),
        ("contrastive", {"average": "all"}, ValueError, "average is 'all'; allowed are anchors, pairs"),
        ("contrastive", {"margin": -1.5}, ValueError, "margin is -1.5; it must be ≥ -1"),
        ("contrastive", {"form": "distance", "margin": -0.1}, ValueError, "margin is -0.1; it must be ≥ 0"),
        ("triplet", {"form": "distance"}, ValueError, "form is 'distance'; allowed are cosine, squared_distance"),
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
    ],
)
def test_settings_out_of_range(key: str, settings: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        nf.losses.create(key, **settings)


@pytest.mark.parametrize("label", [-1, 5])
def test_a_label_beyond_the_classes_of_margin(label: int) -> None:
    labels = torch.tensor([0, 0, 1, 1, 4, label])
    with pytest.raises(ValueError, match=rf"labels go from .*{label}.*num_classes=5 allowed are 0 to 4"):
        nf.losses.Margin(num_classes=5)(EMBEDDINGS, labels)


def test_settings_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        nf.losses.Raw(2.0)  # type: ignore[misc]
