"""Search results as one image."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from nearfar.search.encoder import THUMBNAIL_SIDE as SIDE
from nearfar.search.results import Results
from nearfar.utils.atomic import whole_file

GAP, MARGIN, FRAME, FONT = 10, 18, 4, 14
GOOD, BAD, NEITHER, ASKED = (22, 122, 72), (192, 57, 43), (205, 207, 203), (29, 33, 38)
INK, SOFT = (29, 33, 38), (91, 99, 109)
ENDINGS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}


def sheet(found: Sequence[Results]) -> Image.Image:
    """Draw a line for each query: the query and its neighbors, framed green if they have its class and red otherwise.

    >>> sheet([Results("a.jpg", "jay", ())]).size
    (196, 236)
    """
    if not found:
        raise ValueError("found is empty; at least one query is needed")
    columns = 1 + max(len(results) for results in found)
    width, height = SIDE + GAP, SIDE + GAP + 2 * (FONT + 4) + 4
    canvas = Image.new("RGB", (2 * MARGIN + columns * width - GAP, 2 * MARGIN + len(found) * height - GAP), "white")
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(FONT)
    for line, results in enumerate(found):
        pictures = results.pictures or (b"",) * (len(results) + 1)
        top = MARGIN + line * height
        cells: list[tuple[Any, str, str]] = [(ASKED, results.name, results.label or "")]
        for each, right in zip(results, results.right, strict=True):
            color = {None: NEITHER, True: GOOD, False: BAD}[right]
            name = each.item.label if each.item.label is not None else each.item.name.rpartition("/")[2]
            cells.append((color, f"{each.score:.3f}", name))
        for column, ((color, upper, lower), picture) in enumerate(zip(cells, pictures, strict=True)):
            left = MARGIN + column * width
            _place(canvas, picture, left, top)
            draw.rectangle((left, top, left + SIDE - 1, top + SIDE - 1), outline=color, width=FRAME)
            draw.text((left, top + SIDE + 4), _fitting(upper, font), fill=INK, font=font)
            draw.text((left, top + SIDE + FONT + 8), _fitting(lower, font), fill=SOFT, font=font)
    return canvas


def write(found: Sequence[Results], file: Path) -> None:
    """Write a contact sheet to a file."""
    if file.suffix.lower() not in ENDINGS:
        raise ValueError(f"the file is {str(file)!r}; its name must end in {', '.join(ENDINGS)}")
    image = sheet(found)
    with whole_file(file) as draft:
        image.save(draft, ENDINGS[file.suffix.lower()])


def _place(canvas: Image.Image, picture: bytes, left: int, top: int) -> None:
    inner = SIDE - 2 * FRAME
    if not picture:
        canvas.paste((232, 233, 230), (left, top, left + SIDE, top + SIDE))
        return
    shown = Image.open(io.BytesIO(picture)).convert("RGB")
    scale = inner / max(shown.size)
    shown = shown.resize((max(1, round(shown.width * scale)), max(1, round(shown.height * scale))))
    canvas.paste(shown, (left + (SIDE - shown.width) // 2, top + (SIDE - shown.height) // 2))


def _fitting(text: str, font: Any) -> str:
    if font.getlength(text) <= SIDE:
        return text
    while text and font.getlength(text + "…") > SIDE:
        text = text[:-1]
    return text + "…"
