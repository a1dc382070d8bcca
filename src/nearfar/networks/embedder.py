"""Embedders: a backbone, a pooling of its feature maps, and a head."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from nearfar.networks.backbones.base import Backbone
from nearfar.utils.preprocessing import Normalization
from nearfar.utils.progress import bars
from nearfar.utils.tensors import check_input
from nearfar.utils.validation import non_negative, one_of, positive, whole

POOLINGS = ("avg", "max", "avg+max", "gem", "token")
CPU_PIXELS = 16 * 224 * 224  # of a batch on a CPU; larger maps are allocated anew for each layer, at twice the time
HEADS = ("linear", "linear_norm", "mlp", "residual", "none")


class EmbeddingModel(nn.Module):
    """What embedders and ensembles have in common; an embedder is an ensemble of one."""

    dim: int
    members: Sequence[Embedder]

    def output_key(self, number: int, level: str) -> str:
        """Return the key of an output that has a loss of its own in training: a level of a member."""
        return f"{number}_{level}"

    @property
    def outputs(self) -> dict[str, int]:
        """Dimensions of all outputs that have a loss of their own in training."""
        members = enumerate(self.members)
        return {self.output_key(number, level): dim for number, member in members for level, dim in member.dims.items()}

    @property
    def in_channels(self) -> int:
        """Channels of the images, or dimensions of the vectors, that the network reads."""
        return self.members[0].backbone.in_channels

    @property
    def normalization(self) -> Normalization | None:
        """Normalization of pixels that the network expects; None if it reads vectors."""
        return self.members[0].backbone.normalization

    @property
    def input_size(self) -> int | None:
        """Side of the images that the weights were trained on; None if the network reads vectors."""
        return self.members[0].backbone.input_size

    def freeze_backbone(self) -> None:
        """Freeze the backbone, so that only pooling and head are trained, as in warm-up epochs.

        Create the optimizer before, so that it has the parameters of the backbone; without gradients it skips them.
        """
        for member in self.members:
            member.backbone.freeze()

    def unfreeze_backbone(self) -> None:
        """Unfreeze the backbone; frozen batch norms stay frozen."""
        for member in self.members:
            member.backbone.unfreeze()

    def embed(self, inputs: Any, *, batch_size: int = 64, progress: bool = False) -> NDArray[np.float32]:
        """Compute embeddings in evaluation mode, on the device of the network.

        Images are decoded, resized and normalized as in the evaluation of the training.
        """
        # Networks know nothing of image files. Whatever decodes them is imported when it is needed.
        encode = import_module("nearfar.search.encoder").embed
        with bars() if progress else nullcontext() as watch:
            embeddings: NDArray[np.float32] = encode(
                self, inputs, batch_size=batch_size, progress=None if watch is None else watch("embedding")
            )
        return embeddings


def cpu_batch(height: int, width: int) -> int:
    """Return how many images should pass through a network at once on a CPU."""
    return max(1, CPU_PIXELS // (height * width))


class Embedder(EmbeddingModel):
    """Maps normalized images [b, c, h, w] or vectors [b, d] to embeddings [b, dim].

    With several ``levels``, each level has its own pooling and head. In training each level has its own copy of the
    loss (:meth:`levels_forward`); ``forward`` concatenates the embeddings of all levels and normalizes them again.
    Embeddings are float32 also if the network computes in lower precision.

    Args:
        backbone: The backbone.
        dim: Dimensions of the embedding, of each level; None for the pooled features themselves.
        pooling: "avg", "max", "avg+max" or "gem"; "token" for the class token of a backbone that has one.
        normalize: Normalize embeddings to length 1.
        head: "linear", "linear_norm", "mlp", "residual", or "none" for the pooled features themselves.
        levels: Any of "low", "mid" and "high", in the order of concatenation; None for "high".
        freeze_batchnorm: Freeze statistics and affine parameters of the backbone's batch norms.

    Attributes:
        dim: Dimensions of the output of ``forward``, over all levels.
        dims: Dimensions of each level.

    Reference:
        Three levels: Wang et al., "Ranked List Loss for Deep Metric Learning", CVPR 2019.

    Example:
        >>> from nearfar.networks import create
        >>> create("linear", in_dim=8, dim=2)(torch.randn(5, 8)).shape
        torch.Size([5, 2])
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        dim: int | None = 512,
        pooling: str = "avg",
        normalize: bool = True,
        head: str = "linear",
        levels: Sequence[str] | None = None,
        freeze_batchnorm: bool = False,
    ) -> None:
        super().__init__()
        self.levels = _checked_levels(backbone, levels)
        self.pooling = one_of("pooling", pooling, POOLINGS)
        if pooling != "avg" and not backbone.gives_maps and self.levels == ("high",):
            raise ValueError(f"pooling is {pooling!r}; {backbone.key} returns vectors, which are not pooled")
        if pooling == "token" and not backbone.has_token:
            allowed = ", ".join(POOLINGS[:-1])
            raise ValueError(f"pooling is 'token'; {backbone.key} has no class token; allowed are {allowed}")
        if pooling == "token" and self.levels != ("high",):
            raise ValueError(f"pooling is 'token', levels is {self.levels!r}; only the level 'high' has a class token")
        one_of("head", head, HEADS)
        self.head = "none" if dim is None and head != "residual" else head
        channels = {level: backbone.channels[level] for level in self.levels}
        for width in channels.values() if head == "residual" else ():
            if dim not in (None, width):
                raise ValueError(f"dim is {dim} and head is 'residual'; it must be None or {width}, as many as pooled")
        keeps = self.head in ("none", "residual")
        self.dims = channels if keeps or dim is None else dict.fromkeys(self.levels, whole("dim", dim))
        self.dim = sum(self.dims.values())
        self.backbone = backbone
        create_pooling = {"gem": GeM, "token": nn.Identity}.get(pooling, partial(Pooling, pooling))
        self.poolings = nn.ModuleDict({level: create_pooling() for level in self.levels})
        self.heads = nn.ModuleDict()
        for level, width in channels.items():
            self.heads[level] = nn.Identity() if self.head == "none" else Head(width, self.dims[level], head)
        self.normalize = normalize
        if freeze_batchnorm:
            backbone.freeze_batchnorm()

    @property
    def members(self) -> tuple[Embedder, ...]:  # type: ignore[override]
        """The embedder itself."""
        return (self,)

    def output_key(self, number: int, level: str) -> str:
        return level

    def levels_forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return the embedding [b, dim] of each level, for one copy of the loss each.

        Args:
            x: Normalized images or vectors; while the backbone is frozen, also its pooled features [b, c].
        """
        backbone = self.backbone
        if x.ndim == 2 and backbone.normalization is not None and backbone.frozen:
            return {level: self._finish(self.heads[level](x)) for level in self.levels}
        check_input(x, backbone.key, backbone.in_channels, images=backbone.normalization is not None)
        maps = {"high": backbone.token(x)} if self.pooling == "token" else backbone.maps(x)
        return {level: self._finish(self.heads[level](self.poolings[level](maps[level]))) for level in self.levels}

    def forward(self, x: Tensor) -> Tensor:
        """Return the embeddings; those of several levels are concatenated."""
        embeddings = list(self.levels_forward(x).values())
        return embeddings[0] if len(embeddings) == 1 else self._finish(torch.cat(embeddings, dim=1))

    def param_groups(
        self, lr: float, head_multiplier: float = 1.0, weight_decay: float | None = None
    ) -> list[dict[str, Any]]:
        """Return parameter groups for an optimizer: "backbone", and "head" with the pooling.

        Frozen parameters are left out, and so are groups without parameters. The defaults are those of recipes.

        Args:
            lr: Learning rate of the backbone.
            head_multiplier: Factor of the learning rate of head and pooling.
            weight_decay: Weight decay; None for the default of the optimizer.

        Example:
            >>> from nearfar.networks import create
            >>> model = create("mlp", in_dim=8, dim=2)
            >>> [(group["name"], group["lr"]) for group in model.param_groups(0.5, head_multiplier=10.0)]
            [('backbone', 0.5), ('head', 5.0)]
        """
        positive("lr", lr)
        positive("head_multiplier", head_multiplier)
        extra = {} if weight_decay is None else {"weight_decay": non_negative("weight_decay", weight_decay)}
        groups = []
        for name, rate, modules in (
            ("backbone", lr, (self.backbone,)),
            ("head", lr * head_multiplier, (self.poolings, self.heads)),
        ):
            parameters = [value for module in modules for value in module.parameters() if value.requires_grad]
            if parameters:
                groups.append({"name": name, "params": parameters, "lr": rate, **extra})
        return groups

    def _finish(self, x: Tensor) -> Tensor:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.normalize(x, dim=1) if self.normalize else x


def _checked_levels(backbone: Backbone, levels: Sequence[str] | None) -> tuple[str, ...]:
    if levels is None:
        return ("high",)
    if isinstance(levels, str):
        raise TypeError(f"levels is {levels!r}; a tuple is needed, such as ({levels!r},)")
    for level in levels:
        if level not in backbone.channels:
            raise ValueError(f"levels has {level!r}; {backbone.key} has {', '.join(backbone.channels)}")
    if not levels or len(set(levels)) != len(levels):
        raise ValueError(f"levels is {tuple(levels)!r}; at least one level is needed, and none twice")
    return tuple(levels)


class Pooling(nn.Module):
    """Average or maximum over all positions of a map, or their sum. Vectors [b, c] are returned unchanged.

    Args:
        kind: "avg", "max" or "avg+max" (the sum).

    Example:
        >>> Pooling("avg+max")(torch.tensor([[[[1.0, 3.0]]]]))
        tensor([[5.]])
    """

    def __init__(self, kind: str = "avg") -> None:
        super().__init__()
        self.kind = one_of("pooling", kind, ("avg", "max", "avg+max"))

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 2:
            return x
        pooled = [x.mean(dim=(2, 3))] if "avg" in self.kind else []
        pooled += [x.amax(dim=(2, 3))] if "max" in self.kind else []
        return pooled[0] if len(pooled) == 1 else pooled[0] + pooled[1]

    def extra_repr(self) -> str:
        return self.kind


class GeM(nn.Module):
    """Generalized mean (mean of xᵖ)^(1/p) with a learned exponent: 1 is the average, ∞ the maximum.

    Args:
        p: Initial exponent.
        smallest: Smaller values, including negative ones, are clamped to this.

    Reference:
        Radenović et al., "Fine-tuning CNN Image Retrieval with No Human Annotation", TPAMI 2019.

    Example:
        >>> GeM(p=1.0)(torch.tensor([[[[1.0, 3.0]]]])).tolist()
        [[2.0]]
    """

    def __init__(self, *, p: float = 3.0, smallest: float = 1e-6) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor([positive("p", p)]))
        self.smallest = positive("smallest", smallest)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 2:
            return x
        # At least float32: a sum of cubes overflows float16.
        x = x.to(torch.promote_types(x.dtype, torch.float32)).clamp(min=self.smallest)
        p = self.p.to(x.dtype)
        # Dividing by the largest value first prevents overflow; it cancels, and so does its gradient.
        top = x.detach().amax(dim=(2, 3), keepdim=True)
        return (x / top).pow(p).mean(dim=(2, 3)).pow(1 / p) * top.flatten(1)

    def extra_repr(self) -> str:
        return f"p={self.p.item():.3g}"


class Head(nn.Module):
    """One linear layer, optionally followed by a layer norm, or two with a ReLU between them.

    The linear layer of "residual" is added to its input. It starts at zero, so that training starts from the features.
    """

    def __init__(self, channels: int, dim: int, kind: str = "linear") -> None:
        super().__init__()
        self.residual = kind == "residual"
        self.hidden = nn.Linear(channels, channels) if kind == "mlp" else None
        self.linear = nn.Linear(channels, dim)
        self.norm = nn.LayerNorm(dim, elementwise_affine=False) if kind == "linear_norm" else None
        for layer in (self.hidden, self.linear):
            if layer is not None:
                (nn.init.zeros_ if self.residual else nn.init.xavier_uniform_)(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x if self.hidden is None else self.hidden(x).relu())
        if self.norm is not None:
            y = self.norm(y)
        return x + y if self.residual else y
