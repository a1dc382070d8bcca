"""Trainings of a second or less: vectors of a few classes, and recipes for them."""

import signal

import numpy as np
import torch
from safetensors.torch import load_file

from nearfar.training.recipe.files import load
from nearfar.training.trainer import Stopped, Trainer
from nearfar.utils.progress import Display

CLASSES, EACH, DIM = 12, 12, 6


def vectors(folder):
    """Twelve classes of twelve noisy vectors; halves of the classes train."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(CLASSES), EACH)
    centres = rng.standard_normal((CLASSES, DIM))
    points = centres[labels] + 0.7 * rng.standard_normal((len(labels), DIM))
    file = folder / "vectors.npz"
    np.savez(file, X=points.astype(np.float32), y=labels)
    return file


def pictures(folder):
    """The same classes as pictures of 8 × 8."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(CLASSES), EACH)
    centres = rng.uniform(40, 215, (CLASSES, 8, 8))
    images = centres[labels] + 30 * rng.standard_normal((len(labels), 8, 8))
    file = folder / "pictures.npz"
    np.savez(file, X=images.clip(0, 255).astype(np.uint8), y=labels)
    return file


def recipe(file, **overrides):
    """A short training of vectors; overrides are "section__key"."""
    tables = {
        "data": {"name": "arrays", "root": str(file)},
        "sampler": {"classes": 4, "per_class": 3, "steps": 6},
        "network": {"name": "mlp", "dim": 4, "settings": {"hidden": [8]}},
        "loss": {"name": "contrastive"},
        "optimizer": {"name": "adamw", "lr": 1e-2},
        "training": {"epochs": 4, "device": "cpu"},
        "evaluation": {
            "ks": [1, 2],
            "test_every": int(not any(key.startswith(("evaluation", "split")) for key in overrides)),
        },
    }
    changes = {key.replace("__", "."): value for key, value in overrides.items() if key != "stages"}
    if "training__iterations" in overrides:
        del tables["training"]["epochs"]
    if "stages" in overrides:
        tables["stages"] = overrides["stages"]
    return load(tables, overrides=changes)


def train(recipe, folder, **settings):
    return Trainer(recipe, folder, **settings).run()


def weights(folder, which="last"):
    """All tensors of the checkpoint (network, losses, optimiser, memory, random numbers), or those of the network."""
    if which == "best":
        return {f"model:{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors = load_file(folder / "checkpoint.safetensors")
    return {name.replace("/", ":", 1): tensor for name, tensor in tensors.items()}


def assert_same(one, other):
    """Bit for bit."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


class Interrupts(Display):
    """Sends this process a signal when a step has been read."""

    def __init__(self, step, number=signal.SIGTERM):
        self.step, self.number = step, number

    def show(self, work, done, total, text):
        if self.step is not None and done >= self.step:
            self.step = 10**9
            signal.raise_signal(self.number)


def interrupted(recipe, folder, *steps):
    """Train, but be stopped after each of these steps and resumed."""
    for count, step in enumerate(steps):
        try:
            train(recipe, folder, resume=count > 0, display=Interrupts(step))
        except Stopped:
            continue
        raise AssertionError(f"not stopped at step {step}")
    train(recipe, folder, resume=True)
