"""The state of a training: all that changes from step to step, and how it is saved and found again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar.data.loader import Batch
from nearfar.data.sampling import HardClasses
from nearfar.data.store.store import Store
from nearfar.networks.embedder import Embedder
from nearfar.training.loop.builder import Parts
from nearfar.training.loop.cuda_graphs import Recorded
from nearfar.training.loop.distributed import World
from nearfar.training.loop.examples import fingerprint_of
from nearfar.training.loop.memory import Memory
from nearfar.training.loop.stages import Stage, dims_of, members_of
from nearfar.training.loop.step import Member, Outcome, Step, check_chunks, mixed
from nearfar.training.recipe.schema import Training
from nearfar.training.run import checkpoints
from nearfar.training.run.folder import RunFolder


@dataclass
class Place:
    """Where a training stands: the next step of an epoch, and what is known so far.

    Args:
        epoch, step: What comes next, both from 0.
        iteration: Steps done in all.
        skipped: Steps that were not finite.
        seconds: Spent, over all sittings.
        memory: Most of it at once, in MiB, in any sitting: of the GPU, or of the process without one.
        best: {"epoch", "value"} of the best validation metric yet, or None.
        metrics: By part, of the last evaluation.
    """

    epoch: int = 0
    step: int = 0
    iteration: int = 0
    skipped: int = 0
    seconds: float = 0.0
    memory: float = 0.0
    best: dict[str, Any] | None = None
    metrics: dict[str, Any] = field(default_factory=dict)


class Session:
    """Network, losses, optimiser, schedule, memory and random numbers of a training under way.

    Args:
        parts: What the recipe built.
        world: The processes that share it.
    """

    def __init__(self, parts: Parts, world: World) -> None:
        self.parts, self.world, self.place = parts, world, Place()
        training = parts.recipe.training
        if training.chunk is not None:
            for network in members_of(parts.model):
                check_chunks(network)
        self.optimizer = parts.optimizer()
        self.schedule = parts.schedule(self.optimizer)
        self.memories = {
            key: Memory(training.memory, dim=dim, device=parts.device)
            for key, dim in dims_of(parts.model).items()
            if training.memory
        }
        self._embed = [_embedding(network, training) for network in members_of(parts.model)]
        self._stage: Stage | None = None
        self._members: list[Member] = []

    # --- steps -------------------------------------------------------------------------------------------------

    def enter_epoch(self) -> None:
        """Make ready for the epoch that comes next: its stage, and whether the backbone sleeps."""
        epoch, training = self.place.epoch, self.parts.recipe.training
        self.parts.model.train()
        if epoch < training.warmup_epochs:
            self.parts.model.freeze_backbone()
        else:
            self.parts.model.unfreeze_backbone()
        stage = self.parts.stage_at(epoch)
        if stage is self._stage:
            return
        self._stage = stage
        self.schedule.enter_stage(stage.lr_factor)
        networks = members_of(self.parts.model)
        single = isinstance(self.parts.model, Embedder)
        self._members = [
            Member(
                network,
                {level: stage.losses[level if single else f"{number}_{level}"] for level in network.levels},
                embed=self._embed[number],
            )
            for number, network in enumerate(networks)
        ]
        self._step = Step(
            self._members,
            self.optimizer,
            world=self.world,
            precision=training.precision,
            channels_last=training.channels_last,
            clip=training.clip,
            chunk=training.chunk,
            skip=training.on_nonfinite == "skip",
        )

    def learn(self, batch: Batch) -> Outcome:
        """One step, and one place further."""
        if self.memories and self.place.iteration >= self.parts.recipe.training.memory_warmup:
            for number, member in enumerate(self._members):
                single = isinstance(self.parts.model, Embedder)
                levels = {level: level if single else f"{number}_{level}" for level in member.losses}
                member.memories = {level: self.memories[key] for level, key in levels.items()}
        outcome = self._step(batch, seed=mixed(self.parts.recipe.training.seed, self.place.iteration))
        self.schedule.step_iteration()
        self.place.step += 1
        self.place.iteration += 1
        return outcome

    def end_epoch(self, metric: float | None) -> None:
        """On to the next one; ``metric`` is the validation's, if there is one."""
        self.schedule.step_epoch(metric)
        self.place.epoch += 1
        self.place.step = 0

    @property
    def finished(self) -> bool:
        """Whether all steps are done and the last epoch has ended."""
        return self.place.epoch >= self.parts.epochs

    # --- checkpoints -------------------------------------------------------------------------------------------

    def save(self, run: RunFolder, log: int) -> None:
        """Write the checkpoint "last"; ``log`` is how long the log is now."""
        parts, values = self._state()
        model, preprocessing = self.parts.model, self.parts.preprocessing
        values |= {"log": log, "fingerprint": self.parts.fingerprint}
        checkpoints.save(run.last, model, parts=parts, values=values, preprocessing=preprocessing)

    def save_best(self, run: RunFolder) -> None:
        """Write the network as the checkpoint "best"."""
        values = {"epoch": self.place.epoch, "iteration": self.place.iteration, "metrics": self.place.metrics}
        model, preprocessing = self.parts.model, self.parts.preprocessing
        checkpoints.save(run.best, model, parts={}, values=values, preprocessing=preprocessing)

    def restore(self, run: RunFolder) -> int:
        """Go on from the checkpoint "last"; gives how long the log was then, 0 where there is no checkpoint yet."""
        self._check_data(run, run.fingerprint())
        if not checkpoints.exists(run.last):
            return 0
        found = checkpoints.load(run.last)
        values = found.values
        self._check_data(run, values["fingerprint"])
        self.parts.model.load_state_dict(found.model)
        self.parts.losses.load_state_dict(found.part("losses"))
        checkpoints.set_optimizer_state(self.optimizer, found.part("optimizer"), values["optimizer"])
        self.schedule.load_state_dict(values["schedule"])
        for key, memory in self.memories.items():
            memory.restore(found.part(f"memory/{key}"))
        means = found.part("sampler").get("means")
        self.parts.sampler.restore({**values["sampler"], "means": None if means is None else means.numpy()})
        self.place = Place(**values["place"])
        checkpoints.set_random_states(found.part("random"), values["random"], self.parts.device)
        return int(values["log"])

    def _check_data(self, run: RunFolder, known: str | None) -> None:
        """Refuse other data than a run began with."""
        parts = self.parts
        if known in (None, parts.fingerprint):
            return
        # Runs of earlier versions knew files by the times when they were written.
        if known != fingerprint_of(parts.dataset.source.stamp(), parts.rows, parts.labels):
            raise ValueError(
                f"the data is not what the run in {run.folder} began with: pictures, labels or split have changed"
            )

    def load_best(self, run: RunFolder) -> int:
        """Put the weights of the checkpoint "best" into the network; gives its epoch."""
        found = checkpoints.load(run.best)
        self.parts.model.load_state_dict(found.model)
        return int(found.values["epoch"])

    def _state(self) -> tuple[dict[str, Mapping[str, Tensor]], dict[str, Any]]:
        optimizer, optimizer_values = checkpoints.optimizer_state(self.optimizer)
        generators, random_values = checkpoints.random_states(self.parts.device)
        sampler = self.parts.sampler.state(self.place.epoch, self.place.step)
        means = sampler.pop("means", None)
        parts: dict[str, Mapping[str, Tensor]] = {
            "losses": self.parts.losses.state_dict(),
            "optimizer": optimizer,
            "random": generators,
            "sampler": {} if means is None else {"means": torch.from_numpy(np.array(means))},
            **{f"memory/{key}": memory.state() for key, memory in self.memories.items()},
        }
        values = {
            "place": vars(self.place),
            "optimizer": optimizer_values,
            "schedule": self.schedule.state_dict(),
            "random": random_values,
            "sampler": sampler,
        }
        return parts, values


def _embedding(network: Embedder, training: Training) -> Callable[[Tensor], dict[str, Tensor]]:
    """How a network is to be called: as it is, compiled, or recorded where that may be."""
    if training.compile:
        compiled: Callable[[Tensor], dict[str, Tensor]] = torch.compile(network.levels_forward)
        return compiled
    return Recorded(network) if training.graphs and training.chunk is None else network.levels_forward


def wants_means(parts: Parts) -> bool:
    """Whether the sampler wants the mean of each class after every epoch."""
    return isinstance(parts.sampler, HardClasses)


def batch_at(parts: Parts, iteration: int) -> dict[str, Any]:
    """What this process's share of a batch was made of: places in the data set, and their names there."""
    epoch, step = divmod(iteration, parts.steps_per_epoch)
    rows = parts.rows["train"][parts.sampler.batch(epoch, step)]
    indices = (parts.store.rows[rows] if isinstance(parts.store, Store) else rows).tolist()
    names = [parts.dataset.source.name(index) for index in indices]
    return {"iteration": iteration, "epoch": epoch, "step": step, "indices": indices, "names": names}
