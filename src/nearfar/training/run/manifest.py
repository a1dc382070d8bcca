"""Manifests: everything that can change the results of a run."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nearfar
from nearfar.data.store.store import Store
from nearfar.networks.weights import save
from nearfar.training.loop.builder import Parts
from nearfar.training.loop.distributed import World
from nearfar.training.recipe.files import to_dict
from nearfar.utils import plugins
from nearfar.utils.paths import expanded

PACKAGES = ("torch", "numpy", "scikit-learn", "pillow", "safetensors", "timm", "torchvision", "transformers")


def of(parts: Parts, world: World | None = None) -> dict[str, Any]:
    """The manifest of a run; call this before the first step, while the network has its first weights.

    Args:
        parts: Everything the run was built from.
        world: The processes of a distributed training.
    """
    recipe, store = parts.recipe, parts.store
    world = world or World()
    validates = bool(len(parts.rows["validation"]))
    return {
        "format": 1,
        "recipe": to_dict(recipe),
        "data": {
            "name": parts.dataset.name,
            "fingerprint": parts.fingerprint,
            "source": parts.dataset.source.fingerprint(),
            "rows": {part: len(rows) for part, rows in parts.rows.items()},
            "classes": {part: len(np.unique(parts.labels[rows])) for part, rows in parts.rows.items()},
            "skipped": len(store.bad) if isinstance(store, Store) else 0,
            "left_out": [f"{bad.name}: {bad.reason}" for bad in store.bad] if isinstance(store, Store) else [],
            "notes": list(parts.dataset.notes),
        },
        "network": {
            **save.card(parts.model, parts.preprocessing),
            "parameters": sum(each.numel() for each in parts.model.parameters()),
            "first_weights": _digest(parts.model),
        },
        "weights": _weights(recipe.network.pretrained, recipe.network.name),
        "batch": {"pictures": parts.sampler.batch_size, "ranks": world.ranks, "sampler": parts.sampler.fingerprint()},
        "length": {"epochs": parts.epochs, "steps": parts.steps, "steps_per_epoch": parts.steps_per_epoch},
        "selection": f"best validation {recipe.selection.metric}" if validates else "last epoch",
        "seed": recipe.training.seed,
        "versions": versions(),
        "hardware": hardware(parts.device),
        "commit": commit(),
        **({"code": {file.name: found for file, found in plugins.used().items()}} if plugins.used() else {}),
    }


def versions() -> dict[str, str]:
    """Versions of Python, nearfar and the libraries it computes with."""
    found = {"python": platform.python_version(), "nearfar": nearfar.__version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware(device: torch.device) -> dict[str, Any]:
    """The device and the machine.

    Args:
        device: The device of the training.
    """
    found: dict[str, Any] = {
        "device": str(device),
        "machine": platform.machine(),
        "system": sys.platform,
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        found |= {
            "gpu": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        }
    return found


def commit() -> str | None:
    """The git commit of this code, with "+" if it was changed since; None outside a repository."""
    where = Path(nearfar.__file__).parent
    quiet: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 10, "check": True}
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        name = ["git", "-C", str(where), "rev-parse", "HEAD"]
        head: str = subprocess.run(name, env=environment, **quiet).stdout.strip()
        # nearfar may be installed inside a repository of something else.
        subprocess.run(["git", "-C", str(where), "ls-files", "--error-unmatch", "__init__.py"], **quiet)
        status = ["git", "-C", str(where), "status", "--porcelain", "--untracked-files=no", "."]
        changed = subprocess.run(status, env=environment, **quiet).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if changed else "")


def _weights(pretrained: bool | str, name: str) -> dict[str, Any] | None:
    """The pretrained weights; None for random ones."""
    if pretrained is False:
        return None
    if pretrained is True:
        return {"name": name}
    file = expanded(pretrained)
    with open(file, "rb") as content:
        return {"file": file.name, "sha256": hashlib.file_digest(content, "sha256").hexdigest()}


def _digest(model: torch.nn.Module) -> str:
    """Digest of all parameters and buffers, whatever file or seed they came from."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
