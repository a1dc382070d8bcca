"""Checkpoints: everything that is needed to resume a training.

A checkpoint is a folder: the network as ``nearfar.networks.weights.save`` writes it, all other tensors in
``training.safetensors``, and plain values in ``state.json``. If the classes of the loss are sharded over processes,
each process writes the tensors of its classes to a file of its own, ``classes.0.safetensors`` and so on. A new
checkpoint is written beside the previous one and replaces it when it is complete and on disk, so that there is always
a complete one. Opening it executes no code.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from nearfar.networks.weights import save as saving
from nearfar.utils.atomic import read_tensors, sync_folder, write_json, write_tensors
from nearfar.utils.folders import remove
from nearfar.utils.preprocessing import Preprocessing

TENSORS, STATE, SHARD = "training.safetensors", "state.json", "classes.{}.safetensors"
FORMAT, VERSION = "nearfar checkpoint", 1
TRIES, PAUSE = 20, 0.01  # attempts to read a checkpoint that is being replaced, and seconds between them

Values = dict[str, Any]
T = TypeVar("T")


class NoCheckpoint(FileNotFoundError):
    """There is no checkpoint, or none that is complete."""


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint."""

    folder: Path
    model: Mapping[str, Tensor]  # the weights of the network, on the CPU
    tensors: Mapping[str, Tensor]  # all other tensors by "part/name", on the CPU
    values: Values  # plain values

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors of a part, by name."""
        start = f"{name}/"
        return {key[len(start) :]: tensor for key, tensor in self.tensors.items() if key.startswith(start)}


def save(
    place: Path,
    model: saving.Model,
    *,
    parts: Mapping[str, Mapping[str, Tensor]],
    values: Values,
    preprocessing: Preprocessing | None = None,
) -> None:
    """Write a checkpoint, and replace the previous one."""
    draft, before = _draft(place), _before(place)
    if "shards" not in values:
        begin(place)
    saving.save(model, draft, preprocessing=preprocessing)
    write_tensors(draft / TENSORS, _flat(parts))
    write_json(draft / STATE, {"format": FORMAT, "version": VERSION, "saved": time.time(), **values})
    sync_folder(draft)
    # A folder cannot replace another in one move. After an interruption between the two, the draft is complete.
    if place.exists():
        os.replace(place, before)
    os.replace(draft, place)
    sync_folder(place.parent)
    remove(before, _names(before), rescue=place)


def begin(place: Path) -> None:
    """Create the folder in which the next checkpoint is written."""
    recover(place)
    _draft(place).mkdir(parents=True)


def save_shard(place: Path, number: int, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write the tensors of some classes for the checkpoint that was begun."""
    write_tensors(_draft(place) / SHARD.format(number), _flat(parts))


def load(place: Path, rows: slice | None = None) -> Checkpoint:
    """Read a checkpoint; the previous one if writing was interrupted.

    Args:
        place: The folder.
        rows: The classes to read of tensors that were saved by several processes; None: all.

    Raises:
        NoCheckpoint: If there is none.
    """
    return read(place, partial(_load, rows=rows))


def values_of(place: Path) -> Values:
    """Read the plain values of a checkpoint."""
    return read(place, _values)


def read(place: Path, reader: Callable[[Path], T]) -> T:
    """Read from one checkpoint, and repeat that if a running training replaces it meanwhile."""
    for left in reversed(range(TRIES)):
        found = find(place)
        before = _stamp(found)
        try:
            value = reader(found)
        except (OSError, ValueError):
            # Only checkpoints that are being replaced are incomplete.
            if not left or (found == place and before is not None and before == _stamp(found)):
                raise
        else:
            if before is not None and before == _stamp(found):
                return value
        time.sleep(PAUSE)
    raise NoCheckpoint(f"{place} is replaced faster than it can be read")


def _load(folder: Path, rows: slice | None) -> Checkpoint:
    values, pieces = _values(folder), dict[str, list[Tensor]]()
    for number, (start, stop) in enumerate(pairwise(values.get("shards", ()))):
        low, high = (start, stop) if rows is None else (max(start, rows.start), min(stop, rows.stop))
        for name, tensor in _tensors(folder / SHARD.format(number)).items() if low < high else ():
            pieces.setdefault(name, []).append(tensor[low - start : high - start])
    tensors = _tensors(folder / TENSORS) | {name: torch.cat(parts) for name, parts in pieces.items()}
    return Checkpoint(folder, _tensors(folder / saving.NAME), tensors, values)


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        return read_tensors(file)[0]
    except (OSError, ValueError) as error:
        raise NoCheckpoint(f"{file} is damaged: {error}") from error


def _values(folder: Path) -> Values:
    try:
        plain: Values = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NoCheckpoint(f"{folder / STATE} is damaged: {error}") from error
    if plain.get("format") != FORMAT or plain.get("version") != VERSION:
        raise NoCheckpoint(
            f"{folder} is a checkpoint of version {plain.get('version')!r}; this nearfar reads version {VERSION}"
        )
    return plain


def _stamp(folder: Path) -> tuple[int, int] | None:
    """Identifies the checkpoint that a folder holds now; None if it holds none."""
    try:
        found = (folder / STATE).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def find(place: Path) -> Path:
    """Find the folder that holds a checkpoint, also while it is being replaced."""
    for _ in range(3):
        for folder in (place, _draft(place), _before(place)):
            if (folder / STATE).is_file():
                return folder
        time.sleep(PAUSE)  # another process may be between its two moves
    raise NoCheckpoint(f"{place} does not exist")


def exists(place: Path) -> bool:
    """Whether there is a complete checkpoint."""
    with contextlib.suppress(NoCheckpoint):
        find(place)
        return True
    return False


def recover(place: Path) -> None:
    """Complete or undo what an interrupted process left. Call this only while holding the lock of the run folder."""
    draft, before = _draft(place), _before(place)
    if not place.exists():
        for folder in (draft, before):
            if (folder / STATE).is_file():
                os.replace(folder, place)
                break
    shutil.rmtree(draft, ignore_errors=True)
    remove(before, _names(before), rescue=place if place.exists() else None)


def remove_files(place: Path) -> None:
    """Remove a checkpoint; other files in its folder are kept."""
    recover(place)
    remove(place, _names(place))


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


def _flat(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{part}/{name}": _plain(tensor) for part, tensors in parts.items() for name, tensor in tensors.items()}


def _plain(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU, so that two names may share a tensor."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _names(folder: Path) -> list[str]:
    """Return the names of all files that a checkpoint in a folder may have."""
    count = len(os.listdir(folder)) if folder.is_dir() else 0
    return [saving.NAME, "model.json", TENSORS, STATE, *map(SHARD.format, range(count))]


def _draft(place: Path) -> Path:
    return place.with_name(f".{place.name}.new")


def _before(place: Path) -> Path:
    return place.with_name(f".{place.name}.old")
