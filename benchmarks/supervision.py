"""Losses of given pairs against pytorch-metric-learning with the same pairs as ``indices_tuple``, in one run.

    python benchmarks/supervision.py                              # 20,000 pairs in a batch of 4,096
    python benchmarks/supervision.py --batch 1024 --pairs 5000 --dim 512

Forward and backward, half of the pairs positive. A pair has no direction: the peer gets it in both. The supervision is
built in every step, as in a training. Both take turns, so that a busy machine slows both; the ratio is that of the
medians. "difference" is that of the two gradients, relative to their largest number. Memory is the peak minus the
memory before the step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from common import Clock, Step, parse, report, show_line
from torch import Tensor

import nearfar as nf

COLUMNS = ["loss", "batch", "dim", "pairs", "ms", "peer ms", "ratio", "MiB", "peer MiB", "difference"]
Given = tuple[Tensor, Tensor, Tensor]  # left, right, same

LOSSES: dict[str, tuple[Callable[[], nf.losses.PairLoss], Callable[[Any], Any]]] = {
    "contrastive": (
        lambda: nf.losses.Contrastive(average="pairs"),
        lambda peer: peer.losses.ContrastiveLoss(1, 0.5, distance=peer.distances.CosineSimilarity()),
    ),
    "contrastive, distance": (
        lambda: nf.losses.Contrastive(form="distance", average="pairs"),
        lambda peer: peer.losses.ContrastiveLoss(0, 1, distance=peer.distances.LpDistance(power=2)),
    ),
    "triplet": (
        lambda: nf.losses.Triplet(mining="all", average="active"),
        lambda peer: peer.losses.TripletMarginLoss(0.1, distance=peer.distances.CosineSimilarity()),
    ),
    "raw": (lambda: nf.losses.Raw(), lambda peer: peer.losses.MultiSimilarityLoss(2, 50, 0.5)),
    "nt_xent": (lambda: nf.losses.NTXent(), lambda peer: peer.losses.NTXentLoss()),
    "circle": (lambda: nf.losses.Circle(), lambda peer: peer.losses.CircleLoss()),
}


def make_pairs(size: int, count: int) -> Given:
    """Different pairs of different rows, half of them positive."""
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randperm(size * (size - 1) // 2, generator=generator)[:count]
    left, right = (index[pairs] for index in torch.triu_indices(size, size, offset=1))
    return left, right, torch.arange(count) % 2 == 0


def our_step(loss: nf.losses.PairLoss, embeddings: Tensor, given: Given) -> Step:
    def step() -> None:
        embeddings.grad = None
        loss(embeddings, nf.supervision.Pairs(*given)).backward()

    return step


def their_step(loss: Any, embeddings: Tensor, given: Given) -> Step:
    left, right, same = given
    both, back = torch.cat([left, right]), torch.cat([right, left])
    chosen = torch.cat([same, same])
    indices = both[chosen], back[chosen], both[~chosen], back[~chosen]

    def step() -> None:
        embeddings.grad = None
        loss(embeddings, indices_tuple=indices).backward()

    return step


def gradient(step: Step, embeddings: Tensor) -> Tensor:
    step()
    assert embeddings.grad is not None
    return embeddings.grad


def compare(name: str, options: argparse.Namespace, peer: Any, clock: Clock) -> dict[str, Any]:
    ours, theirs = LOSSES[name]
    embeddings = torch.randn(options.batch, options.dim, generator=torch.Generator().manual_seed(1)).requires_grad_()
    given = make_pairs(options.batch, options.pairs)
    row: dict[str, Any] = {"loss": name, "batch": options.batch, "dim": options.dim, "pairs": options.pairs}
    step = our_step(ours(), embeddings, given)
    found = gradient(step, embeddings)
    row["MiB"] = clock.extra_memory(step)
    if peer is None:
        return row | {"ms": 1e3 * clock.take_turns([step], options.budget)[0]}
    peer_step = their_step(theirs(peer), embeddings, given)
    expected = gradient(peer_step, embeddings)
    row["peer MiB"] = clock.extra_memory(peer_step)
    seconds, peer_seconds = clock.take_turns([step, peer_step], options.budget)
    row |= {"ms": 1e3 * seconds, "peer ms": 1e3 * peer_seconds, "ratio": peer_seconds / seconds}
    return row | {"difference": f"{float((found - expected).abs().max() / expected.abs().max()):.0e}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--only", default="", help="only losses whose name contains this")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds for each comparison")
    options = parse(parser, COLUMNS)
    try:
        import pytorch_metric_learning as peer
        from pytorch_metric_learning import distances, losses  # noqa: F401
    except ImportError:
        peer = None
        print("pytorch-metric-learning is not installed: no comparison", file=sys.stderr)
    clock, rows = Clock("cpu"), []
    for name in LOSSES:
        if options.only in name:
            rows.append(compare(name, options, peer, clock))
            show_line(rows[-1])
    report(rows, COLUMNS, clock, options.out)


if __name__ == "__main__":
    main()
