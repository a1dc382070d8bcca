"""Pair losses on a GPU: fused Triton kernels, PyTorch and pytorch-metric-learning, time and memory in one run.

    python benchmarks/kernels.py                                       # all losses and sizes
    python benchmarks/kernels.py --only multi_similarity --sizes 4096
    python benchmarks/kernels.py --precision float32,tf32,bfloat16     # all products
    python benchmarks/kernels.py --sizes "" --gallery 1000000          # 256 anchors against a gallery alone
    python benchmarks/kernels.py --sizes 65536 --gallery 0 --alone     # the kernels without PyTorch and the peer
    python benchmarks/kernels.py --sizes 4096 --only raw --sum-blocks 128,128,32,0,8,3
    TRITON_INTERPRET=1 python benchmarks/kernels.py --device cpu --sizes 32 --gallery 0 --dim 16   # does it run at all

Forward and backward, four embeddings per class. The candidates take turns; times are medians. Memory is the peak minus
the memory before the call. The error is that of the gradient by the embeddings against float64, in batches up to 4,096.
Embeddings of a gallery get no gradient. --sum-blocks, --kept-blocks, --strip-blocks and --product-blocks replace the
first choice of blocks: rows, columns, inner and outer dimensions, warps, stages, programs of a multiprocessor (or 1).
"""

from __future__ import annotations

import argparse
import sys
import warnings
from typing import Any

import torch
from common import Clock, Step, parse, report, show_line
from losses import Case, batch, cases, their_step
from torch import Tensor

import nearfar as nf
from nearfar.engine import triton_kernels

SIZES = (180, 1024, 4096, 16384, 65536)
LOSSES = (
    "multi_similarity", "raw", "contrastive", "binomial_deviance", "sup_con", "nt_xent", "lifted_structure_generalized",
    "ranked_list", "circle", "triplet, all", "triplet, hard", "triplet, semi-hard", "margin, hard",
)  # fmt: skip
COLUMNS = [
    "loss", "batch", "gallery", "precision", "ms", "pytorch ms", "peer ms", "MiB", "pytorch MiB", "peer MiB", "error",
    "note",
]  # fmt: skip
ANCHORS = 256  # against a gallery
CHECKED = 4096  # largest batch whose error is measured


def our_step(case: Case, arguments: tuple[Tensor, ...], precision: str | None) -> Step:
    """A step by the kernels, or by PyTorch without a precision."""
    loss = case.ours().to(arguments[0].device)

    def step() -> None:
        nf.engine.use_triton(precision is not None, precision=precision or "float32")
        arguments[0].grad = None
        loss(*arguments).backward()

    return step


def error(case: Case, arguments: tuple[Tensor, ...], step: Step) -> float:
    """The relative error of the gradient of a step."""
    step()
    embeddings, *others = arguments
    found = embeddings.grad
    assert found is not None
    nf.engine.use_triton(False)
    exact = embeddings.detach().double().requires_grad_()
    doubles = [other.double() if other.is_floating_point() else other for other in others]
    case.ours().to(exact.device, torch.float64)(exact, *doubles).backward()
    assert exact.grad is not None
    return float((found.double() - exact.grad).norm() / exact.grad.norm().clamp(min=1e-30))


def inputs(size: int, gallery: int, dim: int, device: str) -> tuple[Tensor, ...]:
    embeddings, labels = batch(size, dim, device)
    if not gallery:
        return embeddings, labels
    columns, column_labels = batch(gallery, dim, device)
    return embeddings, labels, columns.detach(), column_labels


