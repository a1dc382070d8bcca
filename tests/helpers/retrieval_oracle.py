"""Retrieval by the definitions: one query at a time, everything it asks sorted, similarities compared without rounding.

Floating-point numbers are fractions, and to sort by a cosine or a distance no root is needed. So whole numbers of
any length decide which of two answers is nearer, and only the metrics themselves are rounded.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from torch import Tensor

METRICS = ("precision@1", "r_precision", "map@r", "map", "mrr")


@dataclass
class Question:
    """Arguments of ``retrieval``."""

    embeddings: Tensor
    labels: Tensor
    gallery: Tensor | None = None
    gallery_labels: Tensor | None = None
    measure: str = "cosine"
    ks: tuple[int, ...] = (1, 2, 4, 8)
    at_k: tuple[str, ...] = ("recall",)
    positions: Tensor | None = None
    groups: Tensor | None = None
    gallery_groups: Tensor | None = None

    def arguments(self):
        given = (self.embeddings, self.labels)
        return given if self.gallery is None else (*given, self.gallery, self.gallery_labels)

    def settings(self):
        """Return the settings that differ from the defaults."""
        told = {name: getattr(self, name) for name in ("positions", "groups", "gallery_groups")}
        given = {name: value for name, value in told.items() if value is not None}
        return {"ks": self.ks, "at_k": self.at_k, "measure": self.measure, **given}

    def asks(self, i, j):
        """Return whether item j counts for query i: not the query itself, nor an item of its class and group."""
        own = i if self.gallery is None else -1 if self.positions is None else int(self.positions[i])
        if j == own:
            return False
        if self.groups is None:
            return True
        labels = self.labels if self.gallery_labels is None else self.gallery_labels
        groups = self.groups if self.gallery_groups is None else self.gallery_groups
        return bool(labels[j] != self.labels[i]) or bool(groups[j] != self.groups[i])


# --- what to ask ---------------------------------------------------------------------------------------------


def lattice(count, generator):
    """Along an axis or a diagonal of four dimensions, of several lengths: cosines are 0, ±1/2 or ±1, exactly.

    Squared distances are whole numbers. Ties are everywhere.
    """
    axes = torch.eye(4)[torch.randint(4, (count,), generator=generator)] * 2
    signs = torch.randint(2, (count, 4), generator=generator) * 2.0 - 1.0
    along = torch.rand(count, 1, generator=generator) < 0.5
    lengths = torch.tensor([0.5, 1.0, 4.0])[torch.randint(3, (count, 1), generator=generator)]
    return torch.where(along, axes, torch.ones(4)) * signs * lengths


def copies(count, generator):
    """Random vectors, some of them more than once."""
    different = torch.randn(max(1, 2 * count // 3), 5, generator=generator)
    return different[torch.randint(len(different), (count,), generator=generator)]


def close(count, generator):
    """Vectors around three points, whose similarities differ by less than the precision of float32."""
    points = torch.randn(3, 5, generator=generator, dtype=torch.float64)[torch.arange(count) % 3]
    return points + 3e-3 * torch.randn(count, 5, generator=generator, dtype=torch.float64)


def zeros(count, generator):
    """Some vectors are zero: their cosine with any other is 0."""
    return torch.randn(count, 3, generator=generator) * (torch.rand(count, 1, generator=generator) < 0.6)


def far_out(count, generator):
    """Vectors whose squared lengths overflow or underflow in float32."""
    exponent = 25 if torch.rand((), generator=generator) < 0.5 else -25
    return torch.randn(count, 3, generator=generator) * 10.0**exponent


KINDS = (lattice, copies, close, zeros, far_out)


def unbalanced(count, classes, generator):
    """Labels: each class is twice as frequent as the next, and the last ones may have one member or none."""
    weights = 0.5 ** torch.arange(classes, dtype=torch.float64)
    return torch.multinomial(weights, count, replacement=True, generator=generator) - 1


# --- the answers ---------------------------------------------------------------------------------------------


def as_whole_numbers(*sets):
    """Scale all vectors by a power of two to integers."""
    ratios = [[[value.as_integer_ratio() for value in row] for row in points.double().tolist()] for points in sets]
    common = max(below for points in ratios for row in points for _, below in row)
    return [[[above * (common // below) for above, below in row] for row in points] for points in ratios]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def nearness(query, answer, measure):
    """Grows with the similarity: the square of the cosine with the cosine's sign, or minus the squared distance."""
    if measure == "euclidean":
        difference = [x - y for x, y in zip(query, answer, strict=True)]
        return Fraction(-dot(difference, difference))
    product = dot(query, answer)
    return Fraction(product * abs(product), dot(query, query) * dot(answer, answer)) if product else Fraction(0)


