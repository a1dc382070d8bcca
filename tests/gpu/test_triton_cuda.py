"""Fused kernels on a GPU: the numbers of PyTorch in float64, eager and replayed from a CUDA graph."""

import pytest
import torch
from fused_cases import CASES, errors, kernels, make_batch, outcome

import nearfar as nf

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("error:.*without a CUDA graph")]

SIZE, DIM, CLASSES = 4096, 128, 1024
# float32 is 1e-5. With beta = 50 a rounding of the similarities by 2⁻¹¹ (TF32) or 2⁻⁹ (bfloat16) changes weights by
# several percent, and pairs near a bound of a mining or hinge are in or out.
ACCURACY = {"float32": 1e-5, "tf32": 0.1, "bfloat16": 0.2}
# The gradients of the others jump where a hinge, a bound or the nearest pair changes. Among millions of pairs some are
# so close to it that float32 rounds them to the other side of what float64 finds, in PyTorch as well.
SMOOTH = (
    "multi_similarity", "raw", "contrastive, distance", "binomial_deviance", "sup_con", "nt_xent",
    "lifted_structure_generalized", "circle", "triplet, all, soft",
)  # fmt: skip
JUMPS = 0.02
WITH_CLASSES = [name for name in CASES if name != "margin, classes"]


def limit(name, precision="float32"):
    return ACCURACY[precision] if name in SMOOTH else max(JUMPS, ACCURACY[precision])


def check(name, batch, precision="float32", chunk=None):
    """The kernels are used, and compute what PyTorch computes."""
    with kernels(precision) as called:
        found = outcome(CASES[name](), batch, torch.float32, "cuda", chunk=chunk)
    assert called
    expected = outcome(CASES[name](), batch, torch.float64, "cuda", chunk=chunk)
    assert max(errors(found, expected)) < limit(name, precision)


@pytest.mark.parametrize("precision", ACCURACY)
@pytest.mark.parametrize("name", WITH_CLASSES)
def test_a_large_batch(name, precision):
    check(name, make_batch(SIZE, DIM, classes=CLASSES), precision)


@pytest.mark.parametrize("name", WITH_CLASSES)
@pytest.mark.parametrize(("dim", "chunk"), [(96, None), (512, None), (128, 500)])  # in chunks, without its gradient
def test_a_gallery(name, dim, chunk):
    check(name, make_batch(1000, dim, gallery=3001, classes=800), chunk=chunk)  # at most 12 positives


@pytest.mark.parametrize("name", ["multi_similarity", "contrastive, distance", "nt_xent", "circle", "margin, all"])
def test_dot_products_that_do_not_fit_into_memory(name):
    check(name, make_batch(1000, DIM, classes=200), chunk=500)


@pytest.mark.parametrize("name", ["multi_similarity", "triplet, hard"])
def test_nan_in_a_chunk_of_a_gallery_makes_the_loss_nan(name):
    batch = make_batch(300, 16, gallery=700, classes=20)
    batch.gallery[650, 3] = float("nan")
    with kernels():
        value, *_ = outcome(CASES[name](), batch, torch.float32, "cuda", chunk=100)
    assert value.isnan()


@pytest.mark.parametrize("name", WITH_CLASSES)
def test_a_recorded_step_computes_the_same(name):
    equal = "semi_hard" not in name  # of two equal negatives, either may be selected
    loss, batches = CASES[name]().cuda(), [make_batch(180, 64, classes=60, seed=seed, equal=equal) for seed in range(6)]
    with kernels():
        for batch in batches:  # the third step is recorded, later ones are replayed
            found = outcome(loss, batch, torch.float32, "cuda")
            assert max(errors(found, outcome(CASES[name](), batch, torch.float64, "cuda"))) < limit(name)


def test_turning_the_kernels_off_makes_another_recording():
    loss, batch = nf.losses.Raw().cuda(), make_batch(64, 16)
    expected = outcome(CASES["raw"](), batch, torch.float64, "cuda")
    with kernels("bfloat16"):
        for _ in range(4):
            rounded = outcome(loss, batch, torch.float32, "cuda")
    exact = [outcome(loss, batch, torch.float32, "cuda") for _ in range(4)][-1]
    assert max(errors(exact, expected)) < ACCURACY["float32"] < max(errors(rounded, expected))
