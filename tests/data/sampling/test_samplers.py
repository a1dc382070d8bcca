"""What is in a batch, on every rank, after a run was resumed, and in PyTorch's DataLoader."""

import json
import time
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from nearfar.data.sampling import Independent, create, fitting_classes, hard_items, names
from nearfar.data.sampling.classes import _chain

fuzzed = settings(derandomize=True, deadline=None, max_examples=150)
some_labels = st.lists(st.integers(1, 9), min_size=1, max_size=30).flatmap(
    lambda counts: st.permutations(np.repeat(7 * np.arange(len(counts)) - 20, counts).tolist())
)
SETTINGS = {
    "groups": {"classes": 6, "per_class": 3},
    "pairs": {"classes": 6},
    "random": {"batch_size": 18},
    "given": {"relations": np.arange(160).reshape(80, 2), "batch_size": 18},
    "hard_classes": {"classes": 6},
    "neighbor_classes": {"classes": 6, "anchors": 2},
    "importance": {"classes": 2, "batch_size": 18},
    "hard_triplets": {"batch_size": 18},
    "smart_triplets": {"batch_size": 18},
}
all_samplers = pytest.mark.parametrize("key", names())


def labels_of(*counts, seed=0):
    """So many pictures of class 0, 1, … in any order."""
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))


def made(key, seed=0, **more):
    labels = labels_of(*np.random.default_rng(5).integers(2, 9, 40))
    sampler = create(key, labels, seed=seed, **SETTINGS[key], **more)
    if sampler.learns == "classes":
        sampler.update(np.random.default_rng(1).standard_normal((40, 8)))
    return sampler


def test_every_sampler_has_a_case_here():
    assert names() == sorted(SETTINGS)


# --- composition ---------------------------------------------------------------------------------------------


@fuzzed
@given(
    labels=some_labels, classes=st.integers(1, 8), per_class=st.integers(1, 6), seed=st.integers(0, 99), data=st.data()
)
def test_groups_are_full_until_the_batch_is(labels, classes, per_class, seed, data):
    array, counts = np.array(labels), Counter(labels)
    possible = sum(min(count, per_class) for count in counts.values())
    if possible < classes * per_class:
        with pytest.raises(ValueError, match=f"enough for a batch of {possible}"):
            create("groups", array, classes=classes, per_class=per_class)
        return
    sampler = create("groups", array, classes=classes, per_class=per_class, seed=seed)
    batch = sampler.batch(data.draw(st.integers(0, 5)), data.draw(st.integers(0, len(sampler) - 1)))
    assert len(set(batch.tolist())) == len(batch) == classes * per_class
    found = list(dict.fromkeys(array[batch].tolist()))  # classes in the order of the batch
    takes = Counter(array[batch].tolist())
    assert array[batch].tolist() == [label for label in found for _ in range(takes[label])]  # class by class
    for label in found[:-1]:
        assert takes[label] == min(counts[label], per_class)
    assert takes[found[-1]] <= min(counts[found[-1]], per_class)
    if all(counts[label] >= per_class for label in found):
        assert len(found) == classes


@fuzzed
@given(labels=some_labels, classes=st.integers(1, 8), seed=st.integers(0, 99))
def test_pairs_are_two_of_each_class(labels, classes, seed):
    array = np.array(labels)
    enough = sum(count >= 2 for count in Counter(labels).values())
    if enough < classes:
        with pytest.raises(ValueError, match=f"{enough} classes with 2 or more"):
            create("pairs", array, classes=classes)
        return
    batch = create("pairs", array, classes=classes, seed=seed).batch(0, 0)
    pairs = array[batch].reshape(classes, 2)
    assert (pairs[:, 0] == pairs[:, 1]).all()
    assert len(set(pairs[:, 0].tolist())) == classes
    assert len(set(batch.tolist())) == 2 * classes


@fuzzed
@given(count=st.integers(1, 60), size=st.integers(1, 12), seed=st.integers(0, 99), epoch=st.integers(0, 9))
def test_random_shows_every_picture_once(count, size, seed, epoch):
    if size > count:
        with pytest.raises(ValueError, match="batch_size"):
            create("random", np.zeros(count, dtype=int), batch_size=size)
        return
    sampler = create("random", np.zeros(count, dtype=int), batch_size=size, seed=seed)
    drawn = np.concatenate(list(sampler.epoch(epoch)))
    assert len(drawn) == count // size * size
    assert len(set(drawn.tolist())) == len(drawn)


