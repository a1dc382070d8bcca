"""Run folders as a training leaves them, without the training."""

import json

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from nearfar.training.recipe.files import load, to_toml

SETTINGS = {
    "sampler": {"classes": 4, "per_class": 4},
    "network": {"name": "small_cnn", "dim": 8},
    "loss": {"name": "multi_similarity"},
    "optimizer": {"lr": 1e-3},
    "training": {"epochs": 3, "device": "cpu"},
}
NASTY = '<script>alert("x")</script>'


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


def write_run(folder, labels, rows, *, gallery=False, finished=True, **sections):
    """A run that tested pictures ``rows`` of a data set, with embeddings that stand near their class."""
    labels, rows = np.array(labels), np.array(rows)
    folder.mkdir(parents=True)
    recipe = load({**SETTINGS, **sections})
    (folder / "recipe.toml").write_text(to_toml(recipe), encoding="utf-8")
    manifest = {
        "recipe": {"left": "out"},
        "data": {"name": recipe.data.name, "notes": [NASTY]},
        "versions": {"nearfar": "0.1.0"},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    lines = []
    for epoch in range(3):
        for step in range(20):
            number = 20 * epoch + step + 1
            lines.append(
                {"step": number, "epoch": epoch, "loss": None if number == 7 else 2.0 / number, "images_s": 1.0}
            )
        parts = {part: {"recall@1": 0.5 + 0.1 * epoch} for part in ("train", "test")}
        lines.append({"step": 20 * epoch + 20, "epoch": epoch, "metrics": parts})
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if not finished:
        return folder
    metrics = {"selection": "last epoch", "epoch": 2, "steps": 60, "seconds": 75.0, "skipped": 0}
    metrics |= {"test": {"recall@1": 0.7, "nmi": 0.61}, "train": {"recall@1": 0.7}}
    (folder / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(int(labels.max()) + 1, 8, generator=generator)
    points = centers[torch.from_numpy(labels)] + torch.randn(len(labels), 8, generator=generator)
    tensors = {"embeddings": points, "labels": torch.from_numpy(labels), "rows": torch.from_numpy(rows)}
    if gallery:
        tensors = {key: value[::2].contiguous() for key, value in tensors.items()} | {
            f"gallery_{key}": value[1::2].contiguous() for key, value in tensors.items()
        }
    save_file(tensors, folder / "embeddings.safetensors")
    return folder
