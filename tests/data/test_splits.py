"""Splits: no class on two sides, the standard halves, and validation from training classes alone."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nearfar.data import Dataset, from_arrays, splits
from nearfar.data.splits import Split, fixed_validation, halves, k_fold, query_gallery, standard, with_gallery

NOBODY = np.zeros(0, dtype=np.int64)
labelings = (
    st.lists(st.integers(0, 30), min_size=4, max_size=120).map(np.array).filter(lambda x: len(np.unique(x)) >= 4)
)


def data_of(labels, split=None):
    return from_arrays(np.zeros((len(labels), 1), dtype=np.float32), labels, split=split)


def classes(labels, rows):
    return set(labels[rows].tolist())


# --- construction ----------------------------------------------------------------------------------------------


def test_a_class_on_two_sides_is_refused():
    labels = np.array([0, 0, 1, 1, 2, 2])
    with pytest.raises(ValueError, match=r"train and test share 1 classes \(1\); parts of a split must have no class"):
        Split(labels, np.array([0, 1, 2]), NOBODY, {"test": np.array([3, 4])})
    with pytest.raises(ValueError, match="train and validation share 1 classes"):
        Split(labels, np.array([0]), np.array([1]), {"test": np.array([4])})
    with pytest.raises(ValueError, match="validation and test share 1 classes"):
        Split(labels, np.array([0]), np.array([4]), {"query": np.array([3]), "gallery": np.array([5])})


def test_query_and_gallery_share_classes_but_no_rows():
    labels = np.array([0, 0, 1, 1])
    assert Split(labels, np.array([0]), NOBODY, {"query": np.array([2]), "gallery": np.array([3])})
    with pytest.raises(ValueError, match="query and gallery share row 2"):
        Split(labels, np.array([0]), NOBODY, {"query": np.array([2]), "gallery": np.array([2, 3])})


def test_a_side_without_rows_and_other_parts_are_refused():
    labels = np.array([0, 0, 1, 1])
    with pytest.raises(ValueError, match="train has no rows"):
        Split(labels, NOBODY, NOBODY, {"test": np.array([2])})
    with pytest.raises(ValueError, match="test has the parts query; allowed are test, or query and gallery"):
        Split(labels, np.array([0]), NOBODY, {"query": np.array([2])})
    with pytest.raises(ValueError, match="train must be increasing numbers from 0 to 3"):
        Split(labels, np.array([1, 0]), NOBODY, {"test": np.array([2])})


def test_a_split_can_be_sent_to_another_process():
    split = pickle.loads(pickle.dumps(halves(np.array([0, 0, 1, 1]))))
    assert split.test["test"].tolist() == [2, 3]


# --- halves and standard -----------------------------------------------------------------------------------------


def test_halves_of_an_odd_number_of_classes_leave_the_middle_to_training():
    labels = np.array([4, 4, 2, 0, 3, 1])
    split = halves(labels)
    assert classes(labels, split.train) == {0, 1, 2}
    assert classes(labels, split.test["test"]) == {3, 4}


def test_one_class_has_no_halves():
    with pytest.raises(ValueError, match="1 classes; 2 are needed"):
        halves(np.array([3, 3]))


def test_the_standard_split_is_the_data_sets_own():
    data = data_of(np.array([0, 1, 2, 2, 3]), ["train", "test", "query", "gallery", "val"])
    data = Dataset("own", data.source, data.labels, data.classes, {k: v for k, v in data.parts.items() if k != "test"})
    split = standard(data)
    assert split.train.tolist() == [0]
    assert split.validation.tolist() == [4]
    assert {name: rows.tolist() for name, rows in split.test.items()} == {"query": [2], "gallery": [3]}


def test_without_parts_the_standard_split_is_halves():
    split = standard(data_of(np.array([1, 0, 0, 1])))
    assert split.train.tolist() == [1, 2]
    assert split.test["test"].tolist() == [0, 3]


def test_parts_of_the_same_classes_are_no_standard_split():
    data = data_of(np.array([0, 1, 0, 1]), ["train", "train", "test", "test"])
    with pytest.raises(ValueError, match=r"share 2 classes \(0, 1\).*must have no class in common"):
        standard(data)


def test_training_alone_is_no_standard_split():
    with pytest.raises(ValueError, match="has the parts train; needed are train and test"):
        standard(data_of(np.array([0, 1]), ["train", "train"]))


def test_training_only_leaves_nothing_for_the_test():
    split = splits.train_only(data_of(np.array([0, 1, 2, 3]), ["train", "validation", "train", "test"]))
    assert split.train.tolist() == [0, 2]
    assert split.validation.tolist() == [1]
    assert dict(split.test) == {}
    assert splits.train_only(data_of(np.array([0, 1]), None)).train.tolist() == [0, 1]


# --- validation ----------------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=40)
@given(labelings, st.floats(0.01, 1.0), st.integers(0, 5))
def test_fixed_validation_takes_whole_training_classes_and_leaves_the_test_alone(labels, share, seed):
    data = data_of(labels)
    whole = standard(data)
    trained = len(classes(data.labels, whole.train))
    assume(trained > 2)
    split = fixed_validation(data, share=share, seed=seed)
    assert split.test["test"].tolist() == whole.test["test"].tolist()
    assert sorted([*split.train, *split.validation]) == whole.train.tolist()
    expected = min(max(2, round(share * trained)), trained - 1)
    assert len(classes(data.labels, split.validation)) == expected


def test_fixed_validation_is_nine_to_one_and_a_matter_of_the_seed():
    data = data_of(np.repeat(np.arange(200), 3))
    first, again, other = (fixed_validation(data, seed=seed) for seed in (0, 0, 1))
    assert [len(classes(data.labels, rows)) for rows in (first.train, first.validation)] == [90, 10]
    assert first.validation.tolist() == again.validation.tolist() != other.validation.tolist()


def test_a_validation_part_of_its_own_counts_as_training_classes():
    data = data_of(np.array([0, 1, 2, 3]), ["train", "train", "val", "test"])
    split = fixed_validation(data, share=0.5)
    assert sorted([*split.train, *split.validation]) == [0, 1, 2]
    assert split.test["test"].tolist() == [3]


def test_two_classes_validate_at_least_and_one_is_left():
    split = fixed_validation(data_of(np.arange(6)), share=0.01)
    assert (len(split.train), len(split.validation)) == (1, 2)
    with pytest.raises(ValueError, match="2 training classes; validation needs 2"):
        fixed_validation(data_of(np.arange(4)))


@settings(derandomize=True, deadline=None, max_examples=40)
@given(labelings, st.integers(2, 6), st.integers(0, 5))
def test_each_training_class_validates_exactly_once(labels, folds, seed):
    data = data_of(labels)
    whole = standard(data)
    trained = sorted(classes(data.labels, whole.train))
    assume(len(trained) >= 4)
    splits = k_fold(data, min(folds, len(trained) // 2), seed=seed)
    assert sorted(label for split in splits for label in classes(data.labels, split.validation)) == trained
    counts = [len(classes(data.labels, split.validation)) for split in splits]
    assert max(counts) - min(counts) <= 1
    for split in splits:
        assert sorted([*split.train, *split.validation]) == whole.train.tolist()
        assert split.test["test"].tolist() == whole.test["test"].tolist()


def test_more_folds_than_classes_are_refused():
    with pytest.raises(ValueError, match=r"folds is 3; .* 4 training classes; a fold needs 2"):
        k_fold(data_of(np.arange(8)), 3)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5])
def test_a_share_outside_its_range_is_refused(share):
    with pytest.raises(ValueError, match="share is"):
        fixed_validation(data_of(np.arange(8)), share=share)


# --- query and gallery -----------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=40)
@given(labelings, st.floats(0.01, 1.0), st.integers(0, 5))
def test_every_query_has_another_of_its_class_in_the_gallery(labels, share, seed):
    counts = np.bincount(labels)
    if counts.max() < 2:
        return
    query, gallery = query_gallery(labels, share=share, seed=seed)
    assert sorted([*query, *gallery]) == list(range(len(labels)))
    for label in np.flatnonzero(counts):
        asking = np.count_nonzero(labels[query] == label)
        expected = 0 if counts[label] == 1 else min(max(1, np.rint(share * counts[label])), counts[label] - 1)
        assert asking == expected


def test_queries_are_a_matter_of_the_seed():
    labels = np.repeat(np.arange(10), 10)
    first, again, other = (query_gallery(labels, seed=seed)[0].tolist() for seed in (0, 0, 1))
    assert first == again != other


def test_classes_of_one_row_each_have_no_queries():
    with pytest.raises(ValueError, match="no class with two rows"):
        query_gallery(np.arange(5))


def test_the_test_rows_of_a_split_become_queries_and_gallery():
    split = halves(np.repeat(np.arange(4), 5))
    asked = with_gallery(split, share=0.2)
    assert len(asked.test["query"]) == 2
    assert sorted([*asked.test["query"], *asked.test["gallery"]]) == split.test["test"].tolist()
    with pytest.raises(ValueError, match="already"):
        with_gallery(asked)


# --- closed sets -------------------------------------------------------------------------------------------------


def test_a_closed_set_has_other_images_of_the_same_classes():
    labels = np.repeat(np.arange(4), 6)
    dataset = from_arrays(np.eye(24, dtype=np.float32), labels)
    split = splits.closed_set(dataset, share=1 / 3, seed=1)
    test = split.test["test"]
    assert np.bincount(labels[test]).tolist() == [2] * 4
    assert sorted([*split.train, *test]) == list(range(24))
    assert not np.array_equal(test, splits.closed_set(dataset, share=1 / 3, seed=2).test["test"])


def test_a_closed_set_follows_the_published_split():
    official = np.array(["train", "test", "train", "test"])
    dataset = replace(from_arrays(np.eye(4, dtype=np.float32), np.array([0, 0, 1, 1])), columns={"official": official})
    split = splits.closed_set(dataset)
    assert (split.train.tolist(), split.test["test"].tolist()) == ([0, 2], [1, 3])
    assert pickle.loads(pickle.dumps(split)).closed


def test_parts_of_a_closed_set_share_no_row():
    rows = np.arange(2)
    with pytest.raises(ValueError, match="train and test share 2 rows"):
        splits.Split(np.zeros(4, dtype=np.int64), rows, rows[:0], {"test": rows}, closed=True)
