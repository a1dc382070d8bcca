"""Charts as SVG, without libraries and scripts. Colors are those of the page, so that they follow dark mode.

Lines are distinguished by more than color: they have different dashes and their names at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from statistics import median_high
from typing import TYPE_CHECKING

from nearfar.utils import formatting

if TYPE_CHECKING:
    from nearfar.bench.comparison.ranking import RankedLoss

Point = tuple[float, float]

WIDTH, HEIGHT = 520, 280
LEFT, RIGHT, TOP, BOTTOM = 54, 84, 14, 42
MAX_POINTS = 600  # of a line; more would not be visible
DASHES = ("", "7 4", "2 4", "10 4 2 4")
LINE_HEIGHT = 13  # pixels between the names at the ends of lines
LETTER = 7.2  # width of a letter of such a name in pixels
ROW, BAND = 20, 9  # pixels between the rows and between the bands of an interval chart
LONGEST = 26  # letters of a name beside a row
FILE_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#3c434b}.up{text-anchor:end}.across,.axis{text-anchor:middle}"
    ".rule{stroke:#e2e3e0}.line{stroke:#1f5fa8;stroke-width:2;fill:none}.c10{stroke:#5b636d}.dot{fill:#1f5fa8}"
    ".dot.c10{fill:#5b636d;stroke:none}.stem{stroke:#5b636d;fill:none}.thread{stroke:#b4540a;stroke-width:1;opacity:.5}"
    ".band{stroke:#b4540a;stroke-width:4;stroke-linecap:round}"
)


@dataclass(frozen=True)
class Line:
    """A named line."""

    name: str  # the name at its end
    points: Sequence[Point]  # (x, y), in the order of x
    color: int = 1  # number of one of the page's colors, from 1
    faint: bool = False  # whether it is drawn thin and without its name, as the background of another line
    dots: bool = False  # whether each point is marked
    joined: bool = True  # whether the points are joined by a line; otherwise there is no name at the end

    @property
    def named(self) -> bool:
        """Whether its name is written at its end."""
        return self.joined and not self.faint


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    x: str,
    y: str,
    percent: bool = False,
    from_zero: bool = False,
    ticks: Sequence[tuple[float, str]] = (),
) -> str:
    """Lines over a common x axis."""
    shown = [line for line in lines if line.points]
    if not shown:
        return ""
    xs = [point[0] for line in shown for point in line.points]
    ys = [point[1] for line in shown for point in line.points]
    named = [line for line in shown if line.named]
    # The frame is fixed; space for long names and for many of them is added around it.
    width = WIDTH + max(0, round(max((LETTER * len(line.name) for line in named), default=0) + 12 - RIGHT))
    height = max(HEIGHT, TOP + BOTTOM + LINE_HEIGHT * len(named))
    across = _Scale(
        [*xs, *(place for place, _ in ticks)],
        LEFT,
        WIDTH - RIGHT,
        whole=all(float(value).is_integer() for value in xs),
    )
    most = 1.0 if percent and max(ys) <= 1.0 else math.inf
    up = _Scale([*ys, 0.0] if from_zero else ys, height - BOTTOM, TOP, rounded=True, most=most)
    parts = [_frame(across, up, x, y, percent, height, ticks)]
    dash = 0
    for line in shown:
        parts.append(_line(line, across, up, percent, "" if line.faint else DASHES[dash % len(DASHES)]))
        dash += not line.faint
    parts += _names(named, up, height)
    return _svg(title, parts, width, height)


def _line(line: Line, across: _Scale, up: _Scale, percent: bool, dash: str) -> str:
    kept = thinned(line.points)
    path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in kept)
    style = f' stroke-dasharray="{dash}"' if dash else ""
    kind = "line faint" if line.faint else "line"
    drawn = f'<polyline class="{kind} c{line.color}" points="{path}"{style}/>' if line.joined else ""
    if line.dots or len(kept) == 1:
        size = 3 if line.joined else 4
        for px, py in kept:
            value = formatting.percent(py) if percent else formatting.number(py)
            tip = f"<title>{escape(line.name)}: {value} at {px:g}</title>"
            drawn += (
                f'<circle class="dot c{line.color}" cx="{across(px):.1f}" cy="{up(py):.1f}" r="{size}">{tip}</circle>'
            )
    return drawn


def _names(lines: Sequence[Line], up: _Scale, bottom: int) -> list[str]:
    """Names at the ends of lines, moved apart where they would overlap."""
    ends = sorted(((up(line.points[-1][1]), line) for line in lines), key=lambda end: end[0])
    places: list[float] = []
    for height, _ in ends:
        places.append(max(height, places[-1] + LINE_HEIGHT) if places else height)
    lowest = float(bottom - BOTTOM)
    for number in reversed(range(len(places))):  # names below the frame push the others up
        places[number] = lowest = min(places[number], lowest)
        lowest -= LINE_HEIGHT
    return [
        f'<text class="name c{line.color}" x="{WIDTH - RIGHT + 8}" y="{place + 4:.1f}">{escape(line.name)}</text>'
        for place, (_, line) in zip(places, ends, strict=True)
    ]


def scatter(groups: Sequence[tuple[str, int, Sequence[Point]]], *, title: str, labels: bool, side: int = 620) -> str:
    """Points of named groups on a map. A tooltip shows the name of a group."""
    points = [point for _, _, members in groups for point in members]
    if not points:
        return ""
    low = [min(point[axis] for point in points) for axis in (0, 1)]
    high = [max(point[axis] for point in points) for axis in (0, 1)]
    spread = max(high[0] - low[0], high[1] - low[1]) or 1.0
    margin = 18.0
    scale = (side - 2 * margin) / spread
    height = round(2 * margin + (high[1] - low[1]) * scale)

    def place(point: Point) -> Point:
        return margin + (point[0] - low[0]) * scale, margin + (high[1] - point[1]) * scale

    parts, names = [], []
    for number, (name, hue, members) in enumerate(groups):
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in map(place, members))
        parts.append(f'<g class="group s{number % 3}" style="--hue:{hue}"><title>{escape(name)}</title>{dots}</g>')
        if labels and members:
            middle = place((median_high(x for x, _ in members), median_high(y for _, y in members)))
            short = name if len(name) <= 24 else name[:23] + "…"
            names.append(f'<text class="place" x="{middle[0]:.1f}" y="{middle[1]:.1f}">{escape(short)}</text>')
    return _svg(title, parts + names, side, height, kind="map")


def whiskers(low: float, value: float, high: float) -> str:
    """A value and its interval, small enough for a table."""
    start, middle, stop = (4 + 152 * min(max(part, 0.0), 1.0) for part in (low, value, high))
    return (
        '<svg class="whiskers" viewBox="0 0 160 16" width="160" height="16" aria-hidden="true">'
        '<line class="track" x1="4" y1="8" x2="156" y2="8"/>'
        f'<rect class="reach" x="{start:.1f}" y="3" width="{max(stop - start, 1):.1f}" height="10" rx="2"/>'
        f'<line class="value" x1="{middle:.1f}" y1="1" x2="{middle:.1f}" y2="15"/></svg>'
    )


def interval_chart(rows: Sequence[RankedLoss], bands: Sequence[Sequence[str]], *, title: str, x: str) -> str:
    """Scores with their intervals, one below the other. A vertical bar joins the rows of each band."""
    if not rows:
        return ""
    left = round(max(LETTER * len(row.loss) for row in rows)) + 14
    right, height = left + 320, TOP + ROW * len(rows)
    ends = [end for row in rows for end in (row.low, row.score, row.high) if end is not None]
    across = _Scale(ends, left, right, rounded=True, most=1.0)
    parts = _columns(across, height)
    middles = {row.loss: TOP + ROW * (number + 0.5) for number, row in enumerate(rows)}
    for row in rows:
        y = middles[row.loss]
        kind = "c10" if row.is_baseline else "c1"
        parts.append(f'<text class="tick up" x="{left - 8}" y="{y + 4:.1f}">{escape(row.loss)}</text>')
        if row.low is not None and row.high is not None:
            parts.append(_segment(f"line {kind}", across(row.low), y, across(row.high), y))
        tip = f"<title>{escape(row.loss)}: {formatting.percent(row.score, 2)}</title>"
        parts.append(f'<circle class="dot {kind}" cx="{across(row.score):.1f}" cy="{y:.1f}" r="4">{tip}</circle>')
    for number, band in enumerate(bands):
        x_band = right + 16 + BAND * number
        held = [at for at, row in enumerate(rows) if row.loss in band]
        tops, bottoms = ([TOP + ROW * (at + share) for at in held] for share in (0.15, 0.85))
        parts.append(_segment("thread", x_band, tops[0], x_band, bottoms[-1]))
        starts = [at for at in range(len(held)) if at == 0 or held[at] > held[at - 1] + 1]
        for start, stop in pairwise([*starts, len(held)]):
            parts.append(_segment("band", x_band, tops[start], x_band, bottoms[stop - 1]))
    parts.append(f'<text class="axis" x="{(left + right) / 2}" y="{height + 34}">{escape(x)}, %</text>')
    return _svg(title, parts, right + 20 + BAND * len(bands), height + 40)


def change_chart(
    rows: Sequence[tuple[str, float, float, str]], *, title: str, x: str, left_out: tuple[int, str] | None = None
) -> str:
    """Shares before (rings) and after (dots): (name, before, after, id of what the name leads to), one row each.

    ``left_out`` is the number of a row, and what it says about those that are left out there.
    """
    names = [name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…" for name, *_ in rows]
    left = round(max(LETTER * len(name) for name in names)) + 62
    right, height = left + 320, TOP + ROW * (len(rows) + (left_out is not None))
    across = _Scale([end for _, *ends, _ in rows for end in ends], left, right, rounded=True, most=1.0)
    parts = _columns(across, height)
    for number, (name, before, after, place) in enumerate(rows):
        y = TOP + ROW * (number + (left_out is not None and number >= left_out[0]) + 0.5)
        text = f'<text class="tick up" x="{left - 56}" y="{y + 4:.1f}">{escape(names[number])}</text>'
        tip = f"{name}: {formatting.percent(before)} → {formatting.percent(after)}"
        parts.append(f'<g class="{"gained" if after >= before else "lost"}"><title>{escape(tip)}</title>')
        parts.append(f'<a href="#{escape(place)}">{text}</a>' if place else text)
        parts.append(_segment("line", across(before), y, across(after), y))
        parts += [
            f'<circle class="{kind}" cx="{across(value):.1f}" cy="{y:.1f}" r="4"/>'
            for kind, value in (("ring", before), ("dot", after))
        ]
        gain = formatting.signed(100 * (after - before))
        parts.append(f'<text class="name up" x="{left - 10}" y="{y + 4:.1f}">{gain}</text></g>')
    if left_out is not None:
        y = TOP + ROW * (left_out[0] + 0.5) + 4
        parts.append(f'<text class="axis" x="{(left + right) / 2}" y="{y:.1f}">{escape(left_out[1])}</text>')
    parts.append(f'<text class="axis" x="{(left + right) / 2}" y="{height + 34}">{escape(x)}, %</text>')
    return _svg(title, parts, right + 20, height + 40, kind="chart changes")


def rank_chart(ranks: Mapping[str, float], critical: float | None, *, title: str) -> str:
    """Average ranks on a line, best left. Bars join losses whose ranks differ by less than the critical difference."""
    if not ranks:
        return ""
    ordered = sorted(ranks.items(), key=lambda item: item[1])
    joined = rank_bands([rank for _, rank in ordered], critical) if critical is not None else []
    side = round(max(LETTER * (len(name) + 6) for name in ranks)) + 20
    start, stop = side, side + 420
    across = _Scale([1.0, float(len(ranks))], start, stop, whole=True)
    axis = 44 if critical is not None else 26
    first = axis + 16 + 8 * len(joined)  # names begin below the bars
    half = (len(ordered) + 1) // 2
    parts = [_segment("line", start, axis, stop, axis)]
    for value in range(1, len(ranks) + 1):
        place = across(float(value))
        parts.append(_segment("line", place, axis - 6, place, axis))
        parts.append(f'<text class="tick across" x="{place:.1f}" y="{axis - 10}">{value}</text>')
    if critical is not None:
        reach = min(across(1.0 + critical), stop)
        parts.append(_segment("band", start, 12, reach, 12))
        words = f"critical difference {critical:.2f}" + ("" if 1 + critical <= len(ranks) else ", beyond the axis")
        parts.append(f'<text class="tick" x="{reach + 8:.1f}" y="16">{words}</text>')
    for number, (name, rank) in enumerate(ordered):
        is_left = number < half
        row = number if is_left else len(ordered) - 1 - number
        place, y = across(rank), first + 18 * row
        end = start - 8 if is_left else stop + 8
        parts.append(f'<polyline class="stem" points="{place:.1f},{axis} {place:.1f},{y} {end},{y}"/>')
        anchor = "tick up" if is_left else "tick"
        text = f"{escape(name)} {rank:.2f}" if is_left else f"{rank:.2f} {escape(name)}"
        parts.append(f'<text class="{anchor}" x="{end - 4 if is_left else end + 4}" y="{y + 4}">{text}</text>')
    for level, (low, high) in enumerate(joined):
        y = axis + 8 + 8 * level
        parts.append(_segment("band", across(ordered[low][1]) - 4, y, across(ordered[high][1]) + 4, y))
    return _svg(title, parts, stop + side, first + 18 * half + 4)


def rank_bands(ranks: Sequence[float], critical: float) -> list[tuple[int, int]]:
    """Longest runs of at least two sorted ranks that differ by less than the critical difference.

    >>> rank_bands([1.0, 1.5, 2.2, 4.0], 1.0)
    [(0, 1), (1, 2)]
    """
    found: list[tuple[int, int]] = []
    for low, rank in enumerate(ranks):
        high = max(at for at, other in enumerate(ranks) if other - rank < critical)
        if high > low and (not found or high > found[-1][1]):
            found.append((low, high))
    return found


def as_file(svg: str) -> str:
    """A chart with its colors, as a file of its own."""
    head, rest = svg.split(">", 1)
    width, height = head.split('viewBox="0 0 ')[1].split('"')[0].split()
    size = f' xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
    style = f'<!-- nearfar chart --><style>{FILE_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
    return f"{head}{size}>{style}{rest}"


def smoothed(points: Sequence[Point], window: int) -> list[Point]:
    """Moving average over the last points.

    >>> smoothed([(0, 4.0), (1, 2.0), (2, 0.0)], 2)
    [(0, 4.0), (1, 3.0), (2, 1.0)]
    """
    found, total = [], 0.0
    for number, (x, y) in enumerate(points):
        total += y - (points[number - window][1] if number >= window else 0.0)
        found.append((x, total / min(number + 1, window)))
    return found


def thinned(points: Sequence[Point], most: int = MAX_POINTS) -> Sequence[Point]:
    """Evenly spaced points, if there are too many. The first and the last are kept.

    >>> thinned([(n, 0.0) for n in range(9)], 3)
    [(0, 0.0), (4, 0.0), (8, 0.0)]
    """
    if len(points) <= most:
        return points
    return [points[round(number * (len(points) - 1) / (most - 1))] for number in range(most)]


class _Scale:
    """Maps numbers to pixels."""

    def __init__(
        self,
        values: Sequence[float],
        start: float,
        stop: float,
        *,
        rounded: bool = False,
        whole: bool = False,
        most: float = math.inf,
    ) -> None:
        low, high = min(values), max(values)
        if high - low < 1e-12 * max(abs(low), abs(high), 1e-300):
            low, high = low - (abs(low) or 1.0) * 0.5, min(high + (abs(high) or 1.0) * 0.5, most)
        self.step = max(_nice((high - low) / 4), 1.0 if whole else 0.0)
        if rounded:
            low, high = math.floor(low / self.step + 1e-9) * self.step, math.ceil(high / self.step - 1e-9) * self.step
        self.low, self.high, self.start, self.stop = low, high, start, stop

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        first, last = math.ceil(self.low / self.step - 1e-9), math.floor(self.high / self.step + 1e-9)
        return [number * self.step for number in range(first, last + 1)]


def _nice(step: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not below a step."""
    power = 10.0 ** math.floor(math.log10(step))
    return next((factor * power for factor in (1.0, 2.0, 5.0) if factor * power >= step * (1 - 1e-9)), 10.0 * power)


