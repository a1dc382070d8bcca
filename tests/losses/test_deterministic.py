"""No loss asks a GPU for what it cannot repeat: running sums of floating point."""

import pytest
import torch
from cases import CASES
from checks import make_batch
from torch.utils._python_dispatch import TorchDispatchMode


class NoRunningSums(TorchDispatchMode):
    """As torch.use_deterministic_algorithms(True) on a GPU."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        found = function(*arguments, **(keywords or {}))
        assert "cumsum" not in str(function) or not found.is_floating_point(), function
        return found


@pytest.mark.filterwarnings("ignore:.*more embeddings than dimensions")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_no_loss_sums_up_floating_point_step_by_step(case):
    embeddings, labels = make_batch(dtype=torch.float32)
    with NoRunningSums():
        case.create()(embeddings.requires_grad_(), labels).backward()