def compare(
    case: Case, size: int, gallery: int, options: argparse.Namespace, peer: Any, clock: Clock
) -> list[dict[str, Any]]:
    """One row for each precision."""
    arguments = inputs(size, gallery, options.dim, options.device)
    precisions = options.precision.split(",")
    rivals: list[str | None] = [] if options.alone else [None]
    named = {precision: our_step(case, arguments, precision) for precision in (*rivals, *precisions)}
    if peer is not None and case.theirs is not None and not gallery and not options.alone:
        named["peer"] = their_step(case, peer, *arguments)
    memory, notes, kept = {}, {}, {}
    for name, step in named.items():
        try:
            step()
            memory[name] = clock.extra_memory(step)
            for _ in range(3):  # recorded as a CUDA graph
                step()
            kept[name] = step
        except (RuntimeError, MemoryError) as failure:
            out = "memory" in str(failure).lower()
            notes[name] = f"{name or 'pytorch'}: {'out of memory' if out else str(failure).splitlines()[0][:80]}"
            torch.cuda.empty_cache()
    times = dict(zip(kept, clock.take_turns(list(kept.values()), options.budget), strict=True)) if kept else {}
    rows = []
    for precision in precisions:
        row: dict[str, Any] = {"loss": case.name, "batch": size, "gallery": gallery or None, "precision": precision}
        for column, name in (("", precision), ("pytorch ", None), ("peer ", "peer")):
            if name in times:
                row[f"{column}ms"], row[f"{column}MiB"] = times[name] * 1e3, memory[name]
        if precision in kept and size * (gallery or size) <= CHECKED**2:
            row["error"] = f"{error(case, arguments, kept[precision]):.1e}"
        row["note"] = "; ".join(notes[name] for name in (precision, None, "peer") if name in notes) or None
        rows.append({name: value for name, value in row.items() if value is not None})
    return rows


def blocks(text: str) -> triton_kernels.Blocks:
    return triton_kernels.Blocks(*map(int, text.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="batch sizes, separated by commas")
    parser.add_argument("--gallery", type=int, default=1_000_000, help=f"columns for {ANCHORS} anchors; 0: none")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--precision", default="float32", help="float32, tf32, bfloat16, separated by commas")
    parser.add_argument("--only", default="", help="only losses whose name contains this")
    parser.add_argument("--alone", action="store_true", help="neither PyTorch nor pytorch-metric-learning")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds for each comparison")
    parser.add_argument("--sum-blocks", type=blocks, help="six or seven numbers, separated by commas")
    parser.add_argument("--kept-blocks", type=blocks, help="six or seven numbers, separated by commas")
    parser.add_argument("--strip-blocks", type=blocks, help="six or seven numbers, separated by commas")
    parser.add_argument("--product-blocks", type=blocks, help="six or seven numbers, separated by commas")
    options = parse(parser, COLUMNS)
    warnings.filterwarnings("ignore")
    if options.sum_blocks:
        triton_kernels.SUM_BLOCKS.insert(0, options.sum_blocks)
    if options.kept_blocks:
        triton_kernels.KEPT_BLOCKS.insert(0, options.kept_blocks)
    if options.strip_blocks:
        triton_kernels.STRIP_BLOCKS.insert(0, options.strip_blocks)
    if options.product_blocks:
        triton_kernels.PRODUCT_BLOCKS.insert(0, options.product_blocks)
    try:
        import pytorch_metric_learning as peer
        from pytorch_metric_learning import distances, losses, miners  # noqa: F401
    except ImportError:
        peer = None
        print("pytorch-metric-learning is not installed: no comparison", file=sys.stderr)
    clock = Clock(options.device)
    by_name = {case.name: case for case in cases()}
    chosen = [by_name[name] for name in LOSSES if options.only in name]
    shapes = [(int(size), 0) for size in options.sizes.split(",") if size]
    shapes += [(ANCHORS, options.gallery)] if options.gallery else []
    rows = []
    for size, gallery in shapes:
        for case in chosen:
            for row in compare(case, size, gallery, options, peer, clock):
                rows.append(row)
                show_line(row)
    nf.engine.use_triton(False)
    report(rows, COLUMNS, clock, options.out)


if __name__ == "__main__":
    main()
