"""Products in full precision, and rows of length one."""

import subprocess
import sys
import threading

import pytest
import torch

from nearfar.utils import tensors
from nearfar.utils.tensors import full_precision, unit_rows

CPU = torch.device("cpu")

# PyTorch refuses to mix its two ways of setting the precision, so that each has a process of its own.
SCRIPT = """
import torch
from nearfar.utils.tensors import full_precision
{setting}
def states():
    both = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    return [library.fp32_precision for library in both]
before = states()
with full_precision(torch.device("cpu")):
    assert states() == ["ieee", "ieee"], states()
    with full_precision(torch.device("cpu")):
        pass
    assert states() == ["ieee", "ieee"], states()
assert states() == before, (before, states())
{afterwards}
"""

newer = pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="this PyTorch has one word for all libraries"
)


@newer
@pytest.mark.parametrize(
    ("setting", "afterwards"),
    [
        ("", "assert torch.get_float32_matmul_precision() == 'highest'"),
        ("torch.set_float32_matmul_precision('medium')", "assert torch.get_float32_matmul_precision() == 'medium'"),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "assert torch.backends.cuda.matmul.allow_tf32"),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", ""),
        ("torch.backends.mkldnn.matmul.fp32_precision = 'bf16'", ""),
        (
            "torch.backends.fp32_precision = 'tf32'",  # libraries go on following it
            "torch.backends.fp32_precision = 'ieee'; assert states() == ['ieee', 'ieee']",
        ),
    ],
)
def test_every_way_of_setting_the_precision_is_restored(setting, afterwards):
    script = SCRIPT.format(setting=setting, afterwards=afterwards)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.fixture
def older(monkeypatch):
    """A PyTorch with one word for all libraries."""
    monkeypatch.setattr(tensors, "_libraries", lambda: [tensors._OneWord()])


@pytest.mark.parametrize("word", ["highest", "high", "medium"])
def test_an_older_pytorch(older, word):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(word)
    try:
        with full_precision(CPU):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == word
    finally:
        torch.set_float32_matmul_precision(before)


def test_threads_that_overlap_leave_it_as_it_was():
    """The second is still inside when the first one leaves."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()
    seen = []

    def first():
        with full_precision(CPU):
            first_in.set()
            second_in.wait(10)
        first_out.set()

    def second():
        first_in.wait(10)
        with full_precision(CPU):
            second_in.set()
            first_out.wait(10)
            seen.append([library.fp32_precision for library in tensors._libraries()])

    threads = [threading.Thread(target=work) for work in (first, second)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(seen[0]) <= {"ieee", "highest"}
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_an_error_inside_restores_it():
    before = [library.fp32_precision for library in tensors._libraries()]
    with pytest.raises(KeyError), full_precision(CPU):
        raise KeyError
    assert [library.fp32_precision for library in tensors._libraries()] == before


def test_autocast_is_off_inside():
    with torch.autocast("cpu", dtype=torch.bfloat16), full_precision(CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_rows_of_any_length_become_one_long():
    rows = torch.tensor([[3.0, 4.0], [3e-320, 4e-320], [3e300, 4e300], [0.0, 0.0]], dtype=torch.float64)
    expected = torch.tensor([[0.6, 0.8], [0.6, 0.8], [0.6, 0.8], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(unit_rows(rows), expected, rtol=1e-3, atol=0)


def test_zeros_stay_zeros_on_a_processor_without_the_tiniest_numbers():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor always has them")
    try:
        found = unit_rows(torch.zeros(1, 3, dtype=torch.float64))
    finally:
        torch.set_flush_denormal(False)
    assert found.tolist() == [[0.0, 0.0, 0.0]]
