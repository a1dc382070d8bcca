"""What every loss has in common: one signature, checked input, parameters that reach the optimiser."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nearfar import mining as minings
from nearfar.engine import Batch, Mean, Row, RowLoss, Tile, pair_weights, row_loss
from nearfar.mining import Choice, Mining
from nearfar.utils.inputs import check_vectors, is_integer, readable


class Loss(nn.Module, ABC):
    """A loss of embeddings and labels.

    ``key`` is its name in the registry and ``source`` says which document it comes from. It is differentiable once, by
    ``backward`` or ``torch.autograd.grad``; the transforms of ``torch.func`` are not supported.
    """

    key: ClassVar[str]
    source: ClassVar[str]
    fixed: ClassVar[tuple[str, ...]] = ()  # settings that decide how a loss is built; the others may change later
    record: bool = True  # replay steps as CUDA graphs; settable on any loss

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.fixed and hasattr(self, name):
            raise AttributeError(
                f"{name} of {type(self).__name__} is settled when it is made; make another one for {name}={value!r}"
            )
        super().__setattr__(name, value)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        gallery: Tensor | None = None,
        gallery_labels: Tensor | None = None,
        *,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The loss of a batch, a scalar.

        Args:
            embeddings: [m, d], floating point. Computed in float32 (or float64) whatever autocast says.
            labels: [m], integers of any value.
            gallery, gallery_labels: [n, d] and [n], columns to compare with instead of the batch: a memory
                of earlier batches, or the embeddings of all ranks. Gradients reach a gallery that asks for them.
            positions: [m], the column at which each anchor itself stands in the gallery (−1: nowhere), so
                that it is not its own positive. Checked on a CPU.
        """
        batch = check_batch(embeddings, labels, gallery, gallery_labels, positions)
        with no_autocast(embeddings.device.type):
            return self.compute(*batch)

    @abstractmethod
    def compute(
        self,
        embeddings: Tensor,
        labels: Tensor,
        gallery: Tensor | None,
        gallery_labels: Tensor,
        positions: Tensor | None,
    ) -> Tensor:
        """The loss of checked input; ``gallery_labels`` are ``labels`` where there is no gallery."""

    def param_groups(self, lr: float) -> list[dict[str, Any]]:
        """Optimiser groups for the loss's own parameters, with their own learning rates."""
        return []

    def recordable(self) -> Hashable:
        """The settings as one value for CUDA graphs; None for losses from elsewhere, which may hold more."""
        return _frozen(self) if self.record else None

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments as this loss has them."""
        return {
            name: getattr(self, name)
            for name in inspect.signature(type(self).__init__).parameters
            if name != "self" and hasattr(self, name)
        }

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.settings().items())


class PairLoss(Loss, RowLoss):
    """A loss that is a function of one anchor's row of similarities.

    A subclass says how embeddings are compared (``measure``, ``raw``) and what a row costs (``rows``).
    The engine does the rest: tiles, gradients, galleries, pair weights.

    >>> class Hinge(PairLoss):
    ...     def rows(self, sim, pos, neg):
    ...         return torch.where(neg, sim.relu(), 0).sum(1) - torch.where(pos, sim, 0).sum(1)
    """

    minings: tuple[str, ...] = ("all",)  # those that make sense with this loss

    def __init__(self, mining: Choice = "all", *, measure: str | None = None, normalize: bool = True) -> None:
        super().__init__()
        self.measure = measure or self.measure
        self.raw = self.raw or not normalize
        if self.measure == "cosine" and not normalize:
            raise ValueError(
                f"normalize is {normalize!r}, and a cosine compares directions alone; a form of distances is needed"
            )
        self.mining = minings.create(mining)

    @property
    def mining(self) -> Mining:
        """Which pairs count. A name or a table may be assigned, too."""
        return self._mining

    @mining.setter
    def mining(self, choice: Choice) -> None:
        mining = minings.create(choice)
        if minings.is_known(mining) and mining.name not in self.minings:
            raise ValueError(
                f"mining {mining.name!r} makes no sense with {type(self).__name__}; "
                f"allowed are {', '.join(self.minings)}"
            )
        if mining.unit_only and self.raw:
            raise ValueError(
                f"mining {mining.name!r} needs unit vectors and {type(self).__name__} compares raw embeddings"
            )
        self._mining = mining

    @property
    def normalize(self) -> bool:
        """Whether embeddings are compared at length one, not as they are."""
        return not self.raw

    @property
    def bytes_per_pair(self) -> int:
        """Working memory for each entry of a float32 tile."""
        return super().bytes_per_pair + self.mining.bytes_per_pair

    def _noise(self, embeddings: Tensor, gallery_labels: Tensor) -> Tensor | None:
        if not self.mining.draws:
            return None
        return torch.rand(len(embeddings) + len(gallery_labels), dtype=embeddings.dtype, device=embeddings.device)

    def _in_one_precision(
        self, embeddings: Tensor, gallery: Tensor | None, anchor_values: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """All with the digits of whichever has more; what the loss learns keeps its own."""
        if anchor_values is None or anchor_values.dtype == embeddings.dtype:
            return embeddings, gallery, anchor_values
        dtype = torch.promote_types(embeddings.dtype, anchor_values.dtype)
        return embeddings.to(dtype), None if gallery is None else gallery.to(dtype), anchor_values.to(dtype)

    def recordable(self) -> Hashable:
        settings, mined = super().recordable(), _frozen(self.mining)
        return None if settings is None or mined is None else (settings, type(self.mining), mined)

    def rows(self, sim: Tensor, pos: Tensor, neg: Tensor) -> Tensor | Row | Sequence[Mean]:
        """The loss of each anchor, [a], from its values and masks, [a, n] each.

        Averaged over all anchors; return :class:`~nearfar.engine.Mean` objects for other denominators.
        A tensor is differentiated by autograd. A loss that sets ``closed_form`` returns
        :class:`~nearfar.engine.Row` instead, built from ``row_sum`` and ``row_logsumexp``: less work.
        """
        raise NotImplementedError(f"{type(self).__name__} must define rows(sim, pos, neg)")

    def on_tile(self, tile: Tile) -> Tensor | Row | Sequence[Mean]:
        """Mine, then ``rows``. Losses that need more of the tile than its values override this."""
        return self.rows(tile.values, *self.mining.select(tile))

    def anchor_values(self, labels: Tensor) -> Tensor | None:
        """A number for each anchor that the loss learns, [m]."""
        return None

    def penalty(self, embeddings: Tensor) -> Tensor | None:
        """What is added to the loss beside its pairs."""
        return None

    def compute(
        self,
        embeddings: Tensor,
        labels: Tensor,
        gallery: Tensor | None,
        gallery_labels: Tensor,
        positions: Tensor | None,
    ) -> Tensor:
        embeddings, gallery, anchor_values = self._in_one_precision(embeddings, gallery, self.anchor_values(labels))
        batch = Batch(self, labels, gallery_labels, positions, self._noise(embeddings, gallery_labels))
        loss: Tensor = row_loss(batch, embeddings, gallery, anchor_values)
        penalty = self.penalty(embeddings)
        return loss if penalty is None else loss + penalty

    def pair_weights(
        self,
        embeddings: Tensor,
        labels: Tensor,
        gallery: Tensor | None = None,
        gallery_labels: Tensor | None = None,
        *,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The weight view: w, [m, n], with the gradient of Σ_negatives w·s − Σ_positives w·s.

        s is the similarity, or minus the distance where the loss compares distances. Weights are ≥ 0
        wherever the loss pulls positives and pushes negatives (some do the opposite as well, and say so).
        """
        embeddings, labels, gallery, gallery_labels, positions = check_batch(
            embeddings, labels, gallery, gallery_labels, positions
        )
        # Weights are derivatives: inference mode would keep autograd from finding them.
        with no_autocast(embeddings.device.type), torch.inference_mode(False), torch.no_grad():
            embeddings, gallery, anchor_values = self._in_one_precision(embeddings, gallery, self.anchor_values(labels))
            batch = Batch(self, labels, gallery_labels, positions, self._noise(embeddings, gallery_labels))
            weights: Tensor = pair_weights(batch, embeddings, gallery, anchor_values)
        same = labels.unsqueeze(1) == gallery_labels.unsqueeze(0)
        return torch.where(same != self.comparison.is_distance, -weights, weights)


