"""Losses that have fused kernels, and their errors against float64 in PyTorch.

As a script, in Triton's interpreter, it answers each line of options with a line of errors:

echo '{"size": 37, "dim": 16}' | TRITON_INTERPRET=1 python tests/helpers/fused_cases.py
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

import nearfar as nf
from nearfar.engine import triton_kernels
from nearfar.losses import create

CLASSES = 7
MOST_POSITIVES = triton_kernels.MOST_POSITIVES
ENTRIES = "evaluate", "hard_pairs", "semi_hard_pairs", "all_triplets"
CASES = {
    "multi_similarity": partial(create, "multi_similarity"),
    "raw": partial(create, "raw"),
    "raw, hard": partial(create, "raw", mining="hard"),
    "contrastive": partial(create, "contrastive"),
    "contrastive, pairs": partial(create, "contrastive", average="pairs", mining="valid_triplet"),
    "contrastive, distance": partial(create, "contrastive", form="distance"),
    "contrastive, distance, raw vectors": partial(
        create, "contrastive", form="distance", average="pairs", normalize=False
    ),
    "binomial_deviance": partial(create, "binomial_deviance"),
    "sup_con": partial(create, "sup_con"),
    "nt_xent": partial(create, "nt_xent"),
    "nt_xent, symmetric": partial(create, "nt_xent", symmetric=True, mining="valid_triplet"),
    "nt_xent, learned, hard": partial(create, "nt_xent", learn_temperature=True, mining="hard"),
    "lifted_structure_generalized": partial(create, "lifted_structure_generalized"),
    "ranked_list": partial(create, "ranked_list"),
    "ranked_list, violation": partial(create, "ranked_list", query_weighting="violation"),
    "circle": partial(create, "circle"),
    "margin, all": partial(create, "margin", mining="all"),
    "margin, classes": partial(create, "margin", mining="valid_triplet", num_classes=CLASSES),
    "margin, hard": partial(create, "margin", mining="hard"),
    "margin, semi_hard": partial(create, "margin", mining="semi_hard"),
    "raw, semi_hard": partial(create, "raw", mining="semi_hard"),
    "triplet, semi_hard": partial(create, "triplet"),
    "triplet, semi_hard, active": partial(
        create, "triplet", mining={"name": "semi_hard", "fallback": "none"}, average="active", form="distance"
    ),
    "triplet, all": partial(create, "triplet", mining="all"),
    "triplet, all, active": partial(create, "triplet", mining="all", average="active", form="distance"),
    "triplet, all, soft": partial(create, "triplet", mining="all", soft_margin=True),
    "triplet, all, soft, raw vectors": partial(
        create, "triplet", mining="all", form="squared_distance", soft_margin=True, normalize=False
    ),
    "triplet, hard": partial(create, "triplet", mining="hard"),
    "triplet, hard, distance": partial(create, "triplet", mining="hard", form="distance", normalize=False),
    "triplet, hard, soft": partial(create, "triplet", mining="hard", form="squared_distance", soft_margin=True),
}
OTHERS = {  # have none
    "triplet, valid_triplet": partial(create, "triplet", mining="valid_triplet"),
    "triplet, hard, snr": partial(create, "triplet", mining="hard", form="snr"),
    "contrastive, snr": partial(create, "contrastive", form="snr"),
    "nt_xent, learned": partial(create, "nt_xent", learn_temperature=True),
    "raw, random": partial(create, "raw", mining="random"),
}


class Batch(NamedTuple):
    """Arguments of a loss; gallery, its labels and positions may be None."""

    embeddings: Tensor
    labels: Tensor
    gallery: Tensor | None
    gallery_labels: Tensor | None
    positions: Tensor | None


def make_batch(size, dim, *, gallery=0, classes=CLASSES, seed=0, equal=True):
    """Classes that overlap, one with a single member, and two equal embeddings; some anchors are in the gallery."""
    draw = torch.Generator().manual_seed(seed)
    centers = torch.randn(classes, dim, generator=draw)

    def members(count):
        labels = torch.randint(0, classes - 1, (count,), generator=draw)
        return centers[labels] + torch.randn(count, dim, generator=draw), labels

    embeddings, labels = members(size)
    labels[0] = classes - 1
    if equal:
        first, second = (labels.unsqueeze(1) == labels).triu(1).nonzero()[0]
        embeddings[second] = embeddings[first]
    if not gallery:
        return Batch(embeddings, labels, None, None, None)
    columns, column_labels = members(gallery)
    known = torch.randperm(size, generator=draw)[: gallery // 2]
    columns[: len(known)], column_labels[: len(known)] = embeddings[known], labels[known]
    positions = torch.full((size,), -1).index_put_((known,), torch.arange(len(known)))
    return Batch(embeddings, labels, columns, column_labels, positions)


def outcome(loss, batch, dtype, device="cpu", *, chunk=None):
    """The loss and its gradients by embeddings, gallery and parameters.

    With a size of chunks, the gallery gets no gradient, and the memory budget allows for so many columns at a time.
    """
    loss = loss.to(device, dtype)
    if chunk is not None:
        loss.memory_budget = 8 * batch.embeddings.shape[1] * chunk
    tensors = [None if tensor is None else tensor.to(device) for tensor in batch]
    embeddings, labels, gallery, gallery_labels, positions = tensors
    leaves = [embeddings.to(dtype, copy=True).requires_grad_()]
    if gallery is not None:
        leaves.append(gallery.to(dtype, copy=True).requires_grad_(chunk is None))
    value = loss(leaves[0], labels, *(leaves[1:] and [leaves[1], gallery_labels]), positions=positions)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    found = torch.autograd.grad(value, [*wanted, *loss.parameters()], allow_unused=True)
    return [value.detach(), *(gradient for gradient in found if gradient is not None)]


def errors(found, expected):
    """Relative errors of the loss and of each gradient."""
    pairs = zip(found, expected, strict=True)
    return [float((a.double().cpu() - b.cpu()).norm() / b.norm().cpu().clamp(min=1e-30)) for a, b in pairs]


@contextmanager
def kernels(precision="float32"):
    """Use the kernels; yields what they were called for."""
    called = []

    def spy(original):
        def replacement(*arguments, **named):
            called.append(original.__name__)
            return original(*arguments, **named)

        return replacement

    nf.engine.use_triton(precision=precision)
    try:
        with patch.multiple(triton_kernels, **{name: spy(getattr(triton_kernels, name)) for name in ENTRIES}):
            yield called
    finally:
        nf.engine.use_triton(None)


def errors_of_cases(given):
    """The errors of some cases; of cases that did not use the kernels, none."""
    defaults = {"gallery": 0, "precision": "float32", "only": list(CASES), "chunk": None}
    options = {**defaults, "most_positives": MOST_POSITIVES, **given}
    triton_kernels.MOST_POSITIVES = options["most_positives"]
    found = {}
    for name in options["only"]:
        # Of two equal embeddings, mining may select either, as products round; only one of them gets the gradient.
        equal = "hard" not in name
        batch = make_batch(options["size"], options["dim"], gallery=options["gallery"], equal=equal)
        loss = (CASES | OTHERS)[name]
        with kernels(options["precision"]) as called:
            ours = outcome(loss(), batch, torch.float32, chunk=options["chunk"])
        expected = outcome(loss(), batch, torch.float64, chunk=options["chunk"])
        found[name] = errors(ours, expected) if called else []
    return found


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(errors_of_cases(json.loads(line))), flush=True)
