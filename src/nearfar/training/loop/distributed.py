"""Distributed training: several processes make the update of a single process on the same global batch.

``torchrun`` starts a process for each GPU. All build the same network and the same loss, each embeds its share of
the batch, and :func:`global_loss` gives each the gradient of the loss of the *whole* batch with respect to its share.
The sum over the processes is the gradient with respect to the network's parameters.

How the work is divided depends on what the class of the loss declares (``mean_over_anchors``, ``deterministic`` and
``shared_columns``, see :class:`nearfar.losses.Loss`). There are three modes:

==========  =========================================================  ============================================
mode        losses                                                     why it is exact
==========  =========================================================  ============================================
columns     ``raw``, ``multi_similarity``, ``binomial_deviance``,      a mean over all anchors of what each sees in
            ``n_pair``, ``lifted_structure_generalized``,              its row: anchors are local, columns are
            ``contrastive`` averaged over anchors, ``ranked_list``     gathered, and the mean of equal shares is the
            with equal queries; with minings that draw no random       mean of all
            numbers
rows        classification losses (``ClassificationLoss``) against     a mean over embeddings of what each sees of
            all classes                                                the proxies: embeddings are not exchanged
whole       all others: means over pairs, over anchors with a          every process computes the loss of the whole
            positive or over the classes of the batch, histograms,     batch and keeps its part of the gradient; only
            clusterings, Proxy-Anchor, Group, sampled classes,         the order of summation can differ
            losses that declare nothing
==========  =========================================================  ============================================
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn

from nearfar import losses
from nearfar.utils.tensors import as_device
from nearfar.utils.validation import one_of

CPU = torch.device("cpu")
TIMEOUT = timedelta(hours=2)  # the other processes wait while the main one evaluates
BUCKET = 1 << 24  # gradient entries that are reduced together


@dataclass(frozen=True)
class World:
    """The processes of a run, and the rank of this one.

    In a world of one process, the methods return their arguments.

    Args:
        rank: The number of this process.
        ranks: The number of processes.
        device: The device of this process.

    Example:
        >>> single = World()
        >>> single.is_main, single.any(False)
        (True, False)
    """

    rank: int = 0
    ranks: int = 1
    device: torch.device = CPU

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def gather(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gather the embeddings and labels of all processes.

        The gradient of each embedding is the sum over all processes, so all of them must run the backward pass.

        Args:
            embeddings: [m, d], the same number of rows in each process.
            labels: [m].

        Returns:
            All embeddings, all labels, and the positions of this process's rows among them.
        """
        positions = torch.arange(len(labels), device=embeddings.device) + self.rank * len(labels)
        if self.ranks == 1:
            return embeddings, labels, positions
        return _Gather.apply(self, embeddings), self._collect(labels), positions  # type: ignore[no-untyped-call]

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace the gradients of parameters by their sums over all processes."""
        if self.ranks == 1:
            return
        for bucket in _buckets([p.grad for p in parameters if p.grad is not None]):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            distributed.all_reduce(flat)
            start = 0
            for gradient in bucket:
                gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
                start += gradient.numel()

    @torch.no_grad()
    def broadcast(self, *modules: nn.Module) -> None:
        """Copy parameters and buffers from the main process to all others."""
        for module in modules if self.ranks > 1 else ():
            for tensor in (*module.parameters(), *module.buffers()):
                here = tensor.detach().to(self.device).contiguous()
                distributed.broadcast(here, src=0)
                tensor.copy_(here)

    def share(self, value: Any) -> Any:
        """Return the main process's value in all processes; any plain value."""
        if self.ranks == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, src=0, device=CPU)
        return box[0]

    def any(self, flag: bool) -> bool:
        """Whether the flag is true in any process."""
        if self.ranks == 1:
            return flag
        votes = torch.tensor(int(flag))
        distributed.all_reduce(votes, op=distributed.ReduceOp.MAX)
        return bool(votes)

    def close(self) -> None:
        """Leave the process group."""
        if self.ranks > 1 and distributed.is_initialized():
            distributed.destroy_process_group()

    def _collect(self, rows: Tensor) -> Tensor:
        """Gather the rows of all processes, without gradient."""
        rows = rows.detach().contiguous()
        everyone = rows.new_empty((self.ranks * len(rows), *rows.shape[1:]))
        distributed.all_gather(list(everyone.chunk(self.ranks)), rows)
        return everyone


def init_world(device: str = "auto") -> World:
    """Join the processes that ``torchrun`` describes in the environment; without it, return a world of one.

    Args:
        device: "cuda", "cpu", or "auto": a GPU for each process if there are any. ``"cuda:1"`` and the like are for
            a single process.
    """
    kind = as_device("training.device", device)
    rank, ranks = (int(os.environ.get(name, fallback)) for name, fallback in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if ranks == 1:
        return World(device=kind)
    if kind.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", rank))
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"process {rank} has local rank {local}, and this machine has {torch.cuda.device_count()} GPUs; "
                "start as many processes as there are GPUs: torchrun --nproc-per-node"
            )
        kind = torch.device("cuda", local)
        torch.cuda.set_device(kind)
    if not distributed.is_initialized():
        # Flags and plain values go through gloo and never wait for a GPU.
        backend = "cpu:gloo,cuda:nccl" if kind.type == "cuda" else "gloo"
        distributed.init_process_group(backend, timeout=TIMEOUT)
    return World(rank, ranks, kind)


