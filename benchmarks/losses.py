"""Speed and memory of the pair-based losses against pytorch-metric-learning, side by side in one run.

    python benchmarks/losses.py                          # CPU, the sizes of the documentation
    python benchmarks/losses.py --device cuda            # a GPU
    python benchmarks/losses.py --sizes 180 --only raw   # one loss at one size
    python benchmarks/losses.py --scale                  # the largest batches: 20,000 × 128 or 65,536 × 512
    python benchmarks/losses.py --classes                # losses with proxies: 100, 11,318 and 1,000,000 classes

Forward and backward, embeddings of 512 dimensions, four per class. nearfar and the peer take turns, so that a
busy machine slows both; the ratio is that of the medians. Memory is the peak minus the memory before the call; for
losses with proxies, the gradient of the proxies is subtracted as well, since it is part of the result.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from common import Clock, Step, limit_memory, parse, report, show_line
from torch import Tensor

import nearfar as nf
from nearfar.utils.system import reuse_memory

SIZES = (120, 180, 512, 1024, 4096)
COLUMNS = ["loss", "classes", "batch", "dim", "ms", "peer ms", "ratio", "seconds", "MiB", "peer MiB", "peer"]


@dataclass
class Case:
    """A loss of ours and, where there is one that computes the same, of theirs."""

    name: str
    ours: Callable[[], nf.losses.Loss]
    theirs: Callable[[Any], tuple[Any, Any]] | None = None  # package → (loss, miner)
    largest: int = 1 << 30  # largest batch that is measured
    pairs_only: bool = False  # anchors against one positive each, as the peer's N-pair loss does it


def cases() -> list[Case]:
    losses = nf.losses

    def cosine(peer: Any) -> dict[str, Any]:
        return {"distance": peer.distances.CosineSimilarity()}

    def unnormalized(peer: Any) -> dict[str, Any]:
        return {"distance": peer.distances.LpDistance(normalize_embeddings=False)}

    return [
        Case(
            "contrastive",
            lambda: losses.Contrastive(average="pairs"),
            lambda p: (p.losses.ContrastiveLoss(1, 0.5, **cosine(p)), None),
        ),
        Case(
            "contrastive, all active",  # every pair has a weight
            lambda: losses.Contrastive(margin=-1.0, average="pairs"),
            lambda p: (p.losses.ContrastiveLoss(1, -1, **cosine(p)), None),
        ),
        Case(
            "triplet, all",
            lambda: losses.Triplet(mining="all", average="active"),
            lambda p: (p.losses.TripletMarginLoss(0.1, **cosine(p)), None),
        ),
        Case(
            "triplet, hard",
            lambda: losses.Triplet(mining="hard", average="active"),
            lambda p: (p.losses.TripletMarginLoss(0.1, **cosine(p)), p.miners.BatchHardMiner(**cosine(p))),
        ),
        Case("triplet, semi-hard", lambda: losses.Triplet()),
        Case(
            "lifted_structure",
            lambda: losses.LiftedStructure(),
            lambda p: (p.losses.LiftedStructureLoss(**unnormalized(p)), None),
        ),
        Case(
            "lifted_structure_generalized",
            lambda: losses.LiftedStructureGeneralized(),
            lambda p: (p.losses.GeneralizedLiftedStructureLoss(neg_margin=0, pos_margin=0.5, **cosine(p)), None),
        ),
        Case("n_pair", lambda: losses.NPair(l2=0.0), lambda p: (p.losses.NPairsLoss(), None), pairs_only=True),
        Case(
            "margin, hard",
            lambda: losses.Margin(mining="hard"),
            lambda p: (p.losses.MarginLoss(learn_beta=True), p.miners.BatchHardMiner()),
        ),
        Case(
            "margin, distance-weighted",
            lambda: losses.Margin(),
            lambda p: (p.losses.MarginLoss(learn_beta=True), p.miners.DistanceWeightedMiner()),
        ),
        Case("binomial_deviance", lambda: losses.BinomialDeviance()),
        Case("raw", lambda: losses.Raw(), lambda p: (p.losses.MultiSimilarityLoss(2, 50, 0.5), None)),
        Case(
            "multi_similarity",
            lambda: losses.MultiSimilarity(),
            lambda p: (p.losses.MultiSimilarityLoss(2, 50, 0.5), p.miners.MultiSimilarityMiner(0.1)),
        ),
        Case(
            "ranked_list",
            lambda: losses.RankedList(temperature=5.0),
            lambda p: (p.losses.RankedListLoss(0.4, 5, alpha=1.2), None),
        ),
        Case("nra", lambda: losses.NRA()),
        Case("circle", lambda: losses.Circle(), lambda p: (p.losses.CircleLoss(), None)),
        Case("sup_con", lambda: losses.SupCon(), lambda p: (p.losses.SupConLoss(), None)),
        Case("nt_xent", lambda: losses.NTXent(), lambda p: (p.losses.NTXentLoss(), None)),
        Case("angular", lambda: losses.Angular(), lambda p: (p.losses.AngularLoss(), None)),
        Case("histogram", lambda: losses.Histogram(), lambda p: (p.losses.HistogramLoss(n_bins=100), None)),
        Case("smooth_ap", lambda: losses.SmoothAP(), lambda p: (p.losses.SmoothAPLoss(), None)),
        Case("smooth_ap, max_positives", lambda: losses.SmoothAP(max_positives=3)),
        Case("fast_ap", lambda: losses.FastAP(), lambda p: (p.losses.FastAPLoss(), None)),
        Case("spectral_clustering", lambda: losses.SpectralClustering(), largest=1024),
        Case("facility_location", lambda: losses.FacilityLocation(), largest=180),
    ]


@dataclass
class ClassCase:
    """A loss with proxies of ours and, where there is one that computes the same, of theirs."""

    name: str
    ours: Callable[[int, int], nf.losses.ProxyLoss]  # (classes, dimensions) → loss
    theirs: Callable[[Any, int, int], Any] | None = None  # (package, classes, dimensions) → loss
    most: int = 1_000_000  # classes


# How many classes, and the batch and dimensions they are tried with.
CLASSES = {100: (180, 512), 11_318: (180, 512), 1_000_000: (256, 128)}


def class_cases() -> list[ClassCase]:
    losses = nf.losses
    return [
        ClassCase("softmax", lambda c, d: losses.Softmax(num_classes=c, dim=d)),
        ClassCase(
            "normalized_softmax",
            lambda c, d: losses.NormalizedSoftmax(num_classes=c, dim=d),
            lambda p, c, d: p.losses.NormalizedSoftmaxLoss(c, d, temperature=0.05),
        ),
        ClassCase("proxy_nca", lambda c, d: losses.ProxyNCA(num_classes=c, dim=d)),
        ClassCase(
            "proxy_nca, include_positive",
            lambda c, d: losses.ProxyNCA(num_classes=c, dim=d, include_positive=True),
            lambda p, c, d: p.losses.ProxyNCALoss(c, d, softmax_scale=9),
        ),
        ClassCase(
            "arcface",
            lambda c, d: losses.ArcFace(num_classes=c, dim=d),
            lambda p, c, d: p.losses.ArcFaceLoss(c, d),
        ),
        ClassCase("arcface, a tenth sampled", lambda c, d: losses.ArcFace(num_classes=c, dim=d, sample_rate=0.1)),
        ClassCase(
            "cosface",
            lambda c, d: losses.CosFace(num_classes=c, dim=d),
            lambda p, c, d: p.losses.CosFaceLoss(c, d),
        ),
        ClassCase(
            "soft_triple",  # the peer has no regularizer
            lambda c, d: losses.SoftTriple(num_classes=c, dim=d, tau=0.0),
            lambda p, c, d: p.losses.SoftTripleLoss(c, d, centers_per_class=10, la=20, gamma=0.1, margin=0.1),
            most=11_318,
        ),
        ClassCase("soft_triple, regularized", lambda c, d: losses.SoftTriple(num_classes=c, dim=d), most=11_318),
        ClassCase(
            "proxy_anchor",
            lambda c, d: losses.ProxyAnchor(num_classes=c, dim=d),
            lambda p, c, d: p.losses.ProxyAnchorLoss(c, d),
        ),
        ClassCase("proxy_repel", lambda c, d: losses.ProxyRepel(num_classes=c, dim=d), most=11_318),
        ClassCase(
            "proxy_repel, through the batch",
            lambda c, d: losses.ProxyRepel(num_classes=c, dim=d, through_batch=True),
            most=11_318,
        ),
        ClassCase("group", lambda c, d: losses.Group(num_classes=c, dim=d), most=11_318),
    ]


def batch(size: int, dim: int, device: str) -> tuple[Tensor, Tensor]:
    """Classes that overlap a little, as in the middle of a training."""
    torch.manual_seed(0)
    labels = torch.arange(size) // 4
    centers = torch.randn(int(labels[-1]) + 1, dim)
    embeddings = (torch.randn(size, dim) + centers[labels]).to(device)
    return embeddings.requires_grad_(), labels.to(device)


def our_step(case: Case, embeddings: Tensor, labels: Tensor) -> Step:
    loss = case.ours().to(embeddings.device)
    arguments: tuple[Tensor, ...] = (embeddings, labels)
    if case.pairs_only:
        anchors, positives = (embeddings.detach()[start::4].clone().requires_grad_() for start in (0, 1))
        arguments = (anchors, labels[::4], positives, labels[::4])

    def step() -> None:
        for argument in arguments:
            argument.grad = None
        loss(*arguments).backward()

    return step


def their_step(case: Case, peer: Any, embeddings: Tensor, labels: Tensor) -> Step:
    assert case.theirs is not None
    loss, miner = case.theirs(peer)
    loss = loss.to(embeddings.device)

    def step() -> None:
        embeddings.grad = None
        mined = None if miner is None else miner(embeddings.detach(), labels)
        loss(embeddings, labels, mined).backward()

    return step


def compare(case: Case, size: int, peer: Any, clock: Clock, device: str, budget: float) -> dict[str, Any]:
    embeddings, labels = batch(size, 512, device)
    ours = our_step(case, embeddings, labels)
    ours()
    row: dict[str, Any] = {"loss": case.name, "batch": size}
    steps = [ours]
    if case.theirs is not None and peer is not None:
        theirs = their_step(case, peer, embeddings, labels)
        try:
            theirs()
            row["peer MiB"] = clock.extra_memory(theirs)
            steps.append(theirs)
        except (RuntimeError, MemoryError) as error:
            row["peer"] = "out of memory" if "memory" in str(error).lower() else f"fails: {error}"[:80]
    row["MiB"] = clock.extra_memory(ours)
    times = clock.take_turns(steps, budget)
    row["ms"] = times[0] * 1e3
    if len(times) == 2:
        row["peer ms"] = times[1] * 1e3
        row["ratio"] = times[1] / times[0]
    return row


def class_step(loss: torch.nn.Module, embeddings: Tensor, labels: Tensor) -> Step:
    def step() -> None:
        embeddings.grad = None
        loss.zero_grad()
        loss(embeddings, labels).backward()

    return step


def _without(loss: torch.nn.Module, measure: Callable[[Step], float], step: Step) -> float:
    """A measure of a step that starts without gradients; not below that of the gradient."""
    loss.zero_grad()
    gradient = sum(parameter.numel() for parameter in loss.parameters()) * 4 / 2**20
    return max(gradient, measure(step))


def compare_classes(
    case: ClassCase, classes: int, peer: Any, clock: Clock, device: str, budget: float
) -> dict[str, Any]:
    size, dim = CLASSES[classes]
    embeddings, labels = batch(size, dim, device)
    labels = labels * (classes // (size // 4))  # spread over all classes
    row: dict[str, Any] = {"loss": case.name, "classes": classes, "batch": size, "dim": dim}
    loss = case.ours(classes, dim).to(device)
    gradient = sum(parameter.numel() for parameter in loss.parameters()) * 4 / 2**20
    ours = class_step(loss, embeddings, labels)
    ours()
    row["MiB"] = min(_without(loss, clock.extra_memory, ours) for _ in range(2)) - gradient
    steps = [ours]
    if case.theirs is not None and peer is not None:
        try:
            theirs_loss = case.theirs(peer, classes, dim).to(device)
            theirs = class_step(theirs_loss, embeddings, labels)
            theirs()
            row["peer MiB"] = _without(theirs_loss, clock.extra_memory, theirs) - gradient
            steps.append(theirs)
        except (RuntimeError, MemoryError) as error:
            row["peer"] = "out of memory" if "memory" in str(error).lower() else f"fails: {error}"[:80]
    times = clock.take_turns(steps, budget)
    row["ms"] = times[0] * 1e3
    if len(times) == 2:
        row["peer ms"] = times[1] * 1e3
        row["ratio"] = times[1] / times[0]
    return row


def at_scale(case: Case, clock: Clock, device: str) -> dict[str, Any]:
    size, dim = (65_536, 512) if clock.cuda else (20_000, 128)
    embeddings, labels = batch(size, dim, device)
    embeddings.grad = torch.zeros_like(embeddings)  # a parameter's gradient is there before a step
    small, small_labels = batch(64, dim, device)
    our_step(case, small, small_labels)()
    loss = case.ours().to(device)

    def step() -> None:
        loss(embeddings, labels).backward()

    start = time.perf_counter()
    memory = clock.extra_memory(step)
    return {"loss": case.name, "batch": size, "dim": dim, "seconds": time.perf_counter() - start, "MiB": memory}


def plan(options: argparse.Namespace, peer: Any, clock: Clock) -> list[Callable[[], dict[str, Any]]]:
    """What to measure, in order."""
    device, budget = options.device, options.budget
    if options.classes:
        return [
            partial(compare_classes, case, classes, peer, clock, device, budget)
            for classes in map(int, options.classes.split(","))
            for case in class_cases()
            if options.only in case.name and classes <= case.most
        ]
    chosen = [case for case in cases() if options.only in case.name]
    if options.scale:
        return [partial(at_scale, case, clock, device) for case in chosen if case.largest > 1 << 20]
    sizes = [int(size) for size in options.sizes.split(",")]
    return [
        partial(compare, case, size, peer, clock, device, budget)
        for size in sizes
        for case in chosen
        if size <= case.largest
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="batch sizes, separated by commas")
    parser.add_argument("--only", default="", help="only losses whose name contains this")
    parser.add_argument("--budget", type=float, default=3.0, help="seconds for each comparison")
    parser.add_argument("--memory", type=float, default=20.0, help="GiB a CPU step may take before it counts as failed")
    parser.add_argument("--scale", action="store_true", help="the largest batches instead, ours alone")
    parser.add_argument(
        "--classes",
        nargs="?",
        const=",".join(map(str, CLASSES)),
        help=f"losses with proxies instead; how many classes, out of {', '.join(map(str, CLASSES))} (all of them)",
    )
    options = parse(parser, COLUMNS)
    warnings.filterwarnings("ignore")
    try:
        import pytorch_metric_learning as peer
        from pytorch_metric_learning import distances, losses, miners  # noqa: F401
    except ImportError:
        peer = None
        print("pytorch-metric-learning is not installed: no comparison", file=sys.stderr)
    clock = Clock(options.device)
    if not clock.cuda:
        limit_memory(options.memory)
        reuse_memory()  # as nearfar's commands do; the peer gets it, too
    rows = []
    for measure in plan(options, peer, clock):
        row = measure()
        rows.append(row)
        show_line(row)
    report(rows, COLUMNS, clock, options.out)


if __name__ == "__main__":
    main()
