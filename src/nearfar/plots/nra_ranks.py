"""How NRA converts distances to similarities: Figures 1 to 3 of its paper."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nearfar.losses import NRA
from nearfar.plots.style import PULL, PUSH, add_caption, open_figure, simplify_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ALPHAS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)  # those of the paper

# A batch in the plane: three classes of four points. The last point is near the second class instead of its own.
POINTS = torch.tensor(
    [
        [0.0, 1.0], [0.3, 1.5], [-0.9, 1.6], [1.0, 0.5],
        [2.2, -0.6], [2.6, 0.1], [1.7, -1.3], [1.2, -0.9],
        [-1.6, -0.5], [-1.1, -1.3], [-2.0, -1.2], [0.6, -1.6],
    ],
    dtype=torch.float64,
)  # fmt: skip
LABELS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
ANCHORS = {0: "its class is nearest", 11: "another class is nearest"}
MARKERS = ("o", "s", "^")  # of the classes


class Ranked(NamedTuple):
    """Ranks and similarities for an anchor's distances to the others, [n − 1] each, and the loss of the anchor."""

    distance: Tensor
    rank: Tensor
    similarity: Tensor
    loss: float


def ranked(loss: NRA, points: Tensor, labels: Tensor, anchor: int) -> Ranked:
    """Convert distances to ranks and similarities, for one anchor of a batch."""
    others = torch.arange(len(points)) != anchor
    distance = (points[others] - points[anchor]).norm(dim=1)
    positive = labels[others] == labels[anchor]
    rank = (distance - distance.amin()) / (distance.amax() - distance.amin())
    similarity = 1 - loss.transfer(rank)
    cost = loss.cost(similarity[positive].amin()) + loss.cost(1 - similarity[~positive].amax())
    return Ranked(distance, rank, similarity, float(cost))


def draw_transfer(loss: NRA, path: str | Path, *, force: bool = False) -> Path:
    """Draw the transfer function and the loss by rank, for this loss and the paper's values of alpha (Figure 3).

    Args:
        loss: The loss; its alpha is drawn as a thick line.
        path: File to write: .png, .svg or .pdf.
        force: Replace a file that is no plot of ours.
    """
    rank = torch.linspace(0, 1, 401, dtype=torch.float64)
    alphas = sorted({*ALPHAS, loss.alpha})
    with open_figure(path, (8.4, 3.6), force=force) as figure:
        from matplotlib import colormaps

        left, right = figure.subplots(1, 2)
        for place, alpha in enumerate(alphas):
            loss_of_alpha = NRA(alpha=alpha, epsilon=loss.epsilon)
            color = colormaps["viridis"](0.9 * place / (len(alphas) - 1))
            width = 2.8 if alpha == loss.alpha else 1.2
            away = loss_of_alpha.transfer(rank)
            left.plot(rank, away, color=color, linewidth=width, label=f"α = {alpha:g}")
            right.plot(rank, loss_of_alpha.cost(1 - away), color=color, linewidth=width)
        left.legend(frameon=False, loc="lower right")
        left.set_title("transfer function w(r)", fontsize=10)
        left.set_xlabel("rank r")
        right.set_title(f"cost −log(1 − w(r) + ε), ε = {loss.epsilon:g}", fontsize=10)
        right.set_xlabel("rank r of the farthest positive, 1 − r of the nearest negative")
        for panel in (left, right):
            panel.set_xlim(0, 1)
            simplify_axes(panel)
        figure.suptitle("What ranks cost, by the steepness α", fontsize=11)
    return Path(path)


def draw_ranks(loss: NRA, path: str | Path, *, force: bool = False) -> Path:
    """Draw a small batch around two of its anchors: by distance, by rank and by similarity (Figures 1 and 2).

    Args:
        loss: The loss.
        path: File to write: .png, .svg or .pdf.
        force: Replace a file that is no plot of ours.
    """
    titles = ("distance d", "rank r: nearest 0, farthest 1", f"similarity s, drawn at 1 − s (α = {loss.alpha:g})")
    with open_figure(path, (8.4, 6.4), force=force) as figure:
        panels = figure.subplots(len(ANCHORS), len(titles), gridspec_kw={"wspace": 0.08})
        for (anchor, words), across in zip(ANCHORS.items(), panels, strict=True):
            ranks = ranked(loss, POINTS, LABELS, anchor)
            _draw_around(across[0], anchor, ranks.distance, "d", ranks.distance)
            _draw_around(across[1], anchor, ranks.rank, "r", ranks.rank)
            _draw_around(across[2], anchor, 1 - ranks.similarity, "s", ranks.similarity)
            across[0].set_ylabel(f"{words}: loss {ranks.loss:.2g}", fontsize=10)
        for panel, title in zip(panels[0], titles, strict=True):
            panel.set_title(title, fontsize=10, pad=18)
        figure.suptitle("A batch as two of its anchors see it", fontsize=11)
        key = "hollow: the anchor; green: its class; blue: others; circles: the farthest positive, the nearest negative"
        figure.supxlabel(key, fontsize=9)
    return Path(path)


def _draw_around(panel: Axes, anchor: int, radius: Tensor, sign: str, values: Tensor) -> None:
    """Draw the others around the anchor, each at its radius, with the values of the two in the loss."""
    others = torch.arange(len(POINTS)) != anchor
    away = POINTS[others] - POINTS[anchor]
    spots, labels = away * (radius / away.norm(dim=1)).unsqueeze(1), LABELS[others]
    positive = labels == LABELS[anchor]
    farthest = radius.where(positive, -1.0).argmax()
    nearest = radius.where(~positive, torch.inf).argmin()
    _circle(panel, radius.amax(), "lightgray", "-")
    for style, ours, end in ((PULL, positive, farthest), (PUSH, ~positive, nearest)):
        _circle(panel, radius[end], style.color, style.line)
        add_caption(panel, style, f"{style.name}, {sign} = {values[end]:.2f}")
        for label, marker in enumerate(MARKERS):
            members = spots[ours & (labels == label)]
            panel.scatter(members[:, 0], members[:, 1], s=26, color=style.color, marker=marker, linewidths=0, zorder=3)
    panel.scatter(
        [0], [0], s=110, facecolors="none", edgecolors=PULL.color, marker=MARKERS[LABELS[anchor]], linewidths=1.8
    )
    reach = 1.08 * float(radius.amax())
    panel.set(xlim=(-reach, reach), ylim=(-reach, reach), xticks=[], yticks=[], aspect="equal")
    panel.spines[:].set_visible(False)


def _circle(panel: Axes, radius: Tensor, color: str, line: str) -> None:
    from matplotlib.patches import Circle

    panel.add_patch(Circle((0, 0), float(radius), fill=False, edgecolor=color, linestyle=line, linewidth=1.5))
