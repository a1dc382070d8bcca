"""Decision thresholds: from which similarity on are two images of one class, and does an index have a query's class?

Two images are one comparison, and a search among n items is n of them, so that the best score of an image of no class
of the index grows with n. A threshold of pairs therefore says little about a search; that of a search follows n.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearfar.metrics.inputs import MEASURES, QueryGallery, as_query_gallery
from nearfar.metrics.intervals import class_intervals
from nearfar.metrics.verification import CPU_SIDE, RocCurve, compare_pairs, pair_scores
from nearfar.supervision import Pairs
from nearfar.utils.atomic import write_json
from nearfar.utils.folders import claim_file
from nearfar.utils.formatting import interval, percent
from nearfar.utils.progress import Progress
from nearfar.utils.tensors import Array, ArrayInput, full_precision
from nearfar.utils.validation import number, one_of, whole

FORMAT = "nearfar threshold"
VERSION = 2  # increased when older versions cannot read the files; 1 had no ``search``
CRITERIA = ("f1", "accuracy")
DATA = "the calibration data"  # unless it has a name
SLACK = 1e-6  # a search computes similarities in float32
DRAWS, ENOUGH = 8, 10_000  # draws of the items of an index, at most, and searches of strangers that are enough
COLUMNS = ("similarity", "unknown_accept", "low", "high", "known_found")  # of the table of a search, beside items
OCTAVES = 2  # of numbers of items, whose trend larger indexes than the calibration had are judged by


@dataclass(frozen=True, kw_only=True)
class _Decision:
    """The lowest score of a match."""

    similarity: float
    measure: str
    about: Mapping[str, Any] = field(default_factory=dict)

    def score(self, left: Array, right: Array) -> float:
        """Return the score of two embeddings: their cosine, or minus their distance.

        Args:
            left: [d].
            right: [d].
        """
        first, second = (torch.as_tensor(vector).double() for vector in (left, right))
        if self.measure == "euclidean":
            return -float(torch.linalg.vector_norm(first - second))
        return float(torch.cosine_similarity(first, second, dim=0, eps=1e-30))

    def matches(self, score: float) -> bool:
        """Whether two images of this score match.

        Args:
            score: Their cosine, or minus their distance.
        """
        return score >= self.similarity - SLACK

    @property
    def _note(self) -> str:
        """What is to be known about the calibration data, at the end of a line."""
        return f"; {self.about['note']}" if "note" in self.about else ""

    def to_json(self) -> dict[str, Any]:
        """Return the threshold as JSON-compatible data."""
        return {**asdict(self), "about": dict(self.about)}


@dataclass(frozen=True, kw_only=True)
class SearchThreshold(_Decision):
    """A similarity from which on the best item of a search is a match, for an index of some items.

    A stranger is an image whose class the index does not have. The other images of a known one are in the index.

    Args:
        similarity: Lowest score of a match: a cosine, or minus a Euclidean distance.
        measure: "cosine" or "euclidean".
        about: What was calibrated: the model, the data, the date.
        unknown: Share of strangers that may match, which was wanted.
        items: Number of items of the index.
        unknown_accept: Share of strangers that match.
        low: Lower end of its 95 % interval over classes; None for more items than the calibration had.
        high: Upper end of it.
        known_found: Share of known images whose best item is of their class and matches.
        queries: Number of images of the calibration.
        table: Columns of ``items`` (powers of two, and as many as the calibration had) and of the values above.

    Example:
        >>> points = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> threshold = calibrate_search(points, torch.tensor([0, 0, 1, 1]), unknown=0.0)
        >>> [round(threshold.at(items).similarity, 3) for items in (1, 2)], threshold.known_found
        ([0.6, 0.6], 1.0)
    """

    unknown: float
    items: int
    unknown_accept: float
    low: float | None
    high: float | None
    known_found: float
    queries: int
    table: Mapping[str, Sequence[float | None]]

    @property
    def is_measured(self) -> bool:
        """Whether the calibration had as many items; otherwise the threshold and its shares are estimates."""
        return self.items <= self.table["items"][-1]  # type: ignore[operator]

    def at(self, items: int) -> SearchThreshold:
        """Return the threshold for an index of another size, which keeps the share of strangers that match.

        Values are interpolated in the logarithm of the number of items. Beyond the calibration, they follow their
        last trend, which is an estimate.

        Args:
            items: Number of items of the index.
        """
        place, places = math.log2(max(1, items)), np.log2(np.array(self.table["items"], dtype=np.float64))
        columns = {name: np.array(self.table[name], dtype=np.float64) for name in COLUMNS}
        values = {name: _finite(np.interp(place, places, column)) for name, column in columns.items()}
        if items > self.table["items"][-1]:  # type: ignore[operator]
            start = max(0, int(np.searchsorted(places, places[-1] - OCTAVES, side="right")) - 1)
            ahead = (place - places[-1]) / max(places[-1] - places[start], 1.0)
            ends = (columns[name][[start, -1]] for name in ("similarity", "known_found"))
            similarity, found = (float(last + ahead * (last - first)) for first, last in ends)
            highest = max(float(columns["similarity"][-1]), float(self.measure == "cosine"))
            values |= {
                "similarity": min(similarity, highest),
                "known_found": max(found, 0.0),
                "low": None,
                "high": None,
            }
        return replace(self, items=items, **values)  # type: ignore[arg-type]

    def describe(self) -> str:
        """Return one line about the shares of strangers that match and of known images that are found."""
        about, spread, source = "", "" if self.low is None else f" (95 % interval {interval(self.low, self.high)})", ""
        if not self.is_measured:
            about, source = "about ", f", estimated from {self.table['items'][-1]:,} items"
        return (
            f"threshold {self.similarity:.4f} for {self.items:,} items: on {self.about.get('data', DATA)}, "
            f"{about}{percent(self.unknown_accept)}{spread} of strangers would match, and "
            f"{about}{percent(self.known_found)} of known images are found{source}{self._note}"
        )


@dataclass(frozen=True, kw_only=True)
class Threshold(_Decision):
    """A similarity from which on two images match, and its error rates on the pairs that it was calibrated on.

    Args:
        similarity: Lowest score of a match: a cosine, or minus a Euclidean distance.
        measure: "cosine" or "euclidean".
        about: What was calibrated: the model, the data, the date.
        criterion: "f1", "accuracy", or the false accept rate that was wanted.
        false_accept: Share of the pairs of two classes that match.
        false_reject: Share of the pairs of one class that do not match.
        f1: F1 of the matching pairs.
        accuracy: Share of all pairs that are decided correctly.
        positives: Number of pairs of one class.
        negatives: Number of pairs of two classes.
        search: That of searches, which an index uses instead; None if it was not calibrated.

    Example:
        >>> points = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> threshold = calibrate(points, torch.tensor([0, 0, 1, 1]))
        >>> [threshold.matches(threshold.score(points[0], other)) for other in points[1:]]
        [True, False, False]
    """

    criterion: str | float
    false_accept: float
    false_reject: float
    f1: float
    accuracy: float
    positives: int
    negatives: int
    search: SearchThreshold | None = None

    def describe(self) -> str:
        """Return one line about the error rates."""
        return (
            f"threshold {self.similarity:.4f} for pairs: on {self.about.get('data', DATA)}, "
            f"{percent(self.false_accept, 2)} of the pairs of two classes match, and "
            f"{percent(self.false_reject, 2)} of the pairs of one class do not{self._note}"
        )

    def save(self, file: str | Path, *, force: bool = False) -> None:
        """Write the threshold to a JSON file.

        Args:
            file: The file.
            force: Replace a file that is no threshold.
        """
        write_json(claim_file(file, "threshold", force=force), {"format": FORMAT, "version": VERSION, **self.to_json()})

    @classmethod
    def load(cls, file: str | Path) -> Threshold:
        """Read a file that ``save`` wrote.

        Args:
            file: The file.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is damaged, or of a newer version.
        """
        try:
            content = json.loads(Path(file).read_text(encoding="utf-8"))
            head = content.pop("format"), content.pop("version")
            search = content.pop("search", None)
            read = None if search is None else SearchThreshold(**search).at(search["items"])
            threshold = cls(**content, search=read)
            one_of("measure", threshold.measure, MEASURES)
            for name in ("similarity", "false_accept", "false_reject", "f1", "accuracy", "positives", "negatives"):
                number(name, getattr(threshold, name))
        except FileNotFoundError:
            raise
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"{file} is no threshold that this version of nearfar reads: {error}") from error
        if head not in ((FORMAT, 1), (FORMAT, VERSION)):
            raise ValueError(f"{file} is of format {head[0]!r}, version {head[1]!r}; {FORMAT!r}, {VERSION} is needed")
        return threshold


@torch.no_grad()
def calibrate(
    embeddings: ArrayInput,
    labels: ArrayInput | Pairs,
    gallery: ArrayInput | None = None,
    gallery_labels: ArrayInput | None = None,
    *,
    criterion: str | float = "f1",
    measure: str = "cosine",
    memory_budget: int | None = None,
    progress: Progress | None = None,
) -> Threshold:
    """Choose the threshold from which on two images match, over all or over given pairs, exactly.

    Use classes that the model was not trained on, which look better than they are, and that it is not tested on:
    validation classes. The pairs are those of ``verification``.

    Args:
        embeddings: [m, d], a tensor, NumPy array or memory map of 16, 32 or 64 bits.
        labels: [m], integers, or strings in a NumPy array; or given pairs, which are then the only ones.
        gallery: [n, d], items to pair the embeddings with instead of each other.
        gallery_labels: [n], labels of the gallery.
        criterion: "f1": the highest F1. "accuracy": the highest share of correct decisions; most pairs are of two
            classes, so it refuses many pairs of one class. A number: the lowest threshold whose false accept rate
            is at most this, such as 0.001.
        measure: "cosine" or "euclidean".
        memory_budget: As for ``verification``.
        progress: Called with the number of steps done and their total.

    Returns:
        The threshold with its error rates. It is the lowest similarity of a positive pair that matches.

    Raises:
        ValueError: If no threshold has the wanted rate, there is no positive or no negative pair, or an argument is
            invalid.

    Example:
        >>> points = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> threshold = calibrate(points, torch.tensor([0, 0, 1, 1]), criterion=0.0)
        >>> round(threshold.similarity, 6), threshold.false_accept, threshold.false_reject
        (0.8, 0.0, 0.0)
    """
    if isinstance(criterion, str):
        one_of("criterion", criterion, CRITERIA)
    elif not 0 <= number("criterion", criterion) < 1:
        raise ValueError(f"criterion is {criterion}; a false accept rate must be ≥ 0 and < 1")
    curve, _ = compare_pairs(
        embeddings, labels, gallery, gallery_labels, measure=measure, memory_budget=memory_budget, progress=progress
    )
    place = _best(curve, criterion)
    right, wrong = int(curve.accepted[place]), int(curve.reached[place])
    return Threshold(
        similarity=float(curve.similarity[place]) * abs(curve.unit),
        measure=measure,
        criterion=criterion if isinstance(criterion, str) else float(criterion),
        false_accept=wrong / curve.negatives,
        false_reject=1 - right / curve.positives,
        f1=2 * right / (right + wrong + curve.positives),
        accuracy=(right + curve.negatives - wrong) / (curve.positives + curve.negatives),
        positives=curve.positives,
        negatives=curve.negatives,
    )


def _best(curve: RocCurve, criterion: str | float) -> int:
    """Return the best threshold among the similarities of positive pairs; of equally good ones, the highest."""
    right, wrong = curve.accepted.double(), curve.reached.double()
    if not isinstance(criterion, str):
        allowed = (wrong / curve.negatives <= criterion).nonzero()
        if not len(allowed):
            least = int(wrong[-1]) / curve.negatives
            raise ValueError(
                f"criterion is {criterion}; the most similar pair is of two classes, so that every threshold that "
                f"accepts a pair of one class has a false accept rate of at least {least:.2g}"
            )
        return int(allowed[0])
    value: Tensor = right / (right + wrong + curve.positives) if criterion == "f1" else right - wrong
    return int((value == value.max()).nonzero()[-1])


@torch.no_grad()
def calibrate_search(
    embeddings: ArrayInput,
    labels: ArrayInput,
    *,
    items: int | None = None,
    unknown: float = 0.05,
    measure: str = "cosine",
    memory_budget: int | None = None,
    progress: Progress | None = None,
) -> SearchThreshold:
    """Choose the threshold from which on the best item of an index matches, so that few strangers match.

    Each embedding is a stranger among items that are drawn from the other classes. The threshold is the quantile of
    their best scores, which are computed exactly; up to 8 draws, always the same, make up for few embeddings. Known
    images search among as many drawn items and the others of their class. The rates hold for indexes and queries that
    are like these embeddings. Use classes that the model was not trained on, as for ``calibrate``.

    Args:
        embeddings: [m, d], a tensor, NumPy array or memory map of 16, 32 or 64 bits.
        labels: [m], integers, or strings in a NumPy array.
        items: Number of items of the index; as many as the embeddings have of other classes by default.
            ``SearchThreshold.at`` returns the threshold for others.
        unknown: Share of strangers that may match, ≥ 0 and < 1.
        measure: "cosine" or "euclidean".
        memory_budget: Memory for tiles in bytes, as for ``verification``.
        progress: Called with the number of steps done and their total.

    Returns:
        The threshold with its error rates.

    Raises:
        ValueError: If all embeddings are of one class, no class has two, or an argument is invalid.

    Example:
        >>> classes = torch.arange(8).repeat_interleave(4)
        >>> points = torch.eye(8)[classes] + 0.1 * torch.randn(32, 8, generator=torch.manual_seed(0))
        >>> threshold = calibrate_search(points, classes, items=16, unknown=0.1)
        >>> threshold.unknown_accept <= 0.1, threshold.known_found, threshold.at(1000).is_measured
        (True, 1.0, False)
    """
    if not 0 <= number("unknown", unknown) < 1:
        raise ValueError(f"unknown is {unknown}; the share of strangers that may match must be ≥ 0 and < 1")
    inputs = as_query_gallery(embeddings, labels, None, None, measure=measure, memory_budget=memory_budget)
    classes = inputs.query_classes
    largest = int(torch.bincount(classes).max())
    most = len(classes) - largest  # items of other classes that every embedding has
    if not most:
        raise ValueError("labels: all are of one class, so there is no stranger")
    if largest < 2:
        raise ValueError("labels: no class has two members, so there is no known image to find")
    sizes = sorted({2**k for k in range(most.bit_length())} | {most})
    with full_precision(classes.device):
        strangers, known = _best_scores(inputs, sizes, progress)
    table: dict[str, list[float | None]] = {"items": [*sizes], **{name: [] for name in COLUMNS}}
    for scores in strangers:
        highest = scores.flatten().sort(descending=True).values
        lowest = float(highest[math.floor(unknown * len(highest))]) + 2 * SLACK
        matching = (scores >= lowest - SLACK).double().mean(dim=0)
        found = ((known >= lowest - SLACK) & (known >= scores))[:, known > -math.inf]
        share = class_intervals({"": matching}, classes)[""]
        values = (lowest, share.mean, share.low, share.high, float(found.double().mean()))
        for name, value in zip(COLUMNS, values, strict=True):
            table[name].append(_finite(value))
    last: dict[str, Any] = {name: column[-1] for name, column in table.items()}
    threshold = SearchThreshold(**last, measure=measure, unknown=float(unknown), queries=len(classes), table=table)
    return threshold if items is None else threshold.at(whole("items", items))


def _best_scores(inputs: QueryGallery, sizes: Sequence[int], progress: Progress | None) -> tuple[Tensor, Tensor]:
    """Return each embedding's best score among drawn items of other classes, and its best of its own class.

    The first are [sizes, draws, m], of nested draws; the second are [m], −∞ for the only one of a class.
    """
    points, classes, count = inputs.queries, inputs.query_classes, len(inputs.query_classes)
    device = classes.device
    generator = torch.Generator().manual_seed(0)
    draws = min(DRAWS, max(1, ENOUGH // count))
    orders = [torch.randperm(count, generator=generator).to(device) for _ in range(draws)]
    wanted = torch.tensor(sizes, device=device)
    strangers = torch.empty(len(sizes), draws, count, dtype=torch.float64, device=device)
    known = torch.empty(count, dtype=torch.float64, device=device)
    everything = torch.arange(count, device=device)
    for rows in torch.split(everything, max(1, inputs.budget // (64 * count))):
        left = points.float64(rows)
        blocks = [pair_scores(points, left, points.float64(columns)) for columns in torch.split(everything, CPU_SIDE)]
        scores = torch.cat(blocks, dim=1).div_(points.scale)
        other = classes[rows, None] != classes
        known[rows] = scores.masked_fill(other | (rows[:, None] == everything), -math.inf).amax(dim=1)
        scores.masked_fill_(~other, -math.inf)
        for draw, order in enumerate(orders):
            last = torch.searchsorted(other[:, order].cumsum(dim=1), wanted.expand(len(rows), -1).contiguous())
            strangers[:, draw, rows] = scores[:, order].cummax(dim=1).values.gather(1, last).T
        if progress is not None:
            progress(int(rows[-1]) + 1, count)
    return strangers, known


def _finite(value: float) -> float | None:
    """A number, or None for NaN, which JSON does not have."""
    return None if math.isnan(value) else float(value)
