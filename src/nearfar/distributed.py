"""Distributed training: several processes make the update of a single process on the same global batch.

``torchrun`` starts a process for each GPU. All build the same network and the same loss, each embeds its share of
the batch, and :func:`global_loss` gives each the loss of the *whole* batch. Gradients are then averaged over the
processes, as ``DistributedDataParallel`` does. To let it average the gradients of the loss too (proxies and other
parameters), wrap network and loss together:

>>> class Model(nn.Module):
...     def __init__(self, network, loss):
...         super().__init__()
...         self.network, self.loss = network, loss
...
...     def forward(self, inputs, labels, step):
...         return global_loss(self.loss, self.network(inputs), labels, seed=step)
>>> model = Model(nn.Linear(8, 4), losses.ProxyAnchor(num_classes=3, dim=4))  # or DistributedDataParallel(Model(...))
>>> model(torch.randn(6, 8), torch.arange(6) % 3, step=0).backward()

How the work is divided depends on what the class of the loss declares (``mean_over_anchors``, ``deterministic`` and
``shared_columns``, see :class:`nearfar.losses.Loss`). There are four modes:

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
classes     losses whose classes :func:`shard_classes` has             every process compares all embeddings with its
            distributed over the processes                             proxies; only numbers per embedding are summed
==========  =========================================================  ============================================
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.utils import get_total_norm

from nearfar import losses
from nearfar.engine.classes import ClassShard
from nearfar.supervision import Hierarchy, Masks, MultiLabel, Pairs, Supervision, Triplets
from nearfar.utils.tensors import as_device, readable

__all__ = ["World", "current_world", "gather", "global_loss", "init_world", "shard_classes"]

CPU = torch.device("cpu")
TIMEOUT = timedelta(hours=2)  # the other processes wait while the main one measures embeddings
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

    def gather(self, rows: Tensor) -> Tensor:
        """Gather the rows of all processes, as :func:`gather` does."""
        if self.ranks == 1:
            return rows
        gathered: Tensor = _Gather.apply(self, rows)  # type: ignore[no-untyped-call]
        return gathered

    def stack(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all processes, [ranks, …], without gradient; their shapes must be the same."""
        if self.ranks == 1:
            return tensor.detach().unsqueeze(0)
        everyone = tensor.new_empty((self.ranks, *tensor.shape))
        distributed.all_gather(list(everyone.unbind()), tensor.detach().contiguous())
        return everyone

    def join(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the rows of all processes, in the order of the ranks, without gradient.

        Args:
            rows: The rows of this process.
            counts: The number of rows of each process.
        """
        if self.ranks == 1:
            return rows.detach()
        everyone = rows.new_empty((sum(counts), *rows.shape[1:]))
        for rank, part in enumerate(torch.split(everyone, list(counts))):
            if rank == self.rank:
                part.copy_(rows.detach())
            if len(part):
                distributed.broadcast(part, src=rank)
        return everyone

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace the gradients of parameters by their means over all processes; sharded ones are left as they are."""
        if self.ranks == 1:
            return
        whole = [p.grad for p in parameters if p.grad is not None and not isinstance(p, losses.ShardedParameter)]
        for bucket in _buckets(whole):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            distributed.all_reduce(flat)
            flat /= self.ranks
            for gradient, mean in zip(bucket, torch.split(flat, [part.numel() for part in bucket]), strict=True):
                gradient.copy_(mean.view_as(gradient))

    def gradient_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the norm of all gradients, which the processes have averaged; of sharded ones, each has a part."""
        whole: list[Tensor] = []
        sharded: list[Tensor] = []
        for parameter in parameters:
            if parameter.grad is not None:
                (sharded if isinstance(parameter, losses.ShardedParameter) else whole).append(parameter.grad)
        norm = get_total_norm(whole)
        return torch.hypot(norm, self.stack(get_total_norm(sharded)).square().sum().sqrt()) if sharded else norm

    @torch.no_grad()
    def broadcast(self, *modules: nn.Module) -> None:
        """Copy parameters and buffers from the main process to all others, except sharded parameters."""
        for module in modules if self.ranks > 1 else ():
            for tensor in (*module.parameters(), *module.buffers()):
                if isinstance(tensor, losses.ShardedParameter):
                    continue
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
        self._check_equal(rows)
        return self.stack(rows).flatten(0, 1)

    def _check_equal(self, rows: Tensor) -> None:
        """Raise if the processes have different numbers of rows. On a GPU, the host would have to wait for that."""
        if not readable(rows):
            return
        counts = torch.zeros(self.ranks, dtype=torch.int64)
        counts[self.rank] = len(rows)
        distributed.all_reduce(counts)
        if (counts != len(rows)).any():
            raise ValueError(
                f"the processes have {', '.join(map(str, counts.tolist()))} rows; all must have the same number: "
                "drop the last, smaller batch"
            )


def current_world(device: torch.device = CPU) -> World:
    """Return the processes of ``torch.distributed``; a world of one if it is not initialized.

    Args:
        device: The device of this process.

    Example:
        >>> current_world().ranks
        1
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return World(device=device)
    return World(distributed.get_rank(), distributed.get_world_size(), device)


def init_world(device: str = "auto", *, name: str = "training.device") -> World:
    """Join the processes that ``torchrun`` describes in the environment; without it, return a world of one.

    Args:
        device: "cuda", "cpu", or "auto": a GPU for each process if there are any. ``"cuda:1"`` and the like are for
            a single process.
        name: What error messages call the device.
    """
    kind = as_device(name, device)
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


LossFunction = Callable[[Tensor, Any], Tensor]


def draws(loss: LossFunction) -> bool:
    """Whether a loss may draw random numbers: anchors, negatives or classes. Any other function may.

    >>> draws(losses.create("raw")), draws(losses.create("raw", mining="random"))
    (False, True)
    """
    return not isinstance(loss, losses.Loss) or loss.draws


def sharing_mode(loss: LossFunction) -> str:
    """How processes share a loss: "columns", "rows", "whole" or "classes", as the table above says.

    >>> sharing_mode(losses.create("raw")), sharing_mode(losses.create("triplet"))
    ('columns', 'whole')
    >>> sharing_mode(losses.create("softmax", num_classes=3, dim=2))
    'rows'
    """
    if isinstance(loss, losses.ProxyLoss) and loss.shard is not None:
        return "classes"
    if not isinstance(loss, losses.Loss) or loss.draws or not loss.mean_over_anchors:
        return "whole"
    return "columns" if loss.shared_columns else "rows"


def gather(rows: Tensor) -> Tensor:
    """Gather the rows of all processes of ``torch.distributed``, with their gradients.

    The gradient of each row is the sum over all processes, so all of them must run the backward pass. Where each
    process computes a loss from the gathered rows and gradients are averaged over processes, the result is the
    gradient of the mean of these losses. :func:`global_loss` needs less time for most losses.

    Args:
        rows: [m, …], the same number of rows in each process.

    Returns:
        [ranks · m, …], in the order of the ranks.

    Example:
        >>> gather(torch.eye(2)).shape  # of a single process
        torch.Size([2, 2])
    """
    return current_world(rows.device).gather(rows)


def global_loss(
    loss: LossFunction,
    embeddings: Tensor,
    labels: Tensor | Supervision,
    *,
    seed: int | None = None,
    world: World | None = None,
) -> Tensor:
    """Compute the loss of the global batch in every process.

    After ``backward`` in every process, the mean over processes of the gradients of network and loss is exactly the
    gradient of a single process. ``DistributedDataParallel`` computes this mean, or :meth:`World.average_gradients`.
    In a single process it is ``loss(embeddings, labels)``.

    Args:
        loss: A loss, or any function of all embeddings and labels, [M, d] and [M] (such as a loss with a memory
            as gallery that is the same in all processes).
        embeddings: [m, d], this process's share; the same number of rows in each process.
        labels: [m], their labels. Or a supervision of this share: ``MultiLabel``; ``Hierarchy``, with numbers that
            mean the same in all processes; ``Pairs`` or ``Triplets`` of rows of ``embeddings``; or ``Masks``, with a
            column for each embedding of all processes, [m, ranks · m].
        seed: Seed of what the loss draws (anchors, negatives, classes), such as the number of the step. Several
            processes need it for losses that draw, so that all draw the same.
        world: The processes; those of ``torch.distributed`` by default.

    Example:
        >>> loss = losses.Contrastive()
        >>> global_loss(loss, torch.eye(2), torch.tensor([0, 1])) == loss(torch.eye(2), torch.tensor([0, 1]))
        tensor(True)
    """
    world = current_world(embeddings.device) if world is None else world
    if seed is None and world.ranks > 1 and isinstance(loss, losses.Loss) and loss.draws:
        raise ValueError(
            f"seed is None and {type(loss).__name__} may draw random numbers, which must be the same in all "
            f"{world.ranks} processes; use the number of the step as seed"
        )
    with _seeded(seed, embeddings.device):
        if world.ranks == 1:
            return loss(embeddings, labels)
        mode, start = sharing_mode(loss), world.rank * len(embeddings)
        if mode in ("classes", "whole"):
            scaled = embeddings.view_as(embeddings)
            if scaled.requires_grad:  # each process has a part of the gradient, of which a mean is taken
                scaled.register_hook(lambda gradient: gradient * world.ranks)  # type: ignore[no-untyped-call]
            if mode == "classes":
                everyone = world.gather(scaled)
            else:
                constants = world._collect(embeddings)
                everyone = torch.cat([constants[:start], scaled, constants[start + len(embeddings) :]])
            if isinstance(labels, Tensor):
                return loss(everyone, world.gather(labels))
            return loss(everyone, _shared(world, labels, embeddings, whole=True))
        if mode == "columns":
            assert isinstance(loss, losses.Loss)
            positions = torch.arange(len(embeddings), device=embeddings.device) + start
            gallery_labels = world.gather(labels) if isinstance(labels, Tensor) else None
            labels = labels if isinstance(labels, Tensor) else _shared(world, labels, embeddings, whole=False)
            part = loss(embeddings, labels, world.gather(embeddings), gallery_labels, positions=positions)
        else:
            world._check_equal(embeddings)
            part = loss(embeddings, labels)
    mean = part.detach() / world.ranks
    distributed.all_reduce(mean)
    whole: Tensor = part + (mean - part.detach())
    return whole


def _shared(world: World, given: Supervision, embeddings: Tensor, *, whole: bool) -> Supervision:
    """Return the supervision of the global batch, or of this process's embeddings with those of all as gallery."""
    if isinstance(given, MultiLabel):
        matrix = _gather_rows(world, given.matrix, embeddings)
        return MultiLabel(matrix) if whole else MultiLabel(given.matrix, matrix)
    if isinstance(given, Hierarchy):
        levels = [_gather_rows(world, level, embeddings) for level in given.levels]
        return Hierarchy(*([levels] if whole else [given.levels, levels]), weights=given.weights)
    if isinstance(given, Masks):
        needed = len(embeddings), world.ranks * len(embeddings)
        if tuple(given.positives.shape) != needed:
            raise ValueError(
                f"positives has shape {tuple(given.positives.shape)}; with {world.ranks} processes needed is "
                f"{list(needed)}, a column for each embedding of all processes"
            )
        masks = given.positives, given.negatives
        return Masks(*(_gather_rows(world, mask, embeddings) for mask in masks)) if whole else Masks(*masks)
    if not isinstance(given, (Pairs, Triplets)):
        raise TypeError(
            f"labels is a {type(given).__name__}; several processes share labels, Pairs, Triplets, Masks, MultiLabel "
            "and Hierarchy"
        )
    given.of_batch(len(embeddings), None, CPU)  # checks the rows
    start = world.rank * len(embeddings)
    if isinstance(given, Triplets):
        parts = given.anchor, given.positive, given.negative
        if whole:
            return Triplets(*_gather_lists(world, start, embeddings, *parts))
        return Triplets(given.anchor, given.positive + start, given.negative + start)
    kinds = (given.same,) if given.grades is None else (given.same, given.grades)
    if whole:
        left, right, same, *grades = _gather_lists(world, start, embeddings, given.left, given.right, *kinds)
    else:  # each member is an anchor
        left, right = torch.cat([given.left, given.right]), torch.cat([given.right, given.left]) + start
        same, *grades = (torch.cat([kind, kind]) for kind in kinds)
    return Pairs(left, right, same, others=given.others, grades=grades[0] if grades else None)


def _gather_rows(world: World, rows: Tensor, embeddings: Tensor) -> Tensor:
    """Gather what is known of each embedding; booleans travel as bytes."""
    if len(rows) != len(embeddings):
        raise ValueError(f"labels has {len(rows)} rows for {len(embeddings)} embeddings; one for each is needed")
    sent = rows.to(embeddings.device, torch.uint8 if rows.dtype == torch.bool else rows.dtype)
    return world._collect(sent).to(rows.dtype)


def _gather_lists(world: World, start: int, embeddings: Tensor, *parts: Tensor) -> Iterator[Tensor]:
    """Gather the lists of all processes, of any length, as rows of the global batch; other values stay as they are."""
    device = embeddings.device
    shifts = [start if part.dtype == torch.long else 0 for part in parts]
    table = torch.stack([part.to(device).double() + shift for part, shift in zip(parts, shifts, strict=True)], dim=1)
    sizes = world.stack(torch.tensor(table.shape, device=device))
    if bool((sizes[:, 1] != len(parts)).any()):
        raise ValueError("grades are given in some processes only; give them in all, or in none")
    longest = int(sizes[:, 0].max())
    padded = table.new_full((longest, len(parts)), -1)
    padded[: len(table)] = table
    everyone = world.stack(padded).flatten(0, 1)
    lists = everyone[everyone[:, 0] >= 0].unbind(dim=1)
    return (gathered.to(part.dtype) for gathered, part in zip(lists, parts, strict=True))


def class_bounds(num_classes: int, ranks: int) -> list[int]:
    """Return the first class of each process, and the number of classes."""
    return [rank * num_classes // ranks for rank in range(ranks + 1)]


def shard_classes(loss: losses.ProxyLoss, *, world: World | None = None) -> None:
    """Distribute the classes of a loss over the processes, as in Partial FC.

    Each process keeps the proxies of its classes, and later their gradients and optimizer state. :func:`global_loss`
    gives the loss of a single process. Create the loss on the device "meta" so that no process ever holds all proxies.
    Gradients of sharded proxies are complete: do not average them, and keep the loss out of
    ``DistributedDataParallel``.

    Args:
        loss: A cross-entropy over classes, or Proxy-Anchor; not moved to its device yet.
        world: The processes; those of ``torch.distributed`` by default.

    Example:
        >>> with torch.device("meta"):
        ...     loss = losses.ArcFace(num_classes=1000, dim=4)
        >>> shard_classes(loss)
        >>> loss.proxies.shape  # of a single process
        torch.Size([1000, 4])

    Reference:
        An et al., "Partial FC: Training 10 Million Identities on a Single Machine", ICCV Workshops 2021.
    """
    world = current_world() if world is None else world
    if loss.num_classes < world.ranks:
        raise ValueError(f"num_classes is {loss.num_classes}; each of the {world.ranks} processes needs a class")
    bounds = class_bounds(loss.num_classes, world.ranks)
    loss.keep_shard(ClassShard(bounds[world.rank], bounds[world.rank + 1], loss.num_classes, world.stack))


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


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Group gradients of the same dtype and device up to a size: few messages, little memory."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in gradients:
        bucket = kinds.setdefault((gradient.dtype, gradient.device), [])
        bucket.append(gradient)
        if sum(member.numel() for member in bucket) >= BUCKET:
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
