"""Specification of ``retrieval``: values computed by hand, excluded items, ties, order, and results."""

import importlib

import numpy as np
import pytest
import torch
from retrieval_oracle import METRICS

import nearfar as nf
from nearfar.metrics.retrieval import PositiveRanks

module = importlib.import_module("nearfar.metrics.retrieval")  # nf.metrics.retrieval is the function
retrieval = nf.metrics.retrieval

both_measures = pytest.mark.parametrize("measure", ["cosine", "euclidean"])


def on_circle(*degrees):
    """Unit vectors: the smaller the angle between two, the more similar, by either measure."""
    angles = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def answers(pattern):
    """A query of class 1 and a gallery ranked in this order by either measure: # same class, . another class."""
    heights = torch.arange(1, len(pattern) + 1)
    gallery = torch.stack([torch.ones(len(pattern)), heights], dim=1)
    return torch.tensor([[1.0, 0.0]]), torch.tensor([1]), gallery, torch.tensor([int(c == "#") for c in pattern])


def some(count=40, classes=7, dim=6, seed=0):
    """Random embeddings without ties, and shuffled labels."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, dim, generator=generator), torch.randint(classes, (count,), generator=generator)


def per_query(*arguments, **settings):
    return retrieval(*arguments, per_query=True, **settings)["per_query"]


# --- worked out by hand --------------------------------------------------------------------------------------


@both_measures
def test_a_hand_worked_table(measure):
    # On a circle at   0° 10° 25° 45° 70° 100°
    # of class          A   A   B   A   B    C
    #
    # query   finds                                   positives at   r_precision   map@r   map                  mrr
    #   0° A  10° A, 25° B, 45° A, 70° B, 100° C      0, 2           1/2           1/2     (1/1 + 2/3)/2 = 5/6  1
    #  10° A   0° A, 25° B, 45° A, 70° B, 100° C      0, 2           1/2           1/2     (1/1 + 2/3)/2 = 5/6  1
    #  25° B  10° A, 45° A,  0° A, 70° B, 100° C      3              0             0       1/4                  1/4
    #  45° A  25° B, 70° B, 10° A,  0° A, 100° C      2, 3           0             0       (1/3 + 2/4)/2 = 5/12 1/3
    #  70° B  45° A, 100° C, 25° B, 10° A,  0° A      2              0             0       1/3                  1/3
    # 100° C  no other of its class: left out
    embeddings, labels = on_circle(0, 10, 25, 45, 70, 100), torch.tensor([5, 5, 2, 5, 2, 9])
    assert retrieval(embeddings, labels, ks=(1, 2, 3, 4), measure=measure) == pytest.approx(
        {
            "recall@1": 2 / 5,
            "recall@2": 2 / 5,
            "recall@3": 4 / 5,
            "recall@4": 1.0,
            "precision@1": 2 / 5,
            "r_precision": 1 / 5,
            "map@r": 1 / 5,
            "map": 8 / 15,
            "mrr": 7 / 12,
            "queries": 5,
            "queries_without_match": 1,
        }
    )


@both_measures
@pytest.mark.parametrize(
    ("pattern", "recalls", "precision_at_1", "r_precision", "map_at_r", "average_precision", "mrr"),
    [
        # recall at 1, 2, 4, 8
        ("#", (1, 1, 1, 1), 1, 1, 1, 1, 1),
        ("##..", (1, 1, 1, 1), 1, 1, 1, 1, 1),
        (".#", (0, 1, 1, 1), 0, 0, 0, 1 / 2, 1 / 2),
        ("....#", (0, 0, 0, 1), 0, 0, 0, 1 / 5, 1 / 5),
        ("........#", (0, 0, 0, 0), 0, 0, 0, 1 / 9, 1 / 9),
        # Two positives, one of them in the first two places: map is (1/1 + 2/4)/2.
        ("#..#", (1, 1, 1, 1), 1, 1 / 2, 1 / 2, 3 / 4, 1),
        # Three, two of them in the first three: map@r is (1/2 + 2/3)/3, map is (1/2 + 2/3 + 3/5)/3.
        (".##.#", (0, 1, 1, 1), 0, 2 / 3, 7 / 18, 53 / 90, 1 / 2),
        # Four, none of them in the first four: map is (1/5 + 2/6 + 3/7 + 4/8)/4.
        ("....####", (0, 0, 0, 1), 0, 0, 0, 307 / 840, 1 / 5),
    ],
)
def test_every_metric_of_one_query(
    pattern, recalls, precision_at_1, r_precision, map_at_r, average_precision, mrr, measure
):
    assert retrieval(*answers(pattern), measure=measure) == pytest.approx(
        {
            **{f"recall@{k}": recall for k, recall in zip((1, 2, 4, 8), recalls, strict=True)},
            "precision@1": precision_at_1,
            "r_precision": r_precision,
            "map@r": map_at_r,
            "map": average_precision,
            "mrr": mrr,
            "queries": 1,
            "queries_without_match": 0,
        }
    )


@both_measures
@pytest.mark.parametrize("positives", [1, 2, 63, 64, 65, 66, 200])
def test_every_other_answer_is_right(positives, measure):
    """Few positives are counted and many are sorted; the numbers do not tell.

    The j-th positive stands at place 2j: each has a precision of j/2j = 1/2, and half of them are in
    the first R places.
    """
    found = retrieval(*answers(".#" * positives), measure=measure)
    half = positives // 2
    assert [found[name] for name in METRICS] == pytest.approx([0, half / positives, half / positives / 2, 1 / 2, 1 / 2])


@both_measures
@pytest.mark.parametrize("many", [0, 64], ids=["sorted", "counted"])
def test_precision_and_average_precision_at_k(measure, many, monkeypatch):
    monkeypatch.setattr(module, "MANY_POSITIVES", many)
    # Three of its class, at places 2, 3 and 5 of 5. Beyond them, precision is still a share of k.
    found = retrieval(*answers(".##.#"), ks=(1, 2, 4, 10), at_k=("precision", "map"), measure=measure)
    assert [found[f"precision@{k}"] for k in (1, 2, 4, 10)] == pytest.approx([0, 1 / 2, 2 / 4, 3 / 10])
    at = [0, (1 / 2) / 2, (1 / 2 + 2 / 3) / 3, (1 / 2 + 2 / 3 + 3 / 5) / 3]
    assert [found[f"map@{k}"] for k in (1, 2, 4, 10)] == pytest.approx(at)
    assert found["map@10"] == found["map"]


def test_what_is_returned():
    always = ["precision@1", "r_precision", "map@r", "map", "mrr"]
    names = ["recall@1", "recall@2", "recall@4", "recall@8", *always]
    usual = retrieval(*some())
    assert list(usual) == [*names, "queries", "queries_without_match"]
    assert [type(value) for value in usual.values()] == [float] * len(names) + [int, int]
    assert list(per_query(*some())) == names
    found = retrieval(*some(), ks=(2, 1), at_k=("map", "recall"))
    assert list(found) == ["map@2", "map@1", "recall@2", "recall@1", *always, "queries", "queries_without_match"]
    everything = retrieval(*some(), ks=(2, 1), at_k=("recall", "precision", "map"))
    assert everything["precision@1"] == everything["map@1"] == everything["recall@1"]
    assert {name: everything[name] for name in found} == found
    assert retrieval(*some(), ks=2, at_k="precision") == retrieval(*some(), ks=2, at_k=("precision",))


def test_measures_differ_where_lengths_do():
    # The answer of the query's class lies in its direction but ten times as far out; the other is close by.
    query, gallery = torch.tensor([[1.0, 0.0]]), torch.tensor([[10.0, 0.0], [1.0, 0.5]])
    asked = (query, torch.tensor([0]), gallery, torch.tensor([0, 1]))
    assert retrieval(*asked, measure="cosine")["recall@1"] == 1.0
    assert retrieval(*asked, measure="euclidean")["recall@1"] == 0.0


# --- ties ----------------------------------------------------------------------------------------------------


@both_measures
def test_of_equal_answers_the_lower_index_comes_first(measure):
    # Four times the same vector, of classes A B A A: each query finds the others by their index.
    #
    # query  finds        positives at   r_precision   map@r   map                   mrr
    #  0 A   1 B 2 A 3 A  1, 2           1/2           1/4     (1/2 + 2/3)/2 = 7/12  1/2
    #  1 B   no other of its class: left out
    #  2 A   0 A 1 B 3 A  0, 2           1/2           1/2     (1/1 + 2/3)/2 = 5/6   1
    #  3 A   0 A 1 B 2 A  0, 2           1/2           1/2     (1/1 + 2/3)/2 = 5/6   1
    same = torch.tensor([[0.6, 0.8]]).repeat(4, 1)
    assert retrieval(same, torch.tensor([0, 1, 0, 0]), ks=(1, 2), measure=measure) == pytest.approx(
        {
            "recall@1": 2 / 3,
            "recall@2": 1.0,
            "precision@1": 2 / 3,
            "r_precision": 1 / 2,
            "map@r": 5 / 12,
            "map": 3 / 4,
            "mrr": 5 / 6,
            "queries": 3,
            "queries_without_match": 1,
        }
    )


@pytest.mark.parametrize("spread", [0.0, 1e-7, 1e-4])
@pytest.mark.parametrize("asks_a_gallery", [False, True])
def test_a_network_that_sent_all_to_one_place_is_measured_in_time(spread, asks_a_gallery, monkeypatch):
    count = 160
    points, labels = some(count, classes=8, dim=32)
    points = points[0] + spread * points
    gallery = (points.flip(0), labels.flip(0)) if asks_a_gallery else ()
    looked = []
    exactly = PositiveRanks._exactly

    def counted(self, index, others):
        looked.append(others.numel())
        return exactly(self, index, others)

    monkeypatch.setattr(module, "MANY_CLOSE", 1e-9)  # every close comparison one by one
    slow = per_query(points, labels, *gallery)
    monkeypatch.undo()
    monkeypatch.setattr(PositiveRanks, "_exactly", counted)
    quick = per_query(points, labels, *gallery)
    for name, values in slow.items():
        torch.testing.assert_close(quick[name], values, equal_nan=True, msg=name)
    # Its positives twice, and for each query about as many as the crowd: not once for each of the 20 positives.
    assert sum(looked) < 4 * count * count


@both_measures
def test_a_difference_float32_cannot_see_decides(measure):
    # Both answers are the same 13 numbers in float32. The second is nearer, by one part in 10¹⁰.
    generator = torch.Generator().manual_seed(3)
    query, answer = torch.rand(2, 13, generator=generator, dtype=torch.float64)
    gallery = torch.stack([answer, answer + 1e-10 * (query - answer)])
    assert torch.equal(*gallery.float())
    asked = (query.unsqueeze(0), torch.tensor([0]), gallery)
    assert retrieval(*asked, torch.tensor([1, 0]), measure=measure)["mrr"] == 1.0
    assert retrieval(*asked, torch.tensor([0, 1]), measure=measure)["mrr"] == 0.5


# --- who is asked --------------------------------------------------------------------------------------------


def test_a_duplicate_is_found_and_the_query_is_not():
    twins = torch.tensor([[0.6, 0.8], [0.6, 0.8]])
    assert retrieval(twins, torch.tensor([3, 3]), ks=(1,))["recall@1"] == 1.0
    three = torch.tensor([[0.6, 0.8], [0.6, 0.8], [1.0, 0.0]])
    assert retrieval(three, torch.tensor([4, 3, 3]), ks=(1,))["recall@1"] == 0.0


def test_queries_ask_the_gallery_only():
    # The query of class 0 has a twin among the queries, which it must not find. Class 2 is not in the gallery.
    queries, query_labels = on_circle(0, 0, 90), torch.tensor([0, 0, 2])
    gallery, gallery_labels = on_circle(10, 20), torch.tensor([1, 0])
    found = retrieval(queries, query_labels, gallery, gallery_labels, ks=(1, 2))
    assert (found["recall@1"], found["recall@2"], found["mrr"]) == (0.0, 1.0, 0.5)
    assert (found["queries"], found["queries_without_match"]) == (2, 1)


def test_in_a_gallery_nothing_is_left_out():
    embeddings, labels = some()
    found = retrieval(embeddings, labels, embeddings, labels)
    assert (found["recall@1"], found["mrr"], found["queries"]) == (1.0, 1.0, 40)
    alone = torch.arange(40)  # each is the only one of its class, and finds itself
    assert retrieval(embeddings, alone, embeddings, alone)["map"] == 1.0


def test_what_is_of_the_class_and_the_group_takes_no_place():
    # A of camera 1 finds, in this order, A of 1, B of 1, A of 2, A of 1, A of 3: of these it asks B A A.
    query, label, gallery, _ = answers("#.###")
    found = retrieval(
        *(query, label, gallery, torch.tensor([1, 0, 1, 1, 1])),
        groups=torch.tensor([1]),
        gallery_groups=torch.tensor([1, 1, 2, 1, 3]),
        ks=(1, 2),
    )
    assert (found["recall@1"], found["recall@2"]) == (0.0, 1.0)
    assert [found[name] for name in METRICS] == pytest.approx([0, 1 / 2, 1 / 4, (1 / 2 + 2 / 3) / 2, 1 / 2])


@pytest.mark.parametrize("classes", [3, 60], ids=["sorted", "counted"])
def test_a_query_with_nobody_beyond_its_group_has_no_match(classes):
    embeddings, labels = some(300, classes=classes)
    groups = torch.where(labels == 0, 5, torch.arange(300) % 4)
    found = retrieval(embeddings, labels, groups=groups, at_k=("map",), per_query=True)
    nobody = torch.tensor(
        [not bool(((labels == a) & (groups != b)).any()) for a, b in zip(labels, groups, strict=True)]
    )
    assert found["queries_without_match"] == int(nobody.sum()) >= int((labels == 0).sum())
    for name, values in found["per_query"].items():
        assert torch.equal(values.isnan(), nobody), name


def test_groups_may_be_words_and_each_its_own():
    embeddings, labels = some()
    expected = retrieval(embeddings, labels)
    assert retrieval(embeddings, labels, groups=torch.arange(40)) == expected
    assert retrieval(embeddings, labels, groups=np.array([f"camera {i}" for i in range(40)])) == expected


# --- what does not matter ------------------------------------------------------------------------------------


def test_the_origin_does_not_matter_to_distances():
    embeddings, labels = some()
    embeddings = (embeddings * 1024).round()  # so that nothing is lost in the move
    assert retrieval(embeddings + 2.0**20, labels, measure="euclidean") == retrieval(
        embeddings, labels, measure="euclidean"
    )


def test_names_of_classes_do_not_matter():
    embeddings, labels = some()
    names = torch.tensor([2**62, -5, 0, 17, -(2**62), 3, 1])
    assert retrieval(embeddings, names[labels]) == retrieval(embeddings, labels)


@pytest.mark.parametrize("classes", [2, 40], ids=["sorted", "counted"])
def test_one_vector_far_away_does_not_blur_the_others(classes):
    embeddings, labels = some(200, classes=classes)
    far, nobody = torch.full((1, 6), 1e7), torch.tensor([99])
    straight = per_query(embeddings, labels, measure="euclidean")
    blurred = per_query(torch.cat([embeddings, far]), torch.cat([labels, nobody]), measure="euclidean")
    for name, values in straight.items():
        assert torch.equal(blurred[name][:200].nan_to_num(-1), values.nan_to_num(-1)), name


@both_measures
@pytest.mark.parametrize("classes", [2, 40], ids=["sorted", "counted"])
def test_mixed_precision_around_it_does_not_matter(measure, classes):
    """The global precision of matrix products does not matter either."""
    embeddings, labels = some(200, classes=classes)
    expected = retrieval(embeddings, labels, measure=measure)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert retrieval(embeddings, labels, measure=measure) == expected
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert retrieval(embeddings, labels, measure=measure) == expected
    finally:
        torch.set_float32_matmul_precision(before)


# --- what is given back --------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 7, 40])
def test_progress_is_told(classes):
    embeddings, labels = some(200, classes=classes)
    told = []
    found = retrieval(embeddings, labels, memory_budget=100_000, progress=lambda *steps: told.append(steps))
    assert found == retrieval(embeddings, labels, memory_budget=100_000)
    steps = len(told)
    assert steps > 3
    assert told == [(done, steps) for done in range(1, steps + 1)]