LossFunction = Callable[[Tensor, Tensor], Tensor]


def draws(loss: LossFunction) -> bool:
    """Whether a loss may draw random numbers: anchors, negatives or classes. Any other function may.

    >>> draws(losses.create("raw")), draws(losses.create("raw", mining="random"))
    (False, True)
    """
    return not isinstance(loss, losses.Loss) or loss.draws


def sharing_mode(loss: LossFunction) -> str:
    """How processes share a loss: "columns", "rows" or "whole", as the table above says.

    >>> sharing_mode(losses.create("raw")), sharing_mode(losses.create("triplet"))
    ('columns', 'whole')
    >>> sharing_mode(losses.create("softmax", num_classes=3, dim=2))
    'rows'
    """
    if not isinstance(loss, losses.Loss) or loss.draws or not loss.mean_over_anchors:
        return "whole"
    return "columns" if loss.shared_columns else "rows"


def global_loss(
    loss: LossFunction,
    embeddings: Tensor,
    labels: Tensor,
    world: World,
    *,
    seed: int | None = None,
    how: str | None = None,
) -> Tensor:
    """Compute the loss of the global batch in every process.

    After ``backward`` in every process, :meth:`World.reduce_gradients` over the parameters of network and loss gives
    exactly the gradients of a single process. In a world of one it is ``loss(embeddings, labels)``.

    Args:
        loss: A loss, or any function of all embeddings and labels, [M, d] and [M] (such as a loss with a memory
            as gallery that is the same in all processes).
        embeddings: [m, d], this process's share; the same number of rows in each process.
        labels: [m], their labels.
        world: The processes.
        seed: Seed of what the loss draws (anchors, negatives, classes). None: torch's global generator, which must
            then be in the same state in all processes.
        how: "columns", "rows" or "whole" instead of what :func:`sharing_mode` returns; for tests.
    """
    with _seeded(seed, embeddings.device):
        if world.ranks == 1:
            return loss(embeddings, labels)
        how = sharing_mode(loss) if how is None else one_of("how", how, ("columns", "rows", "whole"))
        if how == "whole":
            before, own, after = _pieces(world, embeddings)
            everyone = torch.cat([before, _Scaled.apply(own, world.ranks), after])  # type: ignore[no-untyped-call]
            value = loss(everyone, world._collect(labels))
            # Parameters of the loss have their full gradient in every process, and gradients are summed over processes.
            shared: Tensor = _Scaled.apply(value, 1.0 / world.ranks)  # type: ignore[no-untyped-call]
            return shared
        if how == "columns":
            gallery, gallery_labels, positions = world.gather(embeddings, labels)
            assert isinstance(loss, losses.Loss)
            part = loss(embeddings, labels, gallery, gallery_labels, positions=positions) / world.ranks
        else:
            part = loss(embeddings, labels) / world.ranks
    total = part.detach().clone()
    distributed.all_reduce(total)
    whole: Tensor = part + (total - part.detach())
    return whole


class _Gather(torch.autograd.Function):
    """Gathers the rows of all processes; backward sums their gradients over all processes."""

    @staticmethod
    def forward(ctx: Any, world: World, rows: Tensor) -> Tensor:
        ctx.world = world
        return world._collect(rows)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[None, Tensor]:
        total = incoming[0].contiguous().clone()
        distributed.all_reduce(total)
        return None, total.chunk(ctx.world.ranks)[ctx.world.rank]


class _Scaled(torch.autograd.Function):
    """The identity, whose backward multiplies the gradient by a factor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor, None]:
        return incoming[0] * ctx.factor, None


def _pieces(world: World, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows of the processes before this one, its own with their autograd graph, and those after it."""
    everyone, start = world._collect(rows), world.rank * len(rows)
    return everyone[:start], rows, everyone[start + len(rows) :]


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Group gradients of the same dtype and device up to a size: few messages, little memory."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in gradients:
        bucket = kinds.setdefault((gradient.dtype, gradient.device), [])
        bucket.append(gradient)
        if sum(one.numel() for one in bucket) >= BUCKET:
            yield kinds.pop((gradient.dtype, gradient.device))
    yield from kinds.values()


@contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draw random numbers from a seed, and restore the generators afterwards."""
    if seed is None:
        yield
        return
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        # torch.manual_seed would record a stack trace for devices that are not initialized yet.
        torch.default_generator.manual_seed(seed)
        if cuda:
            index = torch.cuda.current_device() if device.index is None else device.index
            torch.cuda.default_generators[index].manual_seed(seed)
        yield
