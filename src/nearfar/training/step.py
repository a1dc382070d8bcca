"""One training step, from a batch to updated parameters, the batches ahead of it, and the log of what steps report.

Nothing here makes the host wait for a GPU: losses and flags stay on the device until :class:`StepLog` has copied them.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from nearfar.data.loader import Batch, Batches
from nearfar.distributed import World, draws, global_loss
from nearfar.losses import Memory
from nearfar.networks.backbones.base import batchnorm_layers
from nearfar.networks.embedder import Embedder
from nearfar.supervision import Supervision

SUMMARIES = 20  # of which the median is the time of a step
ByLevel = dict[str, Tensor]
Seed = tuple[int, int] | None  # of a step and a learner


@dataclass
class Learner:
    """A network and the losses it is trained with, one for each of its levels."""

    network: Embedder  # the network to train
    losses: Mapping[str, nn.Module]  # A loss for each level
    # Cross-batch memories by level; empty if there are none, or during their warm-up.
    memories: dict[str, Memory] = field(default_factory=dict)
    # Maps images to the embeddings of each level, such as a compiled version of the network's own method; None: itself.
    embed: Callable[[Tensor], ByLevel] | None = None

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the network and its losses, each once."""
        modules = [self.network, *self.losses.values()]
        return list(dict.fromkeys(each for module in modules for each in module.parameters()))


@dataclass(frozen=True)
class GivenRelations:
    """Given pairs or triplets of a batch."""

    rows: Tensor  # the rows of the batch that the loss is computed of, [u]: each item once
    supervision: Supervision  # who is a positive and who a negative of whom among them


Labels = Tensor | GivenRelations


@dataclass(frozen=True)
class StepResult:
    """The result of a step, on the device; reading it makes the host wait."""

    loss: Tensor  # the loss of the batch, summed over levels and averaged over the members of an ensemble
    finite: Tensor  # whether the loss and its gradient were finite


