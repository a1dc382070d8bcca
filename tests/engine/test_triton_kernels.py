"""Fused kernels compute what PyTorch computes, shown in Triton's interpreter, and are compiled for a GPU.

Both take processes of their own: Triton decides on its import whether it interprets.
"""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fused_cases import CASES, OTHERS, errors, make_batch, outcome
from packaging.version import Version

import nearfar as nf
from nearfar.engine import programs, tiles, triton_kernels

HELPERS = Path(__file__).parents[1] / "helpers"
ACCURACY = 1e-5
FEW = [
    "triplet, semi_hard",
    "multi_similarity",
    "contrastive, distance, raw vectors",
    "nt_xent",
    "ranked_list",
    "circle",
    "triplet, hard",
    "triplet, all",
]


TRITON = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None
needs_triton = pytest.mark.skipif(TRITON is None, reason="needs Triton")
# Earlier interpreters convert arrays of one element to numbers, which NumPy 2.4 refuses.
interprets = pytest.mark.skipif(
    TRITON is None or (Version(TRITON) < Version("3.9") and Version(np.__version__) >= Version("2.4")),
    reason="needs Triton 3.9, or an earlier one with NumPy before 2.4",
)


def start(script, *, interpret):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-W", "ignore", str(HELPERS / script)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.fixture(scope="module")
def interpreter():
    """The process of the interpreter; a list, so that the next test gets a new one after a crash."""
    running = []
    yield running
    for process in running:
        process.communicate()


