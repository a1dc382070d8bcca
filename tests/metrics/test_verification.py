"""Verification: values computed by hand, and all pairs compared with a loop over all thresholds."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from checks import Watch
from retrieval_oracle import KINDS, as_whole_numbers, close, copies, nearness, unbalanced

import nearfar as nf

verification = nf.metrics.verification

both_measures = pytest.mark.parametrize("measure", ["cosine", "euclidean"])
both_forms = pytest.mark.parametrize("alone", [True, False], ids=["alone", "gallery"])
RATES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.99)


def one_by_one(pairs):
    """Compute the metrics from the similarities of all pairs, counting anew for each threshold."""
    positive, negative = ([near for near, same in pairs if same is wanted] for wanted in (True, False))
    found = {}
    for rate in RATES:
        found[f"tar@{rate}"] = 0.0
        for threshold in positive:
            if sum(near >= threshold for near in negative) / len(negative) <= rate:
                accepted = sum(near >= threshold for near in positive) / len(positive)
                found[f"tar@{rate}"] = max(found[f"tar@{rate}"], accepted)
    corners = [(Fraction(0), Fraction(0))]
    for threshold in sorted({near for near, _ in pairs}, reverse=True):
        false, true = (Fraction(sum(near >= threshold for near in some), len(some)) for some in (negative, positive))
        corners.append((false, true))
    for (false, true), (later, more) in itertools.pairwise(corners):
        if later + more >= 1:
            way = (1 - false - true) / (later + more - false - true)
            found["eer"] = float(false + way * (later - false))
            break
    wins = sum((Fraction(a > b) + Fraction(a == b, 2) for a in positive for b in negative), Fraction(0))
    return {**found, "auc": float(wins / (len(positive) * len(negative)))}


def all_pairs(points, labels, measure):
    numbers, classes = as_whole_numbers(points)[0], labels.tolist()
    couples = itertools.combinations(range(len(classes)), 2)
    return [(nearness(numbers[i], numbers[j], measure), classes[i] == classes[j]) for i, j in couples]


def metrics(found):
    return {
        name: value for name, value in found.items() if not name.startswith(("threshold", "positives", "negatives"))
    }


# --- worked out by hand --------------------------------------------------------------------------------------


def test_a_hand_worked_table():
    # A query and a gallery at distances 1 2 3 4 5 6, of classes # . # # . .
    # threshold  positives accepted  negatives accepted
    #     1           1/3                 0
    #     3           2/3                1/3
    #     4           3/3                1/3
    gallery = torch.arange(1.0, 7.0).unsqueeze(1)
    asked = (torch.zeros(1, 1), torch.tensor([1]), gallery, torch.tensor([1, 0, 1, 1, 0, 0]))
    assert verification(*asked, rates=(0.0, 0.3, 0.34), measure="euclidean") == pytest.approx(
        {
            "tar@0.0": 1 / 3,
            "threshold@0.0": 1.0,
            "tar@0.3": 1 / 3,
            "threshold@0.3": 1.0,
            "tar@0.34": 1.0,
            "threshold@0.34": 4.0,
            "eer": 1 / 3,  # between 3, which refuses one of three, and 4: one of three negatives is accepted
            "auc": 7 / 9,  # of the nine pairs of a positive and a negative the # at 3 and 4 are behind the . at 2
            "positives": 3,
            "negatives": 3,
        }
    )


def test_where_all_are_equal():
    """If all similarities are equal, a threshold accepts all pairs or none."""
    found = verification(torch.ones(6, 3), torch.arange(6) % 2, rates=0.5)
    assert (found["tar@0.5"], found["eer"], found["auc"]) == (0.0, 0.5, 0.5)
    assert math.isnan(found["threshold@0.5"])


# --- against the loop ----------------------------------------------------------------------------------------


@both_measures
@both_forms
@pytest.mark.parametrize("budget", [1, 5_000, None])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not close], ids=lambda kind: kind.__name__)
def test_all_pairs_one_by_one(kind, budget, alone, measure):
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        points, labels = kind(15, generator), unbalanced(15, 3, generator)
        if alone:
            asked, pairs = (points, labels), all_pairs(points, labels, measure)
        else:
            asked = (points[:6], labels[:6], points[6:], labels[6:])
            queries, items = as_whole_numbers(points[:6], points[6:])
            places = itertools.product(range(6), range(9))
            pairs = [(nearness(queries[i], items[j], measure), bool(labels[i] == labels[6 + j])) for i, j in places]
        found = verification(*asked, rates=RATES, measure=measure, memory_budget=budget)
        assert metrics(found) == pytest.approx(one_by_one(pairs), rel=1e-12, abs=1e-15)
        assert found["positives"] == sum(same for _, same in pairs)
        assert found["positives"] + found["negatives"] == len(pairs)


@both_measures
def test_a_threshold_accepts_what_it_says(measure):
    generator = torch.Generator().manual_seed(0)
    points, labels = torch.randn(60, 5, generator=generator, dtype=torch.float64), torch.arange(60) % 12
    found = verification(points, labels, rates=RATES, measure=measure)
    one, other = torch.triu_indices(60, 60, 1)
    if measure == "cosine":
        near = torch.nn.functional.cosine_similarity(points[one], points[other])
    else:
        near = -(points[one] - points[other]).norm(dim=1)
    same = labels[one] == labels[other]
    for rate in RATES[1:]:
        threshold = found[f"threshold@{rate}"] * (1 if measure == "cosine" else -1)
        accepted = near >= threshold - 1e-12
        assert accepted[same].double().mean().item() == pytest.approx(found[f"tar@{rate}"])
        assert accepted[~same].double().mean().item() <= rate


# --- what does not matter ------------------------------------------------------------------------------------


@both_measures
@both_forms
def test_tiles_and_order_do_not_matter(measure, alone):
    generator = torch.Generator().manual_seed(3)
    points, labels = copies(200, generator), unbalanced(200, 6, generator)
    order = torch.randperm(200, generator=generator)
    gallery = () if alone else (points[::3], labels[::3])
    expected = verification(points, labels, *gallery, measure=measure)
    for budget in (1_000, 100_000):
        found = verification(points[order], labels[order], *gallery, measure=measure, memory_budget=budget)
        assert found == pytest.approx(expected, rel=1e-12, nan_ok=True)


def test_the_unit_of_length_scales_thresholds_of_distances():
    points, labels = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 8
    short, long = (verification(points * 2.0**power, labels, measure="euclidean") for power in (0, 60))
    assert long.pop("threshold@0.01") == short.pop("threshold@0.01") * 2.0**60
    assert long.pop("threshold@0.001") == pytest.approx(short.pop("threshold@0.001") * 2.0**60, nan_ok=True)
    assert long == short


def test_numpy_words_and_progress():
    points, labels = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 8
    steps = []
    words = np.array(list("abcdefgh"))[labels.numpy()]
    given = {"rates": np.array([0.01]), "memory_budget": 4_000}
    found = verification(points.numpy(), words, progress=lambda *step: steps.append(step), **given)
    assert found == verification(points, labels, rates=(0.01,))
    assert steps == [(done, len(steps)) for done in range(1, len(steps) + 1)]


@both_forms
def test_no_tensor_holds_all_pairs(alone):
    count, budget = 1200, 2**20  # all pairs are five times that, and more
    points, labels = torch.randn(count, 8, generator=torch.Generator().manual_seed(0)), torch.arange(count) % 240
    gallery = () if alone else (points.clone(), labels)
    with Watch() as watch:
        verification(points, labels, *gallery, memory_budget=budget)
    assert watch.largest <= budget


# --- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"rates": (1.0,)}, ValueError, "rates contains 1.0; each rate must be ≥ 0 and < 1"),
        ({"rates": (-0.1,)}, ValueError, "rates contains -0.1"),
        ({"rates": ("x",)}, TypeError, "rates is 'x'; a number is needed"),
        ({"rates": None}, TypeError, "rates is None; a number is needed"),
        ({"measure": "dot"}, ValueError, "measure is 'dot'"),
        ({"memory_budget": 0}, ValueError, "memory_budget is 0"),
        ({"labels": torch.arange(4)}, ValueError, "no class has two members, so there is no pair to accept"),
        ({"labels": torch.zeros(4).long()}, ValueError, "all are of one class, so there is no pair to refuse"),
        ({"gallery": torch.eye(4)}, ValueError, "gallery and gallery_labels must be given together"),
        (
            {"gallery": torch.eye(4), "gallery_labels": torch.full((4,), 7)},
            ValueError,
            "the gallery has none of the queries' classes, so there is no pair to accept",
        ),
    ],
)
def test_errors_name_the_argument(changed, error, message):
    with pytest.raises(error, match=message):
        verification(**({"embeddings": torch.eye(4), "labels": torch.tensor([0, 0, 1, 1])} | changed))


@pytest.mark.parametrize("metric", ["retrieval", "clustering", "verification"])
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "array of float16"])
def test_half_precision_gives_the_result_of_float32_without_a_copy_in_float32(metric, kind):
    labels = torch.arange(4_000) // 400
    points = torch.eye(10, 128)[labels] + 0.3 * torch.randn(4_000, 128, generator=torch.Generator().manual_seed(0))
    given = points.to(torch.bfloat16 if kind == "bfloat16" else torch.float16)
    wide = given.float()
    measured = {
        "retrieval": lambda some: nf.metrics.retrieval(some[:64], labels[:64], some, labels, memory_budget=2**18),
        "verification": lambda some: verification(some[:64], labels[:64], some, labels, memory_budget=2**18),
        "clustering": lambda some: nf.metrics.clustering(some, labels, k=10, restarts=1, memory_budget=2**18),
    }[metric]
    with Watch() as watch:
        found = measured(given.numpy() if kind == "array of float16" else given)
    assert watch.largest < wide.nbytes
    assert found == measured(wide)
