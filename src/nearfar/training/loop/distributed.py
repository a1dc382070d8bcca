"""Many processes as one: the update is that of a single process on the same global batch.

``torchrun`` starts a process for each GPU. All build the same network and the same loss, each embeds its share of
the batch, and :func:`global_loss` gives each the gradient of the loss of the *whole* batch by its own share. Summed
over the processes that is the gradient by the network's parameters.

How a loss is shared depends on what it divides by. There are three ways:

==========  =========================================================  ============================================
way         which losses                                               why it is exact
==========  =========================================================  ============================================
columns     ``raw``, ``multi_similarity``, ``binomial_deviance``,      a mean over all anchors of what each sees in
            ``n_pair``, ``lifted_structure_generalized``,              its row: anchors are local, columns are
            ``contrastive`` averaged over anchors, ``ranked_list``     gathered, and the mean of equal shares is the
            with equal queries; with minings that do not draw          mean of all
rows        softmax and its kin (``ClassificationLoss``) against       a mean over embeddings of what each sees of
            all classes                                                the proxies: embeddings need not travel
whole       all others: means over pairs, over anchors with a          every process computes the loss of the whole
            positive or over the classes of the batch, histograms,     batch, and its own part of the gradient goes
            clusterings, Proxy-Anchor, Group, sampled classes, losses  on; nothing can differ but the order of sums
            of one's own
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
from nearfar.utils.inputs import as_device
from nearfar.utils.validation import one_of

CPU = torch.device("cpu")
LONGEST_WAIT = timedelta(hours=2)  # others wait while the main process evaluates
BUCKET = 1 << 24  # numbers of gradients that travel together


@dataclass(frozen=True)
class World:
    """The processes of a run, and which of them this is.

    A world of one has nobody to talk to: its methods return what they get.

    >>> alone = World()
    >>> alone.is_main, alone.any(False)
    (True, False)
    """

    rank: int = 0
    ranks: int = 1
    device: torch.device = CPU

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return self.rank == 0

    def gather(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The embeddings and labels of all processes, and where this one's own stand among them.

        Every process must bring the same number of rows. Gradients go back to where the embeddings came from, those
        of all processes summed up; so all of them must go backward.
        """
        positions = torch.arange(len(labels), device=embeddings.device) + self.rank * len(labels)
        if self.ranks == 1:
            return embeddings, labels, positions
        return _Gather.apply(self, embeddings), self._collect(labels), positions  # type: ignore[no-untyped-call]

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace the gradients by their sums over all processes."""
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
        """Give all processes the parameters and buffers of the main one."""
        for module in modules if self.ranks > 1 else ():
            for tensor in (*module.parameters(), *module.buffers()):
                here = tensor.detach().to(self.device).contiguous()
                distributed.broadcast(here, src=0)
                tensor.copy_(here)

    def share(self, value: Any) -> Any:
        """What the main process says, for all: any plain value."""
        if self.ranks == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, src=0, device=CPU)
        return box[0]

    def any(self, flag: bool) -> bool:
        """Whether any process says yes."""
        if self.ranks == 1:
            return flag
        votes = torch.tensor(int(flag))
        distributed.all_reduce(votes, op=distributed.ReduceOp.MAX)
        return bool(votes)

    def close(self) -> None:
        """Leave; after this there is nobody to talk to."""
        if self.ranks > 1 and distributed.is_initialized():
            distributed.destroy_process_group()

    def _collect(self, rows: Tensor) -> Tensor:
        """The rows of all processes, without gradient."""
        rows = rows.detach().contiguous()
        everyone = rows.new_empty((self.ranks * len(rows), *rows.shape[1:]))
        distributed.all_gather(list(everyone.chunk(self.ranks)), rows)
        return everyone


def world(device: str = "auto") -> World:
    """The world ``torchrun`` describes in the environment; of one process where it does not.

    Args:
        device: "cuda", "cpu", or "auto": a GPU of its own for every process where there is one. ``"cuda:1"`` and the
            like are for a single process.
    """
    kind = as_device("training.device", device)
    rank, ranks = (int(os.environ.get(name, fallback)) for name, fallback in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if ranks == 1:
        return World(device=kind)
    if kind.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", rank))
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"process {rank} is number {local} of its machine, which has {torch.cuda.device_count()} GPUs; "
                "start as many processes as there are GPUs: torchrun --nproc-per-node"
            )
        kind = torch.device("cuda", local)
        torch.cuda.set_device(kind)
    if not distributed.is_initialized():
        # What the host says (flags, plain values) goes through gloo, and never waits for a GPU.
        backend = "cpu:gloo,cuda:nccl" if kind.type == "cuda" else "gloo"
        distributed.init_process_group(backend, timeout=LONGEST_WAIT)
    return World(rank, ranks, kind)


LossFunction = Callable[[Tensor, Tensor], Tensor]


def draws(loss: LossFunction) -> bool:
    """Whether a loss may draw random numbers: anchors, negatives or classes. Any other function may.

    >>> draws(losses.create("raw")), draws(losses.create("raw", mining="random"))
    (False, True)
    """
    return not isinstance(loss, losses.Loss) or loss.draws


def way(loss: LossFunction) -> str:
    """How processes share a loss: "columns", "rows" or "whole", as the table above says.

    >>> way(losses.create("raw")), way(losses.create("triplet"))
    ('columns', 'whole')
    >>> way(losses.create("softmax", num_classes=3, dim=2))
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
    """The loss of the global batch, on every process.

    After ``backward`` on every process, :meth:`World.reduce_gradients` over the parameters of network and loss gives
    exactly what a single process would have. With a world of one it is ``loss(embeddings, labels)``.

    Args:
        loss: A loss, or any function of all embeddings and labels, [M, d] and [M] (such as a loss with a memory
            as gallery that all processes have alike).
        embeddings: [m, d], this process's share, as many rows on each.
        seed: What the loss draws (anchors, negatives, classes) depends on it alone. None: it goes on with
            torch's own generator, which must then stand at the same place on all processes.
        how: "columns", "rows" or "whole" instead of what :func:`way` says; for tests.
    """
    with _drawing(seed, embeddings.device):
        if world.ranks == 1:
            return loss(embeddings, labels)
        how = way(loss) if how is None else one_of("how", how, ("columns", "rows", "whole"))
        if how == "whole":
            before, own, after = _pieces(world, embeddings)
            everyone = torch.cat([before, _Scaled.apply(own, world.ranks), after])  # type: ignore[no-untyped-call]
            value = loss(everyone, world._collect(labels))
            # Parameters of the loss have their whole gradient on every process, and the sum over them is wanted.
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
    """Rows of all processes; each gets the sum of what all of them want of its own."""

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
    """The same value with a gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor, None]:
        return incoming[0] * ctx.factor, None


def _pieces(world: World, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of processes before this one, its own with their history, those of processes after it."""
    everyone, start = world._collect(rows), world.rank * len(rows)
    return everyone[:start], rows, everyone[start + len(rows) :]


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients of one kind together, up to a size: few messages, little memory."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in gradients:
        bucket = kinds.setdefault((gradient.dtype, gradient.device), [])
        bucket.append(gradient)
        if sum(one.numel() for one in bucket) >= BUCKET:
            yield kinds.pop((gradient.dtype, gradient.device))
    yield from kinds.values()


@contextmanager
def _drawing(seed: int | None, device: torch.device) -> Iterator[None]:
    """Random numbers from a seed, leaving the generators as they were."""
    if seed is None:
        yield
        return
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        # Each generator by itself: torch.manual_seed notes the stack for every GPU that may turn up later.
        torch.default_generator.manual_seed(seed)
        if cuda:
            index = torch.cuda.current_device() if device.index is None else device.index
            torch.cuda.default_generators[index].manual_seed(seed)
        yield
