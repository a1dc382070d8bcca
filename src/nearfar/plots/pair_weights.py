"""Pair weights: how strongly a loss pulls or pushes a pair, by its similarity.

The curves are measured, not derived: the similarity of one pair goes from −1 to 1 while the anchor's other pairs stay
fixed, and :meth:`~nearfar.losses.PairLoss.pair_weights` computes the weight. For losses with proxies the pair is a
sample and a proxy, and its weight is the derivative of the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nearfar import losses, mining
from nearfar.losses import Loss, PairLoss
from nearfar.losses.group import Group
from nearfar.losses.proxies import ProxyLoss
from nearfar.plots.style import PULL, PUSH, add_caption, open_figure, simplify_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POSITIVE, NEGATIVE = 0.5, 0.3  # similarities of the fixed pairs
DIMENSIONS = 128
CLASSES = 3  # of losses with proxies: that of the sample, a moved one and a fixed one
COPIES = 256  # of the anchor, so that the result of a random mining is an average
CLOSEST = 1 - 1e-9  # largest similarity of a proxy; at 1 its direction would be undefined


class Curves(NamedTuple):
    """The weight of the moved pair at each similarity, [s] each."""

    similarity: Tensor
    positive: Tensor
    negative: Tensor


def classic() -> dict[str, Loss]:
    """Return the losses whose weights the Unified View compares, with the one it proposes."""
    chosen = {key: losses.create(key) for key in ("contrastive", "lifted_structure_generalized", "binomial_deviance")}
    triplet = losses.create("triplet", mining="all")
    proposed = {"raw": losses.create("raw"), "multi_similarity": losses.create("multi_similarity")}
    return {"contrastive": chosen.pop("contrastive"), "triplet, all triplets": triplet, **chosen, **proposed}


def create(key: str, **settings: object) -> Loss:
    """Create a loss to draw by name.

    Args:
        key: Name of the loss.
        **settings: Settings of the loss; the number of classes and the dimension have defaults here.

    Example:
        >>> create("proxy_anchor", alpha=16.0).num_classes
        3
    """
    loss = losses.get(key)
    check_loss(loss)
    sizes = {"num_classes": CLASSES, "dim": DIMENSIONS} if issubclass(loss, ProxyLoss) else {}
    return losses.create(key, **{**sizes, **settings})


def check_loss(loss: type[Loss]) -> None:
    """Raise if a loss has no pair weights.

    Args:
        loss: The class of the loss.
    """
    if not has_weights(loss):
        raise ValueError(f"{loss.key} is not a loss of pairs, so it has no pair weights to draw")


def has_weights(loss: type[Loss]) -> bool:
    """Whether a loss has pair weights: of two samples, or of a sample and a proxy.

    Args:
        loss: The class of the loss.

    Example:
        >>> has_weights(losses.get("arcface")), has_weights(losses.get("group"))
        (True, False)
    """
    return issubclass(loss, (PairLoss, ProxyLoss)) and not issubclass(loss, Group)  # a function of the whole batch


def curves(loss: Loss, *, steps: int = 201) -> Curves:
    """Compute the weight of a positive and of a negative pair while its similarity goes from −1 to 1.

    Every vector has length one. The anchor also has a positive at 0.5 and a negative at 0.3, since some losses compare
    the pairs of an anchor with each other. Losses of distances get the same vectors, and their weights are those of the
    distance (see ``pair_weights``).

    A loss with proxies has one proxy for each class. The proxy of the sample's class is moved while the others are at
    0.3, and one of the others is moved while the own proxy is at 0.5.

    Args:
        loss: The loss.
        steps: Number of similarities.

    Example:
        >>> weights = curves(losses.create("contrastive", margin=0.25), steps=5)
        >>> weights.similarity.tolist(), weights.negative.tolist()
        ([-1.0, -0.5, 0.0, 0.5, 1.0], [0.0, 0.0, 0.0, 1.0, 1.0])
    """
    check_loss(type(loss))
    similarity = torch.linspace(-1.0, 1.0, steps, dtype=torch.float64)
    if isinstance(loss, ProxyLoss):
        return _proxy_curves(loss, similarity)
    assert isinstance(loss, PairLoss)
    anchors = _at(torch.ones(COPIES if isinstance(loss.mining, mining.RandomTripletMining) else 1, dtype=torch.float64))
    anchor_labels = torch.zeros(len(anchors), dtype=torch.long)
    still = torch.tensor([POSITIVE, NEGATIVE], dtype=torch.float64)
    weights: dict[int, list[Tensor]] = {0: [], 1: []}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for moved in similarity.unsqueeze(1):
            for label, values in weights.items():
                gallery = _at(torch.cat([moved, still]))
                labels = torch.tensor([label, 0, 1])
                values.append(loss.pair_weights(anchors, anchor_labels, gallery, labels)[:, 0].sum())
    return Curves(similarity, torch.stack(weights[0]), torch.stack(weights[1]))


def _proxy_curves(loss: ProxyLoss, similarity: Tensor) -> Curves:
    if not 2 <= loss.num_classes < loss.dim:
        raise ValueError(
            f"{loss.key} has {loss.num_classes} classes and {loss.dim} dimensions; a plot needs at least two classes, "
            "and more dimensions than classes"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = [torch.stack([_proxy_weight(loss, place, moved) for moved in similarity]) for place in (0, 1)]
    return Curves(similarity, *weights)


def _proxy_weight(loss: ProxyLoss, place: int, similarity: Tensor) -> Tensor:
    """How strongly a sample of class 0 is pulled to the proxy of its class (0), or pushed away from another (1).

    Each proxy has a component along an axis of its own, where the sample's gradient depends on this proxy alone.
    """
    at = similarity.new_full((loss.num_classes,), NEGATIVE)
    at[0] = POSITIVE
    at[place] = similarity.clamp(-CLOSEST, CLOSEST)
    component = (1 - at.square()).sqrt()
    proxies = torch.cat([at.unsqueeze(1), component.unsqueeze(1) * torch.eye(len(at), loss.dim - 1).to(at)], dim=1)
    if loss.proxies.ndim == 3:  # all proxies of a class are equal
        proxies = proxies.unsqueeze(1).expand(-1, loss.proxies.shape[1], -1)
    sample = torch.eye(1, loss.dim).to(at).requires_grad_()
    value = loss.against_proxies(sample, torch.zeros(1, dtype=torch.long), proxies)
    (gradient,) = torch.autograd.grad(value, sample)
    slope: Tensor = gradient[0, 1 + place] / component[place]
    return -slope if place == 0 else slope


def _at(similarity: Tensor) -> Tensor:
    """Unit vectors with these similarities to the first axis, [n, DIMENSIONS]."""
    vectors = similarity.new_zeros(len(similarity), DIMENSIONS)
    vectors[:, 0] = similarity
    vectors[:, 1] = (1 - similarity.square()).clamp(min=0).sqrt()
    return vectors


def draw_weights(chosen: Mapping[str, Loss], path: str | Path, *, force: bool = False) -> Path:
    """Draw the weight curves of some losses, in one panel each.

    Positive and negative weights can differ by orders of magnitude (a steepness of 2 against 50 in RAW), so each curve
    is drawn relative to its largest weight, which is written above it.

    Args:
        chosen: The losses by the titles of their panels.
        path: File to write: .png, .svg or .pdf.
        force: Replace a file that is no plot of ours.
    """
    if not chosen:
        raise ValueError("there is no loss to draw")
    columns = 2 if len(chosen) == 4 else min(3, len(chosen))
    rows = -(-len(chosen) // columns)
    with open_figure(path, (max(3.6 * columns, 5.4), 2.8 * rows + 0.7), force=force) as figure:
        panels = figure.subplots(rows, columns, squeeze=False, sharex=True).flatten()
        for panel, (title, loss) in zip(panels, chosen.items(), strict=False):
            _draw_panel(panel, title, loss)
        for panel in panels[len(chosen) :]:
            panel.set_visible(False)
        figure.suptitle("Weight of a pair by its similarity to the anchor", fontsize=11)
        fixed = f"a positive at {POSITIVE} and a negative at {NEGATIVE} are fixed"
        figure.supxlabel(f"cosine similarity ({fixed})", fontsize=9)
        figure.supylabel("weight relative to its maximum", fontsize=9)
    return Path(path)


def _draw_panel(panel: Axes, title: str, loss: Loss) -> None:
    curve = curves(loss)
    lowest = 0.0
    for style, weights in ((PULL, curve.positive), (PUSH, curve.negative)):
        largest = float(weights.abs().amax())
        relative = weights / largest if largest > 0 else weights
        lowest = min(lowest, float(relative.amin()))
        panel.plot(curve.similarity.numpy(), relative.numpy(), color=style.color, linestyle=style.line, linewidth=2)
        add_caption(panel, style, f"{style.name}, up to {largest:.3g}")
    measure = loss.measure if isinstance(loss, PairLoss) else "cosine"  # proxies are drawn against their angle
    compares = "" if measure in ("cosine", "dot") else f" ({measure.replace('_', ' ')} distance)"
    panel.set_title(title + compares, fontsize=10, pad=18)
    panel.set_xlim(-1, 1)
    panel.set_ylim(lowest * 1.08 - 0.04, 1.06)
    panel.set_xticks([-1, -0.5, 0, 0.5, 1])
    panel.tick_params(labelbottom=True)
    simplify_axes(panel)
