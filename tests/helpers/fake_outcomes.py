"""Run folders of finished trainings for comparisons, without the trainings."""

import hashlib
import json

import numpy as np
from safetensors.numpy import save_file

from nearfar.bench import read
from nearfar.training.recipe.files import load, to_dict, to_toml

SETTINGS = {
    "data": {"name": "cub"},
    "split": {"name": "fixed_validation"},
    "sampler": {"classes": 8, "per_class": 4},
    "network": {"name": "resnet50", "dim": 64},
    "optimizer": {"lr": 1e-4},
    "training": {"epochs": 5},
}


def finished(
    folder, loss="proxy_anchor", *, score=0.6, overrides=None, about=None, queries=None, classes=5, cell=None, **metrics
):
    """A finished run; ``about`` replaces parts of its manifest, ``queries`` is what each of its queries found."""
    section = {"name": loss} if isinstance(loss, str) else loss
    recipe = load({**SETTINGS, "loss": section}, overrides=overrides or {})
    tables = to_dict(recipe)
    split, seed = tables["split"], recipe.training.seed
    validates = split["name"] != "standard"
    manifest = {
        "recipe": tables,
        "data": {
            "name": recipe.data.name,
            "fingerprint": _digest(recipe.data.name, split),
            "source": _digest(recipe.data.name),
            "rows": {"train": 100 - split.get("fold", 0), "validation": 10 * validates, "test": 40},
        },
        "network": {
            "model": {"name": recipe.network.name, "dim": recipe.network.dim, "levels": ["high"]},
            "first_weights": _digest(recipe.network.name, recipe.network.dim, seed),
        },
        "weights": None,
        "batch": {"pictures": recipe.sampler.images, "ranks": 1, "sampler": _digest(tables["sampler"], split)},
        "length": {"epochs": recipe.training.epochs, "steps": 20},
        "selection": "best validation recall@1" if validates else "last epoch",
        "seed": seed,
        "versions": {"torch": "2.6.0"},
        "hardware": {"device": "cuda", "gpu": "one", "threads": 8},
        "commit": "abc",
        "code": {"package": {"engine": "e"}, "loss": {"files": [], "digest": "l"}, "diff": None, "used": {}},
        **(about or {}),
    }
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(to_toml(recipe), encoding="utf-8")
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    if queries is not None:
        found = np.asarray(queries)
        labels = np.arange(len(found)) % classes
        tensors = {"rows": np.arange(len(found)), "labels": labels, "recall@1": found.astype(np.uint8)}
        save_file({**tensors, "map@r": found.astype(np.float32) / 2}, folder / "queries.safetensors")
        score = float(found.mean())
    numbers = {"selection": manifest["selection"], "seconds": 12.5, "memory": 900.0, "skipped": 0, **metrics}
    (folder / "metrics.json").write_text(json.dumps({**numbers, "test": {"recall@1": score, "map@r": score / 2}}))
    if cell is not None:
        (folder / "cell.json").write_text(json.dumps({"labels": cell}), encoding="utf-8")
    return read(folder)


def _digest(*parts):
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
