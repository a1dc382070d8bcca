"""Checkpoints: all that is needed to resume a training, in one file.

``checkpoint.safetensors`` holds tensors by "part/name" (such as "model/…" and "optimizer/…") and plain values as JSON.
A new one replaces it in one move, so that there is always a complete one, and a process that reads the old one reads
it to its end. If the classes of the loss are sharded over processes, each process first writes those of its classes to
``classes.RANK.ITERATION.safetensors``. Opening a checkpoint executes no code.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar.utils.atomic import read_about, read_tensors, sync_folder, write_tensors

SHARD = "classes.{}.{}.safetensors"
FORMAT, VERSION = "nearfar checkpoint", 1

Values = dict[str, Any]
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


def save(file: Path, parts: Parts, values: Values) -> None:
    """Write a checkpoint, and replace the previous one with its shards."""
    write_tensors(file, _flat(parts), {"format": FORMAT, "version": VERSION, **values})
    sync_folder(file.parent)
    kept = _shards(file, values)
    for shard in file.parent.glob(SHARD.format("*", "*")):
        if shard not in kept:
            shard.unlink()


def save_shard(file: Path, rank: int, iteration: int, parts: Parts) -> None:
    """Write the tensors of some classes for the checkpoint of an iteration, before the checkpoint itself."""
    write_tensors(file.with_name(SHARD.format(rank, iteration)), _flat(parts))


def load(file: Path, rows: slice | None = None) -> Checkpoint:
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
    return [file.with_name(SHARD.format(rank, values["state"]["iteration"])) for rank in ranks]


def _flat(parts: Parts) -> dict[str, Tensor]:
    return {f"{part}/{name}": _plain(tensor) for part, tensors in parts.items() for name, tensor in tensors.items()}


def _plain(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU, so that two names may share a tensor."""
    return tensor.detach().to("cpu", copy=True).contiguous()


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
    """The state of an optimizer."""
    state = optimizer.state_dict()
    tensors, plain = {}, {}
    for name, value in _entries(state["state"]):
        if isinstance(value, Tensor):
            tensors[name] = value
        else:
            plain[name] = value
    return tensors, {"state": plain, "groups": state["param_groups"]}


def set_optimizer_state(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], values: Values) -> None:
    """Restore the state of an optimizer with the same parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, Values] = {}
    for name, value in (*tensors.items(), *values["state"].items()):
        number, _, key = name.partition(".")
        if isinstance(value, Tensor):
            value = _laid_out(value, parameters[int(number)])
        state.setdefault(int(number), {})[key] = value
    groups = [{**saved, **_tuples(own, saved)} for own, saved in _pairs(optimizer, values["groups"])]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _pairs(optimizer: torch.optim.Optimizer, groups: list[Values]) -> Iterator[tuple[Values, Values]]:
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(f"the optimizer has {len(optimizer.param_groups)} groups and the saved one {len(groups)}")
    return zip(optimizer.param_groups, groups, strict=True)


def _tuples(own: Values, saved: Values) -> Values:
    """Lists of JSON as the tuples they were; settings that depend on the machine are kept."""
    found = {key: tuple(saved[key]) for key, value in own.items() if isinstance(value, tuple) and key in saved}
    return found | {key: own[key] for key in ("fused", "foreach", "capturable") if key in own}


def _laid_out(tensor: Tensor, parameter: Tensor) -> Tensor:
    """In the memory format of its parameter, such as channels last, which fused optimizers require."""
    if tensor.shape != parameter.shape:
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _entries(state: Mapping[int, Values]) -> Iterator[tuple[str, Any]]:
    for number, entry in state.items():
        for key, value in entry.items():
            yield f"{number}.{key}", value
