"""Supervision other than labels: what each kind says of a batch, what is refused, and what it costs."""

import numpy as np
import pytest
import torch
from cases import create
from checks import Watch, assert_close, make_batch, make_gallery, run

import nearfar as nf
from nearfar.engine import autograd
from nearfar.losses import PairLoss
from nearfar.supervision import Hierarchy, Masks, MultiLabel, Pairs, Triplets

CPU = torch.device("cpu")
EMBEDDINGS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
ONES = torch.ones(2, dtype=torch.bool)


def indices(*numbers):
    return torch.tensor(numbers)


def whole(supervision, rows, columns=None):
    """Positives and negatives of a batch, as lists of 0 and 1."""
    width = rows if columns is None else columns
    masks = supervision.of_batch(rows, columns, CPU).masks(slice(0, rows), slice(0, width))
    return [mask.int().tolist() for mask in masks]


def graded(supervision, rows, columns=None):
    width = rows if columns is None else columns
    return supervision.of_batch(rows, columns, CPU).relevance(slice(0, rows), slice(0, width)).tolist()


# --- what is said -------------------------------------------------------------------------------------------


def test_pairs_have_no_direction_within_a_batch_and_one_with_a_gallery():
    pairs = Pairs(indices(0, 2), indices(1, 0), torch.tensor([True, False]))
    assert whole(pairs, 3) == [[[0, 1, 0], [1, 0, 0], [0, 0, 0]], [[0, 0, 1], [0, 0, 0], [1, 0, 0]]]
    assert whole(pairs, 3, 2) == [[[0, 1], [0, 0], [0, 0]], [[0, 0], [0, 0], [1, 0]]]


def test_pairs_without_same_are_positive_and_others_can_be_negative():
    assert whole(Pairs(indices(0), indices(1), others="negative"), 2, 2) == [[[0, 1], [0, 0]], [[1, 0], [1, 1]]]


def test_classes_as_any_kind_of_supervision_give_the_loss_of_labels():
    embeddings, labels = make_batch()
    same = labels.unsqueeze(1) == labels
    left, right = torch.triu_indices(len(labels), len(labels), offset=1)
    supervisions = [
        Pairs(left, right, same[left, right]), Masks(same), Masks(same, ~same), Hierarchy([labels]),
        MultiLabel(torch.nn.functional.one_hot(labels)),
    ]  # fmt: skip
    for loss in (nf.losses.MultiSimilarity(), nf.losses.Triplet(), nf.losses.LiftedStructure(), nf.losses.Histogram()):
        expected = run(loss, embeddings, labels)
        for supervision in supervisions:
            actual = run(loss, embeddings, supervision)
            assert_close(actual.value, expected.value, 1e-12)
            assert_close(actual.gradients["embeddings"], expected.gradients["embeddings"], 1e-12)


def test_the_triplet_loss_uses_given_triplets_and_no_others():
    points = torch.nn.functional.normalize(EMBEDDINGS, dim=1)
    anchor, positive, negative = indices(0, 0, 3), indices(1, 2, 4), indices(4, 5, 0)
    loss = nf.losses.Triplet(mining="all", margin=2.0)(EMBEDDINGS, Triplets(anchor, positive, negative))
    gaps = ((points[negative] - points[positive]) * points[anchor]).sum(dim=1) + 2.0
    assert loss.item() == pytest.approx(gaps.mean().item())


def test_a_hierarchy_is_the_weighted_sum_of_the_losses_of_its_levels():
    embeddings, labels, gallery, gallery_labels, positions = make_gallery()
    loss, coarse, gallery_coarse = nf.losses.MultiSimilarity(), labels // 2, gallery_labels // 2
    fine = run(loss, embeddings, labels, gallery, gallery_labels, positions)
    rough = run(loss, embeddings, coarse, gallery, gallery_coarse, positions)
    levels = Hierarchy([coarse, labels], [gallery_coarse, gallery_labels], weights=(0.5, 2.0))
    actual = run(loss, embeddings, levels, gallery, None, positions)
    assert_close(actual.value, 0.5 * rough.value + 2.0 * fine.value, 1e-12)
    for name in ("embeddings", "gallery"):
        assert_close(actual.gradients[name], 0.5 * rough.gradients[name] + 2.0 * fine.gradients[name], 1e-12)


