"""Settings of the whole suite."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)  # tests run side by side, and their batches are tiny
if not torch.cuda.is_available():
    # torch.manual_seed notes the stack for every kind of GPU that may yet turn up: milliseconds each time
    torch.manual_seed = torch.default_generator.manual_seed


# Files whose tests share something that takes seconds to set up: with --dist loadgroup one process has it, once.
TOGETHER = (
    "test_distributed",
    "test_leaderboard_page",
    "test_page",
    "test_ray_engine",
    "test_running",
    "test_serve_schema",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a GPU is skipped where there is none; what shares a costly start stays together."""
    for item in items:
        if item.path.stem in TOGETHER:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
