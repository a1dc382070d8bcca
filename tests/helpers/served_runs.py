"""Folders of finished runs, written without training."""

import json

from nearfar.training.recipe.files import load, to_toml


def fake_run(folder, loss, score, *, dim=8, data="digits"):
    """A run of two epochs whose last one has this score."""
    folder.mkdir(parents=True)
    settings = {
        "data": {"name": data},
        "sampler": {"classes": 4, "per_class": 4},
        "network": {"name": "small_cnn", "dim": dim},
        "loss": {"name": loss},
        "optimizer": {"lr": 1e-3},
        "training": {"epochs": 2, "device": "cpu"},
    }
    (folder / "recipe.toml").write_text(to_toml(load(settings)), encoding="utf-8")
    (folder / "manifest.json").write_text(json.dumps({"recipe": settings, "data": settings["data"]}))
    lines = [{"step": n, "epoch": n, "metrics": {"test": {"recall@1": score - 0.1 + 0.1 * n}}} for n in (0, 1)]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "metrics.json").write_text(json.dumps({"seconds": 5.0, "test": {"recall@1": score, "map@r": 0.3}}))
    return folder