def test_the_levels_of_a_hierarchy_count_equally_unless_weighted():
    embeddings, labels = make_batch()
    loss = nf.losses.Contrastive()
    mean = (loss(embeddings, labels) + loss(embeddings, labels // 2)) / 2
    matrix = torch.stack([labels // 2, labels], dim=1)
    assert_close(loss(embeddings, Hierarchy(matrix)), mean, 1e-12)
    assert_close(loss(embeddings, Hierarchy(matrix.numpy())), mean, 1e-12)


def test_levels_may_be_text():
    levels = [np.array(["bird", "bird", "fish"]), np.array(["jay", "wren", "cod"])]
    assert graded(Hierarchy(levels, weights=(1, 3)), 3) == [[1, 0.25, 0], [0.25, 1, 0], [0, 0, 1]]


def test_the_grade_of_items_with_several_labels_is_their_overlap():
    labels = MultiLabel(torch.tensor([[1, 1, 0], [0, 0, 0]]), np.array([[True, True, True], [False, False, True]]))
    assert graded(labels, 2, 2) == [[pytest.approx(2 / 3), 0], [0, 0]]
    assert whole(labels, 2, 2)[1] == [[0, 1], [1, 1]]


def test_the_grade_of_a_positive_is_one_otherwise():
    pairs = Pairs(indices(0, 1), indices(1, 2), torch.tensor([1, 0]))
    assert graded(pairs, 3) == [[0, 1, 0], [1, 0, 0], [0, 0, 0]]


def test_given_grades_are_those_of_their_pairs():
    pairs = Pairs(indices(0, 1), indices(1, 2), grades=torch.tensor([0.25, 0.0]))
    assert graded(pairs, 3) == [[0, 0.25, 0], [0.25, 0, 0], [0, 0, 0]]
    assert pairs.of_batch(3, None, CPU).relevance(slice(1, 2), slice(0, 2)).tolist() == [[0.25, 0]]
    assert whole(pairs, 3) == [[[0, 1, 0], [1, 0, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 1], [0, 1, 0]]]
    assert graded(Pairs(indices(0, 1), indices(1, 0), grades=torch.tensor([0.5, 0.75])), 2) == [[0, 0.625], [0.625, 0]]


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_pair_with_several_grades_is_positive_if_one_is_above_zero(is_readable, monkeypatch):
    pairs = Pairs(indices(0, 1, 0, 2), indices(1, 0, 1, 1), grades=torch.tensor([0.0, 0.75, 0.0, 0.0]))
    monkeypatch.setattr(nf.supervision, "readable", lambda tensor: is_readable)
    assert whole(pairs, 3) == [[[0, 1, 0], [1, 0, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 1], [0, 1, 0]]]
    assert graded(pairs, 3)[0] == [0, 0.25, 0]


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Pairs(indices(0, 1), indices(1)), r"right has shape \(1,\); needed is \[2\]"),
        (lambda: Pairs(indices(0, 1), indices(1, 2), torch.ones(3)), r"same has shape \(3,\); needed is \[2\]"),
        (lambda: Pairs(indices(0, 1), indices(1, 2), indices(1, 2)), "same contains 2; allowed are booleans, or 0"),
        (lambda: Pairs(indices(0, 1), indices(1, 2), torch.tensor([0.5, 1])), "same contains 0.5; allowed"),
        (lambda: Pairs(indices(0), indices(1), others="positive"), "others is 'positive'; allowed are unknown, negat"),
        (lambda: Pairs(indices(0), indices(1), grades=torch.tensor([1.5])), "grades contains 1.5; allowed are numbers"),
        (lambda: Pairs(indices(0), indices(1), grades=torch.ones(2)), r"grades has shape \(2,\); needed is \[1\]"),
        (lambda: Triplets(indices(0), indices(1), indices(2, 3)), r"negative has shape \(2,\)"),
        (lambda: Masks(torch.ones(2, 2), torch.ones(2, 3)), r"negatives has shape \(2, 3\); needed is \[2, 2\]"),
        (lambda: Masks(torch.ones(2, 2), torch.eye(2)), r"positives and negatives are both true at \(0, 0\)"),
        (lambda: Masks(torch.ones(2)), r"positives has shape \(2,\); needed is \[n, n\]"),
        (lambda: MultiLabel(torch.ones(2, 3), torch.ones(2, 4)), r"gallery_matrix has shape \(2, 4\); .*\[n, 3\]"),
        (lambda: Hierarchy([]), "levels is empty"),
        (lambda: Hierarchy([indices(0, 1), indices(0)]), r"levels\[1\] has shape \(1,\); needed is \[2\]"),
        (lambda: Hierarchy([indices(0, 1)], [indices(0), indices(1)]), "gallery_levels has 2 levels and levels 1"),
        (lambda: Hierarchy([indices(0, 1)], weights=(1.0, 2.0)), "weights has 2 numbers for 1 levels"),
        (lambda: Hierarchy(indices(0, 1)), r"levels has shape \(2,\); a matrix \[m, levels\]"),
    ],
)
def test_wrong_supervision(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Pairs(np.array(["a"]), indices(1)), "left is of <U1; whole numbers"),
        (lambda: Pairs(indices(0), indices(1), np.array(["yes"])), "same is of <U3; booleans"),
        (lambda: Pairs([0], [1]), "left is a list"),
        (lambda: Pairs(indices(0), indices(1), [True]), "same is a list"),
        (lambda: Pairs(indices(0), indices(1), torch.ones(1, dtype=torch.complex64)), "same is of torch.complex64"),
    ],
)
def test_supervision_of_a_wrong_type(make, words):
    with pytest.raises(TypeError, match=words):
        make()


