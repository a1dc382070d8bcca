"""One step of training: from a batch to the next parameters, without a word from the device to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from nearfar.data.loader import Batch
from nearfar.networks import batchnorm
from nearfar.networks.embedder import Embedder
from nearfar.training.loop.batchnorm_statistics import Statistics
from nearfar.training.loop.distributed import World, draws, global_loss
from nearfar.training.loop.memory import Memory
from nearfar.utils.validation import one_of, positive, whole

PRECISIONS = ("float32", "bfloat16")
ByLevel = dict[str, Tensor]
Seed = tuple[int, int] | None  # of a step and a member


@dataclass
class Member:
    """A network with the losses it learns by: one for each of its levels.

    Args:
        network: What learns.
        losses: By level.
        memories: By level, of earlier embeddings; empty where there are none, or not yet.
        embed: From images to the embeddings of each level; the network's own unless told (a compiled one, say).
    """

    network: Embedder
    losses: Mapping[str, nn.Module]
    memories: Mapping[str, Memory] = field(default_factory=dict)
    embed: Callable[[Tensor], ByLevel] | None = None

    def __post_init__(self) -> None:
        if self.embed is None:
            self.embed = self.network.levels_forward

    def parameters(self) -> list[nn.Parameter]:
        """Those of the network and of its losses."""
        modules = [self.network, *self.losses.values()]
        return list(dict.fromkeys(each for module in modules for each in module.parameters()))


@dataclass(frozen=True)
class Outcome:
    """What a step tells, on the device: reading it makes the host wait.

    Args:
        loss: The loss of the batch; summed over levels, averaged over the members of an ensemble.
        finite: Whether loss and gradient were numbers.
    """

    loss: Tensor
    finite: Tensor


class Step:
    """Forward, loss, backward, clipping and update.

    A loss or gradient that is no number changes nothing: fused optimisers look at the flag on the device, and on a CPU
    the host does; batch norms forget what they saw. Whether a training goes on after that is for who reads the outcome
    to say. An optimiser that is not fused can be masked on a GPU only by a host that waits for the flag, so that it
    does only if ``skip``.

    Args:
        members: Of an ensemble, each learning on its own; or just one.
        optimizer: Has the parameters of all members.
        world: The processes that share the batch.
        precision: "float32", or "bfloat16" by autocast. Losses are computed in float32.
        channels_last: How pictures lie in memory.
        clip: Largest norm of a member's gradient; None: any.
        chunk: Pictures that go through the network together; None: the whole batch. The gradient is that of
            the whole batch: embeddings first, then the loss of all, then each chunk once more, backwards.
        skip: Whether training goes on after a step that was not finite.

    >>> from nearfar import losses, networks
    >>> network = networks.create("linear", in_dim=4, dim=2)
    >>> member = Member(network, {"high": losses.create("contrastive")})
    >>> step = Step([member], torch.optim.SGD(network.parameters(), lr=0.1))
    >>> batch = Batch(torch.randn(6, 4), torch.tensor([0, 0, 1, 1, 2, 2]), torch.arange(6))
    >>> bool(step(batch).finite)
    True
    """

    def __init__(
        self,
        members: Sequence[Member],
        optimizer: torch.optim.Optimizer,
        *,
        world: World | None = None,
        precision: str = "float32",
        channels_last: bool = True,
        clip: float | None = None,
        chunk: int | None = None,
        skip: bool = True,
    ) -> None:
        if not members:
            raise ValueError("members is empty; there is nothing to train")
        self.members, self.optimizer = tuple(members), optimizer
        self.world = world or World()
        self.precision = one_of("precision", precision, PRECISIONS)
        self.channels_last = channels_last
        self.clip = None if clip is None else positive("clip", clip)
        self.chunk = None if chunk is None else whole("chunk", chunk)
        if self.chunk is not None:
            for member in self.members:
                check_chunks(member.network)
        self.skip = skip
        self._parameters = [member.parameters() for member in self.members]
        self._norms = [layer for member in self.members for layer in batchnorm.layers(member.network)]
        self._fused = masks_updates(optimizer)
        if self._fused:
            seed_momentum(optimizer)

    def __call__(self, batch: Batch, *, seed: int | None = None) -> Outcome:
        """Learn from a batch.

        Args:
            seed: What losses draw depends on it alone, and so is the same in all processes; another one for each
                step, please. None: they go on with torch's own generator.
        """
        self.optimizer.zero_grad(set_to_none=True)
        images = batch.images
        if self.channels_last and images.ndim == 4:
            images = images.contiguous(memory_format=torch.channels_last)
        chunked = self.chunk is not None and self.chunk < len(batch)
        backward = self._in_chunks if chunked else self._at_once
        seeds = [None if seed is None else (seed, number) for number in range(len(self.members))]
        statistics = Statistics(self._norms)
        values = [backward(member, images, batch.labels, seeds[number]) for number, member in enumerate(self.members)]
        norms = [self._finish(parameters) for parameters in self._parameters]
        loss = values[0] if len(values) == 1 else torch.stack(values).mean()
        finite = torch.stack([loss, *norms]).isfinite().all()
        self._update(finite)
        statistics.put_back(unless=finite)
        return Outcome(loss, finite)

    # --- gradients ---------------------------------------------------------------------------------------------

    def _at_once(self, member: Member, images: Tensor, labels: Tensor, seed: Seed) -> Tensor:
        assert member.embed is not None
        with autocast(images.device, self.precision):
            embeddings = member.embed(images)
        value = self._loss(member, embeddings, labels, seed)
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    def _in_chunks(self, member: Member, images: Tensor, labels: Tensor, seed: Seed) -> Tensor:
        assert self.chunk is not None
        assert member.embed is not None
        chunks = torch.split(images, self.chunk)
        states, found = [], []
        with torch.no_grad():
            for chunk in chunks:
                states.append(_random_state(images.device))
                with autocast(images.device, self.precision):
                    found.append(member.embed(chunk))
        leaves = {level: torch.cat([one[level] for one in found]).requires_grad_() for level in found[0]}
        value = self._loss(member, leaves, labels, seed)
        value.backward()  # type: ignore[no-untyped-call]
        after = _random_state(images.device)
        for number, chunk in enumerate(chunks):
            _set_random_state(states[number], images.device)  # the same dropout as the first time
            with autocast(images.device, self.precision):
                again = member.embed(chunk)
            rows = slice(number * self.chunk, number * self.chunk + len(chunk))
            # Without a head, nothing of a network learns while its backbone sleeps.
            learn = {level: leaf.grad[rows] for level, leaf in leaves.items() if leaf.grad is not None}
            learn = {level: grad for level, grad in learn.items() if again[level].requires_grad}
            if learn:
                torch.autograd.backward([again[level] for level in learn], list(learn.values()))
        _set_random_state(after, images.device)
        return value.detach()

    def _loss(self, member: Member, embeddings: ByLevel, labels: Tensor, seed: Seed) -> Tensor:
        """The sum of the levels' losses of the global batch."""
        embeddings, strange = self._checked(embeddings)
        values = []
        for number, (level, points) in enumerate(embeddings.items()):
            loss, memory = member.losses[level], member.memories.get(level)
            start = None if seed is None or not draws(loss) else mixed(*seed, number)
            if memory is None:
                values.append(global_loss(loss, points, labels, self.world, seed=start))
                continue

            def remembering(points: Tensor, labels: Tensor, loss: nn.Module = loss, memory: Memory = memory) -> Tensor:
                value = memory.loss(loss, points, labels)
                memory.add(points, labels)
                return value

            values.append(global_loss(remembering, points, labels, self.world, seed=start))
        value = values[0] if len(values) == 1 else torch.stack(values).sum()
        return value * torch.nan if strange else value

    def _checked(self, embeddings: ByLevel) -> tuple[ByLevel, bool]:
        """On a CPU, losses refuse what is no number; here such a batch is one that counts as strange."""
        if next(iter(embeddings.values())).device.type != "cpu":
            return embeddings, False
        fine = all(bool(points.detach().isfinite().all()) for points in embeddings.values())
        if not self.world.any(not fine):
            return embeddings, False
        return {level: points.nan_to_num(0.0, 0.0, 0.0) for level, points in embeddings.items()}, True

    # --- update ------------------------------------------------------------------------------------------------

    def _finish(self, parameters: list[nn.Parameter]) -> Tensor:
        """Sum the gradients of all processes, clip them, and give their norm before."""
        parameters = [each for each in parameters if each.grad is not None]
        self.world.reduce_gradients(parameters)
        norm = get_total_norm([each.grad for each in parameters if each.grad is not None])
        if self.clip is not None:
            clip_grads_with_norm_(parameters, self.clip, norm)
        return norm

    def _update(self, finite: Tensor) -> None:
        if self._fused:
            self.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
            self.optimizer.step()
        elif (finite.is_cuda and not self.skip) or bool(finite):
            self.optimizer.step()


