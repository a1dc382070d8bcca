"""The part of the battery about supervision other than labels: every kind of it for every loss of pairs."""

import random
from contextlib import contextmanager
from unittest import mock

import torch
from checks import assert_close, assert_same, make_batch, make_gallery, record_draws, run, run_oracle
from oracles import Given
from pair_checks import similarities

import nearfar as nf
from nearfar.engine import tiles
from nearfar.supervision import Masks, MultiLabel, Pairs, Triplets


def pairs(rows, columns, seed, others="unknown"):
    """Some pairs, each of them twice; without a gallery the second time turned around."""
    draw = random.Random(seed)
    width = rows if columns is None else columns
    every = [(i, j) for i in range(rows) for j in range(width) if columns is not None or i < j]
    chosen = {pair: draw.random() < 0.5 for pair in draw.sample(every, 2 * rows)}
    repeated = [*chosen, *(chosen if columns is not None else ((j, i) for i, j in chosen))]
    left, right = torch.tensor(repeated).T
    same = torch.tensor([*chosen.values()] * 2)
    if columns is None:
        chosen |= {(j, i): kind for (i, j), kind in chosen.items()}
    positives = [[j for j in range(width) if chosen.get((i, j))] for i in range(rows)]
    negatives = [
        [j for j in range(width) if chosen.get((i, j), None if others == "unknown" else False) is False]
        for i in range(rows)
    ]
    return Pairs(left, right, same, others=others), Given(positives, negatives)


def graded_pairs(rows, columns, seed):
    """The same pairs, each with one of five grades; some positive pairs have lower grades than negative ones."""
    plain, given = pairs(rows, columns, seed)
    draw = random.Random(seed)
    width = rows if columns is None else columns
    table = [[draw.randrange(5) / 4 for _ in range(width)] for _ in range(rows)]
    if columns is None:
        table = [[table[min(i, j)][max(i, j)] for j in range(width)] for i in range(rows)]
    grades = torch.tensor([table[i][j] for i, j in zip(plain.left.tolist(), plain.right.tolist(), strict=True)])
    return Pairs(plain.left, plain.right, plain.same, grades=grades), Given(
        given.positives, given.negatives, grades=table
    )


def triplets(rows, columns, seed):
    """Up to three triplets of each anchor but the first, the last of all twice."""
    draw = random.Random(seed)
    width, found = rows if columns is None else columns, []
    for i in range(1, rows):
        others = [j for j in range(width) if columns is not None or j != i]
        draw.shuffle(others)
        near, far = others[:2], others[2:5]
        found += [(i, draw.choice(near), draw.choice(far)) for _ in range(draw.randrange(4))]
    found.append(found[-1])
    by_anchor = [[(p, n) for a, p, n in found if a == i] for i in range(rows)]
    given = Given(
        [sorted({p for p, _ in some}) for some in by_anchor], [sorted({n for _, n in some}) for some in by_anchor],
        by_anchor,
    )  # fmt: skip
    return Triplets(*torch.tensor(found).T), given


def masks(rows, columns, seed):
    """Positives, negatives and unknown pairs at random, without any symmetry."""
    width = rows if columns is None else columns
    kinds = torch.randint(0, 3, (rows, width), generator=torch.Generator().manual_seed(seed))
    positives, negatives = kinds == 0, kinds == 1
    lists = [[row.nonzero().flatten().tolist() for row in mask] for mask in (positives, negatives)]
    return Masks(positives, negatives), Given(*lists)


def multi_label(rows, columns, seed):
    """One or two of six labels, or none."""
    generator = torch.Generator().manual_seed(seed)
    own, gallery = (torch.rand(size, 6, generator=generator) < 0.25 for size in (rows, columns or rows))
    gallery = own if columns is None else gallery
    sets, others = ([set(row.nonzero().flatten().tolist()) for row in matrix] for matrix in (own, gallery))
    given = Given(
        [[j for j, other in enumerate(others) if some & other] for some in sets],
        [[j for j, other in enumerate(others) if not some & other] for some in sets],
        grades=[[len(some & other) / max(1, len(some | other)) for other in others] for some in sets],
    )
    return MultiLabel(own, None if columns is None else gallery), given


