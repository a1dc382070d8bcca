"""Images per second against Pillow and per-sample transforms in a DataLoader, side by side in one run.

    python benchmarks/data.py                       # CPU
    python benchmarks/data.py --device cuda         # batches wanted on a GPU
    python benchmarks/data.py --root photos/        # pictures in class folders instead of made-up ones
    python benchmarks/data.py --pictures 200 --batches 4    # a quick look

The pictures are made-up JPEG files of 375 × 500 pixels, most of them wide. Ours decodes them once, into a cache with a
shorter side of 256, before the clock starts; on a GPU also at full size. The usual way decodes a picture each time
it is asked for: Image.open, crop and resize, flip, to a tensor, normalize, one by one in the 2 workers of a DataLoader
(torchvision's transforms, written out here so that it need not be installed). It is measured on the files as they are
and on JPEG files that were shrunk to a shorter side of 256 beforehand.

Two views: a shorter side of 256 and a random window of 224, and a random-resized-crop to 224; both flip. The two sides
take turns; a turn is a fresh iterator, a few batches that are not counted, and then the clock. Images per second are
medians of the turns, and the ratio is ours over theirs.

The last rows are batches of 512 positions out of 1,000,000 pictures of 100,000 classes, drawn by each sampler.
"""

from __future__ import annotations

import argparse
import io
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Clock, parse, report, show_line
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from nearfar import data
from nearfar.data import sampling
from nearfar.data.loader import Loader
from nearfar.data.store.prepare import prepare
from nearfar.data.transforms.view import View
from nearfar.utils.preprocessing import IMAGENET

COLUMNS = ["work", "way", "images/s", "ratio", "ms/batch", "first ms", "setup s"]
VIEWS = {
    "resize 256, random crop 224": View(size=224, resize=256),
    "random-resized-crop 224": View(size=224, crop="random_resized"),
}
THEIR_WORKERS = 2
UNCOUNTED = 6  # batches at the start of a turn: those the workers begin with all arrive together

Turn = Callable[[], Iterator[Any]]


def made_up(root: Path, count: int) -> None:
    """JPEG files that take as long to decode as photographs do: smooth shapes and some grain."""
    rng = np.random.default_rng(0)
    for i in range(count):
        width, height = (500, 375) if i % 4 else (375, 500)
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)
        grain = rng.standard_normal((height, width, 1), dtype=np.float32) * 8
        folder = root / f"class_{i % 10}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).save(folder / f"{i}.jpg", quality=90)


class OneByOne(Dataset[Tensor]):
    """The usual way: decode a picture and transform it, each time it is asked for."""

    def __init__(self, files: list[bytes], view: View) -> None:
        self.files, self.view = files, view
        self.mean = torch.tensor(IMAGENET.mean).view(-1, 1, 1)
        self.std = torch.tensor(IMAGENET.std).view(-1, 1, 1)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        picture = Image.open(io.BytesIO(self.files[index])).convert("RGB")
        crop = self.random_resized if self.view.crop == "random_resized" else self.resized_then_cropped
        picture = crop(picture)
        if random.random() < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous().float().div(255)
        return pixels.sub_(self.mean).div_(self.std)

    def random_resized(self, picture: Image.Image) -> Image.Image:
        size = self.view.window[::-1]
        for _ in range(10):
            area = picture.width * picture.height * random.uniform(*self.view.scale)
            shape = math.exp(random.uniform(math.log(self.view.ratio[0]), math.log(self.view.ratio[1])))
            width, height = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
            if width <= picture.width and height <= picture.height:
                left, top = random.randint(0, picture.width - width), random.randint(0, picture.height - height)
                return picture.crop((left, top, left + width, top + height)).resize(size, Image.Resampling.BILINEAR)
        return picture.resize(size, Image.Resampling.BILINEAR)  # too rare here to matter

    def resized_then_cropped(self, picture: Image.Image) -> Image.Image:
        height, width = self.view.window
        picture = shrunk(picture, self.view.resize or 256)
        left, top = random.randint(0, picture.width - width), random.randint(0, picture.height - height)
        return picture.crop((left, top, left + width, top + height))


