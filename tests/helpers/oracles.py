"""The losses once more, as loops: slow, in float64, and written from the papers rather than from the code.

Everything here takes one pair at a time with torch scalars, so that autograd differentiates the loops. The
defaults are those of the papers, which makes every default of the library part of what is tested.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

Pairs = list[tuple[int, int]]


@dataclass
class Given:
    """Positives and negatives of each anchor that do not follow from labels, and triplets where they are given."""

    positives: list[list[int]]
    negatives: list[list[int]]
    triplets: list[Pairs] | None = None
    grades: list[list[float]] | None = None  # from 0 to 1; None: 1 for positives, 0 for negatives


@dataclass
class View:
    """A batch seen from its anchors: who is positive, who is negative, and how near everybody is."""

    embeddings: Tensor  # [m, d]
    labels: Sequence[int]
    columns: Tensor  # [n, d], the batch itself or a gallery
    column_labels: Sequence[int]
    own: Sequence[int]  # the column at which each anchor itself stands, -1: nowhere
    measure: str
    normalize: bool
    constant_columns: bool = False
    parameters: dict[str, Tensor] = field(default_factory=dict)
    given: Given | None = None  # instead of what follows from labels

    def __post_init__(self):
        self.has_gallery = self.columns is not self.embeddings
        columns = self.columns.detach() if self.constant_columns else self.columns
        self._rows = [self._ready(row) for row in self.embeddings]
        self._columns = [self._ready(column) for column in columns]
        self._known = {}
        self.anchors = range(len(self.labels))
        self.positives = [
            [j for j, label in enumerate(self.column_labels) if label == self.labels[i] and j != self.own[i]]
            for i in self.anchors
        ]
        self.negatives = [
            [j for j, label in enumerate(self.column_labels) if label != self.labels[i]] for i in self.anchors
        ]
        if self.given is not None:
            self.positives = [[j for j in self.given.positives[i] if j != self.own[i]] for i in self.anchors]
            self.negatives = [[j for j in self.given.negatives[i] if j != self.own[i]] for i in self.anchors]
        self.triplets = [[(p, n) for p in self.positives[i] for n in self.negatives[i]] for i in self.anchors]
        if self.given is not None and self.given.triplets is not None:
            self.triplets = [
                [(p, n) for p, n in self.given.triplets[i] if self.own[i] not in (p, n)] for i in self.anchors
            ]

    def _ready(self, vector):
        length = vector.square().sum()
        if not self.normalize or length == 0:
            return vector
        return vector / length.sqrt()

    def value(self, i, j):
        """What the measure says of anchor i and column j."""
        if (i, j) not in self._known:
            self._known[i, j] = compare(self._rows[i], self._columns[j], self.measure)
        return self._known[i, j]

    def between(self, j, k):
        """What it says of two columns."""
        return compare(self._columns[j], self._columns[k], self.measure)

    def near(self, i, j):
        """The same as a number, larger for nearer pairs."""
        value = self.value(i, j).item()
        return value if self.measure in ("cosine", "dot") else -value

    def keep_pairs(self):
        """The first of each class among the anchors, and the second of each class among the columns."""
        anchors = {self.labels.index(label) for label in set(self.labels)}
        partners = {
            label: [j for j, other in enumerate(self.column_labels) if other == label] for label in self.column_labels
        }
        columns = {members[1] for members in partners.values() if len(members) > 1}
        for i in self.anchors:
            self.positives[i] = [j for j in self.positives[i] if i in anchors and j in columns]
            self.negatives[i] = [j for j in self.negatives[i] if i in anchors and j in columns]

    def mine(self, mining, margin, drawn):
        """Keep what a mining keeps. What a random one drew has to be told."""
        if mining == "all":
            return self
        if mining == "valid_triplet":
            kept = [valid_pairs(self, i, margin) for i in self.anchors]
            self.positives, self.negatives = [list(k[0]) for k in kept], [list(k[1]) for k in kept]
            self.triplets = [[(p, n) for p in self.positives[i] for n in self.negatives[i]] for i in self.anchors]
            return self
        self.triplets = [MININGS[mining](self, i) for i in self.anchors] if drawn is None else drawn
        self.positives = [sorted({p for p, _ in self.triplets[i]}) for i in self.anchors]
        self.negatives = [sorted({n for _, n in self.triplets[i]}) for i in self.anchors]
        return self


def compare(a, b, measure):
    """One pair of vectors."""
    if measure in ("cosine", "dot"):
        return (a * b).sum()
    if measure == "snr":
        signal, noise = (vector.var(correction=0) for vector in (a, a - b))
        return noise / signal if signal > 0 else noise * 0
    square = (a - b).square().sum()
    if measure == "squared_euclidean":
        return square
    return square.sqrt() if square > 0 else square  # equal vectors have no direction, so no gradient


# --- mining -------------------------------------------------------------------------------------------------


def valid_pairs(view, i, margin):
    """Pairs that can be part of a triplet with a loss."""
    positives, negatives = view.positives[i], view.negatives[i]
    if not positives or not negatives:
        return [], []
    hardest_positive = min(view.near(i, p) for p in positives)
    hardest_negative = max(view.near(i, n) for n in negatives)
    return (
        [p for p in positives if view.near(i, p) < hardest_negative + margin],
        [n for n in negatives if view.near(i, n) > hardest_positive - margin],
    )


def semi_hard(view, i):
    """For each positive the nearest negative that is farther, or else the farthest of all."""
    if not view.negatives[i]:
        return []
    found = []
    for p in view.positives[i]:
        farther = [n for n in view.negatives[i] if view.near(i, n) < view.near(i, p)]
        if farther:
            found.append((p, max(farther, key=lambda n: view.near(i, n))))
        else:
            found.append((p, min(view.negatives[i], key=lambda n: view.near(i, n))))
    return found


def semi_hard_or_none(view, i):
    """Without what semi-hard mining does for a positive that has no negative farther away."""
    return [(p, n) for p, n in semi_hard(view, i) if view.near(i, n) < view.near(i, p)]


def hard(view, i):
    """The farthest positive and the nearest negative."""
    if not view.positives[i] or not view.negatives[i]:
        return []
    positive = min(view.positives[i], key=lambda p: view.near(i, p))
    return [(positive, max(view.negatives[i], key=lambda n: view.near(i, n)))]


def distance_weighted_chances(distances, dim):
    """How likely each negative is to be drawn, from its distance to the anchor."""
    chances = []
    for distance in distances:
        near = max(distance, 0.5)
        if near > 1.4:
            chances.append(0.0)
            continue
        density = (dim - 2) * math.log(near) + (dim - 3) / 2 * math.log(1 - near**2 / 4)
        chances.append(math.exp(-density))
    total = sum(chances)
    return [chance / total for chance in chances] if total else chances


MININGS = {"semi_hard": semi_hard, "semi_hard_or_none": semi_hard_or_none, "hard": hard}


# --- losses -------------------------------------------------------------------------------------------------


def total(terms, like):
    """Σ, connected to the graph even when there is nothing to add up."""
    return sum(terms, start=like.sum() * 0)


def mean(terms, like):
    return total(terms, like) / max(1, len(terms))


def hinge(value):
    return value if value > 0 else value * 0


def log_sum_exp(terms):
    return torch.logsumexp(torch.stack(list(terms)), dim=0)


def log_one_plus_sum_exp(terms, like):
    return log_sum_exp([like.sum() * 0, *terms])


def contrastive(view, *, form="cosine", margin=None, average="anchors"):
    pull, push = [], []
    for i in view.anchors:
        for j in view.positives[i]:
            value = view.value(i, j)
            pull.append({"cosine": -value, "distance": value**2, "snr": value}[form])
        for j in view.negatives[i]:
            value = view.value(i, j)
            if form == "cosine":
                push.append(hinge(value - (0.5 if margin is None else margin)))
            else:
                too_near = hinge((1.0 if margin is None else margin) - value)
                push.append(too_near if form == "snr" else too_near**2)
    like = view.embeddings
    if average == "anchors":
        return total(pull + push, like) / len(view.anchors)
    return mean([t for t in pull if t != 0], like) + mean([t for t in push if t != 0], like)


def triplet(view, *, form="cosine", margin=None, average="all", soft_margin=False):
    if margin is None:
        margin = 0.0 if soft_margin else 1.0 if form == "squared_distance" else 0.1
    terms = []
    for i in view.anchors:
        for p, n in view.triplets[i]:
            too_near = view.value(i, n) - view.value(i, p)
            violation = (too_near if form == "cosine" else -too_near) + margin
            terms.append(log_one_plus_sum_exp([violation], view.embeddings) if soft_margin else hinge(violation))
    if average == "active" and not soft_margin:  # softly, every triplet has a loss, if too small for a number
        terms = [term for term in terms if term > 0]
    return mean(terms, view.embeddings)


def hierarchical_triplet(view, *, margin=0.1, num_classes=None, levels=16):
    """Before the tree is built; see test_hierarchical_triplet.py for the margins of a tree."""
    return triplet(view, form="squared_distance", margin=margin) / 2


def quadruplet(view, *, margin=1.0, second_margin=0.5):
    terms = []
    for a in view.anchors:
        for p in view.positives[a]:
            for m in view.negatives[a]:
                apart = [n for n in view.negatives[a] if view.labels[n] != view.labels[m]]
                terms += [hinge(view.value(a, p) - view.value(m, n) + second_margin) for n in apart]
    return triplet(view, form="squared_distance", margin=margin) + mean(terms, view.embeddings)


def lifted_structure(view, *, margin=1.0, squared=True):
    """Each positive pair of an anchor and a column."""
    of_columns = [[] for _ in view.column_labels]  # the anchors a column is a negative of
    for i in view.anchors:
        for j in view.negatives[i]:
            of_columns[j].append(i)
    terms = []
    for i in view.anchors:
        for j in view.positives[i]:
            ends = [margin - view.value(i, k) for k in view.negatives[i]]
            ends += [margin - view.value(k, j) for k in of_columns[j]]
            violation = hinge(log_sum_exp(ends) + view.value(i, j)) if ends else view.value(i, j) * 0
            terms.append(violation**2 if squared else violation)
    return mean(terms, view.embeddings) / 2


def lifted_structure_generalized(view, *, margin=0.5):
    terms = []
    for i in view.anchors:
        if view.positives[i] and view.negatives[i]:
            pull = log_sum_exp([margin - view.value(i, j) for j in view.positives[i]])
            terms.append(hinge(pull + log_sum_exp([view.value(i, j) for j in view.negatives[i]])))
    return total(terms, view.embeddings) / len(view.anchors)


def n_pair(view, *, form="per_positive", l2=0.02):
    like, terms = view.embeddings, []
    for i in view.anchors:
        gaps = [[view.value(i, k) - view.value(i, j) for k in view.negatives[i]] for j in view.positives[i]]
        if form == "pairs":
            terms += [log_one_plus_sum_exp(of_positive, like) for of_positive in gaps]
        elif form == "joint":
            terms.append(log_one_plus_sum_exp([gap for of_positive in gaps for gap in of_positive], like))
        else:
            terms.append(mean([log_one_plus_sum_exp(of_positive, like) for of_positive in gaps], like))
    return mean(terms, like) + l2 * mean([row.square().sum() for row in view.embeddings], like)


def margin(view, *, margin=0.2, beta=1.2, num_classes=None, nu=0.0):
    boundary, terms = view.parameters["beta"], []
    for i in view.anchors:
        here = boundary if num_classes is None else boundary[view.labels[i]]
        terms += [hinge(view.value(i, j) - here + margin) for j in view.positives[i]]
        terms += [hinge(here - view.value(i, j) + margin) for j in view.negatives[i]]
    return mean([term for term in terms if term > 0], view.embeddings) + nu * boundary.sum()


def binomial_deviance(view, *, alpha=2.0, beta=50.0, base=0.5):
    like, terms = view.embeddings, []
    for i in view.anchors:
        pull = [log_one_plus_sum_exp([alpha * (base - view.value(i, j))], like) for j in view.positives[i]]
        push = [log_one_plus_sum_exp([beta * (view.value(i, j) - base)], like) for j in view.negatives[i]]
        terms.append(mean(pull, like) + mean(push, like))
    return mean(terms, like)


def raw(view, *, alpha=2.0, beta=50.0, base=0.5):
    like, terms = view.embeddings, []
    for i in view.anchors:
        pull = log_one_plus_sum_exp([-alpha * (view.value(i, j) - base) for j in view.positives[i]], like)
        push = log_one_plus_sum_exp([beta * (view.value(i, j) - base) for j in view.negatives[i]], like)
        terms.append(pull / alpha + push / beta)
    return mean(terms, like)


def multi_similarity(view, *, alpha=2.0, beta=50.0, base=0.5, epsilon=0.1):
    return raw(view, alpha=alpha, beta=beta, base=base)


def ranked_list(view, *, alpha=1.2, margin=0.4, temperature=10.0, balance=1.0, query_weighting="mean"):
    like, terms, violations = view.embeddings, [], []
    for i in view.anchors:
        far = [view.value(i, j) for j in view.positives[i] if view.value(i, j) > alpha - margin]
        near = [view.value(i, j) for j in view.negatives[i] if view.value(i, j) < alpha]
        weights = [math.exp(temperature * (alpha - distance.item())) for distance in near]
        push = total([w * (alpha - distance) for w, distance in zip(weights, near, strict=True)], like)
        terms.append(mean([d - (alpha - margin) for d in far], like) + balance * push / (sum(weights) or 1.0))
        violations.append(len(far) + sum(weights))
    if query_weighting == "mean":
        return mean(terms, like)
    return total([s * term for s, term in zip(violations, terms, strict=True)], like) / (sum(violations) or 1.0)


def nra(view, *, alpha=4.0, epsilon=1e-4):
    def dissimilarity(rank):
        if rank in (0, 1):
            return rank.round()  # without a gradient: below an alpha of 1 the slope is infinite
        return 0.5 * (2 * rank) ** alpha if rank < 0.5 else 1 - 0.5 * (2 * (1 - rank)) ** alpha

    terms = []
    for i in view.anchors:
        positives, negatives = ([view.value(i, j) for j in some] for some in (view.positives[i], view.negatives[i]))
        if not positives or not negatives:
            continue
        low, high = min(positives + negatives), max(positives + negatives)
        if high > low:
            similar = 1 - dissimilarity((max(positives) - low) / (high - low))
            confused = 1 - dissimilarity((min(negatives) - low) / (high - low))
        else:
            similar = confused = low * 0 + 1
        terms.append(-torch.log(similar + epsilon) - torch.log(1 - confused + epsilon))
    return mean(terms, view.embeddings)


def circle(view, *, margin=0.4, scale=80.0):
    """The weights are constants, as in the paper."""
    terms = []
    for i in view.anchors:
        pull, push = [], []
        for j in view.positives[i]:
            weight = max(0.0, 1 + margin - view.value(i, j).item())
            pull.append(-scale * weight * (view.value(i, j) - (1 - margin)))
        for j in view.negatives[i]:
            weight = max(0.0, view.value(i, j).item() + margin)
            push.append(scale * weight * (view.value(i, j) - margin))
        if pull and push:
            terms.append(log_one_plus_sum_exp([p + n for p in pull for n in push], view.embeddings))
    return mean(terms, view.embeddings)


def sup_con(view, *, temperature=0.1):
    like, terms = view.embeddings, []
    for i in view.anchors:
        others = [view.value(i, j) / temperature for j in view.positives[i] + view.negatives[i]]
        if view.positives[i]:
            terms.append(-mean([view.value(i, j) / temperature - log_sum_exp(others) for j in view.positives[i]], like))
    return mean(terms, like)


def nt_xent(view, *, temperature=0.07, symmetric=False, learn_temperature=False):
    scale = view.parameters["logit_scale"].exp() if learn_temperature else 1 / temperature
    pairs = [(i, j) for i in view.anchors for j in view.positives[i]]
    there, back = [], []
    for i, j in pairs:
        near = scale * view.value(i, j)
        there.append(log_sum_exp([near, *(scale * view.value(i, k) for k in view.negatives[i])]) - near)
        others = [k for k in view.anchors if j in view.negatives[k]]
        back.append(log_sum_exp([near, *(scale * view.value(k, j) for k in others)]) - near)
    both = symmetric and view.has_gallery
    return mean(there + back if both else there, view.embeddings)


def nca(view, *, form="log", scale=1.0):
    terms = []
    for i in view.anchors:
        if view.positives[i]:
            near = log_sum_exp([-scale * view.value(i, j) for j in view.positives[i]])
            everybody = log_sum_exp([-scale * view.value(i, j) for j in view.positives[i] + view.negatives[i]])
            terms.append(everybody - near if form == "log" else 1 - torch.exp(near - everybody))
    return mean(terms, view.embeddings)


def tuplet_margin(view, *, slack=0.1, scale=64.0):
    terms = []
    for i in view.anchors:
        for j in view.positives[i]:
            near = torch.cos(torch.acos(view.value(i, j).clamp(-1, 1)) - slack)
            gaps = [scale * (view.value(i, k) - near) for k in view.negatives[i]]
            terms.append(log_one_plus_sum_exp(gaps, view.embeddings))
    return mean(terms, view.embeddings)


def threshold_consistent_margin(
    view, *, positive_margin=0.9, negative_margin=0.5, positive_weight=1.0, negative_weight=1.0
):
    pull, push = [], []
    for i in view.anchors:
        pull += [positive_margin - view.value(i, j) for j in view.positives[i] if view.value(i, j) < positive_margin]
        push += [view.value(i, j) - negative_margin for j in view.negatives[i] if view.value(i, j) > negative_margin]
    return positive_weight * mean(pull, view.embeddings) + negative_weight * mean(push, view.embeddings)


def cosent(view, *, scale=20.0, graded=False):
    known = [(i, j, 1.0) for i in view.anchors for j in view.positives[i]]
    known += [(i, j, 0.0) for i in view.anchors for j in view.negatives[i]]
    if graded and view.given is not None and view.given.grades is not None:
        known = [(i, j, view.given.grades[i][j]) for i, j, _ in known]
    terms = [
        scale * (view.value(*far) - view.value(*near)) for *near, more in known for *far, less in known if more > less
    ]
    return log_one_plus_sum_exp(terms, view.embeddings)


def vicreg(view, *, invariance=25.0, variance=25.0, covariance=1.0):
    like, dim = view.embeddings, view.embeddings.shape[1]
    value = invariance * mean([view.value(i, j) / dim for i in view.anchors for j in view.positives[i]], like)
    for side in (view.embeddings, view.columns):
        if len(side) < 2:
            continue
        columns = [column - column.mean() for column in side.T]
        products = [[(one * other).sum() / (len(side) - 1) for other in columns] for one in columns]
        narrow = [hinge(1 - (products[k][k] + 1e-4).sqrt()) for k in range(dim)]
        crossed = [products[k][l] ** 2 for k in range(dim) for l in range(dim) if k != l]  # noqa: E741
        value = value + variance * mean(narrow, like) / 2 + covariance * total(crossed, like) / dim
    return value


def barlow_twins(view, *, redundancy=0.005):
    pairs = [(i, j) for i in view.anchors for j in view.positives[i]]
    if not pairs:
        return view.embeddings.sum() * 0
    scaled = []
    for side in (view.embeddings, view.columns):
        centered = [column - column.mean() for column in side.T]
        scaled.append([column / (column.square().mean() + 1e-5).sqrt() for column in centered])
    terms = []
    for k, one in enumerate(scaled[0]):
        for l, other in enumerate(scaled[1]):  # noqa: E741
            correlation = sum(one[i] * other[j] for i, j in pairs) / len(pairs)
            terms.append((1 - correlation) ** 2 if k == l else redundancy * correlation**2)
    return total(terms, view.embeddings)


def angular(view, *, angle=40.0):
    square, terms = math.tan(math.pi * angle / 180) ** 2, []
    for i in view.anchors:
        for j in view.positives[i]:
            gaps = [
                4 * square * (view.value(i, k) + view.between(j, k)) - 2 * (1 + square) * view.value(i, j)
                for k in view.negatives[i]
            ]
            terms.append(log_one_plus_sum_exp(gaps, view.embeddings))
    return mean(terms, view.embeddings)


def soft_histogram(values, nodes, like):
    """How much of the values is at each node: a triangle as wide as the gap between nodes, to both sides."""
    gap = nodes[1] - nodes[0]
    near = [[value for value in values if abs(value.item() - node) <= gap] for node in nodes]
    return [total([hinge(1 - abs(value - node) / gap) for value in near[r]], like) for r, node in enumerate(nodes)]


def histogram(view, *, bins=100):
    like, nodes = view.embeddings, [-1 + 2 * r / bins for r in range(bins + 1)]
    pairs = {
        kind: [view.value(i, j).clamp(-1, 1) for i in view.anchors for j in columns[i]]
        for kind, columns in (("positive", view.positives), ("negative", view.negatives))
    }
    near, far = (soft_histogram(values, nodes, like) for values in pairs.values())
    counts = [max(1, len(values)) for values in pairs.values()]
    terms = [far[r] * found for r, found in enumerate(accumulate(near))]
    return total(terms, like) / math.prod(counts)


def smooth_ap(view, *, temperature=0.01, max_positives=None):
    assert max_positives is None or max_positives >= max(map(len, view.positives))

    def rank(i, j, others):
        return 1 + total(
            [torch.sigmoid((view.value(i, k) - view.value(i, j)) / temperature) for k in others if k != j],
            view.embeddings,
        )

    terms = []
    for i in view.anchors:
        positives, everybody = view.positives[i], view.positives[i] + view.negatives[i]
        if positives:
            terms.append(1 - mean([rank(i, j, positives) / rank(i, j, everybody) for j in positives], view.embeddings))
    return mean(terms, view.embeddings)


def fast_ap(view, *, bins=10):
    like, nodes, terms = view.embeddings, [4 * r / bins for r in range(bins + 1)], []
    for i in view.anchors:
        if not view.positives[i]:
            continue
        near, far = (
            soft_histogram([view.value(i, j).clamp(0, 4) for j in some], nodes, like)
            for some in (view.positives[i], view.negatives[i])
        )
        precisions = []
        for r in range(len(nodes)):
            found = sum(near[: r + 1])
            if near[r] > 0:
                precisions.append(near[r] * found / (found + sum(far[: r + 1])))
        terms.append(1 - total(precisions, like) / len(view.positives[i]))
    return mean(terms, like)
