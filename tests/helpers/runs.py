"""Run folders as trainings leave them, without the trainings."""

import hashlib
import json
import math

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from nearfar.bench import read
from nearfar.training.recipe.files import load, to_dict, to_toml

CLASSES, EACH = 20, 10
NASTY = '<script>alert("x")</script>'
SETTINGS = {
    "data": {"name": "cub"},
    "split": {"name": "fixed_validation"},
    "sampler": {"classes": 8, "per_class": 4},
    "network": {"name": "resnet50", "dim": 64},
    "optimizer": {"lr": 1e-4},
    "training": {"epochs": 5},
}
DIGITS = {
    "sampler": {"classes": 4, "per_class": 4},
    "network": {"name": "small_cnn", "dim": 8},
    "loss": {"name": "multi_similarity"},
    "optimizer": {"lr": 1e-3},
    "training": {"epochs": 3, "device": "cpu"},
}


def write(folder, recipe, manifest, metrics, *, log=(), found=None, labels=None, cell=None):
    """Write the files of a run; ``found`` is what each query found, of the classes ``labels``."""
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(to_toml(recipe), encoding="utf-8")
    tables = {"manifest": manifest, "metrics": metrics, "cell": None if cell is None else {"labels": cell}}
    for name, table in tables.items():
        if table is not None:
            (folder / f"{name}.json").write_text(json.dumps(table), encoding="utf-8")
    if log:
        (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log), encoding="utf-8")
    if found is not None:
        queries = {"rows": np.arange(len(found)), "labels": labels, "recall@1": found.astype(np.uint8)}
        queries["map@r"] = found.astype(np.float32) / 2
        save_file({name: torch.from_numpy(values) for name, values in queries.items()}, folder / "queries.safetensors")
    return folder


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
    found = None if queries is None else np.asarray(queries)
    score = score if found is None else float(found.mean())
    numbers = {"selection": manifest["selection"], "seconds": 12.5, "memory": 900.0, "skipped": 0, **metrics}
    numbers["test"] = numbers.get("test", {"recall@1": score, "map@r": score / 2})
    labels = None if found is None else np.arange(len(found)) % classes
    return read(write(folder, recipe, manifest, numbers, found=found, labels=labels, cell=cell))


def write_run(
    folder,
    loss,
    score,
    *,
    network="resnet50",
    dim=64,
    seed=0,
    baseline=False,
    validation=True,
    queries=True,
    epochs=12,
    seconds=80.0,
    memory=2048.0,
    **overrides,
):
    """A run with ``score`` as its recall@1 of the test, and a log; overrides are "section__key"."""
    tables = {
        "split": {"name": "fixed_validation"} if validation else {"name": "standard"},
        "sampler": {"classes": 4, "per_class": 4},
        "network": {"name": network, "dim": dim},
        "loss": {"name": loss},
        "optimizer": {"lr": 1e-3},
        "training": {"epochs": epochs, "device": "cpu", "seed": seed},
    }
    recipe = load(tables, overrides={key.replace("__", "."): value for key, value in overrides.items()})
    manifest = {
        "recipe": to_dict(recipe),
        "data": {"name": recipe.data.name, "fingerprint": "f" * 64},
        "network": {"model": {"dim": dim}},
        "length": {"epochs": epochs, "steps": 10 * epochs},
        "selection": "best validation recall@1" if validation else "last epoch",
        "seed": seed,
        "versions": {"nearfar": "0.1.0"},
        "hardware": {"device": "cpu"},
    }
    manifest |= {"baseline": "frozen"} if baseline else {}
    found = None
    if queries:
        found = np.random.default_rng(seed).permutation(CLASSES * EACH) < round(score * CLASSES * EACH)
        score = float(found.mean())
    test = {"recall@1": score, "recall@2": round(min(1.0, score + 0.1), 9), "map@r": score / 2}
    metrics = {"selection": "x", "epoch": epochs - 1, "steps": 10 * epochs, "seconds": seconds, "memory": memory}
    log = []
    for epoch in range(0 if baseline else epochs):
        reached = score * (1 - 0.6 * math.exp(-epoch / 3)) + 0.01 * math.sin(epoch * (1 + len(loss)))
        part = "validation" if validation else "test"
        reached = score if epoch == epochs - 1 else reached
        log.append({"step": 10 * epoch + 10, "epoch": epoch, "metrics": {part: {"recall@1": reached}}})
    labels = np.repeat(np.arange(CLASSES), EACH)
    return write(folder, recipe, manifest, metrics | {"test": test}, log=log, found=found, labels=labels)


