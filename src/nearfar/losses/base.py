"""Base classes of the losses: one signature, checked input, parameters that reach the optimizer."""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from nearfar import mining as minings
from nearfar.engine import LossBatch, Mean, Row, Tile
from nearfar.engine.autograd import LossComputation, by_autograd, differentiable
from nearfar.engine.measures import create
from nearfar.engine.programs import AllTriplets, KernelProgram, Program
from nearfar.engine.tiles import RowLoss, pair_weights, row_loss
from nearfar.losses.pml import refuse_foreign
from nearfar.mining import Choice, Mining
from nearfar.supervision import Hierarchy, Supervision
from nearfar.utils.registry import Registry
from nearfar.utils.tensors import NOT_PAIRS, check_embeddings, check_vectors, is_integer, readable
from nearfar.utils.validation import check_constructor, defaults_of

ANY = tuple(minings.names())


class Loss(nn.Module, ABC):
    """A loss of embeddings and labels.

    A loss is differentiable once, by ``backward`` or ``torch.autograd.grad``; the transforms of ``torch.func`` are not
    supported.

    A class declares what the rest of nearfar may rely on. These declarations are not inherited, because a subclass may
    compute something else. A class that declares nothing gets the safe treatment: it is not recorded as a CUDA graph,
    gets the same random numbers in every process, and every process computes it for the whole batch.

    Attributes:
        key: Name in the registry, set by ``register``.
        source: Where the loss comes from, set by ``register``.
        fixed: Settings that cannot change after construction.
        cuda_graph: Declared by the class: the loss depends on nothing but its tensors and its public attributes, so
            on a GPU its kernels can be recorded and replayed. Set it to False on an object to turn this off.
        deterministic: Declared by the class: the loss draws no random numbers apart from its mining or sampled classes.
        mean_over_anchors: Declared by the class: the loss is the mean over all embeddings of the batch of a function
            of the embedding and what it is compared with. Processes can then compute it for a part of the batch each.
        needs_grades: Whether the loss uses graded relevance, so that a hierarchy is one loss, not one for each level.
        shared_columns: Whether embeddings are compared with each other, so that processes that compute a part of the
            batch need the embeddings of all as gallery. False: they are compared with parameters of the loss.

    Example:
        >>> class Spread(Loss):
        ...     cuda_graph = deterministic = mean_over_anchors = True
        ...     shared_columns = False
        ...
        ...     def compute(self, batch):
        ...         return batch.embeddings.square().mean()
        >>> Spread()(torch.ones(2, 3), torch.tensor([0, 1]))
        tensor(1.)
    """

    key: ClassVar[str]
    source: ClassVar[str]
    fixed: ClassVar[tuple[str, ...]] = ()
    cuda_graph: bool = False
    deterministic: ClassVar[bool] = False
    mean_over_anchors: bool = False
    needs_grades: bool = False
    shared_columns: ClassVar[bool] = True

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for declaration in ("cuda_graph", "deterministic", "mean_over_anchors"):
            if declaration not in vars(cls):
                setattr(cls, declaration, False)
        check_constructor(cls)

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        if settings:
            refuse_foreign(cls.__name__, settings, defaults_of(cls.__init__))
        return super().__new__(cls)

    def __call__(self, *inputs: Any, **named: Any) -> Tensor:
        """Compute the loss; arguments as in ``forward``."""
        if named:
            refuse_foreign(type(self).__name__, named)
        value: Tensor = super().__call__(*inputs, **named)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        is_property = isinstance(getattr(type(self), name, None), property)
        if name in self.fixed and (name in vars(self) or (is_property and hasattr(self, name))):
            raise AttributeError(
                f"{name} of {type(self).__name__} cannot change after construction; create a new loss with "
                f"{name}={value!r}"
            )
        super().__setattr__(name, value)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | Supervision,
        gallery: Tensor | None = None,
        gallery_labels: Tensor | None = None,
        *,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss of a batch, a scalar.

        Args:
            embeddings: Embeddings, [m, d], floating point. Computed in float32 (or float64), also under autocast.
            labels: Integer labels, [m], of any value; or another supervision, see :mod:`nearfar.supervision`.
            gallery: Columns to compare with instead of the batch, [n, d]: a memory of earlier batches, or the
                embeddings of all processes. A gallery that requires a gradient gets one.
            gallery_labels: Labels of the gallery, [n]; None with another supervision, which knows the gallery.
            positions: The column of each anchor in the gallery, [m] (−1: not in it), so that it is not its own
                positive. Checked on a CPU.
        """
        compute = self.compute
        if isinstance(labels, Supervision):
            self._check_supervision(labels)
            compute = self.compute_levels
        batch = check_batch(embeddings, labels, gallery, gallery_labels, positions)
        if not torch.is_autocast_enabled(embeddings.device.type):
            return compute(batch)
        with torch.autocast(embeddings.device.type, enabled=False):
            return compute(batch)

    @property
    def needs_labels(self) -> str | None:
        """Why the loss needs a class label of each embedding; None: it is enough to know positives and negatives."""
        return "is defined by classes"

    def _check_supervision(self, supervision: Supervision) -> None:
        if self.needs_labels is not None:
            raise TypeError(
                f"labels is a {type(supervision).__name__}, but {type(self).__name__} {self.needs_labels}; it needs "
                "integer labels, [m], the class of each embedding"
            )

    @abstractmethod
    def compute(self, batch: LossBatch) -> Tensor:
        """Compute the loss of checked input, a scalar.

        Args:
            batch: Embeddings, labels or another supervision, and a gallery.
        """

    def compute_levels(self, batch: LossBatch) -> Tensor:
        """Compute the loss of checked input; of a hierarchy, the sum over its levels unless the loss needs grades."""
        levels = None if isinstance(batch.relations, Tensor) or self.needs_grades else batch.relations.split()
        if levels is None:
            return self.compute(batch)
        values = []
        for weight, labels, column_labels in levels:
            if batch.positions is not None and readable(batch.positions):
                _check_own_labels(batch.positions, labels, column_labels)
            gallery_labels = None if batch.gallery is None else column_labels
            values.append(weight * self.compute(replace(batch, relations=labels, gallery_labels=gallery_labels)))
        return torch.stack(values).sum()

    def differentiate(
        self,
        function: Callable[..., Tensor],
        inputs: Sequence[Tensor | None],
        constants: Sequence[Tensor | None] = (),
        static: tuple[int, ...] = (),
    ) -> Tensor:
        """Compute a function of tensors with its gradients in the forward pass, by autograd.

        Autocast is off there, and on a GPU all of it can be recorded. The backward pass only scales the gradients.

        Args:
            function: Called with the inputs and the constants; returns a scalar.
            inputs: What it is differentiated by.
            constants: Tensors without a gradient, such as labels.
            static: Inputs that keep their memory address from step to step if they are parameters.
        """

        def graph_key() -> Hashable:
            settings = self.graph_key()
            return None if settings is None else (function.__name__, settings)

        sizes = [len(tensor) for tensor in inputs if tensor is not None]
        pairs = math.prod(sizes if len(sizes) > 1 else sizes * 2)
        computation = LossComputation(by_autograd(function), constants, self, graph_key, pairs, static)
        return differentiable(computation, inputs)

    def param_groups(self, lr: float) -> list[dict[str, Any]]:
        """Return optimizer groups for the parameters of the loss, with their own learning rates.

        Args:
            lr: Learning rate of the network.
        """
        return []

    @property
    def draws(self) -> bool:
        """Whether a call may draw random numbers: negatives, classes or anchors."""
        return not self.deterministic

    def graph_key(self) -> Hashable:
        """Return the settings as one value for CUDA graphs; None if the loss must not be recorded."""
        return _graph_key(self)

    def settings(self) -> dict[str, Any]:
        """Return the arguments of the constructor with their current values."""
        return {
            name: getattr(self, name)
            for name in inspect.signature(type(self).__init__).parameters
            if name != "self" and hasattr(self, name)
        }

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.settings().items())


L = TypeVar("L", bound=type[Loss])
LOSSES: Registry[type[Loss]] = Registry("loss")


def register(key: str, source: str = "") -> Callable[[L], L]:
    """Register a loss class, as a class decorator.

    Args:
        key: Name of the loss, for ``create`` and recipes.
        source: Where the loss comes from, in a few words.

    Raises:
        ValueError: If another class has the same key.
        TypeError: If it is used without a key.

    Example:
        >>> @register("spread", "this example")
        ... class Spread(Loss):
        ...     def compute(self, batch):
        ...         return batch.embeddings.square().mean()
        >>> LOSSES.entries.pop("spread").source
        'this example'
    """
    if not isinstance(key, str):
        raise TypeError('register needs the key of the loss: @register("two_hinges", "Paper 7")')

    def decorate(loss: L) -> L:
        LOSSES.register(key, loss)
        loss.key, loss.source = key, source
        return loss

    return decorate


class PairLoss(Loss, RowLoss):
    """A loss that is a function of one anchor's row of similarities.

    A subclass defines how embeddings are compared (``measure``, ``normalize``) and the loss of a row (``rows``).
    The engine does the rest: tiles, gradients, galleries, pair weights.

    Args:
        mining: Which pairs are used: the name of a mining, a mining, or a table of a name and settings.
        measure: "cosine", "dot", "euclidean", "squared_euclidean" or "snr"; None: that of the class.
        normalize: False: compare embeddings as they are instead of scaling them to length one.

    Example:
        >>> class Hinge(PairLoss):
        ...     def rows(self, sim, pos, neg):
        ...         return torch.where(neg, sim.relu(), 0).sum(1) - torch.where(pos, sim, 0).sum(1)
        >>> Hinge()(torch.eye(2), torch.tensor([0, 1]))
        tensor(0.)
    """

    minings: tuple[str, ...] = ("all",)  # those that make sense with this loss
    _is_plain: ClassVar[bool] = True  # the class has neither `anchor_values` nor a `regularizer`

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls._is_plain = all(getattr(cls, name) is getattr(PairLoss, name) for name in ("anchor_values", "regularizer"))

    def __init__(self, mining: Choice = "all", *, measure: str | None = None, normalize: bool = True) -> None:
        super().__init__()
        self.measure = measure or self.measure
        self.normalize = self.normalize and bool(normalize)
        if self.measure == "cosine" and not normalize:
            raise ValueError(
                f"normalize is {normalize!r}, but a cosine does not depend on lengths; choose a form with distances"
            )
        self.mining = minings.create(mining)

    @property
    def mining(self) -> Mining:
        """Which pairs are used. A name or a table can be assigned as well."""
        return self._mining

    @mining.setter
    def mining(self, choice: Choice) -> None:
        mining = minings.create(choice)
        if minings.is_known(mining) and mining.name not in self.minings:
            raise ValueError(
                f"mining {mining.name!r} makes no sense with {type(self).__name__}; "
                f"allowed are {', '.join(self.minings)}"
            )
        if mining.unit_only and not self.normalize:
            raise ValueError(
                f"mining {mining.name!r} needs unit vectors and {type(self).__name__} does not normalize embeddings"
            )
        if mining.unit_only and self.measure == "snr":
            raise ValueError(
                f"mining {mining.name!r} needs distances or cosines and {type(self).__name__} compares by 'snr'"
            )
        self._mining = mining

    @property
    def draws(self) -> bool:
        return not self.deterministic or self.mining.draws

    @property
    def bytes_per_pair(self) -> int:
        return (self.row_bytes or (28 if self.closed_form else 48)) + self._mining.bytes_per_pair

    def graph_key(self) -> Hashable:
        """Return the settings of loss and mining as one value for CUDA graphs; None if they must not be recorded."""
        settings, mined = super().graph_key(), _graph_key(self.mining)
        return None if settings is None or mined is None else (settings, type(self.mining), mined)

    def rows(self, sim: Tensor, pos: Tensor, neg: Tensor) -> Tensor | Row | Sequence[Mean]:
        """Compute the loss of each anchor, [a].

        The batch loss is the mean over all anchors; return :class:`~nearfar.engine.Mean` objects for other
        denominators. A tensor is differentiated by autograd. A loss that sets ``closed_form`` returns a
        :class:`~nearfar.engine.Row` instead, built from ``row_sum`` and ``row_logsumexp``, which is faster.

        Args:
            sim: Similarities or distances of anchors and columns, [a, n].
            pos: Mask of the positives, [a, n].
            neg: Mask of the negatives, [a, n].
        """
        raise NotImplementedError(f"{type(self).__name__} must define rows(sim, pos, neg)")

    def on_tile(self, tile: Tile) -> Tensor | Row | Sequence[Mean]:
        """Mine, then call ``rows``. Losses that need more of the tile than its values override this."""
        return self.rows(tile.values, *self._mining.select(tile))

    def program(self) -> Program | AllTriplets | None:
        """Return the loss without its mining as sums over rows, for the fused kernels; None if it has no such form.

        It is not inherited: a subclass may compute something else. A class that defines it uses the pairs of its
        mining and no others.
        """
        return None

    def kernel_program(self) -> KernelProgram | None:
        if "program" not in vars(type(self)):
            return None
        kind = type(self.mining)
        if kind is minings.Hard:
            return "hard"
        if kind is minings.SemiHard:
            return "semi_hard"
        program = self.program()
        if program is None or kind is minings.All:
            return program
        if isinstance(program, Program) and type(self.mining) is minings.ValidTriplet:
            return replace(program, valid_triplet=self.mining.margin)
        return None

    @property
    def selects_columns(self) -> bool:  # type: ignore[override]
        return "program" in vars(type(self)) and type(self.mining) is minings.Hard

    def select_columns(self, tile: Tile) -> Tensor:
        """Return the columns of the triplet that hard mining selects for each anchor, [a, 2]."""
        assert isinstance(self.mining, minings.Hard)
        mined = self.mining.triplets(tile)
        return torch.cat([mined.positive, mined.negative], dim=1)

    @property
    def needs_labels(self) -> str | None:
        return "forms pairs of the members of classes" if self.needs_ordinals else None

    def anchor_values(self, batch: LossBatch) -> Tensor | None:
        """Return a learned number for each anchor, [m], or None."""
        return None

    def regularizer(self, embeddings: Tensor) -> Tensor | None:
        """Return a term that is added to the loss of the pairs, or None."""
        return None

    def compute(self, batch: LossBatch) -> Tensor:
        if self._is_plain and not self._mining.draws:
            return row_loss(self, batch)
        batch = self._completed(batch)
        loss, term = row_loss(self, batch), self.regularizer(batch.embeddings)
        return loss if term is None else loss + term

    def pair_weights(
        self,
        embeddings: Tensor,
        labels: Tensor | Supervision,
        gallery: Tensor | None = None,
        gallery_labels: Tensor | None = None,
        *,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Compute the weight of every pair, [m, n].

        The weights w are such that Σ_negatives w·s − Σ_positives w·s has the gradient of the loss, where s is the
        similarity, or minus the distance if the loss compares distances. Weights are ≥ 0 where the loss pulls positives
        and pushes negatives. Some losses also do the opposite; their documentation says so.

        Arguments are those of a call of the loss, except a hierarchy, whose levels have weights of their own.

        Example:
            >>> import nearfar as nf
            >>> nf.losses.Contrastive().pair_weights(torch.eye(3), torch.tensor([0, 0, 1]))
            tensor([[-0.0000, 0.3333, 0.0000],
                    [0.3333, -0.0000, 0.0000],
                    [0.0000, 0.0000, -0.0000]])
        """
        if isinstance(labels, Supervision):
            self._check_supervision(labels)
        if isinstance(labels, Hierarchy):
            raise TypeError("labels is a Hierarchy; pair weights are computed for one level: give its labels")
        batch = check_batch(embeddings, labels, gallery, gallery_labels, positions)
        autocast = torch.autocast(embeddings.device.type, enabled=False)
        # Weights are derivatives, which autograd cannot compute in inference mode.
        with autocast, torch.inference_mode(False), torch.no_grad():
            return self.compute_weights(batch)

    def compute_weights(self, batch: LossBatch) -> Tensor:
        """Compute the pair weights of checked input, [m, n]."""
        if isinstance(batch.relations, Tensor):
            same = batch.labels.unsqueeze(1) == batch.column_labels
        else:
            same, _ = batch.relations.masks(*(slice(0, size) for size in batch.relations.shape))
        weights = pair_weights(self, self._completed(batch))
        return torch.where(same != create(self.measure, normalize=self.normalize).is_distance, -weights, weights)

    def _completed(self, batch: LossBatch) -> LossBatch:
        """The batch with anchor values, in the highest precision of all, and random numbers for the mining."""
        anchor_values, noise = self.anchor_values(batch), None
        if anchor_values is not None and anchor_values.dtype != batch.embeddings.dtype:
            dtype = torch.promote_types(batch.embeddings.dtype, anchor_values.dtype)
            gallery = None if batch.gallery is None else batch.gallery.to(dtype)
            batch = replace(batch, embeddings=batch.embeddings.to(dtype), gallery=gallery)
            anchor_values = anchor_values.to(dtype)
        if self._mining.draws:
            embeddings = batch.embeddings
            noise = torch.rand(len(embeddings) + len(batch.columns), dtype=embeddings.dtype, device=embeddings.device)
        return replace(batch, anchor_values=anchor_values, noise=noise)


