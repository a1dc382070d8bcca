"""docs/architecture.md lists the modules that a loss, a training and an HTTP search really pass through."""

from __future__ import annotations

import pytest
import walks

REMEDY = "run: python tests/helpers/walks.py --write"


@pytest.mark.parametrize("name", walks.WALKS)
def test_the_page_lists_the_modules_of_a_walk(name: str) -> None:
    modules = walks.WALKS[name]()
    assert walks.listed(walks.PAGE.read_text(encoding="utf-8"), name) == modules, REMEDY
    assert len(modules) <= walks.MOST[name]