def write_board(folder, losses, networks, dims, seeds):
    """Runs of all combinations, and a frozen baseline for each network and size."""
    for network, gain in networks.items():
        for dim in dims:
            longer = 0.03 * math.log2(dim / 64)
            base = 0.3 + gain + longer / 4
            write_run(folder / f"{network}-{dim}-frozen", "contrastive", base, network=network, dim=dim, baseline=True)
            for number, (loss, good) in enumerate(losses.items()):
                gained = good + gain + longer * (1 + 0.1 * math.sin(number + dim))
                for seed in range(seeds):
                    settings = {"network": network, "dim": dim, "seed": seed, "seconds": 70 + 9 * number}
                    score = gained + 0.004 * math.sin(7 * seed + number)
                    write_run(folder / f"{network}-{dim}-{loss}-{seed}", loss, score, **settings)
    return folder


def photos(folder):
    """Three classes of colour pictures; one has a name that is markup, and so has one file."""
    rng = np.random.default_rng(0)
    for number, name in enumerate(("jay & wren", "<b>bold<b>", "owl")):
        (folder / name).mkdir(parents=True)
        for picture in range(4):
            pixels = np.clip(rng.normal([60 * number, 120, 200 - 60 * number], 30, (60, 80, 3)), 0, 255)
            file = '"><img src=x>.png' if picture == 3 else f"{picture}.png"
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / file)
    return folder


def write_embedded(folder, labels, rows, *, gallery=False, finished=True, **sections):
    """A run that tested pictures ``rows`` of a data set, with embeddings that stand near their class."""
    labels, rows = (torch.from_numpy(np.array(values)) for values in (labels, rows))
    recipe = load({**DIGITS, **sections})
    manifest = {
        "recipe": {"left": "out"},
        "data": {"name": recipe.data.name, "notes": [NASTY]},
        "versions": {"nearfar": "0.1.0"},
    }
    log = []
    for epoch in range(3):
        for step in range(20 * epoch + 1, 20 * epoch + 21):
            log.append({"step": step, "epoch": epoch, "loss": None if step == 7 else 2.0 / step, "images_s": 1.0})
        parts = {part: {"recall@1": 0.5 + 0.1 * epoch} for part in ("train", "test")}
        log.append({"step": 20 * epoch + 20, "epoch": epoch, "metrics": parts})
    metrics = {"selection": "last epoch", "epoch": 2, "steps": 60, "seconds": 75.0, "skipped": 0}
    metrics |= {"test": {"recall@1": 0.7, "nmi": 0.61}, "train": {"recall@1": 0.7}}
    write(folder, recipe, manifest, metrics if finished else None, log=log)
    if finished:
        generator = torch.Generator().manual_seed(0)
        centers = torch.randn(int(labels.max()) + 1, 8, generator=generator)
        points = centers[labels] + torch.randn(len(labels), 8, generator=generator)
        tensors = {"embeddings": points, "labels": labels, "rows": rows}
        if gallery:
            asked = {name: values[::2].contiguous() for name, values in tensors.items()}
            tensors = asked | {f"gallery_{name}": values[1::2].contiguous() for name, values in tensors.items()}
        save_file(tensors, folder / "embeddings.safetensors")
    return folder


def _digest(*parts):
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