def mixed(*numbers: int) -> int:
    """A seed made of several numbers, far from that of any others.

    >>> mixed(0, 1) == mixed(0, 1), mixed(0, 1) == mixed(1, 0)
    (True, False)
    """
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Work in ``precision``; float32 whatever a context around it says."""
    if precision == "float32":
        return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def masks_updates(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimiser leaves everything as it is when a flag on the device says so: fused ones on a GPU do."""
    on_gpu = all(each.is_cuda for each in _parameters(optimizer.param_groups))
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return on_gpu and bool(fused) and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def seed_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Let SGD's momentum begin at zero, which gives the same first step.

    Otherwise the buffers of a first step that is masked would hold whatever was in memory, and a parameter that wakes
    up later than others of its group would have none.
    """
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def check_chunks(network: nn.Module) -> None:
    """Refuse networks whose embeddings depend on which pictures go through them together."""
    was = network.training
    network.train()
    alive = sum(layer.training for layer in batchnorm.layers(network))
    network.train(was)
    if alive:
        raise ValueError(
            f"training.chunk is set and {alive} batch norms of the network take statistics of what they see, so that "
            "chunks would change the result; set network.freeze_batchnorm = true, or leave chunk out"
        )


def _parameters(groups: Iterable[dict[str, Any]]) -> Iterable[nn.Parameter]:
    return (parameter for group in groups for parameter in group["params"])


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_random_state(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