KINDS = {
    "pairs": pairs,
    "pairs among negatives": lambda rows, columns, seed: pairs(rows, columns, seed, "negative"),
    "graded pairs": graded_pairs,
    "triplets": triplets,
    "masks": masks,
    "multi-label": multi_label,
}


@contextmanager
def lists_of_any_length():
    """Lists of pairs are used however long they are; elsewhere in these small batches they never are."""
    with mock.patch.object(tiles, "SPARSE", 0):
        yield


def run_both(case, embeddings, kind, gallery=None, positions=None):
    """A loss in float64 and its oracle, with the same draws."""
    supervision, given = kind
    loss = case.create().double()
    drawn = record_draws(loss) if case.draws == "pairs" else None
    actual = run(loss, embeddings, supervision, gallery, None, positions)
    no_labels = torch.zeros(len(embeddings), dtype=torch.long)
    expected = run_oracle(
        case, loss, embeddings, no_labels, gallery, None if gallery is None else torch.zeros(len(gallery)), positions,
        drawn=drawn(len(embeddings)) if drawn else None, given=given,
    )  # fmt: skip
    return actual, expected


def check_oracle(case):
    """Value and gradients are those of the loops for every kind of supervision."""
    for seed, make in enumerate(KINDS.values()):
        embeddings, _ = make_batch("mixed", seed=seed)
        assert_same(*run_both(case, embeddings, make(len(embeddings), None, seed)), tolerance=1e-9)


def check_oracle_with_a_gallery(case):
    """Also between a batch and a gallery that holds some of the anchors."""
    embeddings, _, gallery, _, positions = make_gallery()
    for seed, make in enumerate(KINDS.values()):
        kind = make(len(embeddings), len(gallery), seed)
        assert_same(*run_both(case, embeddings, kind, gallery, positions), tolerance=1e-9)


def check_oracle_of_lists(case):
    """Given pairs that are compared one by one, as few among many are."""
    embeddings, _, gallery, _, positions = make_gallery()
    with lists_of_any_length():
        assert_same(*run_both(case, embeddings, pairs(len(embeddings), None, 0)), tolerance=1e-9)
        assert_same(
            *run_both(case, embeddings, pairs(len(embeddings), len(gallery), 1), gallery, positions), tolerance=1e-9
        )


def check_tile_size(case):
    """One row at a time or all at once: the same value, gradient and draws."""
    embeddings, _, gallery, _, positions = make_gallery()
    size = len(embeddings), len(gallery)
    for batch in (
        (embeddings, masks(len(embeddings), None, 0)[0]),
        (embeddings, triplets(*size, 1)[0], gallery, None, positions),
        (embeddings, pairs(*size, 2)[0], gallery, None, positions),
    ):
        loss = case.create().double()
        expected = run(loss, *batch)
        loss.memory_budget = 1
        assert_same(run(loss, *batch), expected, tolerance=1e-11)
    with lists_of_any_length():
        assert_same(run(loss, *batch), expected, tolerance=1e-11)


def check_weights(case):
    """Σ_N w·s − Σ_P w·s has the gradient of the loss, and unknown pairs have no weight."""
    settings = dict(case.settings) | ({"l2": 0.0} if case.key == "n_pair" else {})
    loss = nf.losses.create(case.key, **settings).double()
    embeddings, _ = make_batch()
    for seed, make in enumerate(KINDS.values()):
        supervision, given = make(len(embeddings), None, seed)
        expected = run(loss, embeddings, supervision).gradients["embeddings"]
        torch.manual_seed(0)
        weights = loss.pair_weights(embeddings, supervision)
        signs = torch.zeros_like(weights)
        for i, (positives, negatives) in enumerate(zip(given.positives, given.negatives, strict=True)):
            signs[i, positives], signs[i, negatives] = -1.0, 1.0
        assert not weights[signs == 0].any()
        leaf = embeddings.clone().requires_grad_()
        near = similarities(case, leaf, leaf.detach() if case.query_only else leaf)
        (actual,) = torch.autograd.grad((signs * weights * near).sum(), leaf)
        assert_close(actual, expected, 1e-9)


SUPERVISION_CHECKS = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
