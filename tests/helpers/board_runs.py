"""Finished runs of many losses, networks and sizes, without the training."""

import json
import math

import numpy as np
from safetensors.numpy import save_file

from nearfar.training.recipe.files import load, to_dict, to_toml

CLASSES, EACH = 20, 10


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
    hardware="cpu",
    **overrides,
):
    """A run with ``score`` as its recall@1 of the test; overrides are "section__key"."""
    folder.mkdir(parents=True)
    tables = {
        "split": {"name": "fixed_validation"} if validation else {"name": "standard"},
        "sampler": {"classes": 4, "per_class": 4},
        "network": {"name": network, "dim": dim},
        "loss": {"name": loss},
        "optimizer": {"lr": 1e-3},
        "training": {"epochs": epochs, "device": "cpu", "seed": seed},
    }
    recipe = load(tables, overrides={key.replace("__", "."): value for key, value in overrides.items()})
    (folder / "recipe.toml").write_text(to_toml(recipe), encoding="utf-8")
    manifest = {
        "recipe": to_dict(recipe),
        "data": {"name": recipe.data.name, "fingerprint": "f" * 64},
        "network": {"model": {"dim": dim}},
        "length": {"epochs": epochs, "steps": 10 * epochs},
        "selection": "best validation recall@1" if validation else "last epoch",
        "seed": seed,
        "versions": {"nearfar": "0.1.0"},
        "hardware": {"device": hardware},
    }
    manifest |= {"baseline": "frozen"} if baseline else {}
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(CLASSES), EACH)
    found = (rng.permutation(CLASSES * EACH) < round(score * CLASSES * EACH)).astype(np.uint8)
    if queries:
        tensors = {"rows": np.arange(len(labels)), "recall@1": found, "map@r": (0.5 * found).astype(np.float32)}
        save_file({**tensors, "labels": labels}, folder / "queries.safetensors")
        score = float(found.mean())
    test = {"recall@1": score, "recall@2": min(1.0, score + 0.1), "map@r": score / 2}
    metrics = {"selection": "x", "epoch": epochs - 1, "steps": 10 * epochs, "seconds": seconds, "memory": memory}
    (folder / "metrics.json").write_text(json.dumps(metrics | {"test": test}), encoding="utf-8")
    lines = []
    for epoch in range(0 if baseline else epochs):
        reached = score * (1 - 0.6 * math.exp(-epoch / 3)) + 0.01 * math.sin(epoch * (1 + len(loss)))
        part = "validation" if validation else "test"
        reached = score if epoch == epochs - 1 else reached
        lines.append({"step": 10 * epoch + 10, "epoch": epoch, "metrics": {part: {"recall@1": reached}}})
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


def write_board(folder, losses, networks, dims, seeds):
    """Runs of all combinations, and a frozen baseline for each network and size."""
    for network, gain in networks.items():
        for dim in dims:
            longer = 0.03 * math.log2(dim / 64)
            base = 0.3 + gain + longer / 4
            write_run(folder / f"{network}-{dim}-frozen", "contrastive", base, network=network, dim=dim, baseline=True)
            for number, (loss, good) in enumerate(losses.items()):
                for seed in range(seeds):
                    score = (
                        good + gain + longer * (1 + 0.1 * math.sin(number + dim)) + 0.004 * math.sin(7 * seed + number)
                    )
                    name = f"{network}-{dim}-{loss}-{seed}"
                    write_run(folder / name, loss, score, network=network, dim=dim, seed=seed, seconds=70 + 9 * number)
    return folder
