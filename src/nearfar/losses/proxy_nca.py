"""Proxy-NCA, and ProxyNCA++ as a setting."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nearfar.engine import LossBatch, Mean, Tile, masked, row_logsumexp, row_sum, unit
from nearfar.engine.measures import create
from nearfar.engine.tiles import RowLoss, row_loss
from nearfar.losses.base import register
from nearfar.losses.n_pair import against_negatives
from nearfar.losses.proxies import ClassificationLoss
from nearfar.utils.validation import one_of, positive, whole

MEASURES = ("squared_euclidean", "euclidean", "dot")


@register("proxy_nca", "Thesis 2.27–2.28, RLL 4–5")
class ProxyNCA(ClassificationLoss, RowLoss):
    """Pulls each embedding to its own proxy with a constant force and pushes it from the others, the nearest most.

    Formula:
        ℓ_i = −s_iy + log Σ_{c≠y} e^(s_ic)
        squared_euclidean:  s_ic = −scale/2 · ‖x_i − w_c‖², which is scale·cos(x_i, w_c) + const for unit vectors
        euclidean:          s_ic = −scale · ‖x_i − w_c‖
        dot:                s_ic = scale · x_i·w_c
        dynamic:            ℓ_i = mean over j∈P_i of −s_ip(j) + log Σ_{k∈N_i} e^(s_ip(k)), p(j) the proxy nearest to x_j

    Args:
        measure: "squared_euclidean"; "euclidean", as printed in RLL 5; or "dot", as printed in Thesis 2.27.
        normalize: False: compare embeddings and proxies as they are instead of scaling them to length one.
        scale: Factor of the similarities. The papers scale both vectors to length 3 and compare squared distances:
            −9‖x − w‖² = 18·cos + const. RLL 5 and Thesis 2.27 print none, which is 1.
        include_positive: True: the own class is part of the sum, which is ProxyNCA++ (its temperature of 1/9 on unit
            vectors is scale = 2·9 = 18).
        assignment: "static": a class has its own proxy. "dynamic": an embedding is represented by the proxy that is
            nearest to it, as in RLL 4.
        num_proxies: Number of proxies with dynamic assignment; None: one for each class.

    Differences:
        The loss is computed from logarithms, so embeddings whose probability underflows are not lost. With a single
        class the loss is 0. With dynamic assignment the nearest proxy is a constant for the gradient, embeddings
        without a positive or without a negative in the batch are left out, and a proxy that represents several
        negatives counts several times, as printed.

    Reference:
        Movshovitz-Attias et al., "No Fuss Distance Metric Learning using Proxies", ICCV 2017. Thesis 2.27–2.28,
        RLL 4–5.
        Teh et al., "ProxyNCA++: Revisiting and Revitalizing Proxy Neighborhood Component Analysis", ECCV 2020.

    Example:
        >>> import torch, nearfar as nf
        >>> loss = nf.losses.ProxyNCA(num_classes=2, dim=4)
        >>> loss(torch.eye(4), torch.tensor([0, 0, 1, 1])).backward()
    """

    cuda_graph = deterministic = True
    closed_form = True
    fixed = (*ClassificationLoss.fixed, "normalize", "assignment", "num_proxies")

    def __init__(
        self,
        *,
        num_classes: int,
        dim: int,
        measure: str = "squared_euclidean",
        normalize: bool = True,
        scale: float = 18.0,
        include_positive: bool = False,
        assignment: str = "static",
        num_proxies: int | None = None,
        sample_rate: float = 1.0,
        lr_multiplier: float = 100.0,
    ) -> None:
        super().__init__(num_classes, dim, sample_rate, lr_multiplier)
        self.measure = one_of("measure", measure, MEASURES)
        self.normalize = bool(normalize)
        self.scale = positive("scale", scale)
        self.include_positive = include_positive
        self.assignment = one_of("assignment", assignment, ("static", "dynamic"))
        self.num_proxies = None if num_proxies is None else whole("num_proxies", num_proxies)
        if self.assignment == "static" and self.num_proxies is not None:
            raise ValueError(
                "num_proxies is given; it needs assignment='dynamic', as every class has its own otherwise"
            )
        if self.assignment == "dynamic" and self.sample_rate < 1:
            raise ValueError(f"sample_rate is {sample_rate}; with assignment='dynamic' only 1 is allowed")
        if self.num_proxies is not None:
            self.proxies = torch.nn.Parameter(torch.randn(self.num_proxies, self.dim) * self.dim**-0.5)

    @property
    def mean_over_anchors(self) -> bool:  # type: ignore[override]
        return self.assignment == "static"

    @property
    def pools(self) -> bool:  # type: ignore[override]
        return self.measure == "euclidean"  # `pool` turns squared distances into similarities

    @property
    def unit_vectors(self) -> bool:
        return self.normalize and self.measure != "euclidean"  # of the vectors that `against_proxies` makes

    def pool(self, similarities: Tensor) -> tuple[Tensor, Tensor]:
        """Return minus the root of squared distances, without a gradient at 0."""
        apart = ~(similarities <= 0)  # NaN stays NaN
        root = masked(masked(similarities, apart, 1.0).sqrt(), apart)
        return -root.squeeze(2), masked(-0.5 / root, apart)

    def against_proxies(self, embeddings: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
        if self.assignment == "dynamic":
            return self._dynamic(embeddings, labels, proxies)
        if self.measure == "squared_euclidean" and not self.normalize:
            # −½‖x − w‖² is x·w − ½‖w‖² and a constant for all classes.
            embeddings = torch.cat([embeddings, torch.ones_like(embeddings[:, :1])], dim=1)
            proxies = torch.cat([proxies, -0.5 * proxies.square().sum(dim=1, keepdim=True)], dim=1)
        elif self.measure == "euclidean":
            embeddings, proxies = (unit(vectors) if self.normalize else vectors for vectors in (embeddings, proxies))
            # ‖x − w‖² as a product, for ``pool``
            squares = (vectors.square().sum(dim=1, keepdim=True) for vectors in (embeddings, proxies))
            lengths, widths = (square.add(square, alpha=0.0) for square in squares)  # an overflow becomes NaN: 0 · ∞
            embeddings = torch.cat([embeddings, lengths, torch.ones_like(lengths)], dim=1)
            proxies = torch.cat([-2.0 * proxies, torch.ones_like(widths), widths], dim=1).unsqueeze(1)
        return super().against_proxies(embeddings, labels, proxies)

    def _dynamic(self, embeddings: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
        with torch.no_grad():
            comparison = create(self.measure, normalize=self.normalize)
            compared = comparison.pairwise(comparison.prepare(embeddings), comparison.prepare(proxies))
            nearest = (compared * self._factor).argmax(dim=1)
        positions = torch.arange(len(labels), device=labels.device)
        value = row_loss(self, LossBatch(embeddings, labels, proxies[nearest], labels, positions))
        # Labels are only compared with each other, so that one beyond the classes has to be looked for.
        beyond = ((labels < 0) | (labels >= self.num_classes)).any()
        value = value * torch.ones_like(value).masked_fill_(beyond, torch.nan)
        return value.add(compared.sum(), alpha=0.0)  # NaN in a proxy that represents nobody is noticed

    @property
    def _factor(self) -> float:
        """What turns the values of the measure into scaled similarities."""
        return {"squared_euclidean": -0.5, "euclidean": -1.0, "dot": 1.0}[self.measure] * self.scale

    def on_tile(self, tile: Tile) -> Sequence[Mean]:
        """Compute the loss of each embedding against the proxies that represent the batch."""
        complete = tile.positives.any(dim=1) & tile.negatives.any(dim=1)
        pos, neg = tile.positives & complete.unsqueeze(1), tile.negatives
        if self.include_positive:
            total, number = against_negatives(tile.values, pos, neg, self._factor)
        else:
            number = pos.sum(dim=1, dtype=tile.values.dtype)
            pull = row_sum(masked(tile.values, pos), pos.to(tile.values.dtype)) * -self._factor
            total = row_logsumexp(tile.values, neg, self._factor) * number + pull
        counted = complete.to(tile.values.dtype)
        return [Mean(total * (counted / number.clamp(min=1.0)), counted)]
