"""NMI, AMI and F1: by hand, with exact fractions, and compared with scikit-learn and pytorch-metric-learning."""

import importlib
import math
import time
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score
from sklearn.metrics.cluster import pair_confusion_matrix

from nearfar.metrics import ami, f1, nmi

module = importlib.import_module("nearfar.metrics.clustering")

LN2, LN3 = math.log(2), math.log(3)
CLASSES = torch.tensor([0, 0, 0, 1, 1, 1])
CLUSTERS = torch.tensor([0, 0, 1, 1, 2, 2])  # shares 2 and 1 with the first class, 1 and 2 with the second


def test_nmi_by_hand():
    # Entropies ln 2 and ln 3. A sample's cluster tells its class in 4 cases of 6: information 4/6 · ln 2.
    assert nmi(CLASSES, CLUSTERS) == pytest.approx(2 / 3 * LN2 / ((LN2 + LN3) / 2))
    assert nmi(CLASSES, CLUSTERS) == pytest.approx(0.5158037429793889)
    assert nmi(CLASSES, CLUSTERS, normalization="geometric") == pytest.approx(2 / 3 * LN2 / math.sqrt(LN2 * LN3))
    assert nmi(CLASSES, CLUSTERS, normalization="geometric") == pytest.approx(0.5295405780575617)


def test_ami_by_hand():
    # A class of 3 and a cluster of 2 among 6 share both samples in 3 of 15 cases: Σ s log s is expected to be
    # 6 · 1/5 · 2 ln 2. It is 2 · 2 ln 2, and would be (6 ln 3 + 6 ln 2) / 2 in the mean of a perfect match.
    assert ami(CLASSES, CLUSTERS) == pytest.approx((4 - 2.4) * LN2 / (3 * LN3 + 3 * LN2 - 2.4 * LN2))
    assert ami(CLASSES, CLUSTERS) == pytest.approx(0.2987924581708903)


def test_f1_by_hand():
    # Clusters have 3 pairs, 2 of them of one class: P = 2/3. Classes have 6 pairs, 2 in one cluster: R = 1/3.
    assert f1(CLASSES, CLUSTERS) == pytest.approx(2 * (2 / 3) * (1 / 3) / (2 / 3 + 1 / 3))


def exact_ami(classes, clusters):
    """Compute AMI with the exact expectation, as a sum over all classes, clusters and intersection sizes."""
    n = len(classes)
    expected = 0.0
    for a in Counter(classes).values():
        for b in Counter(clusters).values():
            for shared in range(2, min(a, b) + 1):
                ways = math.comb(a, shared) * math.comb(n - a, b - shared) if b - shared <= n - a else 0
                expected += float(Fraction(ways, math.comb(n, b))) * shared * math.log(shared)
    of_classes, of_clusters, of_shared = (
        math.fsum(size * math.log(size) for size in Counter(groups).values())
        for groups in (classes, clusters, zip(classes, clusters, strict=True))
    )
    return (of_shared - expected) / ((of_classes + of_clusters) / 2 - expected)


def drawn(n, classes, clusters, *, alike, seed):
    """Draw classes and clusters that agree for a fraction ``alike`` of the samples."""
    generator = torch.Generator().manual_seed(seed)
    one = torch.randint(classes, (n,), generator=generator)
    other = torch.randint(clusters, (n,), generator=generator)
    return one, torch.where(torch.rand(n, generator=generator) < alike, one, other)


@pytest.mark.parametrize(
    ("n", "classes", "clusters"),
    [(30, 3, 5), (200, 2, 2), (200, 150, 60), (1000, 3, 40), (1500, 2, 3), (1500, 700, 500)],
)
@pytest.mark.parametrize("alike", [0.0, 0.8])
def test_ami_as_exact_fractions_have_it(n, classes, clusters, alike):
    one, other = drawn(n, classes, clusters, alike=alike, seed=n)
    assert ami(one, other) == pytest.approx(exact_ami(one.tolist(), other.tolist()), rel=1e-12, abs=1e-13)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunks_do_not_matter(chunk, monkeypatch):
    one, other = drawn(400, 20, 30, alike=0.3, seed=0)
    at_once = ami(one, other)
    monkeypatch.setattr(module, "CHUNK", chunk)
    assert ami(one, other) == pytest.approx(at_once, rel=1e-14)


