"""What a data set checks when it is made."""

import pickle

import numpy as np
import pytest

from nearfar.data.datasets.base import Dataset, left_out
from nearfar.data.store.sources import Arrays, Files, Vectors

VECTORS = Vectors(np.eye(4, dtype=np.float32))


def make(**other):
    given = {
        "name": "four",
        "source": VECTORS,
        "labels": np.array([0, 0, 1, 1]),
        "classes": ("jay", "wren"),
        "parts": {"train": np.array([0, 1]), "test": np.array([2, 3])},
    }
    return Dataset(**{**given, **other})


def test_it_counts_rows_and_classes():
    data = make()
    assert len(data) == 4
    assert data.num_classes == 2
    assert repr(data) == "Dataset('four': 4 of 2 classes; train 2, test 2; 0 notes)"


def test_labels_and_parts_are_copies_that_cannot_be_changed():
    labels = np.array([0, 0, 1, 1], dtype=np.int32)
    data = make(labels=labels)
    labels[0] = 1
    assert data.labels.dtype == np.int64
    assert data.labels.tolist() == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="read-only"):
        data.labels[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        data.parts["train"][0] = 1


def test_it_can_be_sent_to_another_process():
    sent = pickle.loads(pickle.dumps(make(columns={"size": np.arange(4)}, notes=("one", left_out("two", "no label")))))
    assert sent.parts["test"].tolist() == [2, 3]
    assert sent.columns["size"].tolist() == [0, 1, 2, 3]
    assert sent.notes == ("one", "two: no label; left out")
    assert sent.left_out == ["two: no label; left out"]


def test_it_knows_what_its_rows_are():
    files = make(source=Files("birds", [f"{at}.jpg" for at in range(4)]))
    images = make(source=Arrays(np.zeros((4, 2, 2), dtype=np.uint8)))
    assert [data.is_vectors for data in (make(), images, files)] == [True, False, False]
    assert [data.is_encoded for data in (make(), images, files)] == [False, False, True]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"labels": np.array([0, 1, 1])}, "labels has 3 rows; needed are 4"),
        ({"labels": np.array([0, 0, 1, 2])}, "labels go from 0 to 2; allowed are 0 to 1"),
        ({"labels": np.array([0, 0, 1, -1])}, "labels go from -1 to 1"),
        ({"labels": np.array([[0, 0, 1, 1]])}, r"labels is \[1, 4\]; a NumPy array of shape \[n\] is needed"),
        ({"labels": [0, 0, 1, 1]}, "labels is list"),
        ({"classes": ("jay", "jay")}, "two classes have the name 'jay'"),
        ({"parts": {"training": np.array([0])}}, "parts has 'training'; allowed are train, validation, test"),
        ({"parts": {"train": np.array([1, 0])}}, r"parts\['train'\] must be increasing numbers from 0 to 3"),
        ({"parts": {"train": np.array([0, 4])}}, r"parts\['train'\] must be increasing numbers from 0 to 3"),
        ({"parts": {"train": np.array([-1, 2])}}, r"parts\['train'\] must be increasing numbers from 0 to 3"),
        ({"parts": {"train": np.array([0, 2]), "test": np.array([2])}}, r"parts\['test'\] and .*'train'\] share row 2"),
        ({"columns": {"size": np.arange(3)}}, r"columns\['size'\] has shape \[3\]; needed is \[4\]"),
    ],
)
def test_what_does_not_fit_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        make(**wrong)


def test_labels_must_be_whole_numbers():
    with pytest.raises(TypeError, match="labels is of float64; whole numbers are needed"):
        make(labels=np.array([0.0, 0.0, 1.0, 1.0]))