def _frozen(owner: Loss | Mining) -> Hashable:
    """The public attributes by name; None where one could change unseen, or the class is from elsewhere."""
    settings = tuple((name, value) for name, value in vars(owner).items() if not name.startswith("_"))
    seen = all(value is None or isinstance(value, (float, int, str)) for _, value in settings)
    return settings if seen and type(owner).__module__.startswith("nearfar.") else None


def check_classes(labels: Tensor, num_classes: int) -> None:
    """Labels are class numbers. Not looked at on a GPU, where that would stop the host."""
    if readable(labels):
        low, high = labels.min().item(), labels.max().item()
        if low < 0 or high >= num_classes:
            raise ValueError(
                f"labels go from {low} to {high}; with num_classes={num_classes} allowed are 0 to {num_classes - 1}"
            )


def refuse_gallery(loss: Loss, gallery: Tensor | None, instead: str) -> None:
    """For losses that have something else to compare with than columns."""
    if gallery is not None:
        raise ValueError(f"{type(loss).__name__} {instead} and takes no gallery")


def no_autocast(kind: str) -> AbstractContextManager[Any]:
    """Full precision, whatever autocast says."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


CheckedBatch = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]


def check_batch(
    embeddings: Tensor,
    labels: Tensor,
    gallery: Tensor | None,
    gallery_labels: Tensor | None,
    positions: Tensor | None,
) -> CheckedBatch:
    """The arguments of a loss, fit for use; ``gallery_labels`` are ``labels`` where there is no gallery."""
    embeddings, labels = check_vectors("embeddings", embeddings, "labels", labels)
    if gallery is None and gallery_labels is None:
        if positions is not None:
            raise ValueError("positions say where anchors stand in a gallery, and no gallery was given")
        return embeddings, labels, None, labels, None
    if gallery is None or gallery_labels is None:
        raise ValueError("gallery and gallery_labels go together; only one of them was given")
    gallery, gallery_labels = check_vectors("gallery", gallery, "gallery_labels", gallery_labels)
    if gallery.shape[1] != embeddings.shape[1]:
        raise ValueError(f"gallery has {gallery.shape[1]} dimensions and embeddings {embeddings.shape[1]}")
    if gallery.device != embeddings.device:
        raise ValueError(f"gallery is on {gallery.device} and embeddings on {embeddings.device}")
    if positions is not None:
        if not isinstance(positions, Tensor):
            raise TypeError(f"positions is a {type(positions).__name__}; a torch.Tensor is needed")
        if positions.shape != labels.shape or not is_integer(positions):
            raise ValueError(
                f"positions has shape {tuple(positions.shape)} of {positions.dtype}; needed is one whole number for "
                f"each of the {labels.shape[0]} anchors"
            )
        positions = positions.to(embeddings.device, torch.int64)
        if readable(positions):
            _check_positions(positions, labels, gallery_labels)
    return embeddings, labels, gallery.to(embeddings.dtype), gallery_labels, positions


def _check_positions(positions: Tensor, labels: Tensor, gallery_labels: Tensor) -> None:
    low, high, count = positions.min().item(), positions.max().item(), len(gallery_labels)
    if low < -1 or high >= count:
        raise ValueError(
            f"positions go from {low} to {high}; allowed are 0 to {count - 1}, in a gallery of {count}, and -1, nowhere"
        )
    wrong = ((positions >= 0) & (gallery_labels[positions] != labels)).nonzero()
    if len(wrong):
        anchor = int(wrong[0])
        place = int(positions[anchor])
        raise ValueError(
            f"positions says that anchor {anchor} of label {labels[anchor]} stands at {place}, where gallery_labels "
            f"has {gallery_labels[place]}; an anchor needs the position of its own copy, or -1"
        )