def shrunk(picture: Image.Image, side: int) -> Image.Image:
    shorter = min(picture.size)
    size = (side * picture.width // shorter, side * picture.height // shorter)
    return picture.resize(size, Image.Resampling.BILINEAR)


def as_jpeg(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.convert("RGB").save(file, "JPEG", quality=90)
    return file.getvalue()


def theirs(files: list[bytes], view: View, batch: int, device: str) -> Turn:
    """Files are already in memory: no disk takes part."""
    pictures, cuda = OneByOne(files, view), device.startswith("cuda")

    def turn() -> Iterator[Any]:
        order = RandomSampler(pictures, replacement=True, num_samples=10**9)
        loader = DataLoader(pictures, batch, sampler=order, num_workers=THEIR_WORKERS, pin_memory=cuda)
        for images in loader:
            yield images.to(device, non_blocking=True)

    return turn


def ours(loader: Loader, batch: int) -> Turn:
    sampler = sampling.create("random", loader.labels, batch_size=min(batch, len(loader.labels)), steps=10**9)
    return lambda: loader.epoch(sampler, 0)


def take_turns(turns: list[Turn], clock: Clock, batches: int, repeats: int) -> list[float]:
    """Median seconds of a batch for each."""
    times: list[list[float]] = [[] for _ in turns]
    for _ in range(repeats):
        for turn, seen in zip(turns, times, strict=True):
            iterator = turn()
            for _ in islice(iterator, UNCOUNTED):
                pass
            seen.append(clock.seconds(lambda it=iterator: run(it, batches)) / batches)  # type: ignore[misc]
            iterator.close()  # type: ignore[attr-defined]
            del iterator
    return [statistics.median(seen) for seen in times]


def run(iterator: Iterator[Any], batches: int) -> None:
    for _ in islice(iterator, batches):
        pass


def loading(options: argparse.Namespace, root: Path, cache: Path, clock: Clock) -> list[dict[str, Any]]:
    """Rows of both views, for each way to a batch."""
    dataset = data.open("folder", root)
    files = [dataset.source.read(i) for i in range(min(len(dataset), options.pictures))]
    small = [as_jpeg(shrunk(Image.open(io.BytesIO(file)), 256)) for file in files]
    rows = []
    for work, view in VIEWS.items():
        ways: list[tuple[str, Turn]] = []
        for side in (256, 375) if clock.cuda else (256,):
            store = prepare(dataset, cache=cache, side=side, on_error="skip")
            for mode in ("resident", "streaming") if clock.cuda else ("streaming",):
                loader = Loader(
                    store,
                    dataset.labels[store.rows],
                    view=view,
                    normalization=IMAGENET,
                    device=options.device,
                    mode=mode,
                    workers=options.workers,
                )
                name = f"nearfar, {mode}" if clock.cuda else f"nearfar, {options.workers} threads"
                ways.append((f"{name}, {side} px", ours(loader, options.batch)))
        for name, pictures in (("files as they are", files), ("files of 256 px", small)):
            turn = theirs(pictures, view, options.batch, options.device)
            ways.append((f"Pillow, {THEIR_WORKERS} processes, {name}", turn))
        seconds = take_turns([turn for _, turn in ways], clock, options.batches, options.repeats)
        for (way, _), each in zip(ways, seconds, strict=True):
            row = {"work": work, "way": way, "images/s": options.batch / each, "ratio": each / seconds[0]}
            rows.append({**row, "ms/batch": 1000 * each})
            show_line(rows[-1])
    return rows


def sampler_rows(images: int = 1_000_000, classes: int = 100_000, batch: int = 512) -> list[dict[str, Any]]:
    """Rows of all samplers: seconds to make one, milliseconds of its first batch and of later ones."""
    rng = np.random.default_rng(0)
    labels, rows = rng.integers(0, classes, images), []
    cases = {
        "groups": {"classes": batch // 4, "per_class": 4},
        "pairs": {"classes": batch // 2},
        "random": {"batch_size": batch},
        "hard_classes": {"classes": batch // 2},
    }
    for key, settings in cases.items():
        start = time.perf_counter()
        sampler = sampling.create(key, labels, **settings)
        setup, times = time.perf_counter() - start, []
        if isinstance(sampler, sampling.HardClasses):
            sampler.update(rng.standard_normal((len(sampler.class_labels), 128), dtype=np.float32))
        for step in range(101):
            start = time.perf_counter()
            sampler.batch(0, step)
            times.append(time.perf_counter() - start)
        row = {"work": f"sampler {key}, {batch} of {images:,}", "way": "nearfar"}
        median = 1000 * statistics.median(times[1:])
        rows.append({**row, "ms/batch": median, "first ms": 1000 * times[0], "setup s": setup})
        show_line(rows[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--root", type=Path, help="pictures in class folders; made-up ones unless told")
    parser.add_argument("--pictures", type=int, default=600, help="how many to make up, or to read for the usual way")
    parser.add_argument("--batch", type=int, default=120)
    parser.add_argument("--batches", type=int, help="in a turn; 12 on a CPU and 100 on a GPU unless told")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each way")
    parser.add_argument("--workers", type=int, default=2, help="our threads")
    options = parse(parser, COLUMNS)
    clock = Clock(options.device)
    options.batches = options.batches or (100 if clock.cuda else 12)
    rows = sampler_rows()
    with tempfile.TemporaryDirectory() as folder:
        root = options.root or Path(folder) / "pictures"
        if options.root is None:
            made_up(root, options.pictures)
        rows = loading(options, root, Path(folder) / "cache", clock) + rows
    report(rows, COLUMNS, clock, options.out)


if __name__ == "__main__":
    main()
