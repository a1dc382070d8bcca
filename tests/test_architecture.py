"""A loss, a training and an HTTP search enter no more functions and files than their budgets allow."""

import pytest
import walks


@pytest.mark.parametrize("name", walks.WALKS)
def test_a_walk_stays_within_its_budget(name):
    functions = walks.WALKS[name]()
    most_functions, most_files = walks.BUDGETS[name]
    assert len(functions) <= most_functions
    assert len({file for file, _ in functions}) <= most_files
