"""Rows: numbers that carry their derivative."""

import pytest
import torch

from nearfar.engine import Row


def row(value, learned):
    by_anchor_values = None if learned is None else torch.tensor([learned])
    return Row(torch.tensor([value]), [(1.0, torch.ones(1, 2))], by_anchor_values)


@pytest.mark.parametrize(
    ("left", "right", "expected"), [(None, None, None), (2.0, None, 2.0), (None, 3.0, 3.0), (2.0, 3.0, 5.0)]
)
def test_a_sum_has_the_derivatives_of_both_by_what_is_learned_of_an_anchor(left, right, expected):
    found = (row(1.0, left) + row(4.0, right)).by_anchor_values
    assert found is None if expected is None else found.item() == expected


def test_a_matrix_that_occurs_twice_counts_twice():
    once = row(1.0, None)
    assert torch.equal((once + once * 3.0).weights(), torch.full((1, 2), 4.0))


def test_derivatives_by_column_values_are_scaled_and_added():
    of_columns = Row(torch.tensor([1.0]), [(1.0, torch.ones(1, 2))], by_column_values=torch.tensor([1.0, 2.0]))
    total = of_columns * 3 + row(2.0, None) + of_columns * torch.tensor(0.5)
    assert total.by_column_values.tolist() == [3.5, 7.0]
    with pytest.raises(AssertionError, match="the same slope for all anchors"):
        of_columns * torch.tensor([2.0])
