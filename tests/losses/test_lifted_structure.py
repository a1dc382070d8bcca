"""Lifted structure loss with a slot for every column, as on a GPU."""

import checks
import pair_checks
import pytest
import torch
from cases import CASES

from nearfar.losses import lifted_structure

CHECKS = [
    checks.check_oracle,
    checks.check_gradcheck,
    pair_checks.check_oracle_with_a_gallery,
    pair_checks.check_gradcheck_with_a_gallery,
    checks.check_tile_size,
    checks.check_degenerate,
]


def every_column(mask):
    return torch.arange(mask.shape[1]).expand(mask.shape), mask


@pytest.mark.parametrize("case", [case for case in CASES if case.key == "lifted_structure"], ids=lambda case: case.id)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_a_slot_for_every_column(check, case, monkeypatch):
    monkeypatch.setattr(lifted_structure, "positive_columns", every_column)
    check(case)