class TrainStep:
    """Forward pass, loss, backward pass, gradient clipping and update.

    If the loss or its gradient is NaN or infinite, the step changes nothing: fused optimizers read the flag on the
    device, on a CPU the host does, and the running statistics of batch norms are restored. The caller reads the result
    and decides whether training continues. On a GPU, an optimizer that is not fused can only be masked by a host that
    waits for the flag; this is done only if ``skip`` is set.
    """

    def __init__(
        self,
        learners: Sequence[Learner],
        optimizer: torch.optim.Optimizer,
        *,
        world: World | None = None,
        precision: str = "float32",
        channels_last: bool = True,
        clip: float | None = None,
        chunk: int | None = None,
        skip: bool = True,
        independent: bool = False,
    ) -> None:
        self.learners, self.optimizer, self.world = tuple(learners), optimizer, world or World()
        self.precision, self.channels_last, self.clip, self.chunk = precision, channels_last, clip, chunk
        self.skip, self.independent = skip, independent
        if chunk is not None:
            for learner in self.learners:
                check_chunks(learner.network)
        self._parameters = [learner.parameters() for learner in self.learners]
        self._norms = [layer for learner in self.learners for layer in batchnorm_layers(learner.network)]
        on_gpu = all(parameter.is_cuda for group in optimizer.param_groups for parameter in group["params"])
        fused = all(group.get("fused") for group in optimizer.param_groups)
        # Whether the optimizer skips its update when a flag on the device is set.
        self._fused = on_gpu and bool(fused) and bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        if self._fused:
            seed_momentum(optimizer)

    def __call__(self, batch: Batch, *, seed: int | None = None, given: GivenRelations | None = None) -> StepResult:
        """Train on a batch."""
        self.optimizer.zero_grad(set_to_none=True)
        images = batch.images
        if self.channels_last and images.ndim == 4:
            images = images.contiguous(memory_format=torch.channels_last)
        count = len(self.learners)
        shares: list[tuple[Tensor, Labels]] = [(images, batch.labels if given is None else given)] * count
        if self.independent:
            shares = list(zip(images.chunk(count), batch.labels.chunk(count), strict=True))
        chunked = self.chunk is not None and self.chunk < len(shares[0][0])
        backward = self._backward_in_chunks if chunked else self._backward
        before = BatchNormStatistics(self._norms)
        values = [
            backward(learner, *shares[number], None if seed is None else (seed, number))
            for number, learner in enumerate(self.learners)
        ]
        norms = [self._reduce_and_clip(parameters) for parameters in self._parameters]
        loss = values[0] if len(values) == 1 else torch.stack(values).mean()
        finite = torch.stack([loss, *norms]).isfinite().all()
        if self._fused:
            self.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        if self._fused or (finite.is_cuda and not self.skip) or bool(finite):
            self.optimizer.step()
        before.restore(unless=finite)
        return StepResult(loss, finite)

    # --- gradients ---------------------------------------------------------------------------------------------

    def _backward(self, learner: Learner, images: Tensor, labels: Labels, seed: Seed) -> Tensor:
        embed = learner.embed or learner.network.levels_forward
        with autocast(images.device, self.precision):
            embeddings = embed(images)
        value = self._loss(learner, embeddings, labels, seed)
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    def _backward_in_chunks(self, learner: Learner, images: Tensor, labels: Labels, seed: Seed) -> Tensor:
        assert self.chunk is not None
        embed = learner.embed or learner.network.levels_forward
        chunks = torch.split(images, self.chunk)
        states, passes = [], []
        with torch.no_grad():
            for chunk in chunks:
                states.append(_random_state(images.device))
                with autocast(images.device, self.precision):
                    passes.append(embed(chunk))
        leaves = {level: torch.cat([each[level] for each in passes]).requires_grad_() for level in passes[0]}
        value = self._loss(learner, leaves, labels, seed)
        value.backward()  # type: ignore[no-untyped-call]
        after = _random_state(images.device)
        for number, chunk in enumerate(chunks):
            _set_random_state(states[number], images.device)  # the same dropout as in the first pass
            with autocast(images.device, self.precision):
                again = embed(chunk)
            rows = slice(number * self.chunk, number * self.chunk + len(chunk))
            # While the backbone is frozen, the outputs of a network without a head need no gradient.
            gradients = {level: leaf.grad[rows] for level, leaf in leaves.items() if leaf.grad is not None}
            gradients = {level: grad for level, grad in gradients.items() if again[level].requires_grad}
            if gradients:
                torch.autograd.backward([again[level] for level in gradients], list(gradients.values()))
        _set_random_state(after, images.device)
        return value.detach()

    def _loss(self, learner: Learner, embeddings: ByLevel, labels: Labels, seed: Seed) -> Tensor:
        """Return the sum over levels of the losses of the global batch."""
        embeddings, replaced = self._without_nan(embeddings)
        values = []
        for number, (level, points) in enumerate(embeddings.items()):
            loss, memory = learner.losses[level], learner.memories.get(level)
            start = None if seed is None or not draws(loss) else combine_seeds(*seed, number)
            function: Callable[[Tensor, Tensor], Tensor] = loss
            targets = torch.arange(len(points)) if isinstance(labels, GivenRelations) else labels
            if isinstance(labels, GivenRelations):
                function = partial(_on_relations, loss, labels)
            elif memory is not None:
                function = partial(_with_memory, loss, memory)
            values.append(global_loss(function, points, targets, seed=start, world=self.world))
        value = values[0] if len(values) == 1 else torch.stack(values).sum()
        return value * torch.nan if replaced else value

    def _without_nan(self, embeddings: ByLevel) -> tuple[ByLevel, bool]:
        """Replace NaN and infinity by zeros on a CPU, where losses raise an error for them."""
        if next(iter(embeddings.values())).device.type != "cpu":
            return embeddings, False
        finite = all(bool(points.detach().isfinite().all()) for points in embeddings.values())
        if not self.world.any(not finite):
            return embeddings, False
        return {level: points.nan_to_num(0.0, 0.0, 0.0) for level, points in embeddings.items()}, True

    def _reduce_and_clip(self, parameters: list[nn.Parameter]) -> Tensor:
        """Average the gradients over all processes, clip them, and return their norm before clipping."""
        parameters = [each for each in parameters if each.grad is not None]
        self.world.average_gradients(parameters)
        norm = self.world.gradient_norm(parameters)
        if self.clip is not None:
            clip_grads_with_norm_(parameters, self.clip, norm)
        return norm


