"""Terms that keep the members of an ensemble different: ABE's divergence and A-BIER's adversarial regularizer."""

from collections.abc import Sequence
from itertools import combinations, permutations
from typing import Any

import torch
from torch import Tensor, nn

from nearfar.engine import unit
from nearfar.utils.validation import non_negative, positive, whole


class Divergence(nn.Module):
    """Pushes the embeddings of one image by different members apart, up to a margin.

    Add it to the losses of the members, which share their batches.

    Formula:
        loss = mean over images and pairs of members (p, q) of [margin − ‖e_p − e_q‖²]+, for unit vectors

    Args:
        margin: The squared distance that is far enough. The paper uses 1.

    Differences:
        The paper sums over images and pairs; this is the mean.

    Reference:
        Kim et al., "Attention-based Ensemble for Deep Metric Learning", ECCV 2018. NRA Table II, Group Loss Table 2.

    Example:
        >>> Divergence()([torch.eye(2), torch.eye(2)])
        tensor(1.)
    """

    def __init__(self, *, margin: float = 1.0) -> None:
        super().__init__()
        self.margin = positive("margin", margin)

    def forward(self, members: Sequence[Tensor]) -> Tensor:
        """Return the loss, a scalar.

        Args:
            members: Embeddings of the same images by each member, [m, d] each.
        """
        check_members(members)
        points = [unit(member) for member in members]
        gaps = [(first - second).square().sum(dim=1) for first, second in combinations(points, 2)]
        return (self.margin - torch.stack(gaps)).relu().mean()


class AdversarialRegularizer(nn.Module):
    """Makes it hard to predict the embedding of one member from that of another.

    For each ordered pair of members, a small network maps the embedding of one to that of the other and learns to make
    them similar. Its gradient is reversed before it reaches the members, so they learn to become different. Add it to
    the losses of the members, and its parameters to the optimizer: ``param_groups`` returns them.

    Formula:
        loss = −weight · mean over pairs (i, j) and images of 1/d_j Σ_k (e_jk · R_ij(e_i)_k)²
             + penalty · Σ_ij (Σ_rows (‖w‖² − 1)² + [‖b‖² − 1]+)
        R_ij: a hidden layer of ReLUs and a linear layer, with weights w and biases b

    Args:
        dims: Dimension of each member.
        hidden: Width of the hidden layers. The paper uses 512.
        weight: Weight of the similarity.
        penalty: Weight of the norms, which keeps the similarity bounded.

    Differences:
        The paper compares neighboring learners of a boosted embedding; here all ordered pairs of members are compared.

    Reference:
        Opitz et al., "Deep Metric Learning with BIER: Boosting Independent Embeddings Robustly", 2018. NRA Table II,
        Unified View Table 2, Group Loss Table 2.

    Example:
        >>> term = AdversarialRegularizer([4, 4], hidden=8)
        >>> term([torch.ones(3, 4), torch.ones(3, 4)]).shape
        torch.Size([])
    """

    def __init__(self, dims: Sequence[int], *, hidden: int = 512, weight: float = 1e-3, penalty: float = 1e-3) -> None:
        super().__init__()
        self.dims = tuple(whole("dims", dim) for dim in dims)
        self.weight, self.penalty = non_negative("weight", weight), non_negative("penalty", penalty)
        whole("hidden", hidden)
        if len(self.dims) < 2:
            raise ValueError(f"dims is {list(self.dims)}; there must be two members at least")
        self.regressors = nn.ModuleDict(
            {
                f"{i}_{j}": nn.Sequential(nn.Linear(self.dims[i], hidden), nn.ReLU(), nn.Linear(hidden, self.dims[j]))
                for i, j in permutations(range(len(self.dims)), 2)
            }
        )

    def param_groups(self, lr: float) -> list[dict[str, Any]]:
        """Return optimizer groups of the regressors.

        Args:
            lr: Learning rate.
        """
        return [{"params": list(self.parameters()), "lr": lr, "weight_decay": 0.0}]

    def forward(self, members: Sequence[Tensor]) -> Tensor:
        """Return the loss, a scalar.

        Args:
            members: Embeddings of the same images by each member, [m, d] each.
        """
        check_members(members)
        dims = tuple(member.shape[1] for member in members)
        if dims != self.dims:
            raise ValueError(f"members have {list(dims)} dimensions; dims is {list(self.dims)}")
        reversed_points = [_reverse(member) for member in members]
        terms, norms = [], []
        for i, j in permutations(range(len(members)), 2):
            regressor = self.regressors[f"{i}_{j}"]
            terms.append((reversed_points[j] * regressor(reversed_points[i])).square().mean())
            for layer in regressor.children():
                if isinstance(layer, nn.Linear):
                    norms.append((layer.weight.square().sum(dim=1) - 1).square().sum())
                    norms.append((layer.bias.square().sum() - 1).relu())
        return self.penalty * torch.stack(norms).sum() - self.weight * torch.stack(terms).mean()


def _reverse(points: Tensor) -> Tensor:
    """The points, with the sign of their gradient reversed."""
    points = points.view_as(points)
    if points.requires_grad:
        points.register_hook(torch.neg)  # type: ignore[no-untyped-call]
    return points


def check_members(members: Sequence[Tensor]) -> None:
    """Raise if there are fewer than two members, or if they are not of the same images."""
    shapes = [tuple(member.shape) for member in members]
    if len(shapes) < 2 or any(len(shape) != 2 for shape in shapes) or len({shape[0] for shape in shapes}) > 1:
        raise ValueError(f"members have shapes {shapes}; needed are two or more of [m, d] with the same m")
