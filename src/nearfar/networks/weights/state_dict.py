"""State dicts in files, read without running what is in them, and fitted to a network."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

WRAPPERS = ("state_dict", "model", "model_state_dict")  # names under which training scripts keep the state dict
COUNTER = (
    "num_batches_tracked"  # of batch normalisation; files from before PyTorch 0.4.1 have none, and nobody needs it
)
MAGIC = (b"PK\x03\x04", b"\x80")  # how archives of torch.save begin, and pickles of versions before 1.6
FEW = 3  # keys that an error names


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What became of the keys of a file.

    Args:
        file: Where the weights come from.
        loaded: How many tensors the network took from it.
        missing: Keys of the network that the file does not have.
        unexpected: Keys of the file that nobody asked for.
        ignored: Keys of the file that are left out on purpose: the classifier of the original network.
    """

    file: Path
    loaded: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    ignored: tuple[str, ...]


def read_state(file: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file or of a PyTorch checkpoint, on the CPU; which of the two, the content tells.

    Nothing is executed: a checkpoint that needs more than tensors is refused.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there, or no file")
    state = _read_safetensors(file) if is_safetensors(file) else _read_checkpoint(file)
    if state and all(key.startswith("module.") for key in state):  # saved from within DataParallel
        state = {key.removeprefix("module."): tensor for key, tensor in state.items()}
    return state


def is_safetensors(file: Path) -> bool:
    """Whether a file begins like a .safetensors file: with the length of a JSON object, and the object."""
    with open(file, "rb") as content:
        start = content.read(9)
    return len(start) == 9 and start[8:] == b"{" and int.from_bytes(start[:8], "little") < file.stat().st_size


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def _read_checkpoint(file: Path) -> dict[str, Tensor]:
    damaged = f"{file} is no .safetensors file and no PyTorch checkpoint, or it is damaged"
    with open(file, "rb") as start:
        if not start.read(4).startswith(MAGIC):
            raise ValueError(damaged)
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file} holds more than tensors and could only be loaded by running code from it, which is never done; "
            "save its state dict alone"
        ) from error
    except Exception as error:  # torch has no one kind of error for damaged files
        raise ValueError(damaged) from error
    for name in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not isinstance(content, Mapping) or not content:
        raise ValueError(f"{file} holds a {type(content).__name__}; a state dict is needed: names and their tensors")
    for key, tensor in content.items():
        if not isinstance(key, str) or not isinstance(tensor, Tensor):
            raise ValueError(f"{file} holds a {type(tensor).__name__} at {key!r}; a state dict is needed: only tensors")
    return dict(content)


def compare(
    network: nn.Module, state: Mapping[str, Tensor], file: Path, ignore: Sequence[str] = ()
) -> tuple[LoadReport, list[str]]:
    """How the keys of a state fit a network, and the keys whose shapes do not, each with both shapes.

    Keys that begin with a word of ``ignore`` are left out, unless the network has them.
    """
    wanted = network.state_dict()
    foreign = [key for key in state if key not in wanted]
    ignored = tuple(key for key in foreign if key.startswith(tuple(ignore)))
    report = LoadReport(
        file=file,
        loaded=len(wanted.keys() & state.keys()),
        missing=tuple(key for key in wanted if key not in state and not key.endswith(COUNTER)),
        unexpected=tuple(key for key in foreign if key not in set(ignored)),
        ignored=ignored,
    )
    shapes = [
        f"{key} ({_shape(state[key])}, needed is {_shape(tensor)})"
        for key, tensor in wanted.items()
        if key in state and _squeezed(state[key], tensor).shape != tensor.shape
    ]
    return report, shapes


def check(
    network: nn.Module, name: str, state: Mapping[str, Tensor], file: Path, ignore: Sequence[str] = ()
) -> LoadReport:
    """How the keys of a state fit a network; an error if they do not.

    Keys that the network does not have are listed in the report, but not when they go on where a part of the network
    ends: then the file is of a larger network of the same kind, and refused.
    """
    report, shapes = compare(network, state, file, ignore)
    problem = f"{file} does not fit {name}: "
    if report.missing:
        raise ValueError(f"{problem}{len(report.missing)} keys are missing, as {_some(report.missing)}")
    if shapes:
        raise ValueError(f"{problem}{len(shapes)} tensors have another shape, as {_some(shapes)}")
    parts = {key.partition(".")[0] for key in network.state_dict() if "." in key}
    beyond = [key for key in report.unexpected if key.partition(".")[0] in parts]
    if beyond:
        raise ValueError(f"{problem}it is of a larger network with {len(beyond)} more keys, as {_some(beyond)}")
    return report


def load_into(backbone: nn.Module, name: str, file: Path, ignore: Sequence[str] = ()) -> LoadReport:
    """Copy the weights of a file into a network; all of them fit (see ``check``), or nothing is copied."""
    state = read_state(file)
    report = check(backbone, name, state, file, ignore)
    with torch.no_grad():
        for key, tensor in backbone.state_dict().items():
            if key in state:
                tensor.copy_(_squeezed(state[key], tensor))
    return report


def _squeezed(tensor: Tensor, like: Tensor) -> Tensor:
    """Ports from Caffe keep the numbers of batch normalisation as [1, c] instead of [c]."""
    return tensor[0] if like.ndim == 1 and tensor.ndim == 2 and len(tensor) == 1 else tensor


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _some(things: Sequence[str]) -> str:
    more = f" and {len(things) - FEW} more" if len(things) > FEW else ""
    return ", ".join(things[:FEW]) + more
