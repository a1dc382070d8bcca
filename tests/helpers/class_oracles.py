"""The losses of classes and clusters as loops, like those of pairs in oracles.py: slow, and from the papers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from oracles import compare, hinge, log_one_plus_sum_exp, log_sum_exp, mean, total
from torch import Tensor


@dataclass
class Scene:
    """A batch in front of the classes."""

    embeddings: Tensor  # [m, d]
    labels: Sequence[int]
    proxies: Tensor | None = None  # [C, d] or [C, K, d]
    drawn: Sequence[int] | None = None  # the classes to compare with, or the anchors of a group
    parameters: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self):
        self.samples = range(len(self.labels))
        self.units = [unit(row) for row in self.embeddings]
        self._known = {}
        if self.proxies is not None:
            self.classes = range(len(self.proxies)) if self.drawn is None else self.drawn

    def dot(self, i, c):
        """Sample i and class c as they are."""
        return (self.embeddings[i] * self.proxies[c]).sum()

    def cosine(self, i, c):
        """Sample i and class c, both of length one."""
        if (i, c) not in self._known:
            self._known[i, c] = (self.units[i] * unit(self.proxies[c])).sum()
        return self._known[i, c]

    def nearest(self, i, c):
        """Sample i and the nearest of the centres of class c."""
        return max((self.units[i] * unit(center)).sum() for center in self.proxies[c])


def unit(vector):
    length = vector.square().sum()
    return vector / length.sqrt() if length > 0 else vector


def cross_entropy(logits, own):
    return log_sum_exp(list(logits.values())) - logits[own]


# --- a vector for each class --------------------------------------------------------------------------------


def softmax(scene):
    terms = [cross_entropy({c: scene.dot(i, c) for c in scene.classes}, scene.labels[i]) for i in scene.samples]
    return mean(terms, scene.embeddings)


def normalized_softmax(scene, *, temperature=0.05):
    terms = []
    for i in scene.samples:
        terms.append(cross_entropy({c: scene.cosine(i, c) / temperature for c in scene.classes}, scene.labels[i]))
    return mean(terms, scene.embeddings)


def proxy_nca(
    scene,
    *,
    measure="squared_euclidean",
    normalize=True,
    scale=18.0,
    include_positive=False,
    assignment="static",
    num_proxies=None,
):
    @cache
    def near(i, w):
        x, proxy = (unit(v) if normalize else v for v in (scene.embeddings[i], scene.proxies[w]))
        value = compare(x, proxy, measure)
        return scale * {"dot": value, "euclidean": -value, "squared_euclidean": -value / 2}[measure]

    def against(own, others):
        return log_sum_exp(others + ([own] if include_positive else [])) - own

    terms = []
    for i in scene.samples:
        if assignment == "static":
            others = [near(i, c) for c in scene.classes if c != scene.labels[i]]
            terms.append(against(near(i, scene.labels[i]), others))
            continue
        proxy_of = [max(range(len(scene.proxies)), key=lambda w, j=j: near(j, w).item()) for j in scene.samples]
        same = [j for j in scene.samples if scene.labels[j] == scene.labels[i] and j != i]
        others = [near(i, proxy_of[k]) for k in scene.samples if scene.labels[k] != scene.labels[i]]
        if same and others:
            terms.append(mean([against(near(i, proxy_of[j]), others) for j in same], scene.embeddings))
    return mean(terms, scene.embeddings)


def arcface(scene, *, centers=1, margin=0.5, scale=64.0):
    terms = []
    for i in scene.samples:
        cosines = {c: scene.cosine(i, c) if centers == 1 else scene.nearest(i, c) for c in scene.classes}
        logits = {c: scale * cosine for c, cosine in cosines.items()}
        cosine = cosines[scene.labels[i]]
        angle = torch.acos(cosine)
        within = angle + margin <= math.pi
        target = torch.cos(angle + margin) if within else cosine - margin * math.sin(margin)
        terms.append(cross_entropy(logits | {scene.labels[i]: scale * target}, scene.labels[i]))
    return mean(terms, scene.embeddings)


def cosface(scene, *, margin=0.35, scale=64.0):
    terms = []
    for i in scene.samples:
        logits = {c: scale * scene.cosine(i, c) for c in scene.classes}
        logits[scene.labels[i]] = logits[scene.labels[i]] - scale * margin
        terms.append(cross_entropy(logits, scene.labels[i]))
    return mean(terms, scene.embeddings)


def sphereface(scene, *, margin=4, scale=None):
    terms = []
    for i in scene.samples:
        own = scene.labels[i]
        factor = scene.embeddings[i].square().sum().sqrt() if scale is None else scale
        if scale is None and factor == 0:
            factor = scene.embeddings[i].sum()  # no length, and no direction
        angle = torch.acos(scene.cosine(i, own))
        k = min(int(angle.item() * margin / math.pi), margin - 1)
        psi = (-1) ** k * torch.cos(margin * angle) - 2 * k
        logits = {c: factor * scene.cosine(i, c) for c in scene.classes}
        terms.append(cross_entropy(logits | {own: factor * psi}, own))
    return mean(terms, scene.embeddings)


def adaface(scene, *, margin=0.4, concentration=0.333, scale=64.0, momentum=0.99):
    """The lengths of this batch are those that are known."""
    lengths = [row.square().sum().sqrt().item() for row in scene.embeddings]
    middle = sum(lengths) / len(lengths)
    spread = math.sqrt(sum((length - middle) ** 2 for length in lengths) / max(1, len(lengths) - 1))
    terms = []
    for i in scene.samples:
        quality = max(-1.0, min(1.0, (lengths[i] - middle) / (spread + 1e-3) * concentration))
        angle = torch.acos(scene.cosine(i, scene.labels[i])) - margin * quality
        target = torch.cos(angle.clamp(0, math.pi)) - (margin * quality + margin)
        logits = {c: scale * scene.cosine(i, c) for c in scene.classes}
        terms.append(cross_entropy(logits | {scene.labels[i]: scale * target}, scene.labels[i]))
    return mean(terms, scene.embeddings)


def center(scene):
    squares = [compare(scene.embeddings[i], scene.proxies[scene.labels[i]], "squared_euclidean") for i in scene.samples]
    return mean(squares, scene.embeddings) / 2


def soft_triple(scene, *, centers=10, alpha=20.0, gamma=10.0, tau=0.2, margin=0.1):
    like, terms, spread = scene.embeddings, [], []
    points = {c: [unit(center) for center in scene.proxies[c]] for c in scene.classes}
    for i in scene.samples:
        logits = {}
        for c in scene.classes:
            near = [(scene.units[i] * point).sum() for point in points[c]]
            shares = torch.softmax(gamma * torch.stack(near), dim=0)
            relaxed = total([share * s for share, s in zip(shares, near, strict=True)], like)
            logits[c] = alpha * (relaxed - (margin if c == scene.labels[i] else 0.0))
        terms.append(cross_entropy(logits, scene.labels[i]))
    for c in scene.classes:
        for t in range(centers):
            spread += [compare(points[c][t], points[c][u], "euclidean") for u in range(t + 1, centers)]
    pairs = len(scene.classes) * centers * (centers - 1)
    return mean(terms, like) + tau * total(spread, like) / max(1, pairs)


def pulls(scene, alpha, margin):
    """The part that proxy anchor and proxy repel share: every proxy in the batch and its samples."""
    terms = []
    for c in sorted(set(scene.labels)):
        far = [-alpha * (scene.cosine(i, c) - margin) for i in scene.samples if scene.labels[i] == c]
        terms.append(log_one_plus_sum_exp(far, scene.embeddings))
    return mean(terms, scene.embeddings)


def proxy_anchor(scene, *, alpha=32.0, margin=0.1):
    pushes = []
    for c in scene.classes:
        near = [alpha * (scene.cosine(i, c) + margin) for i in scene.samples if scene.labels[i] != c]
        pushes.append(log_one_plus_sum_exp(near, scene.embeddings))
    return pulls(scene, alpha, margin) + mean(pushes, scene.embeddings)


def proxy_repel(scene, *, alpha=32.0, margin=0.1, through_batch=False, repelled="all"):
    @cache
    def near(c, other):
        if not through_batch:
            return (unit(scene.proxies[c]) * unit(scene.proxies[other])).sum()
        return total([scene.cosine(i, c) * scene.cosine(i, other) for i in scene.samples], scene.embeddings)

    pushes = []
    classes = [c for c in scene.classes if repelled == "all" or c not in scene.labels]
    for c in classes:
        against = [alpha * (near(min(c, other), max(c, other)) + margin) for other in classes if other != c]
        pushes.append(log_one_plus_sum_exp(against, scene.embeddings))
    return pulls(scene, alpha, margin) + mean(pushes, scene.embeddings)


# --- a group ------------------------------------------------------------------------------------------------


def correlation(a, b):
    """Pearson's, between the coordinates of two embeddings; 0 where one of them does not vary."""
    return (unit(a - a.mean()) * unit(b - b.mean())).sum()