GALLERY = {"gallery": EMBEDDINGS[:3]}


@pytest.mark.parametrize(
    ("supervision", "others", "words"),
    [
        (Pairs(indices(0, 6), indices(1, 2)), {}, "left ranges from 0 to 6; allowed are the rows of embeddings, 0 to"),
        (Pairs(indices(0, 1), indices(-1, 2)), {}, "right ranges from -1 to 2; allowed are the rows of embeddings, 0 "),
        (Pairs(indices(0, 3), indices(1, 3)), {}, "left and right are both 3 at 1"),
        (Pairs(indices(0, 1), indices(1, 0), indices(1, 0)), {}, "the pair of 0 and 1 is given as same and as diff"),
        (Triplets(indices(0), indices(0), indices(1)), {}, "anchor and positive are both 0 at 0"),
        (Triplets(indices(0), indices(1), indices(1)), {}, "the pair of 0 and 1 is given as same and as different"),
        (Masks(torch.eye(5)), {}, r"positives has shape \(5, 5\); needed is \[6, 6\]"),
        (MultiLabel(torch.ones(5, 2)), {}, "matrix has 5 rows for 6 embeddings"),
        (MultiLabel(torch.ones(6, 2), torch.ones(6, 2)), {}, "gallery_matrix is given, but no gallery was given"),
        (Hierarchy([indices(0, 1)]), {}, "levels has 2 rows for 6 embeddings"),
        (Pairs(indices(0), indices(4)), GALLERY, "right ranges from 4 to 4; allowed are the rows of gallery, 0 to 2"),
        (Pairs(indices(0), indices(1)), GALLERY | {"gallery_labels": indices(0, 1, 2)}, "gallery_labels is given, but"),
        (Pairs(indices(0), indices(1)), GALLERY | {"positions": indices(0, 1)}, r"positions has .*\(2,\).* 6 anchors"),
        (Pairs(indices(0), indices(1)), GALLERY | {"positions": torch.arange(6)}, "positions range from 0 to 5; allow"),
        (MultiLabel(torch.ones(6, 2)), GALLERY, "gallery_matrix is missing, but the loss has a gallery"),
        (Hierarchy([torch.arange(6)]), GALLERY, "gallery_levels is missing, but the loss has a gallery"),
    ],
)
def test_supervision_of_another_batch_or_gallery(supervision, others, words):
    with pytest.raises(ValueError, match=words):
        nf.losses.Contrastive()(EMBEDDINGS, supervision, **others)


@pytest.mark.parametrize(
    ("labels", "error"),
    [(ONES[:1].expand(6), TypeError), (torch.ones(6), TypeError), (torch.ones(3).long(), ValueError)],
)
def test_labels_of_pairs_are_refused_with_the_name_of_pairs(labels, error):
    with pytest.raises(error, match=r"nearfar\.supervision\.Pairs"):
        nf.losses.Contrastive()(EMBEDDINGS, labels)
    with pytest.raises(error, match=r"nearfar\.supervision\.Pairs"):
        nf.losses.Contrastive()(EMBEDDINGS, labels, EMBEDDINGS)


def test_two_classes_are_still_two_classes():
    assert nf.losses.Contrastive()(EMBEDDINGS, indices(0, 1, 0, 1, 0, 1)).isfinite()


CLASS_LOSSES = [key for key in nf.losses.names() if not issubclass(nf.losses.get(key), PairLoss)]


