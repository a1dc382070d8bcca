"""Decision thresholds: from which similarity on are two images of one class?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearfar.metrics.inputs import MEASURES
from nearfar.metrics.verification import RocCurve, compare_pairs
from nearfar.supervision import Pairs
from nearfar.utils.atomic import write_json
from nearfar.utils.folders import claim_file
from nearfar.utils.formatting import percent
from nearfar.utils.progress import Progress
from nearfar.utils.tensors import Array, ArrayInput
from nearfar.utils.validation import number, one_of

FORMAT = "nearfar threshold"
VERSION = 1  # increased when older versions cannot read the files
CRITERIA = ("f1", "accuracy")
SLACK = 1e-6  # a search computes similarities in float32


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """A similarity from which on two images match, and its error rates on the pairs that it was calibrated on.

    Args:
        similarity: Lowest score of a match: a cosine, or minus a Euclidean distance.
        measure: "cosine" or "euclidean".
        criterion: "f1", "accuracy", or the false accept rate that was wanted.
        false_accept: Share of the pairs of two classes that match.
        false_reject: Share of the pairs of one class that do not match.
        f1: F1 of the matching pairs.
        accuracy: Share of all pairs that are decided correctly.
        positives: Number of pairs of one class.
        negatives: Number of pairs of two classes.
        about: What was calibrated: the model, the data, the date.

    Example:
        >>> points = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> threshold = calibrate(points, torch.tensor([0, 0, 1, 1]))
        >>> [threshold.matches(threshold.score(points[0], other)) for other in points[1:]]
        [True, False, False]
    """

    similarity: float
    measure: str
    criterion: str | float
    false_accept: float
    false_reject: float
    f1: float
    accuracy: float
    positives: int
    negatives: int
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

    def describe(self) -> str:
        """Return one line about the error rates."""
        where = self.about.get("data", "the calibration data")
        return (
            f"threshold {self.similarity:.4f}: on {where}, {percent(self.false_accept, 2)} of the pairs of two classes "
            f"match, and {percent(self.false_reject, 2)} of the pairs of one class do not"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the threshold as JSON-compatible data."""
        return {**asdict(self), "about": dict(self.about)}

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
            threshold = cls(**content)
            one_of("measure", threshold.measure, MEASURES)
            for name in ("similarity", "false_accept", "false_reject", "f1", "accuracy", "positives", "negatives"):
                number(name, getattr(threshold, name))
        except FileNotFoundError:
            raise
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"{file} is no threshold that this version of nearfar reads: {error}") from error
        if head != (FORMAT, VERSION):
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
