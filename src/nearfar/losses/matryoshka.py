"""Matryoshka: a loss of several prefixes of the embedding."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from nearfar.engine import LossBatch
from nearfar.losses.base import Loss
from nearfar.losses.multiple import MultipleLosses
from nearfar.utils.validation import whole


class Matryoshka(MultipleLosses):
    """Trains the first coordinates of an embedding to be a good, shorter embedding.

    Formula:
        loss = Σ_d weight_d · loss(the first d coordinates of the embeddings)

    Args:
        loss: A loss, used for all prefixes, or a function that creates one for a dimension. Losses with proxies need
            the function: every prefix has proxies of its own.
        dims: Lengths of the prefixes, increasing. Include the whole embedding, unless only its prefixes are trained.
        weights: A weight for each prefix; None: 1 for each.

    Differences:
        Losses that normalize embeddings normalize each prefix.

    Reference:
        Kusupati et al., "Matryoshka Representation Learning", NeurIPS 2022.

    Example:
        >>> import torch, nearfar as nf
        >>> nf.losses.Matryoshka(nf.losses.Raw(), dims=[2, 4])(torch.randn(4, 4), torch.tensor([0, 0, 1, 1])).shape
        torch.Size([])
        >>> loss = nf.losses.Matryoshka(lambda dim: nf.losses.ProxyAnchor(num_classes=2, dim=dim), dims=[2, 4])
        >>> [tuple(proxies.shape) for proxies in loss.parameters()]
        [(2, 2), (2, 4)]
    """

    mean_over_anchors = MultipleLosses.mean_over_anchors
    fixed = ("dims",)

    def __init__(
        self, loss: Loss | Callable[[int], Loss], *, dims: Sequence[int], weights: Sequence[float] | None = None
    ) -> None:
        lengths = [whole("dims", dim) for dim in dims]
        if not lengths or lengths != sorted(set(lengths)):
            raise ValueError(f"dims is {lengths}; increasing whole numbers are needed")
        super().__init__([loss if isinstance(loss, Loss) else loss(dim) for dim in lengths], weights=weights)
        self.dims = lengths

    def part(self, number: int, batch: LossBatch) -> LossBatch:
        dim = self.dims[number]
        if dim > batch.embeddings.shape[1]:
            raise ValueError(f"dims has {dim}, and embeddings have {batch.embeddings.shape[1]} dimensions")
        gallery = None if batch.gallery is None else batch.gallery[:, :dim]
        return replace(batch, embeddings=batch.embeddings[:, :dim], gallery=gallery)