def refine(similarity, assignment, steps):
    """Replicator dynamics: a label gains where similar samples support it."""
    samples, classes = range(len(assignment)), range(len(assignment[0]))
    for _ in range(steps):
        refined = []
        for i in samples:
            support = [total([similarity[i][j] * assignment[j][c] for j in samples], assignment[i][c]) for c in classes]
            gains = [assignment[i][c] * (support[c] if support[c] > 1e-30 else 1e-30) for c in classes]
            refined.append([gain / sum(gains) for gain in gains] if sum(gains) > 0 else assignment[i])
        assignment = refined
    return assignment


def group(
    scene,
    *,
    iterations=2,
    temperature=1.0,
    anchors_per_class=1,
    similarity="correlation",
    bandwidth=1.0,
    keep_diagonal=False,
    average_over="rest",
    classification_weight=0.0,
):
    like, samples, classes = scene.embeddings, scene.samples, range(len(scene.proxies))

    def alike(a, b):
        if similarity == "gaussian":
            return torch.exp(-compare(a, b, "squared_euclidean") / (2 * bandwidth**2))
        if similarity == "cosine":
            return (unit(a) * unit(b)).sum()
        metric = scene.parameters.get("projection")
        return correlation(a, b) if metric is None else correlation(metric @ a, metric @ b)

    weights = [
        [
            hinge(alike(scene.embeddings[i], scene.embeddings[j])) if i != j or keep_diagonal else like.sum() * 0
            for j in samples
        ]
        for i in samples
    ]
    logits = [[scene.dot(i, c) for c in classes] for i in samples]
    assignment = []
    for i in samples:
        one_hot = torch.tensor([float(c == scene.labels[i]) for c in classes], dtype=like.dtype)
        soft = torch.softmax(torch.stack(logits[i]) / temperature, dim=0)
        assignment.append(list(one_hot if i in scene.drawn else soft))
    assignment = refine(weights, assignment, iterations)
    counted = [i for i in samples if average_over == "all" or i not in scene.drawn]
    value = mean([-torch.log(assignment[i][scene.labels[i]]) for i in counted], like)
    plain = mean([cross_entropy(dict(enumerate(logits[i])), scene.labels[i]) for i in samples], like)
    return value + classification_weight * plain


