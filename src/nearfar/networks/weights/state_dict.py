"""Reads state dicts from files without executing code, and loads them into networks."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

WRAPPERS = ("state_dict", "model", "model_state_dict")  # keys under which training scripts store the state dict
COUNTER = "num_batches_tracked"  # of batch norms; missing in files from before PyTorch 0.4.1, and not needed
MAGIC = (b"PK\x03\x04", b"\x80")  # first bytes of archives of torch.save, and of pickles before PyTorch 1.6
FEW = 3  # keys that an error lists


def read_state(file: Path) -> dict[str, Tensor]:
    """Read the tensors of a .safetensors file or of a PyTorch checkpoint, recognized by the content.

    No code is executed: a checkpoint that contains other objects than tensors is an error.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist or is not a file")
    if is_safetensors(file):
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            state = load_file(file)
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read: {error}") from error
    else:
        state = _read_checkpoint(file)
    if state and all(key.startswith("module.") for key in state):  # saved from DataParallel
        state = {key.removeprefix("module."): tensor for key, tensor in state.items()}
    return state


def is_safetensors(file: Path) -> bool:
    """Return whether a file starts like a .safetensors file, with the length of a JSON object and the object."""
    with open(file, "rb") as content:
        start = content.read(9)
    return len(start) == 9 and start[8:] == b"{" and int.from_bytes(start[:8], "little") < file.stat().st_size


def _read_checkpoint(file: Path) -> dict[str, Tensor]:
    damaged = f"{file} is not a .safetensors file or a PyTorch checkpoint, or it is damaged"
    with open(file, "rb") as start:
        if not start.read(4).startswith(MAGIC):
            raise ValueError(damaged)
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file} contains other objects than tensors and could only be loaded by executing code, which is never "
            "done; save its state dict only"
        ) from error
    except Exception as error:  # torch raises various errors for damaged files
        raise ValueError(damaged) from error
    for name in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not isinstance(content, Mapping) or not content:
        raise ValueError(f"{file} contains a {type(content).__name__}; a state dict is needed: names and their tensors")
    for key, tensor in content.items():
        if not isinstance(key, str) or not isinstance(tensor, Tensor):
            raise ValueError(f"{file} contains a {type(tensor).__name__} at {key!r}; a state dict of tensors is needed")
    return dict(content)


def check(
    network: nn.Module, name: str, state: Mapping[str, Tensor], file: Path, ignore: Sequence[str] = ()
) -> list[str]:
    """Check that a state dict fits a network, and return the keys that the network does not have.

    Keys that begin as in ``ignore``, those of the original classifier, are left out. A key that continues a part of the
    network is an error: the file belongs to a larger network of the same kind.
    """
    needed = network.state_dict()
    missing = [key for key in needed if key not in state and not key.endswith(COUNTER)]
    shapes = [
        f"{key} ({list(state[key].shape)}, needed is {list(tensor.shape)})"
        for key, tensor in needed.items()
        if key in state and _squeezed(state[key], tensor).shape != tensor.shape
    ]
    parts = {key.partition(".")[0] for key in needed if "." in key}
    unexpected = [key for key in state if key not in needed and not key.startswith(tuple(ignore))]
    beyond = [key for key in unexpected if key.partition(".")[0] in parts]
    for keys, problem in (
        (missing, "{} keys are missing"),
        (shapes, "{} tensors have another shape"),
        (beyond, "it is of a larger network with {} more keys"),
    ):
        if keys:
            examples = ", ".join(keys[:FEW]) + (f" and {len(keys) - FEW} more" if len(keys) > FEW else "")
            raise ValueError(f"{file} does not fit {name}: {problem.format(len(keys))}, such as {examples}")
    return unexpected


def load_into(backbone: nn.Module, name: str, file: Path, ignore: Sequence[str] = ()) -> list[str]:
    """Copy the weights of a file into a network, if they fit, and return what :func:`check` does."""
    state = read_state(file)
    unexpected = check(backbone, name, state, file, ignore)
    with torch.no_grad():
        for key, tensor in backbone.state_dict().items():
            if key in state:
                tensor.copy_(_squeezed(state[key], tensor))
    return unexpected


def _squeezed(tensor: Tensor, like: Tensor) -> Tensor:
    """Return [c] for the [1, c] tensors of batch norms in ports from Caffe."""
    return tensor[0] if like.ndim == 1 and tensor.ndim == 2 and len(tensor) == 1 else tensor
