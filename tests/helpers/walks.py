"""The modules that a loss, a training and an HTTP search pass through, in the order in which they are entered.

``python tests/helpers/walks.py`` prints the three walks; ``--write`` puts them into docs/architecture.md.
"""

from __future__ import annotations

import re
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
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
MOST = {"loss": 9, "training": 45, "search": 14}


class Recorder:
    """Notes every module of nearfar in which a function is called while it is recording, in all threads."""

    def __init__(self) -> None:
        self.modules: dict[str, None] = {}
        self.recording = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.recording or event != "call" or frame.f_code.co_name == "<module>":
            return
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(SOURCE):
            self.modules.setdefault(str(file.relative_to(SOURCE)))

    def record(self, call: Callable[[], object]) -> list[str]:
        """Make a call and return the modules it entered."""
        before = sys.getprofile()
        sys.setprofile(self)
        self.recording = True
        try:
            call()
        finally:
            self.recording = False
            sys.setprofile(before)
        return list(self.modules)


def loss() -> list[str]:
    """One evaluation of multi_similarity with its gradient."""
    embeddings, labels = torch.randn(16, 8, requires_grad=True), torch.arange(16) // 4
    function = nf.losses.MultiSimilarity()
    function(embeddings, labels).backward()  # imports
    return Recorder().record(lambda: nf.losses.MultiSimilarity()(embeddings, labels).backward())


def training() -> list[str]:
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
            nf.training.api.start(recipe, out=f"{folder}/run", cache=f"{folder}/cache")

    train()  # imports
    return Recorder().record(train)


def search() -> list[str]:
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
                found = recorder.record(post)
            index.close()
            return found
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]


WALKS = {"loss": loss, "training": training, "search": search}


def listed(text: str, name: str) -> list[str]:
    """The modules that the page lists for a walk."""
    part = re.search(rf"<!-- walk: {name} -->\n(.*?)<!-- end -->", text, re.DOTALL)
    assert part is not None, f"docs/architecture.md has no walk named {name}"
    return re.findall(r"^\d+\. `([\w/]+\.py)`", part.group(1), re.MULTILINE)


def summary(module: str) -> str:
    """The first line of a module's docstring."""
    text = (SOURCE / module).read_text(encoding="utf-8")
    return text.removeprefix('"""').partition("\n")[0].removesuffix('"""').strip()


def write() -> None:
    """Put the walks as they are now into the page."""
    text = PAGE.read_text(encoding="utf-8")
    for name, walk in WALKS.items():
        lines = [f"{place}. `{module}`: {summary(module)}" for place, module in enumerate(walk(), 1)]
        new = f"<!-- walk: {name} -->\n" + "\n".join(lines) + "\n<!-- end -->"
        text = re.sub(rf"<!-- walk: {name} -->\n.*?<!-- end -->", lambda _, new=new: new, text, flags=re.DOTALL)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        write()
    else:
        for name, walk in WALKS.items():
            modules = walk()
            print(f"{name}: {len(modules)} files, at most {MOST[name]}", *modules, sep="\n  ")
