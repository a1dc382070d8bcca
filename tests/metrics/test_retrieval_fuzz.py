"""Retrieval compared with a loop that sorts all items of each query without rounding; see retrieval_oracle.py."""

import importlib
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from retrieval_oracle import KINDS, Question, assert_as_asked_one_by_one, is_clear, score, unbalanced

import nearfar as nf

ranking = importlib.import_module("nearfar.metrics.retrieval")

BUDGETS = (1, 800, 5_000, 256 * 2**20)  # bytes; the first ones force blocks of one row or of a few


@st.composite
def questions(draw, most=14):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 100_000)))
    kind, classes = draw(st.sampled_from(KINDS)), draw(st.integers(1, 8))
    count, others = draw(st.integers(1, most)), draw(st.just(0) | st.integers(1, most))
    points, labels = kind(count + others, generator), unbalanced(count + others, classes, generator)
    question = Question(points[:count], labels[:count])
    if others:
        question.gallery, question.gallery_labels = points[count:], labels[count:]
    question.measure = draw(st.sampled_from(["cosine", "euclidean"]))
    question.ks = tuple(draw(st.lists(st.integers(1, 2 * most), min_size=1, max_size=4, unique=True)))
    return question


@st.composite
def questions_that_leave_out(draw):
    """Queries with known positions in the gallery, or some of them, and groups."""
    question = draw(questions())
    question.at_k = draw(st.sampled_from([("precision", "recall"), ("map",), ("recall", "precision", "map")]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 100_000)))
    many = draw(st.integers(1, 4))
    if draw(st.booleans()):
        question.groups = torch.randint(many, (len(question.labels),), generator=generator) - 1
    if question.gallery is None or question.gallery_labels is None:
        return question
    if question.groups is not None:
        question.gallery_groups = torch.randint(many, (len(question.gallery),), generator=generator) - 1
    if draw(st.booleans()):  # every second query, or what is left of them, is an item of the gallery
        places = torch.randint(len(question.gallery), (len(question.labels),), generator=generator)
        there = torch.arange(len(places)) % 2 == 0
        question.positions = torch.where(there, places, -1)
        question.embeddings = torch.where(there.unsqueeze(1), question.gallery[places], question.embeddings)
        question.labels = torch.where(there, question.gallery_labels[places], question.labels)
    return question


def has_a_match(question):
    labels = question.labels if question.gallery_labels is None else question.gallery_labels
    pairs = (labels == question.labels.unsqueeze(1)).nonzero().tolist()
    return any(question.asks(i, j) for i, j in pairs)


def ask(question, **settings):
    return nf.metrics.retrieval(*question.arguments(), **question.settings(), per_query=True, **settings)


# Beyond so many positives a query is sorted for: here all are, most, some, or none.
@pytest.mark.parametrize("many", [0, 1, 3, 64])
@pytest.mark.parametrize("asked", [questions(), questions_that_leave_out()], ids=["all", "left out"])
def test_as_asked_one_by_one(asked, many, monkeypatch):
    monkeypatch.setattr(ranking, "MANY_POSITIVES", many)

    @settings(derandomize=True, deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
    @given(asked, st.sampled_from(BUDGETS))
    def search(question, budget):
        assume(has_a_match(question))
        assume(is_clear(question))
        assert_as_asked_one_by_one(ask(question, memory_budget=budget), question)

    search()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("measure", ["cosine", "euclidean"])
@pytest.mark.parametrize("budget", [1_000, 20_000, 256 * 2**20])
def test_few_and_many_positives_in_one_question(kind, measure, budget):
    """Classes of 90, 5, 5, …, and one of 1: some queries are ranked by counting, others by sorting."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.cat([torch.zeros(90), 1 + torch.arange(20) // 5, torch.tensor([9])]).long()
    labels = labels[torch.randperm(len(labels), generator=generator)]
    question = Question(kind(len(labels), generator), labels, measure=measure)
    assert is_clear(question)
    assert_as_asked_one_by_one(ask(question, memory_budget=budget), question)
    some = torch.randperm(len(labels), generator=generator)[:30]
    asked = replace(
        question,
        embeddings=question.embeddings[some],
        labels=labels[some],
        gallery=question.embeddings,
        gallery_labels=labels,
    )
    assert_as_asked_one_by_one(ask(asked, memory_budget=budget), asked)
    cameras = torch.randint(3, (len(labels),), generator=generator)
    told = replace(asked, at_k=("precision", "map"), positions=some, groups=cameras[some], gallery_groups=cameras)
    assert_as_asked_one_by_one(ask(told, memory_budget=budget), told)


@settings(derandomize=True, deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(questions(most=20))
def test_blocks_do_not_matter(question):
    assume(has_a_match(question))
    first, *others = (ask(question, memory_budget=budget) for budget in BUDGETS)
    one_by_one = first.pop("per_query")
    for other in others:
        for name, values in other.pop("per_query").items():
            assert values.tolist() == pytest.approx(one_by_one[name].tolist(), rel=1e-12, nan_ok=True), name
        assert other == pytest.approx(first, rel=1e-12)


@pytest.mark.parametrize("measure", ["cosine", "euclidean"])
@pytest.mark.parametrize("classes", [100, 6], ids=["counted", "sorted"])
@pytest.mark.parametrize(("budget", "asking"), [(5_000, 100), (256 * 2**20, 2000)], ids=["rows", "at once"])
def test_duplicates_tie_wherever_they_stand(measure, classes, asking, budget):
    """Twelve copies of each of fifty vectors: copies that differ by rounding would not be ordered by index."""
    generator = torch.Generator().manual_seed(2)
    distinct = torch.randn(50, 16, generator=generator, dtype=torch.float64)
    which = (torch.arange(600) % 50)[torch.randperm(600, generator=generator)]
    labels = torch.randint(classes, (600,), generator=generator)
    queries, query_labels = torch.randn(asking, 16, generator=generator), torch.arange(asking) % classes
    if measure == "cosine":
        nearness = torch.nn.functional.cosine_similarity(queries.double().unsqueeze(1), distinct, dim=2)
    else:
        nearness = -(queries.double().unsqueeze(1) - distinct).square().sum(dim=2)
    order = nearness[:, which].argsort(dim=1, descending=True, stable=True)  # copies share one number
    right = labels[order] == query_labels.unsqueeze(1)
    found = ask(Question(queries, query_labels, distinct[which], labels, measure), memory_budget=budget)["per_query"]
    for i in range(asking):
        expected = score(right[i].nonzero().squeeze(1).tolist(), (1, 2, 4, 8))
        assert {name: values[i].item() for name, values in found.items()} == pytest.approx(expected, rel=1e-12)