class BatchNormStatistics:
    """A copy of the running statistics of batch norms, to restore them after a step that is skipped.

    Frozen batch norms are ignored, and cost nothing. All statistics are copied into one tensor, so that a GPU runs few
    kernels and none of them makes the host wait. The buffers keep their addresses, which CUDA graphs require.
    """

    BUFFERS = ("running_mean", "running_var", "num_batches_tracked")

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for layer in layers:
            for name in self.BUFFERS if layer.training else ():
                buffer = getattr(layer, name, None)
                if buffer is not None:
                    kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        self._copies = [(buffers, _flat(buffers)) for buffers in kinds.values()]

    @torch.no_grad()
    def restore(self, *, unless: Tensor) -> None:
        """Restore the statistics, without waiting for the device."""
        for buffers, before in self._copies:
            chosen = torch.where(unless, _flat(buffers), before)
            parts = torch.split(chosen, [each.numel() for each in buffers])
            torch._foreach_copy_(buffers, [part.view_as(each) for part, each in zip(parts, buffers, strict=True)])


def _flat(buffers: list[Tensor]) -> Tensor:
    return torch.cat([each.reshape(-1) for each in buffers])


# --- what steps report ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepSummary:
    """Losses and timing of consecutive steps."""

    first: int  # the number of the first step
    losses: list[float]  # the loss of each step
    finite: list[bool]  # whether loss and gradient of each step were finite
    images: int  # the number of images in all steps
    seconds: float  # the duration of all steps

    @property
    def loss(self) -> float | None:
        """The mean loss over the finite steps; None if there is none."""
        kept = [loss for loss, finite in zip(self.losses, self.finite, strict=True) if finite]
        return sum(kept) / len(kept) if kept else None

    @property
    def nonfinite(self) -> list[int]:
        """The numbers of the steps that were not finite."""
        return [self.first + number for number, finite in enumerate(self.finite) if not finite]


class StepLog:
    """Collects step results on the device and copies them to the host without blocking.

    Results are sent when ``steps`` of them have been collected or ``seconds`` have passed, and returned once they have
    arrived, some steps later. The device never waits for the host; the host waits only in ``flush``.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        steps: int = 20,
        seconds: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.device, self.steps, self.seconds, self._clock = device, steps, seconds, clock
        self._results: list[StepResult] = []
        self._first = self._images = 0
        self._since = clock()
        self._sent: deque[tuple[Tensor, torch.cuda.Event | None, int, int, float]] = deque()
        self._times: deque[tuple[float, int]] = deque(maxlen=SUMMARIES)  # seconds per step, number of steps

    def restart(self) -> None:
        """Measure time from now on, after work that was not training."""
        self._since = self._clock()

    def add(self, number: int, result: StepResult, images: int) -> list[StepSummary]:
        """Add the result of a step."""
        if not self._results:
            self._first = number
        self._results.append(result)
        self._images += images
        if len(self._results) >= self.steps or self._clock() - self._since >= self.seconds:
            self._send()
        return self._arrived(wait=False)

    def flush(self) -> list[StepSummary]:
        """Wait for all remaining results and return them."""
        if self._results:
            self._send()
        return self._arrived(wait=True)

    def _send(self) -> None:
        table, event = (
            torch.stack([torch.stack([each.loss.float(), each.finite.float()]) for each in self._results]),
            None,
        )
        if self.device.type == "cuda":
            table = torch.empty(table.shape, pin_memory=True).copy_(table, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
        now = self._clock()
        self._sent.append((table, event, self._first, self._images, now - self._since))
        self._results, self._images, self._since = [], 0, now

    def _arrived(self, wait: bool) -> list[StepSummary]:
        summaries = []
        while self._sent:
            table, event, first, images, seconds = self._sent[0]
            if event is not None and not event.query():  # type: ignore[no-untyped-call]
                if not wait:
                    break
                event.synchronize()
            self._sent.popleft()
            losses, finite = table.T.tolist()
            summaries.append(StepSummary(first, losses, [bool(flag) for flag in finite], images, seconds))
            self._times.append((seconds / len(losses), len(losses)))
        return summaries

    def seconds_per_step(self) -> float | None:
        """Return the median over the last summaries, which ignores slow first steps; None if there is only one."""
        if len(self._times) < 2:
            return None
        return statistics.median_low(seconds for seconds, steps in self._times for _ in range(steps))


# --- precision and kernels -----------------------------------------------------------------------------------------


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Compute in a precision, regardless of any autocast around it."""
    if precision == "float32":
        return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