@pytest.mark.parametrize(
    ("key", "settings"),
    [*((key, {}) for key in CLASS_LOSSES), ("n_pair", {"form": "pairs"})]
    + [(key, {"num_classes": 3}) for key in ("margin", "hierarchical_triplet")],
)
@pytest.mark.parametrize("supervision", [Pairs(indices(0), indices(1)), Hierarchy([torch.arange(6)])])
def test_a_loss_of_classes_says_what_it_needs(key, settings, supervision):
    words = f"labels is a {type(supervision).__name__}, but {nf.losses.get(key).__name__} .*class.*; it needs integer"
    with pytest.raises(TypeError, match=words):
        create(key, settings)(EMBEDDINGS, supervision)


def test_pair_weights_are_those_of_one_level():
    with pytest.raises(TypeError, match="labels is a Hierarchy; pair weights are computed for one level"):
        nf.losses.Raw().pair_weights(EMBEDDINGS, Hierarchy([torch.arange(6)]))


def test_a_memory_keeps_labels():
    memory = nf.losses.Memory(4, dim=4)
    with pytest.raises(TypeError, match="labels is a Pairs; a memory stores class labels"):
        memory.loss(nf.losses.Raw(), EMBEDDINGS, Pairs(indices(0), indices(1)))


# --- what it costs ------------------------------------------------------------------------------------------


def test_few_pairs_of_a_large_batch_are_compared_one_by_one():
    embeddings = torch.randn(2000, 8, requires_grad=True)
    left = torch.arange(0, 2000, 2)
    pairs = Pairs(left, left + 1, torch.arange(1000) % 2 == 0)
    with Watch() as watch:
        nf.losses.MultiSimilarity()(embeddings, pairs).backward()
    assert watch.largest < 2000 * 2000  # bytes: no matrix of all pairs, not even of booleans


def test_supervision_is_never_recorded_as_a_cuda_graph(monkeypatch):
    seen = []

    def record(computation, inputs, needed):
        seen.append(computation.owner)
        return computation.compute(inputs, computation.constants, needed)[0], autograd.StoredGradients([])

    monkeypatch.setattr(autograd, "run", record)
    loss, leaf = nf.losses.Contrastive(), EMBEDDINGS.clone().requires_grad_()
    loss(leaf, torch.arange(6))
    loss(leaf, Pairs(indices(0), indices(1)))
    assert seen == [loss, None]


@pytest.mark.parametrize("budget", [1, 1 << 28])
def test_a_graded_loss_ranks_pairs_by_the_levels_they_share(budget):
    embeddings, labels = make_batch()
    levels, loss = [labels % 2, labels], nf.losses.CoSENT(scale=3.0, graded=True).double()
    loss.memory_budget = budget
    leaf = embeddings.clone().requires_grad_()
    value = loss(leaf, nf.supervision.Hierarchy(levels, weights=(1.0, 3.0)))
    points, terms = torch.nn.functional.normalize(leaf, dim=1), []
    graded = [
        (
            points[i] @ points[j],
            sum(weight * (level[i] == level[j]) for weight, level in zip((1, 3), levels, strict=True)),
        )
        for i in range(len(labels))
        for j in range(len(labels))
        if i != j
    ]
    terms = [3.0 * (far - near) for near, more in graded for far, less in graded if more > less]
    expected = torch.logsumexp(torch.stack([leaf.new_zeros(()), *terms]), dim=0)
    assert_close(value.detach(), expected.detach(), 1e-11)
    gradients = [torch.autograd.grad(one, leaf, retain_graph=True)[0] for one in (value, expected)]
    assert_close(*gradients, 1e-10)
    plain = nf.losses.CoSENT(scale=3.0).double()
    assert not torch.isclose(plain(leaf, nf.supervision.Hierarchy(levels)), value)


def test_a_weighted_sum_keeps_the_grades_of_a_graded_loss():
    embeddings, labels = make_batch()
    levels = nf.supervision.Hierarchy([labels % 2, labels], weights=(1.0, 3.0))
    graded, plain = nf.losses.CoSENT(graded=True), nf.losses.Contrastive()
    together = nf.losses.MultipleLosses([graded, plain], weights=(2.0, 0.5))
    assert_close(
        together(embeddings, levels), 2.0 * graded(embeddings, levels) + 0.5 * plain(embeddings, levels), 1e-12
    )
    prefixes = nf.losses.Matryoshka(graded, dims=(2, embeddings.shape[1]))
    expected = graded(embeddings[:, :2], levels) + graded(embeddings, levels)
    assert_close(prefixes(embeddings, levels), expected, 1e-12)
