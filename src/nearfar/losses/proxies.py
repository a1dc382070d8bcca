"""Base classes of the losses that learn a vector, a proxy, for every class."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nearfar.engine import LossBatch
from nearfar.engine.classes import ClassShard, class_loss
from nearfar.engine.tiles import DEFAULT_BUDGET
from nearfar.losses.base import Loss, check_classes, refuse_gallery
from nearfar.utils.validation import number, positive, whole

DRAWN = 1 << 14  # classes whose proxies are drawn at once


class ShardedParameter(nn.Parameter):
    """A parameter of which every process holds other rows.

    Its gradient is complete in its process: it is not summed over the processes.
    """


class ProxyLoss(Loss):
    """A loss of embeddings against learned vectors of the classes, the parameter ``proxies``.

    ``proxies`` has the shape [num_classes, dim], or [num_classes, centers, dim] with several proxies per class. They
    are trained with ``lr_multiplier`` times the learning rate of the network, without weight decay.

    Args:
        num_classes: Number of classes.
        dim: Dimension of the embeddings.
        lr_multiplier: Learning rate of the proxies divided by that of the network.
        centers: Number of proxies per class; None: one, without a dimension of its own.

    Example:
        >>> class Pull(ProxyLoss):
        ...     def against_proxies(self, embeddings, labels, proxies):
        ...         return (embeddings - proxies[labels]).square().mean()
        >>> Pull(num_classes=3, dim=8, lr_multiplier=10.0).param_groups(lr=0.5)[0]["lr"]
        5.0
    """

    shared_columns = False
    shardable: bool = False  # the loss can be computed with its classes distributed over processes
    shard: ClassShard | None = None  # the classes of this process, see `keep_shard`
    fixed: ClassVar[tuple[str, ...]] = ("num_classes", "dim", "centers")

    def __init__(self, num_classes: int, dim: int, lr_multiplier: float, centers: int | None = None) -> None:
        super().__init__()
        self.num_classes, self.dim = whole("num_classes", num_classes), whole("dim", dim)
        self.lr_multiplier = positive("lr_multiplier", lr_multiplier)
        shape = (self.dim,) if centers is None else (centers, self.dim)
        self.proxies = nn.Parameter(_draw(self.num_classes, shape, 0, self.num_classes))

    def param_groups(self, lr: float) -> list[dict[str, Any]]:
        return [{"params": [self.proxies], "lr": lr * self.lr_multiplier, "weight_decay": 0.0}]

    def keep_shard(self, shard: ClassShard) -> None:
        """Keep the proxies of some classes; other processes hold the others.

        From then on the loss is called with the embeddings of all processes, in all processes at once, see
        :func:`nearfar.distributed.shard_classes`. If the loss was created on the device "meta", only these proxies are
        ever created, with the values they have in a single process.

        Args:
            shard: The classes of this process.
        """
        if not self.shardable:
            raise ValueError(f"{type(self).__name__} needs all classes in every process; they cannot be sharded")
        rows = slice(shard.start, shard.stop)
        if self.proxies.is_meta:
            part = _draw(self.num_classes, self.proxies.shape[1:], rows.start, rows.stop)
        else:
            part = self.proxies.detach()[rows].clone()
        self.proxies, self.shard = ShardedParameter(part), shard

    def compute(self, batch: LossBatch) -> Tensor:
        refuse_gallery(self, batch, "compares with its proxies")
        embeddings, proxies = batch.embeddings, self.proxies
        if embeddings.shape[1] != self.dim:
            raise ValueError(f"embeddings have {embeddings.shape[1]} dimensions and proxies {self.dim}")
        if embeddings.device != proxies.device:
            raise ValueError(f"embeddings are on {embeddings.device} and proxies on {proxies.device}")
        check_classes(batch.labels, self.num_classes)
        # The higher of the two precisions; the parameter itself keeps its own.
        dtype = torch.promote_types(embeddings.dtype, proxies.dtype)
        return self.against_proxies(embeddings.to(dtype), batch.labels, proxies.to(dtype))

    @property
    def needs_labels(self) -> str | None:
        return "learns vectors for each class"

    def against_proxies(self, embeddings: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
        """Compute the loss of checked input, a scalar.

        Args:
            embeddings: Embeddings, [m, dim].
            labels: Labels from 0 to num_classes − 1, [m].
            proxies: The proxies, in the dtype of the embeddings.
        """
        raise NotImplementedError(f"{type(self).__name__} must define against_proxies(embeddings, labels, proxies)")


def _draw(num_classes: int, shape: Sequence[int], start: int, stop: int) -> Tensor:
    """Draw the proxies of all classes, [num_classes, *shape], and return those from ``start`` to ``stop``.

    The directions are uniform and the lengths about 1, so that losses with and without normalization start alike.
    """
    part = torch.empty(stop - start, *shape)
    for first in range(0, num_classes, DRAWN):
        drawn = torch.randn(min(DRAWN, num_classes - first), *shape)
        low, high = max(start, first), min(stop, first + DRAWN)
        if low < high:
            part[low - start : high - start] = drawn[low - first : high - first]
    return part.mul_(shape[-1] ** -0.5)


class ClassificationLoss(ProxyLoss):
    """A cross-entropy over classes: ℓ_i = −target + log(e^target + Σ_{c≠y} e^(scale·s_ic)).

    A subclass defines how embeddings are compared (``normalize``, ``scale``) and computes the logit of the
    own class from its scaled similarity (``target``). The engine goes over the classes in tiles, so that a million of
    them need no batch × classes matrix.

    Args:
        num_classes: Number of classes.
        dim: Dimension of the embeddings.
        sample_rate: Below 1, each step compares with the classes of the batch and a random part of the others.
        lr_multiplier: Learning rate of the proxies divided by that of the network.
        centers: Number of proxies per class; None: one, without a dimension of its own.

    Example:
        >>> class Shifted(ClassificationLoss):
        ...     def target(self, similarity):
        ...         return similarity - 0.2, None
        >>> loss = Shifted(num_classes=3, dim=8, sample_rate=1.0, lr_multiplier=10.0)
        >>> loss(torch.ones(2, 8), torch.tensor([0, 2])).shape
        torch.Size([])
    """

    normalize: bool = True  # scale embeddings and proxies to length one before they are compared
    raw_embeddings: bool = False  # embeddings keep their lengths even so
    pools: bool = False  # a class has several proxies: see `pool`
    pool_scale: float = 1.0  # the factor of the similarities that `pool` takes and returns
    penalizes: bool = False  # a term for the proxies of each class is added: see `proxy_cost`
    memory_budget: int = DEFAULT_BUDGET  # bytes for one tile; can be set on any loss
    scale: float = 1.0  # of the similarities
    include_positive: bool = True  # the own class is part of the sum

    def __init__(
        self, num_classes: int, dim: int, sample_rate: float, lr_multiplier: float, centers: int | None = None
    ) -> None:
        super().__init__(num_classes, dim, lr_multiplier, centers)
        self.sample_rate = number("sample_rate", sample_rate, low=0.0, high=1.0, open_low=True)

    @property
    def shardable(self) -> bool:  # type: ignore[override]
        return self.mean_over_anchors  # each embedding has a term of its own

    @property
    def unit_vectors(self) -> bool:
        """Whether embeddings and proxies are scaled to length one."""
        return self.normalize

    @property
    def sharpness(self) -> float:
        """The factor of the similarities in the sum: ``scale``, unless the loss has another name for it."""
        return self.scale

    @property
    def draws(self) -> bool:
        return not self.deterministic or self.sample_rate < 1.0

    def target(self, similarity: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the logit of the own class given its scaled similarity, [m], and the derivative; None: 1."""
        return similarity, None

    def anchored_target(self, similarity: Tensor, anchor_values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same given also a number for each embedding, and the derivatives by both; see ``anchor_values``.

        Args:
            similarity: Scaled similarity to the own class, [m, 1].
            anchor_values: What ``anchor_values`` returned, [m, 1].
        """
        raise NotImplementedError(f"{type(self).__name__} returns anchor_values and must define anchored_target")

    def anchor_values(self, batch: LossBatch) -> Tensor | None:
        """Return a number for each embedding, [m], that the logit of the own class depends on; None: there is none.

        Args:
            batch: Embeddings and labels.
        """
        return None

    def pool(self, similarities: Tensor) -> tuple[Tensor, Tensor]:
        """Combine similarities to proxies, [m, c, k], to those to classes, [m, c]; also return the derivatives."""
        raise NotImplementedError(f"{type(self).__name__} sets pools and must define pool(similarities)")

    def proxy_cost(self, similarities: Tensor) -> tuple[Tensor, Tensor]:
        """Return the summed cost of the similarities within each class, [c, k, k], and its derivative by them."""
        raise NotImplementedError(f"{type(self).__name__} sets penalizes and must define proxy_cost(similarities)")

    def sample_classes(self, labels: Tensor) -> Tensor:
        """Draw sample_rate · num_classes classes (or enough for the batch): those of the batch and random others."""
        share = math.ceil(round(self.sample_rate * self.num_classes, 6))  # 0.55 · 20 is 11.000000000000002
        count = max(share, min(len(labels), self.num_classes))
        chance = torch.rand(self.num_classes, dtype=torch.float32, device=labels.device)
        return chance.scatter_(0, labels, 2.0).topk(count, sorted=False).indices

    def against_proxies(self, embeddings: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
        sampled = None if self.sample_rate == 1.0 else self.sample_classes(labels)
        values = self.anchor_values(LossBatch(embeddings, labels))
        return class_loss(self, embeddings, labels, proxies, sampled, values)
