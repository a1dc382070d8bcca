"""Retrieval on a GPU: the numbers of the loop and of the CPU, whatever the GPU is allowed to round."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from retrieval_oracle import KINDS, Question, assert_as_asked_one_by_one

import nearfar as nf

pytestmark = pytest.mark.gpu

both_measures = pytest.mark.parametrize("measure", ["cosine", "euclidean"])
both_ways = pytest.mark.parametrize("classes", [1000, 20], ids=["counted", "sorted"])


def ask(question, **settings):
    return nf.metrics.retrieval(*question.arguments(), **question.settings(), per_query=True, **settings)


def ask_the_gpu(question, **settings):
    given = [tensor.cuda() for tensor in question.arguments()]
    found = nf.metrics.retrieval(*given, **question.settings(), per_query=True, **settings)
    return {**found, "per_query": {name: values.cpu() for name, values in found["per_query"].items()}}


def assert_same(found, expected):
    for name, values in found.pop("per_query").items():
        assert values.tolist() == pytest.approx(expected["per_query"][name].tolist(), rel=1e-12, nan_ok=True), name
    assert found == pytest.approx({key: expected[key] for key in found}, rel=1e-12)


def clusters(classes, count=4000):
    """Classes that overlap; one embedding in ten is a copy of another."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (count,), generator=generator)
    centers = torch.randn(classes, 64, generator=generator)
    embeddings = centers[labels] + 1.5 * torch.randn(count, 64, generator=generator)
    some, others = torch.randint(count, (2, count // 10), generator=generator)
    embeddings[some] = embeddings[others]
    return embeddings, labels


@both_measures
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("budget", [1_000, 20_000, 256 * 2**20])
def test_as_asked_one_by_one(kind, measure, budget):
    generator = torch.Generator().manual_seed(1)
    labels = torch.cat([torch.zeros(90), 1 + torch.arange(20) // 5, torch.tensor([9])]).long()
    labels = labels[torch.randperm(len(labels), generator=generator)]
    question = Question(kind(len(labels), generator), labels, measure=measure)
    assert_as_asked_one_by_one(ask_the_gpu(question, memory_budget=budget), question)
    queries = replace(question, embeddings=question.embeddings[::4], labels=labels[::4])
    asked = replace(queries, gallery=question.embeddings, gallery_labels=labels)
    assert_as_asked_one_by_one(ask_the_gpu(asked, memory_budget=budget), asked)


@both_measures
@both_ways
@pytest.mark.parametrize("budget", [2**22, 256 * 2**20])
def test_the_numbers_of_the_cpu(measure, classes, budget):
    alone = Question(*clusters(classes), measure=measure)
    shop = replace(alone, gallery=alone.embeddings[1000:], gallery_labels=alone.labels[1000:])
    shop = replace(shop, embeddings=alone.embeddings[:1000], labels=alone.labels[:1000])
    for question in (alone, shop):
        assert_same(ask_the_gpu(question, memory_budget=budget), ask(question))


@contextmanager
def rough_multiplication():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")  # TF32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@both_measures
@both_ways
@pytest.mark.parametrize(
    "around", [rough_multiplication, lambda: torch.autocast("cuda", dtype=torch.float16)], ids=["TF32", "autocast"]
)
def test_rounding_the_rest_of_the_program_allows_is_not_used(measure, classes, around):
    question = Question(*clusters(classes), measure=measure)
    expected = ask(question)
    with around():
        assert_same(ask_the_gpu(question), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@both_measures
def test_other_kinds_of_numbers(dtype, measure):
    embeddings, labels = clusters(200, count=1000)
    question = Question((100 * embeddings).to(dtype), labels, measure=measure)
    assert_same(ask_the_gpu(question), ask(question))


def test_labels_and_gallery_may_stay_on_the_cpu():
    embeddings, labels = clusters(200, count=1000)
    asked = (embeddings[:100], labels[:100], embeddings[100:], labels[100:])
    expected = nf.metrics.retrieval(*asked)
    assert nf.metrics.retrieval(asked[0].cuda(), *asked[1:]) == pytest.approx(expected, rel=1e-12)
    assert nf.metrics.retrieval(asked[0].cuda(), asked[1], *(given.numpy() for given in asked[2:])) == pytest.approx(
        expected, rel=1e-12
    )


@both_measures
@both_ways
def test_memory_keeps_to_its_budget(measure, classes):
    generator = torch.Generator("cuda").manual_seed(0)
    embeddings = torch.randn(30_000, 64, device="cuda", generator=generator)
    labels = torch.randint(10 * classes, (30_000,), device="cuda", generator=generator)
    budget = 64 * 2**20
    nf.metrics.retrieval(embeddings[:100], labels[:100] % 2, measure=measure)  # set up the libraries
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    nf.metrics.retrieval(embeddings, labels, measure=measure, memory_budget=budget)
    assert torch.cuda.max_memory_allocated() - before <= budget + 8 * embeddings.nbytes