@pytest.fixture
def worst(interpreter):
    """Returns the largest error of each case, for some options; infinity if the kernels were not used."""

    def ask(**options):
        process = interpreter.pop() if interpreter else start("fused_cases.py", interpret=True)
        process.stdin.write(f"{json.dumps(options)}\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, process.communicate()[1]
        interpreter.append(process)
        return {name: max(errors, default=float("inf")) for name, errors in json.loads(answer).items()}

    return ask


WAYS = {
    "every loss": {},
    "every loss with a gallery": {"gallery": 50},
    "as many rows as two blocks": {"size": 64, "dim": 40, "only": FEW},
    "more rows": {"size": 130, "only": FEW[:2]},
    "a gallery without gradient, read in chunks": {
        "gallery": 50, "only": [*FEW, "contrastive, pairs", "raw, hard"], "chunk": 20,
    },
    "dot products that do not fit into memory": {"only": [*FEW, "contrastive, pairs", "margin, all"], "chunk": 20},
    # The interpreter does not round. One product keeps the weights on the chip.
    "tf32": {"only": FEW, "precision": "tf32"},
    "tf32 with a gallery": {"gallery": 50, "only": FEW, "precision": "tf32"},
    "semi-hard mining of too many positives": {"size": 130, "only": ["triplet, semi_hard"], "most_positives": 5},
}  # fmt: skip


@interprets
@pytest.mark.parametrize("way", WAYS)
def test_value_and_gradients_are_those_of_float64(worst, way):
    found = worst(**{"size": 37, "dim": 16, **WAYS[way]})
    assert set(found) == set(WAYS[way].get("only", CASES))
    assert max(found.values()) < ACCURACY, found


@interprets
def test_other_losses_and_minings_use_pytorch(worst):
    assert set(worst(size=37, dim=16, only=list(OTHERS)).values()) == {float("inf")}


@interprets
def test_bfloat16_rounds_the_vectors(worst):
    found = worst(size=37, dim=16, precision="bfloat16", only=["raw", "sup_con"])
    assert all(ACCURACY < error < 0.1 for error in found.values()), found


@needs_triton
def test_every_kernel_compiles_for_hopper():
    process = start("fused_compile.py", interpret=False)
    output, problems = process.communicate()
    assert process.returncode == 0, problems
    found = json.loads(output.splitlines()[-1])
    assert {kernel.split(",")[0] for kernel in found} == {
        "_split", "_all_dots", "_merge", "_sums", "_extremes", "_semi_hard", "_triplets", "_products", "_strip",
        "_times_columns",
    }  # fmt: skip
    assert max(found.values()) <= 227 * 1024, found  # shared memory that a program can have


@pytest.fixture
def turned_on(monkeypatch):
    monkeypatch.setattr(programs.Setting, "smallest", 0)


def test_a_cpu_uses_pytorch(turned_on, monkeypatch):
    monkeypatch.delattr(triton_kernels, "evaluate")
    monkeypatch.delattr(triton_kernels, "hard_pairs")
    batch = make_batch(12, 4)
    for name in ("raw", "triplet, hard"):
        outcome(CASES[name](), batch, torch.float32)


@pytest.mark.parametrize("name", ["raw", "triplet, hard"])
def test_kernels_that_fail_are_turned_off_with_a_warning(name, monkeypatch):
    def fail(*arguments, **named):
        raise programs.KernelError("no such GPU")

    monkeypatch.setattr(programs, "applies", lambda batch: True)
    monkeypatch.setattr(triton_kernels, "evaluate", fail)
    monkeypatch.setattr(triton_kernels, "hard_pairs", fail)
    monkeypatch.setattr(programs.Setting, "precision", "float32")
    monkeypatch.setattr(programs.Setting, "smallest", 0)
    batch = make_batch(12, 4)
    with pytest.raises(programs.KernelError, match="no such GPU"):  # they were asked for
        outcome(CASES[name](), batch, torch.float32)
    monkeypatch.setattr(programs, "AUTOMATIC", 0)
    with pytest.warns(UserWarning, match="so PyTorch is used: no such GPU"):
        found = outcome(CASES[name](), batch, torch.float32)
    assert programs.Setting.precision is None
    assert max(errors(found, outcome(CASES[name](), batch, torch.float64))) < ACCURACY


@pytest.mark.parametrize(
    ("mining", "program"), [("semi_hard", "semi_hard"), ("all", programs.AllTriplets(0.1, False, False))]
)
def test_kernels_that_wait_for_the_gpu_are_used_from_the_same_size_on(mining, program):
    triplet = nf.losses.Triplet(mining=mining)
    assert tiles._kernel_program(nf.losses.Raw(), 1 << 24) is not None
    assert tiles._kernel_program(triplet, (1 << 24) - 1) is None
    assert tiles._kernel_program(triplet, 1 << 24) == program


@interprets
def test_all_triplets_of_many_positives_use_pytorch(worst):
    assert worst(size=130, dim=16, only=["triplet, all"], most_positives=5) == {"triplet, all": float("inf")}


class OwnLoss(nf.losses.Raw):
    def rows(self, sim, pos, neg):
        return super().rows(2 * sim, pos, neg)


class OwnMining(nf.mining.All):
    pass


@pytest.mark.parametrize(
    "loss",
    [
        *(nf.losses.create(key) for key in ("n_pair", "tuplet_margin", "lifted_structure", "margin", "smooth_ap")),
        nf.losses.NTXent(learn_temperature=True), OwnLoss(), OwnLoss(mining="hard"), nf.losses.Raw(mining=OwnMining()),
    ],
    ids=repr,
)  # fmt: skip
def test_losses_without_a_program(loss):
    """A program is not inherited, and a mining of a user selects pairs that no program knows."""
    assert nf.losses.Raw().kernel_program() is not None
    assert loss.kernel_program() is None


def test_float32_for_large_batches_by_default_and_one_error_without_triton(monkeypatch):
    assert (programs.Setting.precision, programs.Setting.smallest) == ("float32", 4096**2)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install triton"):
        nf.engine.use_triton()
    with pytest.raises(ValueError, match="precision is 'half'; allowed are"):
        nf.engine.use_triton(precision="half")
    assert (programs.Setting.precision, programs.Setting.smallest) == ("float32", 4096**2)