def param_groups(module: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Return optimizer groups of a module that holds a network and losses.

    The parameters of losses, such as proxies, keep their own learning rates and have no weight decay. All others have
    the learning rate ``lr``; frozen ones are left out.

    Args:
        module: A module that holds both, such as a ``LightningModule``; or one of them.
        lr: Learning rate of the network.

    Example:
        >>> from nearfar import losses
        >>> module = nn.ModuleList([nn.Linear(8, 4), losses.ProxyAnchor(num_classes=3, dim=4)])
        >>> [(group["name"], group["lr"]) for group in param_groups(module, lr=0.5)]
        [('network', 0.5), ('loss', 50.0)]
    """
    of_losses = loss_groups(module, lr)
    known = {id(parameter) for group in of_losses for parameter in group["params"]}
    rest = [parameter for parameter in module.parameters() if parameter.requires_grad and id(parameter) not in known]
    return [*([{"name": "network", "params": rest, "lr": lr}] if rest else []), *of_losses]


def loss_groups(losses: nn.Module, lr: float, multiplier: float | None = None) -> list[dict[str, Any]]:
    """Return the parameter groups of all losses in a module, each parameter once."""
    modules = [(path, module) for path, module in losses.named_modules() if isinstance(module, Loss)]
    seen: set[int] = set()
    groups = []
    for path, loss in modules:
        for group in loss.param_groups(lr):
            params = [parameter for parameter in group["params"] if id(parameter) not in seen]
            seen.update(map(id, params))
            if params:
                rate = group.get("lr", lr) if multiplier is None else lr * multiplier
                name = "loss" if len(modules) == 1 else f"loss.{path}"
                groups.append({"weight_decay": 0.0, **group, "name": name, "params": params, "lr": rate})
    return groups


def _graph_key(owner: Loss | Mining) -> Hashable:
    """The settings by name; None if the class does not allow it or one of them could change unnoticed."""
    if not owner.cuda_graph:
        return None
    settings = tuple((name, value) for name, value in vars(owner).items() if _is_setting(owner, name))
    constant = all(value is None or isinstance(value, (float, int, str)) for _, value in settings)
    return settings if constant else None


def _is_setting(owner: Loss | Mining, attribute: str) -> bool:
    """Whether an attribute is public or has the value of a property; a mining has settings of its own."""
    if not attribute.startswith("_"):
        return True
    return attribute != "_mining" and isinstance(getattr(type(owner), attribute[1:], None), property)


def check_classes(labels: Tensor, num_classes: int) -> None:
    """Raise if a label is no class number. Not checked on a GPU, where the host would have to wait for it."""
    if readable(labels):
        low, high = labels.min().item(), labels.max().item()
        if low < 0 or high >= num_classes:
            raise ValueError(
                f"labels range from {low} to {high}; with num_classes={num_classes} allowed are 0 to {num_classes - 1}"
            )


def refuse_gallery(loss: Loss, batch: LossBatch, instead: str) -> None:
    """Raise if a gallery is given to a loss that does not compare with columns."""
    if batch.gallery is not None:
        raise ValueError(f"{type(loss).__name__} {instead} and takes no gallery")


def check_batch(
    embeddings: Tensor,
    labels: Tensor | Supervision,
    gallery: Tensor | None,
    gallery_labels: Tensor | None,
    positions: Tensor | None,
) -> LossBatch:
    """Check and convert the arguments of a loss."""
    if isinstance(labels, Supervision):
        embeddings = check_embeddings("embeddings", embeddings)
        if gallery_labels is not None:
            kind = type(labels).__name__
            raise ValueError(
                f"gallery_labels is given, but labels is a {kind}, which relates the embeddings to the gallery"
            )
    else:
        embeddings, labels = check_vectors("embeddings", embeddings, "labels", labels)
        if (gallery is None) != (gallery_labels is None):
            missing = "gallery" if gallery is None else "gallery_labels"
            raise ValueError(f"gallery and gallery_labels must be given together; {missing} is missing{NOT_PAIRS}")
    if gallery is not None:
        if gallery_labels is None:
            gallery = check_embeddings("gallery", gallery)
        else:
            gallery, gallery_labels = check_vectors("gallery", gallery, "gallery_labels", gallery_labels)
        if gallery.shape[1] != embeddings.shape[1]:
            raise ValueError(f"gallery has {gallery.shape[1]} dimensions and embeddings {embeddings.shape[1]}")
        if gallery.device != embeddings.device:
            raise ValueError(f"gallery is on {gallery.device} and embeddings on {embeddings.device}")
        gallery = gallery.to(embeddings.dtype)
    if positions is not None:
        if gallery is None:
            raise ValueError("positions are columns of a gallery, but no gallery was given")
        positions = _check_positions(positions, embeddings, gallery)
        if isinstance(labels, Tensor) and gallery_labels is not None and readable(positions):
            _check_own_labels(positions, labels, gallery_labels)
    if isinstance(labels, Supervision):
        columns = None if gallery is None else len(gallery)
        return LossBatch(
            embeddings, labels.of_batch(len(embeddings), columns, embeddings.device), gallery, None, positions
        )
    return LossBatch(embeddings, labels, gallery, gallery_labels, positions)


def _check_positions(positions: Tensor, embeddings: Tensor, gallery: Tensor) -> Tensor:
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions is a {type(positions).__name__}; a torch.Tensor is needed")
    if positions.shape != embeddings.shape[:1] or not is_integer(positions):
        raise ValueError(
            f"positions has shape {tuple(positions.shape)} of {positions.dtype}; it must have one integer for "
            f"each of the {len(embeddings)} anchors"
        )
    positions = positions.to(embeddings.device, torch.int64)
    if readable(positions):
        low, high, count = positions.min().item(), positions.max().item(), len(gallery)
        if low < -1 or high >= count:
            raise ValueError(
                f"positions range from {low} to {high}; allowed are 0 to {count - 1} in a gallery of {count}, and -1"
            )
    return positions


def _check_own_labels(positions: Tensor, labels: Tensor, gallery_labels: Tensor) -> None:
    wrong = ((positions >= 0) & (gallery_labels[positions] != labels)).nonzero()
    if len(wrong):
        anchor = int(wrong[0])
        place = int(positions[anchor])
        raise ValueError(
            f"positions has {place} for anchor {anchor} of label {labels[anchor]}, but gallery_labels[{place}] is "
            f"{gallery_labels[place]}; it must be the position of the anchor's own copy, or -1"
        )
