"""Relational distillation and the diversity of ensembles, against loops in float64."""

import itertools

import pytest
import torch
from checks import assert_close

from nearfar.losses import AdversarialRegularizer, Divergence, RelationalDistillation


def points(seed, count=5, dim=3):
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def huber(one, other):
    gap = (one - other).abs()
    return 0.5 * gap**2 if gap <= 1 else gap - 0.5


def distances_by_hand(student, teacher):
    pairs = list(itertools.permutations(range(len(student)), 2))
    lengths = [[(x[i] - x[j]).norm() for i, j in pairs] for x in (student, teacher)]
    means = [sum(some) / len(some) for some in lengths]
    return sum(huber(a / means[0], b / means[1]) for a, b in zip(*lengths, strict=True)) / len(pairs)


def angles_by_hand(student, teacher):
    def cosine(x, i, j, k):
        one, other = x[i] - x[j], x[k] - x[j]
        return one @ other / (one.norm() * other.norm())

    triples = list(itertools.permutations(range(len(student)), 3))
    return sum(huber(cosine(student, *triple), cosine(teacher, *triple)) for triple in triples) / len(triples)


def assert_equal_with_gradients(value, expected, *leaves):
    assert_close(value.detach(), expected.detach(), 1e-10)
    found, wanted = (torch.autograd.grad(one, leaves, retain_graph=True) for one in (value, expected))
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, 1e-9)


@pytest.mark.parametrize(("distance", "angle"), [(1.0, 2.0), (3.0, 0.0), (0.0, 0.5)])
def test_relations_are_compared_as_printed(distance, angle):
    student, teacher = points(0).requires_grad_(), 4.0 * points(1, dim=6)
    loss = RelationalDistillation(distance=distance, angle=angle)
    expected = distance * distances_by_hand(student, teacher) + angle * angles_by_hand(student, teacher)
    assert_equal_with_gradients(loss(student, teacher), expected, student)
    assert torch.autograd.gradcheck(lambda x: loss(x, teacher), student)


def test_a_teacher_learns_nothing_and_equal_points_are_harmless():
    student, teacher = points(0).requires_grad_(), points(1).requires_grad_()
    with torch.no_grad():
        student[1] = student[0]
    RelationalDistillation()(student, teacher).backward()
    assert teacher.grad is None
    assert student.grad.isfinite().all()
    for count in (1, 2):
        assert RelationalDistillation()(points(0, count), points(1, count)).isfinite()


def test_divergence_is_a_hinge_for_every_pair_of_members():
    members = [points(seed).requires_grad_() for seed in range(3)]
    terms = []
    for one, other in itertools.combinations(members, 2):
        for a, b in zip(one, other, strict=True):
            terms.append((1.5 - (a / a.norm() - b / b.norm()).square().sum()).relu())
    assert_equal_with_gradients(Divergence(margin=1.5)(members), sum(terms) / len(terms), *members)


def test_regressors_learn_what_members_unlearn():
    members = [points(0).requires_grad_(), points(1, dim=2).requires_grad_()]
    term = AdversarialRegularizer([3, 2], hidden=4, weight=0.7, penalty=0.3).double()
    similar, norms = [], []
    for i, j in ((0, 1), (1, 0)):
        first, _, last = term.regressors[f"{i}_{j}"]
        images = []
        for x, y in zip(members[i], members[j], strict=True):
            guess = last.weight @ (first.weight @ x + first.bias).relu() + last.bias
            images.append(sum((y[k] * guess[k]) ** 2 for k in range(len(y))) / len(y))
        similar.append(sum(images) / len(images))
        for layer in (first, last):
            norms += [(row.square().sum() - 1) ** 2 for row in layer.weight] + [(layer.bias.square().sum() - 1).relu()]
    value, expected = term(members), 0.3 * sum(norms) - 0.7 * sum(similar) / 2
    assert_equal_with_gradients(value, expected, *term.parameters())
    found = torch.autograd.grad(term(members), members)
    for one, other in zip(found, torch.autograd.grad(-0.7 * sum(similar) / 2, members), strict=True):
        assert_close(one, -other, 1e-9)  # the gradient is reversed
    assert [id(p) for p in term.param_groups(0.1)[0]["params"]] == [id(p) for p in term.parameters()]


@pytest.mark.parametrize("members", [[torch.zeros(3, 2)], [torch.zeros(3, 2), torch.zeros(4, 2)]])
def test_members_must_be_of_the_same_images(members):
    with pytest.raises(ValueError, match="two or more of"):
        Divergence()(members)