def _frame(
    across: _Scale, up: _Scale, x: str, y: str, percent: bool, bottom: int, ticks: Sequence[tuple[float, str]]
) -> str:
    parts = []
    for value in up.ticks():
        height = f"{up(value):.1f}"
        parts.append(f'<line class="rule" x1="{LEFT}" y1="{height}" x2="{WIDTH - RIGHT}" y2="{height}"/>')
        shown = f"{100 * value:g}" if percent else f"{value:g}"
        parts.append(f'<text class="tick up" x="{LEFT - 8}" y="{up(value) + 4:.1f}">{shown}</text>')
    for value, name in ticks or [(value, f"{value:g}") for value in across.ticks()]:
        place = f'x="{across(value):.1f}" y="{bottom - BOTTOM + 18}"'
        parts.append(f'<text class="tick across" {place}>{escape(name)}</text>')
    parts.append(f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{bottom - 4}">{escape(x)}</text>')
    middle = (TOP + bottom - BOTTOM) / 2
    unit = f"{y}, %" if percent else y
    parts.append(f'<text class="axis" transform="translate(12 {middle}) rotate(-90)">{escape(unit)}</text>')
    return "".join(parts)


def _columns(across: _Scale, height: float) -> list[str]:
    """Vertical rules with their values in percent."""
    parts = []
    for value in across.ticks():
        place = f"{across(value):.1f}"
        parts.append(f'<line class="rule" x1="{place}" y1="{TOP}" x2="{place}" y2="{height}"/>')
        parts.append(f'<text class="tick across" x="{place}" y="{height + 16}">{100 * value:g}</text>')
    return parts


def _svg(title: str, parts: Sequence[str], width: int = WIDTH, height: int = HEIGHT, kind: str = "chart") -> str:
    head = f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
    return head + "".join(parts) + "</svg>"


def _segment(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
