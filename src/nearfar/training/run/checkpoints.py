"""Checkpoints: all of a training that must survive the machine it runs on.

A checkpoint is a folder: the network as ``networks.saving`` writes it, everything else that is made of numbers in
``training.safetensors``, and plain values in ``state.json``. It is written beside the one before and takes its place
when it is whole and on disk, so there is always a whole one; opening it runs nothing that is in it.
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
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nearfar.networks.preprocessing import Preprocessing
from nearfar.networks.weights import save as saving
from nearfar.utils.atomic import sync_folder, write_json, write_tensors

TENSORS, STATE = "training.safetensors", "state.json"
FORMAT, VERSION = "nearfar checkpoint", 1
TRIES, PAUSE = 20, 0.01  # at a checkpoint that is being replaced, and seconds between them

Values = dict[str, Any]
T = TypeVar("T")


class NoCheckpoint(FileNotFoundError):
    """There is none, or none that is whole."""


@dataclass(frozen=True)
class Checkpoint:
    """What was found in a folder.

    Args:
        folder: Where it is.
        model: The weights of the network, on the CPU.
        tensors: By name, on the CPU; of the parts that were saved, "part/name".
        values: Plain ones.
    """

    folder: Path
    model: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]
    values: Values

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors of a part, by the names they had there."""
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
    """Write a checkpoint at ``place``, instead of what was there.

    Args:
        place: The folder, such as runs/one/checkpoint/last.
        model: The network.
        parts: Tensors by part and name.
        values: What JSON can hold; numbers come back the same to the last bit.
        preprocessing: What happens to pictures before the network reads them.
    """
    draft, before = _draft(place), _before(place)
    recover(place)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    saving.save(model, draft, preprocessing=preprocessing)
    flat = {f"{part}/{name}": _plain(tensor) for part, tensors in parts.items() for name, tensor in tensors.items()}
    write_tensors(draft / TENSORS, flat)
    write_json(draft / STATE, {"format": FORMAT, "version": VERSION, "saved": time.time(), **values})
    sync_folder(draft)
    # A folder cannot take the place of another in one move. Whoever is stopped between these two finds the draft whole.
    if place.exists():
        os.replace(place, before)
    os.replace(draft, place)
    sync_folder(place.parent)
    shutil.rmtree(before, ignore_errors=True)


def load(place: Path) -> Checkpoint:
    """The checkpoint at a place; where its writing was cut short, the one before."""
    return read(place, _load)


def values_of(place: Path) -> Values:
    """The plain values of the checkpoint at a place."""
    return read(place, _values)


def read(place: Path, reader: Callable[[Path], T]) -> T:
    """What ``reader`` finds in the folder of the checkpoint at a place, all of it of one checkpoint.

    A training under way may put a new one there in the middle of it. Then it is read again.
    """
    for left in reversed(range(TRIES)):
        found = find(place)
        before = _stamp(found)
        try:
            value = reader(found)
        except (OSError, ValueError):
            # Only those that go away are taken apart where they lie.
            if not left or (found == place and before is not None and before == _stamp(found)):
                raise
        else:
            if before is not None and before == _stamp(found):
                return value
        time.sleep(PAUSE)
    raise NoCheckpoint(f"{place} is written anew faster than it can be read")


def _load(folder: Path) -> Checkpoint:
    values = _values(folder)
    return Checkpoint(folder, _tensors(folder / saving.NAME), _tensors(folder / TENSORS), values)


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
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
    """Which checkpoint a folder holds now; None where it holds none."""
    try:
        found = (folder / STATE).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def find(place: Path) -> Path:
    """The folder of the checkpoint at a place, also while a new one is taking its place."""
    for _ in range(3):
        for folder in (place, _draft(place), _before(place)):
            if (folder / STATE).is_file():
                return folder
        time.sleep(PAUSE)  # between two moves of a process that is saving
    raise NoCheckpoint(f"{place} is not there")


def exists(place: Path) -> bool:
    """Whether there is a whole checkpoint."""
    with contextlib.suppress(NoCheckpoint):
        find(place)
        return True
    return False


def recover(place: Path) -> None:
    """Finish what a process left behind that was stopped while saving. Only for who owns the run folder."""
    draft, before = _draft(place), _before(place)
    if not place.exists():
        for folder in (draft, before):
            if (folder / STATE).is_file():
                os.replace(folder, place)
                break
    for folder in (draft, before):
        shutil.rmtree(folder, ignore_errors=True)


# --- random numbers and optimisers ---------------------------------------------------------------------------------


def random_states(device: torch.device) -> tuple[dict[str, Tensor], Values]:
    """Where all generators stand: tensors of torch's, plain values of NumPy's and Python's."""
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
    """Let all generators go on from where they stood."""
    torch.set_rng_state(tensors["cpu"])
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)
    kind, keys, *rest = values["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    version, numbers, gauss = values["python"]
    random.setstate((version, tuple(numbers), gauss))


def optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], Values]:
    """The state of an optimiser as tensors, "number.name", and plain values."""
    state = optimizer.state_dict()
    tensors, plain = {}, {}
    for name, value in _entries(state["state"]):
        if isinstance(value, Tensor):
            tensors[name] = value
        else:
            plain[name] = value
    return tensors, {"state": plain, "groups": state["param_groups"]}


def set_optimizer_state(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], values: Values) -> None:
    """Let an optimiser of the same parameters go on."""
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
        raise ValueError(f"the optimiser has {len(optimizer.param_groups)} groups and the saved one {len(groups)}")
    return zip(optimizer.param_groups, groups, strict=True)


def _tuples(own: Values, saved: Values) -> Values:
    """JSON knows lists alone; what is a tuple here becomes one again. What depends on the machine stays as it is."""
    found = {key: tuple(saved[key]) for key, value in own.items() if isinstance(value, tuple) and key in saved}
    return found | {key: own[key] for key in ("fused", "foreach", "capturable") if key in own}


def _laid_out(tensor: Tensor, parameter: Tensor) -> Tensor:
    """In memory as its parameter is (channels last, say): fused optimisers insist on it."""
    if tensor.shape != parameter.shape:
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _entries(state: Mapping[int, Values]) -> Iterator[tuple[str, Any]]:
    for number, entry in state.items():
        for key, value in entry.items():
            yield f"{number}.{key}", value


def _plain(tensor: Tensor) -> Tensor:
    """A tensor with memory of its own, as files want it; a copy, so that two names may have the same one."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _draft(place: Path) -> Path:
    return place.with_name(f".{place.name}.new")


def _before(place: Path) -> Path:
    return place.with_name(f".{place.name}.old")
