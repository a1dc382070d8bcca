"""The state of a training: everything that changes from step to step, and how checkpoints save and restore it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar.data.loader import Batch
from nearfar.distributed import World, class_bounds
from nearfar.losses import Memory, ProxyLoss, ShardedParameter
from nearfar.networks.embedder import Embedder
from nearfar.networks.weights import save as saving
from nearfar.training.loop.builder import LossStage, Parts, members_of, output_dims
from nearfar.training.loop.optimizers import LearningRateSchedule, create_optimizer
from nearfar.training.loop.step import Learner, StepResult, TrainStep, check_chunks, combine_seeds
from nearfar.training.run import checkpoints
from nearfar.training.run.folder import RunFolder
from nearfar.utils.atomic import read_tensors


@dataclass
class Position:
    """How far a training is, and what is known so far."""

    epoch: int = 0  # the current epoch, from 0
    step: int = 0  # the next step of this epoch, from 0
    iteration: int = 0  # steps done in total
    skipped: int = 0  # steps that were skipped because they were not finite
    seconds: float = 0.0  # time spent, over all sessions of a resumed run
    memory: float = 0.0  # peak memory in MiB, over all sessions: of the GPU, or of the process without one
    best: dict[str, Any] | None = None  # {"epoch", "value"} of the best validation metric so far, or None
    metrics: dict[str, Any] = field(default_factory=dict)  # the metrics of the last evaluation, by part


class Session:
    """Network, losses, optimizer, schedule, memories and random generators of a training."""

    def __init__(self, parts: Parts, world: World) -> None:
        self.parts, self.world, self.position = parts, world, Position()
        recipe, networks = parts.recipe, members_of(parts.model)
        if recipe.training.chunk is not None:
            for network in networks:
                check_chunks(network)
        self.optimizer = create_optimizer(recipe.optimizer, parts.model, parts.losses, parts.device)
        self.schedule = LearningRateSchedule(
            recipe.schedule, self.optimizer, steps_per_epoch=parts.steps_per_epoch, steps=parts.steps
        )
        self.memories = {
            key: Memory(recipe.training.memory, dim=dim, device=parts.device)
            for key, dim in output_dims(parts.model).items()
            if recipe.training.memory
        }
        self._embed = [self._embed_function(network) for network in networks]
        self._stage: LossStage | None = None
        self._learners: list[Learner] = []
        shards = [each.shard for each in parts.losses.modules() if isinstance(each, ProxyLoss)]
        self._shard = next((shard for shard in shards if shard is not None), None)

    # --- steps -------------------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Prepare the next epoch: its stage, and whether the backbone is frozen."""
        model, training = self.parts.model, self.parts.recipe.training
        model.train()
        if self.position.epoch < training.warmup_epochs or self.parts.recipe.network.freeze:
            model.freeze_backbone()
        else:
            model.unfreeze_backbone()
        stage = self.parts.stage_at(self.position.epoch)
        if stage is self._stage:
            return
        self._stage = stage
        self.schedule.enter_stage(stage.lr_factor)
        self._learners = [
            Learner(
                network,
                {level: stage.losses[self._output_key(number, level)] for level in network.levels},
                embed=self._embed[number],
            )
            for number, network in enumerate(members_of(model))
        ]
        self._step = TrainStep(
            self._learners,
            self.optimizer,
            world=self.world,
            skip=training.on_nonfinite == "skip",
            independent=self.parts.recipe.network.independent,
            **training.model_dump(include={"precision", "channels_last", "clip", "chunk"}),
        )

    def train_step(self, batch: Batch) -> StepResult:
        """Train on a batch and advance the position by one step."""
        training = self.parts.recipe.training
        if self.memories and self.position.iteration >= training.memory_warmup:
            for number, learner in enumerate(self._learners):
                learner.memories = {level: self.memories[self._output_key(number, level)] for level in learner.losses}
        result = self._step(
            batch,
            seed=combine_seeds(training.seed, self.position.iteration),
            given=self.parts.given(self.position.epoch, self.position.step),
        )
        self.schedule.step_iteration()
        self.position.step += 1
        self.position.iteration += 1
        return result

    def end_epoch(self, metric: float | None) -> None:
        """Advance to the next epoch."""
        self.schedule.step_epoch(metric)
        self.position.epoch += 1
        self.position.step = 0

    @property
    def finished(self) -> bool:
        """Whether the last epoch has ended, or too many evaluations have passed without improvement."""
        position, recipe = self.position, self.parts.recipe
        if position.epoch >= self.parts.epochs:
            return True
        if recipe.selection.patience is None or position.best is None:
            return False
        waited = position.epoch - 1 - int(position.best["epoch"])
        return waited >= recipe.selection.patience * max(recipe.evaluation.every, 1)

    def batch_contents(self, iteration: int) -> dict[str, Any]:
        """Describe this process's share of a batch: the rows of the dataset, and the names of their images."""
        parts = self.parts
        epoch, step = divmod(iteration, parts.steps_per_epoch)
        indices = parts.dataset_rows(parts.rows["train"][parts.sampler.batch(epoch, step)]).tolist()
        names = [parts.dataset.source.name(index) for index in indices]
        return {"iteration": iteration, "epoch": epoch, "step": step, "indices": indices, "names": names}

    def _output_key(self, number: int, level: str) -> str:
        """Return the key of an output in ``output_dims``."""
        return level if isinstance(self.parts.model, Embedder) else f"{number}_{level}"

    def _embed_function(self, network: Embedder) -> Callable[[Tensor], dict[str, Tensor]]:
        """Return the network's forward method, compiled or replayed as a CUDA graph where the recipe allows it."""
        training = self.parts.recipe.training
        if training.compile:
            compiled: Callable[[Tensor], dict[str, Tensor]] = torch.compile(network.levels_forward)
            return compiled
        graphs = training.graphs and training.chunk is None and not self.parts.recipe.network.freeze
        if self.parts.device.type == "cuda" and graphs:
            from nearfar.training.loop.cuda_graphs import GraphedEmbedder

            return GraphedEmbedder(network)
        return network.levels_forward

    # --- checkpoints -------------------------------------------------------------------------------------------

    def save(self, run: RunFolder, log: int) -> None:
        """Write the checkpoint. With sharded classes, all processes call this; otherwise the main one."""
        parts, values = self._state()
        values |= {"log": log, "fingerprint": self.parts.fingerprint}
        if self._shard is not None:
            self._save_shard(run, parts)
            values["shards"] = class_bounds(self._shard.num_classes, self.world.ranks)
        if self.world.is_main:
            checkpoints.save(run.checkpoint, parts, values)
            if self.position.best is None:
                self.save_network(run)

    def save_network(self, run: RunFolder) -> None:
        """Write the network to the run folder, where ``nearfar.networks.weights.load`` finds it."""
        saving.save(self.parts.model, run.folder, preprocessing=self.parts.preprocessing)

    def restore(self, run: RunFolder) -> int:
        """Restore the checkpoint, if there is one."""
        began = run.fingerprints()
        if began is not None:
            self._check_data(run, began[0])
        if not run.checkpoint.is_file():
            return 0
        shard = self._shard
        found = checkpoints.load(run.checkpoint, rows=None if shard is None else slice(shard.start, shard.stop))
        values = found.values
        self._check_data(run, values["fingerprint"])
        self.parts.model.load_state_dict(found.part("model"))
        self.parts.losses.load_state_dict(found.part("losses"))
        checkpoints.set_optimizer_state(self.optimizer, found.part("optimizer"), values["optimizer"])
        self.schedule.load_state_dict(values["schedule"])
        for key, memory in self.memories.items():
            restore_memory(memory, found.part(f"memory/{key}"))
        means = found.part("sampler").get("means")
        self.parts.sampler.restore({**values["sampler"], "means": None if means is None else means.numpy()})
        self.position = Position(**values["state"])
        checkpoints.set_random_states(found.part("random"), values["random"], self.parts.device)
        return int(values["log"])

    def _save_shard(self, run: RunFolder, parts: dict[str, dict[str, Tensor]]) -> None:
        """Move the tensors of the classes of this process from ``parts`` to a file of their own."""
        parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
        sharded = {str(number) for number, each in enumerate(parameters) if isinstance(each, ShardedParameter)}
        names = {
            "losses": [
                name
                for name, each in self.parts.losses.named_parameters(remove_duplicate=False)
                if isinstance(each, ShardedParameter)
            ],
            "optimizer": [
                name for name, each in parts["optimizer"].items() if each.ndim and name.partition(".")[0] in sharded
            ],
        }
        own = {part: {name: parts[part].pop(name) for name in found} for part, found in names.items()}
        checkpoints.save_shard(run.checkpoint, self.world.rank, self.position.iteration, own)
        self.world.any(False)  # all files are there

    def load_best(self, run: RunFolder) -> int:
        """Load the weights of the best epoch into the network, and return the epoch."""
        assert self.position.best is not None
        self.parts.model.load_state_dict(read_tensors(run.model)[0])
        return int(self.position.best["epoch"])

    def _check_data(self, run: RunFolder, known: str) -> None:
        """Raise an error if the data is not the data that the run began with."""
        if known != self.parts.fingerprint:
            raise ValueError(
                f"the data is not what the run in {run.folder} began with: images, labels or split have changed"
            )

    def _state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        optimizer, optimizer_values = checkpoints.optimizer_state(self.optimizer)
        generators, random_values = checkpoints.random_states(self.parts.device)
        sampler = self.parts.sampler.state(self.position.epoch, self.position.step)
        means = sampler.pop("means", None)
        parts: dict[str, dict[str, Tensor]] = {
            "model": self.parts.model.state_dict(),
            "losses": self.parts.losses.state_dict(),
            "optimizer": optimizer,
            "random": generators,
            "sampler": {} if means is None else {"means": torch.from_numpy(np.array(means))},
            **{f"memory/{key}": memory_state(memory) for key, memory in self.memories.items()},
        }
        values = {
            "state": vars(self.position),
            "optimizer": optimizer_values,
            "schedule": self.schedule.state_dict(),
            "random": random_values,
            "sampler": sampler,
        }
        return parts, values


def memory_state(memory: Memory) -> dict[str, Tensor]:
    """Return the content of a memory as checkpoints store it."""
    return {
        "embeddings": memory.all_embeddings.cpu(),
        "labels": memory.all_labels.cpu(),
        "added": torch.tensor(memory.added),
    }


def restore_memory(memory: Memory, state: Mapping[str, Tensor]) -> None:
    """Restore the content of a memory from what :func:`memory_state` returned."""
    if state["embeddings"].shape != memory.all_embeddings.shape:
        ours, theirs = tuple(memory.all_embeddings.shape), tuple(state["embeddings"].shape)
        raise ValueError(f"the memory has shape {ours} and the saved one {theirs}; both must be the same")
    memory.all_embeddings.copy_(state["embeddings"])
    memory.all_labels.copy_(state["labels"])
    memory.added = int(state["added"])
