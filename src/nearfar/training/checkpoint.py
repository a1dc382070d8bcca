"""Checkpoints: all that is needed to resume a training, in one file.

``checkpoint.safetensors`` holds tensors by "part/name" (such as "model/…" and "optimizer/…") and plain values as JSON.
A new one replaces it in one move, so that there is always a complete one, and a process that reads the old one reads
it to its end. If the classes of the loss are sharded over processes, each process first writes those of its classes to
``classes.RANK.ITERATION.safetensors``. Opening a checkpoint executes no code.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nearfar.distributed import class_bounds
from nearfar.losses import ProxyLoss, ShardedParameter
from nearfar.training.recipe.schema import ScheduleSection
from nearfar.training.run.folder import SHARD, SHARDS, RunFolder
from nearfar.utils.atomic import read_about, read_tensors, sync_folder, write_tensors

if TYPE_CHECKING:
    from nearfar.training.setup import Setup

FORMAT, VERSION = "nearfar checkpoint", 1

Values = dict[str, Any]


@dataclass
class State:
    """The numbers of a training that change: how far it is, and what is known so far."""

    epoch: int = 0  # the current epoch, from 0
    step: int = 0  # the next step of this epoch, from 0
    iteration: int = 0  # steps done in total
    skipped: int = 0  # steps that were skipped because they were not finite
    seconds: float = 0.0  # time spent, over all sessions of a resumed run
    memory: float = 0.0  # peak memory in MiB, over all sessions: of the GPU, or of the process without one
    best: dict[str, Any] | None = None  # {"epoch", "value"} of the best validation metric so far, or None
    metrics: dict[str, Any] = field(default_factory=dict)  # the metrics of the last evaluation, by part
    # Of the schedule "plateau": the factor of the learning rates, the best metric, and the evaluations since then.
    reduced: float = 1.0
    highest: float | None = None
    waited: int = 0

    def end_epoch(self, schedule: ScheduleSection, metric: float | None) -> None:
        """Advance to the next epoch; "plateau" reduces the learning rates if the metric has not improved."""
        self.epoch, self.step = self.epoch + 1, 0
        if metric is None or schedule.name != "plateau":
            return
        if self.highest is None or metric > self.highest:
            self.highest, self.waited = metric, 0
            return
        self.waited += 1
        if self.waited > schedule.patience:
            self.reduced, self.waited = max(self.reduced * schedule.gamma, schedule.minimum), 0


Parts = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint."""

    tensors: Mapping[str, Tensor]  # by "part/name", on the CPU
    values: Values  # plain values

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors of a part, by name."""
        start = f"{name}/"
        return {key[len(start) :]: tensor for key, tensor in self.tensors.items() if key.startswith(start)}


def save(setup: Setup, state: State, run: RunFolder, log: int) -> None:
    """Write the checkpoint. With sharded classes, all processes call this; otherwise the main one."""
    optimizer, optimizer_values = optimizer_state(setup.optimizer)
    generators, random_values = random_states(setup.device)
    sampler = setup.sampler.state(state.epoch, state.step)
    means = sampler.pop("means", None)
    parts: dict[str, dict[str, Tensor]] = {
        "model": setup.model.state_dict(),
        "losses": setup.losses.state_dict(),
        "optimizer": optimizer,
        "random": generators,
        "sampler": {} if means is None else {"means": torch.from_numpy(np.array(means))},
        **{f"memory/{key}": memory.state_dict() for key, memory in setup.memories.items()},
    }
    values = {
        "state": asdict(state),
        "optimizer": optimizer_values,
        "random": random_values,
        "sampler": sampler,
        "log": log,  # bytes of the log
        "fingerprint": setup.fingerprint,
    }
    shard = _shard(setup)
    if shard is not None:
        write_shard(run.checkpoint, setup.world.rank, state.iteration, _own_classes(setup, parts))
        values["shards"] = class_bounds(shard.num_classes, setup.world.ranks)
        setup.world.any(False)  # all files are there
    if setup.world.is_main:
        write(run.checkpoint, parts, values)


def restore(setup: Setup, run: RunFolder) -> tuple[State, int]:
    """Restore the checkpoint, if there is one; return the state and the number of bytes of the log."""
    shard, saved, began = _shard(setup), None, run.fingerprints()
    if run.checkpoint.is_file():
        saved = read(run.checkpoint, rows=None if shard is None else slice(shard.start, shard.stop))
    known = [*(() if began is None else began[:1]), *(() if saved is None else [saved.values["fingerprint"]])]
    if any(fingerprint != setup.fingerprint for fingerprint in known):
        raise ValueError(
            f"the data is not what the run in {run.folder} began with: images, labels or split have changed"
        )
    if saved is None:
        return State(), 0
    values, sampler = saved.values, saved.part("sampler")
    setup.model.load_state_dict(saved.part("model"))
    setup.losses.load_state_dict(saved.part("losses"))
    set_optimizer_state(setup.optimizer, saved.part("optimizer"), values["optimizer"])
    for key, memory in setup.memories.items():
        memory.load_state_dict(saved.part(f"memory/{key}"))
    setup.sampler.restore({**values["sampler"], "means": sampler["means"].numpy() if sampler else None})
    set_random_states(saved.part("random"), values["random"], setup.device)
    return State(**values["state"]), int(values["log"])


def _shard(setup: Setup) -> Any:
    """Return which classes this process has; None if the classes are not sharded."""
    shards = [loss.shard for loss in setup.losses.modules() if isinstance(loss, ProxyLoss)]
    return next((shard for shard in shards if shard is not None), None)


def _own_classes(setup: Setup, parts: dict[str, dict[str, Tensor]]) -> Parts:
    """Take the tensors of the classes of this process out of the parts of a checkpoint."""
    parameters = [parameter for group in setup.optimizer.param_groups for parameter in group["params"]]
    sharded = {str(number) for number, each in enumerate(parameters) if isinstance(each, ShardedParameter)}
    losses = setup.losses.named_parameters(remove_duplicate=False)
    names = {
        "losses": [name for name, each in losses if isinstance(each, ShardedParameter)],
        "optimizer": [
            name for name, each in parts["optimizer"].items() if each.ndim and name.partition(".")[0] in sharded
        ],
    }
    return {part: {name: parts[part].pop(name) for name in keys} for part, keys in names.items()}


# --- the file --------------------------------------------------------------------------------------------------------


def write(file: Path, parts: Parts, values: Values) -> None:
    """Write a checkpoint, and replace the previous one with its shards."""
    write_tensors(file, _flat(parts), {"format": FORMAT, "version": VERSION, **values})
    sync_folder(file.parent)
    kept = _shards(file, values)
    for shard in file.parent.glob(SHARDS):
        if shard not in kept:
            shard.unlink()


def write_shard(file: Path, rank: int, iteration: int, parts: Parts) -> None:
    """Write the tensors of some classes for the checkpoint of an iteration, before the checkpoint itself."""
    write_tensors(file.with_name(SHARD.format(rank=rank, iteration=iteration)), _flat(parts))


def read(file: Path, rows: slice | None = None) -> Checkpoint:
    """Read a checkpoint; of tensors that were saved by several processes, some classes or all."""
    tensors, values = read_tensors(file)
    _check(file, values)
    pieces: dict[str, list[Tensor]] = {}
    for shard, (start, stop) in zip(_shards(file, values), pairwise(values.get("shards", ())), strict=True):
        low, high = (start, stop) if rows is None else (max(start, rows.start), min(stop, rows.stop))
        for name, tensor in read_tensors(shard)[0].items() if low < high else ():
            pieces.setdefault(name, []).append(tensor[low - start : high - start])
    return Checkpoint(tensors | {name: torch.cat(parts) for name, parts in pieces.items()}, values)


def values_of(file: Path) -> Values:
    """Read the plain values of a checkpoint."""
    values = read_about(file)
    _check(file, values)
    return values


def _check(file: Path, values: Values) -> None:
    if values.get("format") != FORMAT or values.get("version") != VERSION:
        raise ValueError(
            f"{file} is a checkpoint of version {values.get('version')!r}; this nearfar reads version {VERSION}"
        )


def _shards(file: Path, values: Values) -> list[Path]:
    ranks = range(len(values.get("shards", ())) - 1)
    return [file.with_name(SHARD.format(rank=rank, iteration=values["state"]["iteration"])) for rank in ranks]


def _flat(parts: Parts) -> dict[str, Tensor]:
    """Name tensors by part, as contiguous copies on the CPU: two names may share a tensor."""
    return {
        f"{part}/{name}": tensor.detach().to("cpu", copy=True).contiguous()
        for part, tensors in parts.items()
        for name, tensor in tensors.items()
    }


# --- random numbers and optimizers ---------------------------------------------------------------------------------


def random_states(device: torch.device) -> tuple[dict[str, Tensor], Values]:
    """The states of all random generators."""
    tensors = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    kind, keys, *rest = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    values = {
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "python": [version, list(numbers), gauss],
    }
    return tensors, values


def set_random_states(tensors: Mapping[str, Tensor], values: Values, device: torch.device) -> None:
    """Restore the states of all random generators."""
    torch.set_rng_state(tensors["cpu"])
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)
    kind, keys, *rest = values["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    version, numbers, gauss = values["python"]
    random.setstate((version, tuple(numbers), gauss))


def optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], Values]:
    """The state of an optimizer: its tensors by "number of the parameter.name", and plain values."""
    state = optimizer.state_dict()
    entries = {f"{number}.{key}": value for number, entry in state["state"].items() for key, value in entry.items()}
    tensors = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    plain = {name: value for name, value in entries.items() if name not in tensors}
    return tensors, {"state": plain, "groups": state["param_groups"]}


def set_optimizer_state(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], values: Values) -> None:
    """Restore the state of an optimizer with the same parameters."""
    present, saved = optimizer.param_groups, values["groups"]
    if len(saved) != len(present):
        raise ValueError(f"the optimizer has {len(present)} groups and the saved one {len(saved)}")
    parameters = [parameter for group in present for parameter in group["params"]]
    state: dict[int, Values] = {}
    for name, value in (*tensors.items(), *values["state"].items()):
        number, _, key = name.partition(".")
        parameter = parameters[int(number)]
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            # In the memory format of its parameter, such as channels last, which fused optimizers require.
            value = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
        state.setdefault(int(number), {})[key] = value
    groups = []
    for group, values_of_group in zip(present, saved, strict=True):
        # JSON turns tuples into lists; settings that depend on the machine are those of this one.
        tuples = {key: tuple(values_of_group[key]) for key, value in group.items() if isinstance(value, tuple)}
        machine = {key: group[key] for key in ("fused", "foreach", "capturable") if key in group}
        groups.append({**values_of_group, **tuples, **machine})
    optimizer.load_state_dict({"state": state, "param_groups": groups})