@contextmanager
def kernels(*, deterministic: bool) -> Iterator[None]:
    """Choose the kernels of a training, and restore the previous settings afterwards."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with no_cudnn_autotune():
        if not deterministic:
            yield
            return
        torch.use_deterministic_algorithms(True)  # imports PyTorch's compiler, which takes seconds
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def no_cudnn_autotune() -> Iterator[None]:
    """Disable cuDNN autotuning (``torch.backends.cudnn.benchmark``).

    Autotuning doubles the time of the first batch of each shape and makes no step faster
    (docs/benchmarks/training.md).
    """
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


# --- helpers -------------------------------------------------------------------------------------------------------


def _on_relations(loss: nn.Module, given: GivenRelations, points: Tensor, _: Tensor) -> Tensor:
    value: Tensor = loss(points[given.rows], given.supervision)
    return value


def _with_memory(loss: nn.Module, memory: Memory, points: Tensor, labels: Tensor) -> Tensor:
    value = memory.loss(loss, points, labels)
    memory.add(points, labels)
    return value


def combine_seeds(*numbers: int) -> int:
    """Derive one seed from several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Initialize SGD's momentum buffers with zeros, which gives the same first step.

    Otherwise the buffers of a masked first step would be uninitialized, and a parameter that is unfrozen later than
    others of its group would have none.
    """
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def check_chunks(network: nn.Module) -> None:
    """Raise an error if the network's embeddings depend on which images are in the same chunk."""
    was = network.training
    network.train()
    unfrozen = sum(layer.training for layer in batchnorm_layers(network))
    network.train(was)
    if unfrozen:
        raise ValueError(
            f"training.chunk is set and {unfrozen} batch norms of the network are not frozen, so that chunks would "
            "change the result; set network.freeze_batchnorm = true, or remove training.chunk"
        )


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_random_state(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


# --- batches ahead of a step -----------------------------------------------------------------------------------------


def prefetch(batches: Batches, device: torch.device) -> Batches:
    """Yield the same batches, each rendered on a separate CUDA stream during the step before it."""
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # pixels may still be on their way to the device
    try:
        ahead = _next(batches, stream)
        while ahead is not None:
            batch, done = ahead
            current = torch.cuda.current_stream(device)
            current.wait_event(done)
            for tensor in (batch.images, batch.labels, batch.indices):
                tensor.record_stream(current)  # so that its memory is not reused before the step is done
            ahead = _next(batches, stream)
            yield batch
    finally:
        batches.close()


@lru_cache
def _stream(device: torch.device) -> Any:
    """One stream for all epochs: cuBLAS keeps a workspace for each stream it was ever used on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _next(batches: Generator[Batch, None, None], stream: Any) -> tuple[Batch, Any] | None:
    with torch.cuda.stream(stream):
        batch = next(batches, None)
        return None if batch is None else (batch, stream.record_event())
