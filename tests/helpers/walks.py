"""Lists the functions of nearfar that a loss, a training, a cell of a grid and an HTTP search enter.

    python tests/helpers/walks.py

Only named functions are counted: comprehensions and generators are frames of their own in some versions of Python.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from PIL import Image

import nearfar as nf

SOURCE = Path(nf.__file__).parent
# The most functions and files that a call may enter.
BUDGETS = {"loss": (45, 8), "loss and gradient": (48, 8), "training": (418, 50), "cell": (475, 55), "search": (87, 17)}


class Recorder:
    """Notes every named function of nearfar that is called while it is recording, in all threads."""

    def __init__(self) -> None:
        self.functions: dict[tuple[str, str], None] = {}  # file and name, in the order of the first call
        self.recording = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.recording or event != "call" or frame.f_code.co_name.startswith("<"):
            return
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(SOURCE):
            self.functions.setdefault((str(file.relative_to(SOURCE)), frame.f_code.co_qualname))

    def record(self, call: Callable[[], object]) -> list[tuple[str, str]]:
        """Make a call and return the functions it entered."""
        before = sys.getprofile()
        sys.setprofile(self)
        self.recording = True
        try:
            call()
        finally:
            self.recording = False
            sys.setprofile(before)
        return list(self.functions)


def loss(*, backward: bool = False) -> list[tuple[str, str]]:
    """One evaluation of multi_similarity."""
    embeddings, labels = torch.randn(16, 8, requires_grad=True), torch.arange(16) // 4
    function = nf.losses.MultiSimilarity()
    function(embeddings, labels).backward()  # imports
    return Recorder().record(
        lambda: function(embeddings, labels).backward() if backward else function(embeddings, labels)
    )


def training() -> list[tuple[str, str]]:
    """One training of the digits, from the recipe to the metrics."""
    recipe = {
        "data": {"name": "digits"},
        "sampler": {"classes": 5, "per_class": 4, "steps": 2},
        "network": {"name": "small_cnn", "dim": 8},
        "loss": {"name": "multi_similarity"},
        "optimizer": {"lr": 1e-3},
        "training": {"epochs": 1, "device": "cpu"},
    }

    def train() -> None:
        with tempfile.TemporaryDirectory() as folder:
            nf.train(recipe, out=f"{folder}/run", cache=f"{folder}/cache")

    train()  # imports
    return Recorder().record(train)


def cell() -> list[tuple[str, str]]:
    """One cell of a grid on the digits, trained in this process."""
    grid = {
        "name": "walk",
        "recipe": {
            "sampler": {"classes": 5, "per_class": 4, "steps": 2},
            "network": {"name": "small_cnn", "dim": 8},
            "optimizer": {"lr": 1e-3},
            "training": {"epochs": 1, "device": "cpu"},
        },
        "losses": {"multi_similarity": {}},
        "baseline": False,
    }

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            (cell,) = nf.bench.run(grid, f"{folder}/bench", engine="inline", cache=f"{folder}/cache")
            assert cell.state == "finished", cell.error

    run()  # imports
    return Recorder().record(run)


def search() -> list[tuple[str, str]]:
    """One HTTP search with an uploaded image."""
    from fastapi.testclient import TestClient

    recorder = Recorder()
    threading.setprofile(recorder)  # before the server starts its threads
    try:
        with tempfile.TemporaryDirectory() as folder:
            photos = Path(folder) / "photos" / "noise"
            photos.mkdir(parents=True)
            for number in range(4):
                pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(photos / f"{number}.png")
            model = nf.networks.create("small_cnn", dim=8)
            index = nf.Index.build(model, photos.parent, out=f"{folder}/my.index")
            image = (photos / "0.png").read_bytes()
            with TestClient(nf.serve.create(index), base_url="http://127.0.0.1") as client:

                def post() -> None:
                    client.post("/api/v1/search?k=2", files={"image": ("query.png", image)}).raise_for_status()

                post()  # imports
                client.app.state.server._stopped.set()  # looking for changes of other processes is no part of a search
                client.app.state.server._watcher.join()
                functions = recorder.record(post)
            index.close()
            return functions
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]


WALKS = {
    "loss": loss,
    "loss and gradient": lambda: loss(backward=True),
    "training": training,
    "cell": cell,
    "search": search,
}


if __name__ == "__main__":
    for name, walk in WALKS.items():
        functions = walk()
        files = {file for file, _ in functions}
        print(f"{name}: {len(functions)} functions in {len(files)} files, at most {BUDGETS[name]}")
        print(*(f"  {file}: {function}" for file, function in functions), sep="\n")