@settings(derandomize=True, deadline=None)  # what passes once passes everywhere
@given(st.lists(st.tuples(st.integers(-2, 4), st.integers(0, 5)), min_size=1, max_size=40))
def test_as_scikit_learn_has_them(samples):
    one, other = np.array(samples).T
    assert nmi(one, other) == pytest.approx(normalized_mutual_info_score(one, other), abs=1e-12)
    geometric = normalized_mutual_info_score(one, other, average_method="geometric")
    assert nmi(one, other, normalization="geometric") == pytest.approx(geometric, abs=1e-12)
    assert ami(one, other) == pytest.approx(adjusted_mutual_info_score(one, other), abs=1e-12)
    (_, only_cluster), (only_class, both) = pair_confusion_matrix(one, other).tolist()
    pairs = 2 * both + only_cluster + only_class
    assert f1(one, other) == pytest.approx(2 * both / pairs if pairs else 1.0, abs=1e-12)


TOGETHER, APART = [0, 0, 0, 0], [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("classes", "clusters", "expected"),
    [
        (TOGETHER, TOGETHER, (1.0, 1.0, 1.0)),
        (APART, APART, (1.0, 1.0, 1.0)),
        ([5], [7], (1.0, 1.0, 1.0)),
        (TOGETHER, APART, (0.0, 0.0, 0.0)),
        (APART, TOGETHER, (0.0, 0.0, 0.0)),
        (TOGETHER, [0, 0, 1, 1], (0.0, 0.0, 0.5)),
        (APART, [0, 0, 1, 1], (2 / 3, 0.0, 0.0)),
        ([0, 0, 1, 1], [0, 1, 0, 1], (0.0, -0.5, 0.0)),
        ([3, 3, -9, -9], [1, 1, 2, 2], (1.0, 1.0, 1.0)),
    ],
)
def test_edges(classes, clusters, expected):
    arguments = torch.tensor(classes), torch.tensor(clusters)
    assert (nmi(*arguments), ami(*arguments), f1(*arguments)) == pytest.approx(expected, abs=1e-15)
    assert ami(*arguments) == pytest.approx(adjusted_mutual_info_score(classes, clusters), abs=1e-12)


@pytest.mark.parametrize("score", [nmi, ami, f1])
def test_names_of_classes_and_clusters_do_not_matter(score):
    one, other = drawn(300, 12, 9, alike=0.4, seed=2)
    expected = score(one, other)
    assert score(other, one) == pytest.approx(expected, rel=1e-13)
    assert score(one * -7 + 3, other.to(torch.int16)) == expected
    words = np.array([f"class {number:02}" for number in one.tolist()])
    assert score(words, other.numpy()) == expected
    assert score(one.flip(0), other.flip(0)) == expected


def test_a_perfect_match_is_exactly_one():
    one, _ = drawn(1000, 37, 1, alike=0.0, seed=3)
    other = torch.arange(37).flip(0)[one]
    assert nmi(one, other) == nmi(one, other, normalization="geometric") == ami(one, other) == f1(one, other) == 1.0


def test_many_clusters_are_quick():
    one, other = drawn(60_502, 11_316, 11_316, alike=0.5, seed=4)
    start = time.process_time()
    value = ami(one, other)
    assert time.process_time() - start < 5  # 20 ms; an hour if every class met every cluster in Python
    assert 0.3 < value < 0.5


@pytest.mark.parametrize("score", [nmi, ami, f1])
@pytest.mark.parametrize(
    ("labels", "assignment", "error", "message"),
    [
        (CLASSES, CLUSTERS[:5], ValueError, r"assignment has shape \(5,\); needed is \[6\]"),
        (CLASSES[:0], CLUSTERS[:0], ValueError, r"labels has shape \(0,\); needed is \[n\] with n ≥ 1"),
        (CLASSES.tolist(), CLUSTERS, TypeError, "labels is a list"),
        (CLASSES, CLUSTERS.float(), TypeError, "assignment is of torch.float32"),
    ],
)
def test_errors_name_the_argument(score, labels, assignment, error, message):
    with pytest.raises(error, match=message):
        score(labels, assignment)


def test_an_unknown_normalization():
    with pytest.raises(ValueError, match="normalization is 'max'; allowed are arithmetic, geometric"):
        nmi(CLASSES, CLUSTERS, normalization="max")
