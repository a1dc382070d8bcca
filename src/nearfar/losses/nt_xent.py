"""Normalized temperature-scaled cross-entropy loss, in one direction or, as in CLIP, in both."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nearfar.engine import LossBatch, Mean, Row, Tile
from nearfar.engine.programs import Program, Sums, Terms, mean_over
from nearfar.losses.base import ANY, PairLoss, register
from nearfar.losses.n_pair import against_negatives
from nearfar.mining import Choice
from nearfar.utils.validation import number, positive

LARGEST_SCALE = 100.0  # of a learned temperature, as in CLIP


@register("nt_xent", "Chen et al. 2020")
class NTXent(PairLoss):
    """Compares each positive with all negatives at once: the N-pair loss of cosines with a temperature.

    Formula:
        loss = mean over all positive pairs of log(1 + Σ_{k∈N_i} e^((s_ik − s_ij) / temperature))
        symmetric: the mean of this and of the same with gallery and batch exchanged
        learn_temperature: temperature = e^(−logit_scale), where the parameter logit_scale is at most log 100

    Args:
        temperature: τ, the divisor of the cosines. A learned one starts here.
        symmetric: True: the columns of a gallery are also compared with all anchors. With two networks, or two
            modalities, and ``loss(images, labels, texts, text_labels)`` this is the loss of CLIP. Without a gallery
            every embedding is an anchor anyway, and the loss is the same.
        learn_temperature: True: the temperature is the parameter ``logit_scale``, as in CLIP.

    Differences:
        The mean is over pairs, so anchors count by their number of positives. In SimCLR and in CLIP every anchor has
        one positive, and the loss is the same. Anchors and columns of the same label are never negatives of each
        other; CLIP would push two equal captions apart.

    Reference:
        Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", ICML 2020.
        Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", ICML 2021 (symmetric).

    Example:
        >>> import torch, nearfar as nf
        >>> nf.losses.NTXent(temperature=0.5)(torch.eye(4), torch.tensor([0, 0, 1, 1]))
        tensor(1.0986)

        Two towers, where image i belongs to text i:

        >>> images, texts, items = torch.eye(3), torch.eye(3), torch.arange(3)
        >>> loss = nf.losses.NTXent(symmetric=True, learn_temperature=True, temperature=1.0)
        >>> loss(images, items, texts, items).detach()
        tensor(0.5514)
    """

    cuda_graph = deterministic = True
    minings = ANY
    closed_form = True
    fixed = ("learn_temperature",)

    def __init__(
        self,
        *,
        temperature: float = 0.07,
        symmetric: bool = False,
        learn_temperature: bool = False,
        mining: Choice = "all",
    ) -> None:
        super().__init__(mining)
        self.symmetric, self.learn_temperature = bool(symmetric), bool(learn_temperature)
        self.logit_scale = nn.Parameter(torch.zeros(())) if self.learn_temperature else None
        self.temperature = temperature

    @property
    def temperature(self) -> float:
        """The divisor of the cosines; a learned one started here, and starts again if it is assigned."""
        return self._temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        checked = positive("temperature", value)
        if self.logit_scale is not None:
            number("temperature", checked, low=1.0 / LARGEST_SCALE)
            self.logit_scale.data.fill_(-math.log(checked))
        self._temperature = checked

    def param_groups(self, lr: float) -> list[dict[str, Any]]:
        return [] if self.logit_scale is None else [{"params": [self.logit_scale], "lr": lr, "weight_decay": 0.0}]

    def anchor_values(self, batch: LossBatch) -> Tensor | None:
        if self.logit_scale is None:
            return None
        # CLIP limits the parameter after each update, so that an optimizer cannot carry it far beyond the limit.
        self.logit_scale.data.clamp_(max=math.log(LARGEST_SCALE))
        return self.logit_scale.exp().expand(len(batch.embeddings))

    def on_tile(self, tile: Tile) -> Sequence[Mean]:
        sim, scale, masks = tile.values, tile.anchor_values, self.mining.select(tile)
        if scale is None:
            return [Mean(*against_negatives(sim, *masks, 1.0 / self.temperature))]
        total, number = against_negatives(sim * scale.unsqueeze(1), *masks)
        ((_, weights),) = total.parts
        return [Mean(Row(total.value, [(scale, weights)], by_anchor_values=torch.linalg.vecdot(weights, sim)), number)]

    def program(self) -> Program | None:
        if self.learn_temperature:
            return None
        scale = 1.0 / self.temperature

        def loss(pos: Sums, neg: Sums) -> Tensor:
            return mean_over(pos.total, pos.number)

        return Program(Terms(total="softplus", scale=-scale), Terms("linear", scale), loss, shift="negatives")

    def compute(self, batch: LossBatch) -> Tensor:
        loss = super().compute(batch)
        if batch.gallery is None or not self.symmetric:
            return loss
        return 0.5 * (loss + super().compute(batch.swapped()))

    def compute_weights(self, batch: LossBatch) -> Tensor:
        weights = super().compute_weights(batch)
        if batch.gallery is None or not self.symmetric:
            return weights
        return 0.5 * (weights + super().compute_weights(batch.swapped()).T)
