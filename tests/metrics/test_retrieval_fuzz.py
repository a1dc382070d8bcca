"""Retrieval against the loop that sorts everything each query asks, without rounding: see retrieval_oracle.py."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from retrieval_oracle import Question, assert_as_asked_one_by_one, is_clear, score
from torch import Tensor

import nearfar as nf

ranking = importlib.import_module("nearfar.metrics.ranking")

BUDGETS = (1, 500, 5_000, 50_000, 256 * 2**20)  # bytes; the first ones force blocks of a few rows or of one


def lattice(count: int, generator: torch.Generator) -> Tensor:
    """Along an axis or a diagonal of four dimensions, of several lengths: cosines are 0, ±1/2 or ±1, exactly.

    Squared distances are whole numbers. Ties are everywhere.
    """
    axes = torch.eye(4)[torch.randint(4, (count,), generator=generator)] * 2
    signs = torch.randint(2, (count, 4), generator=generator) * 2.0 - 1.0
    along = torch.rand(count, 1, generator=generator) < 0.5
    lengths = torch.tensor([0.5, 1.0, 4.0])[torch.randint(3, (count, 1), generator=generator)]
    return torch.where(along, axes, torch.ones(4)) * signs * lengths


def copies(count: int, generator: torch.Generator) -> Tensor:
    """Random vectors, some of them more than once."""
    different = torch.randn(max(1, 2 * count // 3), 5, generator=generator)
    return different[torch.randint(len(different), (count,), generator=generator)]


def close(count: int, generator: torch.Generator) -> Tensor:
    """Around three points: those around the same one differ in similarity by less than float32 can tell."""
    points = torch.randn(3, 5, generator=generator, dtype=torch.float64)[torch.arange(count) % 3]
    return points + 1e-4 * torch.randn(count, 5, generator=generator, dtype=torch.float64)


def zeros(count: int, generator: torch.Generator) -> Tensor:
    """Some vectors are zero: their cosine with any other is 0."""
    return torch.randn(count, 3, generator=generator) * (torch.rand(count, 1, generator=generator) < 0.6)


def far_out(count: int, generator: torch.Generator) -> Tensor:
    """Of lengths whose squares are beyond float32, at one end or the other."""
    exponent = 25 if torch.rand((), generator=generator) < 0.5 else -25
    return torch.randn(count, 3, generator=generator) * 10.0**exponent


KINDS = (lattice, copies, close, zeros, far_out)


def labels_of(count: int, classes: int, generator: torch.Generator) -> Tensor:
    """Unbalanced: the k-th class is twice as frequent as the next, and the last ones may have no or one member."""
    weights = 0.5 ** torch.arange(classes, dtype=torch.float64)
    return torch.multinomial(weights, count, replacement=True, generator=generator) - 1


@st.composite
def questions(draw: st.DrawFn, most: int = 14) -> Question:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 100_000)))
    kind, classes = draw(st.sampled_from(KINDS)), draw(st.integers(1, 8))
    count, others = draw(st.integers(1, most)), draw(st.integers(0, most))
    points, labels = kind(count + others, generator), labels_of(count + others, classes, generator)
    question = Question(points[:count], labels[:count])
    if others:
        question.gallery, question.gallery_labels = points[count:], labels[count:]
    question.measure = draw(st.sampled_from(["cosine", "euclidean"]))
    question.ks = tuple(draw(st.lists(st.integers(1, 2 * most), min_size=1, max_size=4, unique=True)))
    return question


def has_a_match(question: Question) -> bool:
    if question.gallery_labels is not None:
        return bool(torch.isin(question.labels, question.gallery_labels).any())
    return len(question.labels.unique()) < len(question.labels)


def ask(question: Question, **settings: Any) -> dict[str, Any]:
    return nf.metrics.retrieval(*question.arguments(), **question.settings(), per_query=True, **settings)


# From how many positives on a query is sorted for: every one, most, some, or none of these small questions.
@pytest.mark.parametrize("many", [0, 1, 3, 64])
def test_as_asked_one_by_one(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "MANY_POSITIVES", many)

    @settings(derandomize=True, deadline=None, max_examples=300, suppress_health_check=list(HealthCheck))
    @given(questions(), st.sampled_from(BUDGETS))
    def search(question: Question, budget: int) -> None:
        assume(has_a_match(question))
        assume(is_clear(question))
        assert_as_asked_one_by_one(ask(question, memory_budget=budget), question)

    search()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("measure", ["cosine", "euclidean"])
@pytest.mark.parametrize("budget", [1, 20_000, 256 * 2**20])
def test_few_and_many_positives_in_one_question(kind: Any, measure: str, budget: int) -> None:
    """Classes of 90, 5, 5, …, and one of 1: some queries are counted for and others sorted for, as it comes."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.cat([torch.zeros(90), 1 + torch.arange(20) // 5, torch.tensor([9])]).long()
    labels = labels[torch.randperm(len(labels), generator=generator)]
    question = Question(kind(len(labels), generator), labels, measure=measure)
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


@settings(derandomize=True, deadline=None, max_examples=100)
@given(questions(most=40))
def test_blocks_do_not_matter(question: Question) -> None:
    """Not in the last digit: neither in total nor for any query."""
    assume(has_a_match(question))
    first, *others = (ask(question, memory_budget=budget) for budget in BUDGETS)
    one_by_one = first.pop("per_query")
    for other in others:
        for name, values in other.pop("per_query").items():
            assert torch.equal(values.nan_to_num(-1), one_by_one[name].nan_to_num(-1)), name
        assert other == first


@pytest.mark.parametrize("measure", ["cosine", "euclidean"])
@pytest.mark.parametrize("classes", [100, 6])
@pytest.mark.parametrize("budget", [100_000, 2_000_000, 256 * 2**20])
def test_duplicates_tie_wherever_they_stand(measure: str, classes: int, budget: int) -> None:
    """Sixty copies of each of fifty vectors: copies rounded apart would not be in the order of their index."""
    generator = torch.Generator().manual_seed(2)
    distinct = torch.randn(50, 100, generator=generator, dtype=torch.float64)
    which = torch.arange(3000) % 50
    which = which[torch.randperm(3000, generator=generator)]
    labels = torch.randint(classes, (3000,), generator=generator)
    queries, query_labels = torch.randn(40, 100, generator=generator), torch.arange(40) % classes
    if measure == "cosine":
        nearness = torch.nn.functional.cosine_similarity(queries.double().unsqueeze(1), distinct, dim=2)
    else:
        nearness = -(queries.double().unsqueeze(1) - distinct).square().sum(dim=2)
    found = ask(Question(queries, query_labels, distinct[which], labels, measure), memory_budget=budget)
    for i in range(40):
        order = nearness[i][which].argsort(descending=True, stable=True)  # copies share one number
        ranks = (labels[order] == query_labels[i]).nonzero().squeeze(1).tolist()
        assert {name: values[i].item() for name, values in found["per_query"].items()} == pytest.approx(
            score(ranks, (1, 2, 4, 8)), rel=1e-12
        )