def score(ranks, ks, at_k=("recall",)):
    """Return the metrics of one query whose positives have these ranks, counted from 0."""
    positives = len(ranks)
    precisions = [(number + 1) / (rank + 1) for number, rank in enumerate(ranks)]
    within = [precision for precision, rank in zip(precisions, ranks, strict=True) if rank < positives]

    def at(name, k):
        first = [precision for precision, rank in zip(precisions, ranks, strict=True) if rank < k]
        return {"recall": float(bool(first)), "precision": len(first) / k, "map": sum(first) / min(k, positives)}[name]

    return {
        **{f"{name}@{k}": at(name, k) for name in at_k for k in ks},
        "precision@1": float(ranks[0] == 0),
        "r_precision": len(within) / positives,
        "map@r": sum(within) / positives,
        "map": sum(precisions) / positives,
        "mrr": 1 / (ranks[0] + 1),
    }


def all_nearness(question):
    """Return the similarities of each query to its items."""
    alone = question.gallery is None
    queries, answers = as_whole_numbers(question.embeddings, question.embeddings if alone else question.gallery)
    everything = []
    for i, query in enumerate(queries):
        asked = [j for j in range(len(answers)) if question.asks(i, j)]
        everything.append({j: nearness(query, answers[j], question.measure) for j in asked})
    return everything


def ask_one_by_one(question):
    """Return the metrics of each query; None without a positive."""
    labels = question.labels.tolist()
    answer_labels = labels if question.gallery_labels is None else question.gallery_labels.tolist()
    scores = []
    for label, near in zip(labels, all_nearness(question), strict=True):
        order = sorted(near, key=lambda j: (-near[j], j))
        ranks = [rank for rank, j in enumerate(order) if answer_labels[j] == label]
        scores.append(score(ranks, question.ks, question.at_k) if ranks else None)
    return scores


def is_clear(question, gap=1e-11):
    """Return whether any two items of a query are equally similar or differ by more than the precision of float64."""
    everything = [sorted(set(near.values())) for near in all_nearness(question)]
    widest = max(abs(value) for near in everything for value in near) or 1
    for near in everything:
        if question.measure == "cosine":
            similarities = [math.copysign(math.sqrt(abs(value)), value) for value in near]
        else:
            similarities = [float(value / widest) for value in near]
        if any(after - before < gap for before, after in itertools.pairwise(similarities)):
            return False
    return True


def total(scores):
    """Return the expected result of ``retrieval``: means over queries with a match."""
    counted = [one for one in scores if one is not None]
    means = {name: math.fsum(one[name] for one in counted) / len(counted) for name in counted[0]}
    return {**means, "queries": len(counted), "queries_without_match": len(scores) - len(counted)}


def assert_as_asked_one_by_one(found, question):
    """Compare all metrics, in total and for each query."""
    scores = ask_one_by_one(question)
    per_query = found["per_query"]
    assert {key: value for key, value in found.items() if key != "per_query"} == pytest.approx(total(scores), rel=1e-12)
    for name, values in per_query.items():
        expected = [math.nan if one is None else one[name] for one in scores]
        assert values.tolist() == pytest.approx(expected, rel=1e-12, nan_ok=True), name