# --- clusters -----------------------------------------------------------------------------------------------


def spectral_clustering(scene):
    """Between two projections: on the indicators of the classes, and on the columns of the embeddings."""
    basis = []
    for column in torch.stack(scene.units).T:
        rest = column
        for axis in basis + basis:  # twice, for orthogonality to the last digit
            rest = rest - (rest * axis).sum() * axis
        if rest.norm() > 1e-8 * len(scene.labels):
            basis.append(rest / rest.norm())
    terms = []
    for i in scene.samples:
        for j in scene.samples:
            same = scene.labels[i] == scene.labels[j]
            ideal = 1 / scene.labels.count(scene.labels[i]) if same else 0.0
            terms.append((ideal - total([axis[i] * axis[j] for axis in basis], scene.embeddings)) ** 2)
    return total(terms, scene.embeddings) / 2


def facility_location(scene, *, gamma=1.0, refinements=5):
    """The clustering found by greedy search against that of the classes."""
    samples, labels = scene.samples, scene.labels
    apart = [[compare(scene.units[i], scene.units[j], "euclidean") for j in samples] for i in samples]
    distances = [[distance.item() for distance in row] for row in apart]

    def nearest(medoids):
        return [min(sorted(medoids), key=lambda j: distances[i][j]) for i in samples]

    def score(medoids):
        owners = nearest(medoids)
        fit = -sum(distances[i][owners[i]] for i in samples)
        return fit + gamma * (1 - normalized_mutual_information(labels, owners))

    medoids = []
    for _ in range(len(set(labels))):
        medoids.append(first_best({j: score([*medoids, j]) for j in samples if j not in medoids}))
    for _ in range(refinements):
        clusters, before = nearest(medoids), list(medoids)
        for k, old in enumerate(before):
            others = [j for j in medoids if j != old]
            members = [i for i in samples if clusters[i] == old or i == old]
            best = first_best({j: score([*others, j]) for j in members})
            medoids[k] = best if score([*others, best]) > score(medoids) + 1e-9 else old
        if medoids == before:
            break
    found = nearest(medoids)
    fit = -total([apart[i][found[i]] for i in samples], scene.embeddings)
    of_classes = []
    for label in sorted(set(labels)):
        members = [i for i in samples if labels[i] == label]
        sums = {j: sum(distances[i][j] for i in members) for j in members}
        medoid = min(members, key=sums.__getitem__)
        of_classes += [-apart[i][medoid] for i in members]
    error = gamma * (1 - normalized_mutual_information(labels, found))
    return hinge(fit + error - total(of_classes, scene.embeddings))


def first_best(scores):
    """The lowest index among the largest, rounding aside."""
    return min(j for j, value in scores.items() if value >= max(scores.values()) - 1e-9)


def normalized_mutual_information(one, other):
    """2 I / (H + H), and 1 where neither tells anything."""

    def entropy(names):
        shares = [names.count(name) / len(names) for name in set(names)]
        return -sum(share * math.log(share) for share in shares)

    both = entropy(one) + entropy(other)
    shared = both - entropy(list(zip(one, other, strict=True)))
    return 2 * shared / both if both > 0 else 1.0
