"""Plots of losses: the weights of pairs, and how ``nra`` converts distances to similarities.

>>> weights = curves(create("contrastive", margin=0.25), steps=5)
>>> weights.similarity.tolist(), weights.negative.tolist()
([-1.0, -0.5, 0.0, 0.5, 1.0], [0.0, 0.0, 0.0, 1.0, 1.0])
"""

from nearfar.plots.nra_ranks import draw_ranks, draw_transfer
from nearfar.plots.pair_weights import (
    CLASSES,
    DIMENSIONS,
    Curves,
    check_loss,
    classic,
    create,
    curves,
    draw_weights,
    has_weights,
)
from nearfar.plots.style import check_file

__all__ = [
    "CLASSES", "DIMENSIONS", "Curves", "check_file", "check_loss", "classic", "create", "curves", "draw_ranks",
    "draw_transfer", "draw_weights", "has_weights",
]  # fmt: skip
