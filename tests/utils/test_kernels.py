"""Whether Triton is used."""

from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("triton")

from nearfar.utils import kernels


@pytest.fixture
def gpu(monkeypatch):
    """A GPU as far as ``usable`` asks, on which every kernel works."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch, "zeros", lambda *arguments, **named: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    monkeypatch.setattr(kernels, "_add_one", {(1,): lambda x: None})
    kernels.usable.cache_clear()
    yield torch.device("cuda", 0)
    kernels.usable.cache_clear()


@pytest.mark.parametrize(("version", "used"), [("3.5.1", False), ("3.6.0", True), ("4.0.0+git12", True)])
def test_old_versions_of_triton_are_not_used(version, used, gpu, monkeypatch):
    monkeypatch.setattr(kernels.triton, "__version__", version)
    assert kernels.usable(gpu) is used


def test_a_cpu_has_no_kernels():
    assert not kernels.usable(torch.device("cpu"))
