"""Numbers as settings: those of NumPy are numbers, truth values and text are none."""

from fractions import Fraction

import numpy as np
import pytest

import nearfar as nf
from nearfar.utils.validation import number, whole


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.float16(2), np.int8(2), np.uint64(2), Fraction(2)])
def test_a_number_becomes_pythons(value):
    assert number("alpha", value) == 2.0
    assert type(number("alpha", value)) is float


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_a_whole_number_becomes_pythons(value):
    assert whole("bins", value) == 3
    assert type(whole("bins", value)) is int


@pytest.mark.parametrize("value", [True, np.bool_(True), "2", None, [2], np.array([2])])
def test_what_is_no_number(value):
    with pytest.raises(TypeError, match=r"alpha is .*; a number is needed"):
        number("alpha", value)
    with pytest.raises(TypeError, match=r"bins is .*; a whole number is needed"):
        whole("bins", value)


def test_numpys_numbers_keep_to_the_range():
    with pytest.raises(ValueError, match=r"bins is np.int64\(0\); it must be ≥ 1"):
        whole("bins", np.int64(0))
    with pytest.raises(ValueError, match=r"alpha is .*nan.*; it must be finite"):
        number("alpha", np.float32("nan"))


def test_as_many_classes_as_an_array_of_labels_has():
    labels = np.array([0, 2, 4])
    loss = nf.losses.ArcFace(num_classes=labels.max() + 1, dim=np.int32(3), scale=np.float32(8))
    assert loss.settings().items() >= {"num_classes": 5, "dim": 3, "scale": 8.0}.items()
    assert loss.proxies.shape == (5, 3)