def test_random_may_go_round_more_than_once():
    sampler = create("random", np.zeros(10, dtype=int), batch_size=5, steps=6)
    laps = np.stack(list(sampler.epoch(0))).reshape(3, 10)
    assert (np.sort(laps, axis=1) == np.arange(10)).all()
    assert len({tuple(lap) for lap in laps.tolist()}) == 3


def test_classes_and_pictures_are_equally_likely():
    labels = labels_of(4, 8, 16, 32, 4, 8, 16, 32)
    sampler = create("groups", labels, classes=2, per_class=4, steps=8000)
    drawn = np.concatenate(list(sampler.epoch(0)))
    by_class = np.bincount(labels[drawn], minlength=8) / len(drawn)
    assert by_class == pytest.approx(np.full(8, 1 / 8), rel=0.05)
    of_class = np.bincount(drawn, minlength=len(labels))[labels == 2]
    assert of_class / of_class.sum() == pytest.approx(np.full(16, 1 / 16), rel=0.15)


def test_hard_classes_are_the_most_similar_ones():
    # Classes on a circle, in the middle of four clusters of four: a batch of four classes is a cluster.
    labels = labels_of(*[3] * 16)
    angles = np.deg2rad([90 * (i // 4) + 5 * (i % 4) ** 1.5 for i in range(16)])
    sampler = create("hard_classes", labels, classes=4, candidates=16)
    mixed = [len(set((labels[sampler.batch(0, step)] // 4).tolist())) for step in range(6)]
    assert max(mixed) > 1  # as long as nothing is known
    sampler.update(np.stack([np.cos(angles), np.sin(angles)], axis=1) * 100)
    for step in range(6):
        batch = labels[sampler.batch(0, step)]
        assert set((batch // 4).tolist()) == {batch[0] // 4}
        assert sorted(Counter(batch.tolist()).values()) == [2, 2, 2, 2]


def test_hard_classes_follow_one_another():
    # By hand: 0 is taken first; then 2, the nearest to it; then 3, which is nearest to 2; 1 is far from all.
    vectors = np.array([[1.0, 0.0], [-1.0, 0.1], [0.9, 0.5], [0.6, 0.9]], dtype=np.float32)
    assert _chain(vectors, 4).tolist() == [0, 2, 3, 1]


def test_vectors_of_classes_count_from_the_next_epoch_on():
    sampler = made("hard_classes")
    expected = [batch.tolist() for batch in sampler.epoch(0)]
    under_way = sampler.epoch(0)
    sampler.update(np.random.default_rng(2).standard_normal((40, 8)))
    assert [batch.tolist() for batch in under_way] == expected
    assert [batch.tolist() for batch in sampler.epoch(0)] != expected


# --- randomness, ranks, resuming ------------------------------------------------------------------------------


@all_samplers
def test_a_batch_depends_on_seed_epoch_and_step_alone(key):
    sampler, other = made(key), made(key)
    backwards = [other.batch(1, step).tolist() for step in reversed(range(len(other)))]
    assert [batch.tolist() for batch in sampler.epoch(1)] == backwards[::-1]
    batches = [made(key, seed).batch(epoch, step).tolist() for seed in (0, 1) for epoch in (0, 1) for step in (0, 1)]
    assert len({tuple(batch) for batch in batches}) == 8


@pytest.mark.parametrize("key", sorted({*names()} - {"given"}))  # which are trained by a single process
@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_ranks_share_a_batch_and_no_picture(key, ranks):
    sampler = made(key)
    for step in range(3):
        batch = sampler.batch(2, step)
        shares = [sampler.share(batch, rank, ranks) for rank in range(ranks)]
        assert {len(share) for share in shares} == {sampler.batch_size // ranks}
        assert np.concatenate(shares).tolist() == batch.tolist()
        assert len(set(batch.tolist())) == sampler.batch_size


def test_ranks_get_whole_groups():
    labels = labels_of(*[5] * 12)
    sampler = create("groups", labels, classes=6, per_class=4)
    for rank in range(3):
        share = sampler.share(sampler.batch(0, 0), rank, 3)
        assert sorted(Counter(labels[share].tolist()).values()) == [4, 4]


@all_samplers
def test_a_resumed_run_goes_on_where_it_stopped(key):
    sampler, stop = made(key), 4
    expected = [batch.tolist() for batch in sampler.epoch(3)]
    state = sampler.state(epoch=3, step=stop)
    fresh = create(key, sampler.labels, **SETTINGS[key])
    epoch, step = fresh.restore(state)
    assert [batch.tolist() for batch in fresh.epoch(epoch, start=step)] == expected[stop:]
    assert json.loads(json.dumps({name: value for name, value in state.items() if name != "means"}))["step"] == stop


def test_the_state_of_other_batches_is_refused():
    state = made("groups").state(epoch=1, step=2)
    with pytest.raises(ValueError, match="seed 0 and this groups sampler 1"):
        made("groups", seed=1).restore(state)
    for other in (
        create("groups", made("groups").labels, classes=6, per_class=2),
        create("groups", made("groups").labels[::-1].copy(), classes=6, per_class=3),
    ):
        with pytest.raises(ValueError, match="fingerprint"):
            other.restore(state)


def test_an_epoch_is_as_long_as_there_are_pictures():
    labels = labels_of(*[10] * 10)
    assert len(create("groups", labels, classes=4, per_class=4)) == 6
    assert len(create("groups", labels, classes=4, per_class=4, steps=50)) == 50
    assert len(create("groups", labels_of(5, 5), classes=2, per_class=5)) == 1


# --- errors and size ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "given", "message"),
    [
        ("group", {}, "sampler is 'group' .did you mean 'groups'"),
        ("groups", {"classes": 4}, "groups needs per_class"),
        ("groups", {"classes": 4, "perclass": 4}, "did you mean 'per_class'"),
        ("groups", {"classes": 0, "per_class": 4}, "classes is 0"),
        ("groups", {"classes": 11, "per_class": 4}, "labels has 10 classes, enough for a batch of 40"),
        ("hard_classes", {"classes": 4, "candidates": 3}, "candidates is 3"),
    ],
)
def test_errors_say_what_is_wrong(key, given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        create(key, labels_of(*[10] * 10), **given)


@pytest.mark.parametrize(
    ("key", "rank", "ranks", "message"),
    [
        ("groups", 0, 4, "classes is 6; it must be a multiple of ranks, 4"),
        ("groups", 2, 2, "rank is 2"),
        ("random", 0, 4, "batch_size is 18; it must be a multiple of ranks, 4"),
        ("given", 0, 2, "ranks is 2; given pairs and triplets are trained by a single process"),
    ],
)
def test_batches_that_processes_cannot_share_are_refused(key, rank, ranks, message):
    sampler = made(key)
    with pytest.raises(ValueError, match=message):
        sampler.share(sampler.batch(0, 0), rank, ranks)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.zeros(0, dtype=int), r"shape \(0,\)"),
        (np.zeros((3, 1), dtype=int), r"shape \(3, 1\)"),
        (np.zeros(3), "float64; whole numbers"),
        ([], r"shape \(0,\)"),
        ([0.5, 1.0], "float64; whole numbers"),
        (["jay", "wren"], "<U4; whole numbers"),
        (torch.zeros(3), "torch.float32; whole numbers"),
        (torch.zeros(3, dtype=torch.bool), "torch.bool; whole numbers"),
        (torch.zeros(3, 1, dtype=torch.int64), r"shape \(3, 1\)"),
        ({0, 1}, "set; an array, a tensor or a list"),
    ],
)
def test_labels_are_checked(labels, message):
    with pytest.raises((ValueError, TypeError), match=message):
        create("random", labels, batch_size=1)


@pytest.mark.parametrize(
    ("means", "message"), [(np.zeros((3, 2)), r"shape \(3, 2\); needed is \[40"), (np.full((40, 2), np.nan), "NaN")]
)
def test_vectors_of_classes_are_checked(means, message):
    sampler = made("hard_classes")
    with pytest.raises(ValueError, match=message):
        sampler.update(means)


def test_steps_beyond_the_epoch_are_refused():
    sampler = made("groups")
    with pytest.raises(ValueError, match=f"step is {len(sampler)}"):
        sampler.batch(0, len(sampler))
    assert list(sampler.epoch(0, start=len(sampler))) == []


def test_labels_may_be_any_whole_numbers():
    labels = np.array([-(2**62), 2**62, -(2**62), 2**62, 5, 5])
    batch = create("pairs", labels, classes=3).batch(0, 0)
    assert sorted(batch.tolist()) == [0, 1, 2, 3, 4, 5]


def test_a_million_pictures_are_no_burden():
    labels = np.random.default_rng(0).integers(0, 100_000, 1_000_000)
    sampler = create("groups", labels, classes=128, per_class=4)
    times = []
    for step in range(30):
        start = time.thread_time()  # other processes do not count
        batch = sampler.batch(0, step)
        times.append(time.thread_time() - start)
        assert len(set(batch.tolist())) == 512
    assert sorted(times)[5] < 0.005


# --- members of an ensemble ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_members_of_an_ensemble_get_the_batches_of_trainings_of_their_own(ranks):
    labels = labels_of(*[5] * 12)
    both = Independent("groups", labels, SETTINGS["groups"], members=2, seed=7)
    alone = [create("groups", labels, **SETTINGS["groups"], seed=seed) for seed in (7, 8)]
    for step in range(len(both)):
        for rank in range(ranks):
            parts = np.split(both.share(both.batch(1, step), rank, ranks), 2)
            for part, sampler in zip(parts, alone, strict=True):
                assert np.array_equal(part, sampler.share(sampler.batch(1, step), rank, ranks))
    assert not np.array_equal(*np.split(both.batch(1, 0), 2))
    assert both.batch_size == 36
    assert both.restore(both.state(1, 2)) == (1, 2)


# --- hard items of the whole set -------------------------------------------------------------------------------


def embedded(count=60, classes=12):
    labels = np.arange(count) % classes
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(0)), labels


def test_hard_items_are_the_nearest_negatives_and_the_farthest_positive():
    points, labels = embedded()
    points = torch.cat([points, points[:1] + points[1:2]])
    labels = np.append(labels, 99)  # alone in its class
    unit = torch.nn.functional.normalize(points, dim=1)
    table = hard_items(points, labels, neighbors=5)
    for item, row in enumerate(table.tolist()):
        near = (unit @ unit[item]).tolist()
        negatives = sorted((j for j in range(len(labels)) if labels[j] != labels[item]), key=lambda j: -near[j])
        positives = [j for j in range(len(labels)) if labels[j] == labels[item] and j != item]
        assert row[:-1] == negatives[:5]
        assert row[-1] == (min(positives, key=near.__getitem__) if positives else item)


def test_importance_sampling_adds_the_hardest_negatives_of_a_class():
    points, labels = embedded()
    sampler = create("importance", labels, batch_size=12, classes=1, per_class=4)
    table = hard_items(points, labels, sampler.neighbors)
    sampler.update(table)
    batch = sampler.batch(epoch=0, step=0)
    anchors, others = batch[:4], batch[4:]
    assert len(set(labels[anchors])) == 1
    assert labels[anchors[0]] not in labels[others]
    wanted = list(dict.fromkeys(table[anchors, :-1].T.flatten().tolist()))
    assert others.tolist() == wanted[:8]


@pytest.mark.parametrize(("key", "nearest"), [("hard_triplets", 1), ("smart_triplets", 6)])
def test_offline_mining_draws_negatives_from_the_nearest_of_all(key, nearest):
    points, labels = embedded()
    settings = {"neighbors": nearest} if key == "smart_triplets" else {}
    sampler = create(key, labels, batch_size=3, steps=40, **settings)
    table = hard_items(points, labels, sampler.neighbors)
    sampler.update(table)
    places = Counter()
    for anchor, positive, negative in sampler.epoch(0):
        assert labels[anchor] == labels[positive]
        assert anchor != positive
        places[table[anchor].tolist().index(negative)] += 1
        assert key == "smart_triplets" or positive == table[anchor, -1]
    assert set(places) == set(range(nearest))


def test_neighbor_classes_are_those_nearest_to_the_random_ones():
    labels = np.repeat(np.arange(12), 3)
    means = np.stack([np.cos(np.arange(12) // 4), np.sin(np.arange(12) // 4)], axis=1)  # three groups of four classes
    sampler = create("neighbor_classes", labels, classes=4, per_class=2, anchors=1, steps=6)
    assert len({int(label) // 4 for step in range(5) for label in labels[sampler.batch(0, step)]}) > 1
    sampler.update(means)
    for step in range(len(sampler)):
        assert len(set(labels[sampler.batch(0, step)] // 4)) == 1


def test_what_a_sampler_learned_is_restored():
    points, labels = embedded()
    sampler = create("hard_triplets", labels, batch_size=6)
    sampler.update(hard_items(points, labels, 1))
    other = create("hard_triplets", labels, batch_size=6)
    assert other.restore(sampler.state(1, 2)) == (1, 2)
    assert np.array_equal(other.batch(1, 2), sampler.batch(1, 2))
    with pytest.raises(ValueError, match=r"table has shape \[2, 2\]; needed is \[60, 2\]"):
        sampler.update(np.zeros((2, 2)))


# --- in PyTorch's DataLoader ------------------------------------------------------------------------------------

LABELS = torch.arange(60) % 12


def epochs_of(sampler, *epochs):
    return [[batch.tolist() for batch in sampler.epoch(epoch)] for epoch in epochs]


@all_samplers
@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_goes_from_epoch_to_epoch(key, workers):
    sampler = made(key, steps=5)
    items = TensorDataset(torch.arange(len(sampler.labels)), torch.from_numpy(sampler.labels))
    loader = DataLoader(items, batch_sampler=sampler.batches(), num_workers=workers, persistent_workers=workers > 0)
    assert len(loader) == len(sampler) == 5
    epochs = [[(places.tolist(), labels.tolist()) for places, labels in loader] for _ in range(3)]
    assert [[places for places, _ in epoch] for epoch in epochs] == epochs_of(sampler, 0, 1, 2)
    assert epochs[0] != epochs[1]
    assert all(labels == sampler.labels[places].tolist() for epoch in epochs for places, labels in epoch)


def test_batches_are_lists_of_plain_numbers():
    batch = next(iter(create("pairs", LABELS, classes=3).batches()))
    assert type(batch) is list
    assert {type(place) for place in batch} == {int}


def test_the_next_epoch_can_be_chosen():
    sampler = create("random", LABELS, batch_size=20)
    batches = sampler.batches(epoch=7)
    assert list(batches) == epochs_of(sampler, 7)[0]
    assert batches.epoch == 8
    batches.set_epoch(3)
    assert [list(batches), list(batches)] == epochs_of(sampler, 3, 4)


def test_an_epoch_counts_once_it_has_begun():
    sampler = create("random", LABELS, batch_size=20)
    batches = sampler.batches()
    iter(batches)  # asked for and not used, as a DataLoader with workers does
    first, second = epochs_of(sampler, 0, 1)
    assert list(islice(batches, 1)) == first[:1]  # left early
    assert list(batches) == second


def test_ranks_get_their_share():
    sampler = create("groups", LABELS, classes=4, per_class=3)
    first, second = (list(sampler.batches(rank=rank, ranks=2)) for rank in (0, 1))
    assert [left + right for left, right in zip(first, second, strict=True)] == list(sampler.batches())


def test_a_sampler_itself_says_what_a_data_loader_takes():
    sampler = create("groups", LABELS, classes=4, per_class=3)
    with pytest.raises(TypeError, match=r"a groups sampler has no current epoch.*sampler\.batches\(\)"):
        next(iter(DataLoader(LABELS, batch_sampler=sampler)))


def test_epochs_are_checked():
    sampler = create("random", LABELS, batch_size=20)
    with pytest.raises(ValueError, match="epoch is -1"):
        sampler.batches(epoch=-1)
    with pytest.raises(TypeError, match=r"epoch is 1\.5"):
        sampler.batches().set_epoch(1.5)


# --- labels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "labels",
    [LABELS, LABELS.int(), LABELS.to(torch.uint8), LABELS.tolist(), tuple(LABELS.tolist()), LABELS.numpy()],
    ids=["int64", "int32", "uint8", "list", "tuple", "array"],
)
def test_labels_are_arrays_tensors_or_lists(labels):
    expected = create("groups", LABELS.numpy(), classes=4, per_class=3)
    sampler = create("groups", labels, classes=4, per_class=3)
    assert sampler.fingerprint() == expected.fingerprint()
    assert sampler.batch(0, 0).tolist() == expected.batch(0, 0).tolist()
    assert sampler.labels.dtype == np.int64
    assert fitting_classes(labels, batch_size=16, per_class=4) == 4


@pytest.mark.parametrize("labels", [LABELS.clone(), LABELS.numpy().copy()], ids=["tensor", "array"])
def test_labels_are_kept_as_they_were(labels):
    sampler = create("groups", labels, classes=4, per_class=3)
    labels[:] = 0
    assert sampler.labels.tolist() == LABELS.tolist()
