"""Settings of the whole suite."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)  # tests run side by side, and their batches are tiny
if not torch.cuda.is_available():
    # torch.manual_seed notes the stack for every kind of GPU that may yet turn up: milliseconds each time
    torch.manual_seed = torch.default_generator.manual_seed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A machine without a GPU skips the tests that need one, even when they are asked for."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
