"""Draws the first training batch as a grid of images."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageDraw, ImageFont

from nearfar.data import splits
from nearfar.data.datasets.base import Dataset
from nearfar.data.loader import Loader
from nearfar.data.sampling import create
from nearfar.data.store.prepare import BadFilesError, decoded, prepare, store_folder
from nearfar.data.store.store import BadFile, Store
from nearfar.data.transforms.view import View
from nearfar.utils.atomic import whole_file
from nearfar.utils.folders import claim_file
from nearfar.utils.system import processors
from nearfar.utils.validation import one_of

ENDINGS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
TILE = (96, 192)  # pixels: smaller images are enlarged, larger ones shrunk
GAP, MARGIN, FONT = 4, 16, 15
COLUMNS = 8  # used if classes have too few images to fill a line each

Pixels = NDArray[np.uint8]
Ints = NDArray[np.int64]


def part_rows(dataset: Dataset, part: str) -> Ints:
    """Return the rows of a part; without parts, "train" and "test" are the halves of the classes."""
    if part in dataset.parts:
        return dataset.parts[part]
    if set(dataset.parts) == {"all"} and part in ("train", "test"):
        split = splits.standard(dataset)
        return split.train if part == "train" else split.test["test"]
    allowed = [*dataset.parts] + (["train", "test"] if set(dataset.parts) == {"all"} else [])
    raise ValueError(f"part is {part!r}; {dataset.name} has {', '.join(allowed)}")


def training_view(
    dataset: Dataset, crop: str = "auto", *, size: int | None = None, resize: int | None = None, flip: bool = True
) -> View:
    """Return how a training sees images; "auto" leaves small ones as they are and crops others at random."""
    one_of("view", crop, ("auto", "random", "random_resized", "center", "none"))
    array = getattr(dataset.source, "array", None)
    if crop == "auto" and array is not None and max(array.shape[1:3]) < 64:
        # Small images such as digits are not cropped, and not mirrored, as that changes their meaning.
        return View(size=(array.shape[1], array.shape[2]) if size is None else size, crop="none", flip=False)
    window = 224 if size is None else size
    crop = "random" if crop == "auto" else crop
    return View(size=window, crop=crop, resize=max(256, window) if resize is None else resize, flip=flip)


def first_batch(
    dataset: Dataset,
    *,
    view: View,
    part: str = "train",
    classes: int | None = None,
    per_class: int = 4,
    seed: int = 0,
    side: int = 256,
    cache: str | Path | None = None,
) -> tuple[Pixels, Ints]:
    """Return the images and labels of the first class-balanced batch of a training.

    If the dataset is prepared, images come from its store; otherwise only those of the batch are decoded.
    """
    rows, store = part_rows(dataset, part), None
    if not dataset.is_encoded:
        store = prepare(dataset, side=side)
    else:
        with suppress(ValueError):  # it is not prepared
            store = Store.open(store_folder(dataset, side=side, cache=cache))
    if store is not None:
        rows = store.rows[store.places(rows)]  # without skipped files
    labels = dataset.labels[rows]
    if not len(labels):
        raise ValueError(f"part {part} of {dataset.name} has no images")
    if classes is None:
        full = int(np.minimum(np.bincount(labels), per_class).sum()) // per_class
        classes = max(1, min(8, full))
    sampler = create("groups", labels, classes=classes, per_class=per_class, seed=seed)
    if store is None:
        needed = np.sort(rows[sampler.batch(0, 0)])
        results = list(decoded(dataset.source, needed.tolist(), {"side": side}, processors()))
        if bad := tuple(result for result in results if isinstance(result, BadFile)):
            raise BadFilesError(bad, len(needed))
        store = Store.of_arrays([result for result in results if isinstance(result, np.ndarray)], rows=needed)
    places = np.searchsorted(store.rows, rows).clip(max=len(store) - 1)  # rows that are not in the store are not used
    loader = Loader(store, dataset.labels[store.rows], view=view, workers=0, seed=seed)
    batch = next(loader.epoch(sampler, 0, rows=places))
    return batch.images.permute(0, 2, 3, 1).numpy(), batch.labels.numpy()


def grid(images: Sequence[Pixels] | Pixels, captions: Sequence[str]) -> Image.Image:
    """Draw images of one size in lines, one line per run of equal captions.

    Runs of one or two images share lines.
    """
    if len(images) != len(captions) or not len(images):
        raise ValueError(
            f"there are {len(images)} images and {len(captions)} captions; needed is one for each, and at least one"
        )
    tiles = [_tile(image) for image in images]
    runs = [(caption, [at for at, _ in run]) for caption, run in groupby(enumerate(captions), key=lambda pair: pair[1])]
    longest = max(len(places) for _, places in runs)
    columns = longest if longest > 2 else max(longest, min(COLUMNS, len(tiles)))
    width, height = tiles[0].width + GAP, tiles[0].height + GAP + FONT + 8
    lines: list[list[tuple[int, str, list[int]]]] = [[]]
    column = 0
    for caption, places in runs:
        if column + len(places) > columns:
            lines.append([])
            column = 0
        lines[-1].append((column, caption, places))
        column += len(places)
    sheet = Image.new("RGB", (2 * MARGIN + columns * width - GAP, 2 * MARGIN + len(lines) * height - GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(FONT)
    for number, line in enumerate(lines):
        top = MARGIN + number * height
        for column, caption, places in line:
            left = MARGIN + column * width
            room = len(places) * width - GAP
            draw.text((left, top), _fitting(caption, room, font), fill=(40, 40, 40), font=font)
            for at, place in enumerate(places):
                corner = (left + at * width, top + FONT + 6)
                sheet.paste(tiles[place], corner)
                edges = (corner[0] - 1, corner[1] - 1, corner[0] + tiles[0].width, corner[1] + tiles[0].height)
                draw.rectangle(edges, outline=(215, 215, 215))  # to see the edges of white images
    return sheet


def check_file(file: Path, *, force: bool = False) -> Path:
    """Return the path, or raise if an image cannot be written to it."""
    if file.suffix.lower() not in ENDINGS:
        raise ValueError(f"out is {str(file)!r}; needed is a file that ends with {', '.join(ENDINGS)}")
    return claim_file(file, "image", force=force)


def write(sheet: Image.Image, file: Path, *, force: bool = False) -> None:
    """Write an image in the format of the file extension."""
    about = Image.Exif()
    about[ExifTags.Base.Software] = "nearfar image"
    with whole_file(check_file(file, force=force)) as draft:
        sheet.save(draft, ENDINGS[file.suffix.lower()], exif=about)


def _tile(image: Pixels) -> Image.Image:
    tile = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).convert("RGB")
    low, high = TILE
    longest = max(tile.size)
    if longest < low:  # by a whole factor, so that each pixel can be seen
        return tile.resize((tile.width * (low // longest), tile.height * (low // longest)), Image.Resampling.NEAREST)
    if longest > high:
        scale = high / longest
        return tile.resize((max(1, round(tile.width * scale)), max(1, round(tile.height * scale))))
    return tile


def _fitting(text: str, room: int, font: Any) -> str:
    """Shorten a caption that is too long."""
    if font.getlength(text) <= room:
        return text
    while text and font.getlength(text + "…") > room:
        text = text[:-1]
    return text + "…"
