"""The sections of a recipe: one frozen dataclass for each table of the file.

What a field says of its type is checked when a section is made, so a section that exists is well-formed. What
sections say together is looked at by ``nearfar.training.recipe.checks``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nearfar.data.transforms.view import LIMITS
from nearfar.training.recipe.base import Section
from nearfar.utils.validation import non_negative, number, positive, whole


@dataclass(frozen=True, kw_only=True)
class Data(Section):
    """Which data set, and how its pictures are kept.

    ``settings`` are those of the data set, as ``nearfar data info NAME`` lists them. ``channels`` are the file's own
    unless told. ``root`` may hold ~ and $VARIABLES.
    """

    section = "data"
    name: str = "digits"
    root: str | tuple[str, ...] | None = None
    side: int = 256
    aspect: Literal["keep", "squash"] = "keep"
    channels: int | None = None
    on_error: Literal["fail", "skip"] = "fail"
    mode: Literal["auto", "resident", "streaming"] = "auto"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def _check(self) -> None:
        self._whole("side")
        if self.channels not in (None, 1, 3):
            raise ValueError(f"data.channels is {self.channels}; allowed are 1 and 3")


@dataclass(frozen=True, kw_only=True)
class SplitRule(Section):
    """Which classes validate: none ("standard"), a share of the training classes, or one fold of them."""

    section = "split"
    name: Literal["standard", "fixed_validation", "k_fold"] = "standard"
    share: float = 0.1
    folds: int = 10
    fold: int = 0
    seed: int = 0

    def _check(self) -> None:
        number("split.share", self.share, low=0.0, high=1.0, open_low=True)
        whole("split.folds", self.folds, low=2)
        whole("split.fold", self.fold, low=0, high=self.folds - 1)
        self._whole("seed", low=0)


@dataclass(frozen=True, kw_only=True)
class Sampler(Section):
    """What a batch is made of: ``classes`` × ``per_class`` pictures, or ``batch_size`` of any class ("random").

    With ``batch_size`` instead of ``classes``, groups are as many as fill it, or as there are classes.
    """

    section = "sampler"
    name: Literal["groups", "pairs", "random", "hard_classes"] = "groups"
    classes: int | None = None
    per_class: int | None = None
    batch_size: int | None = None
    candidates: int | None = None
    steps: int | None = None

    def _check(self) -> None:
        for key in ("classes", "per_class", "batch_size", "candidates", "steps"):
            self._whole(key)

    @property
    def images(self) -> int:
        """Pictures in a batch, over all ranks."""
        return self.batch_size or (self.classes or 0) * (self.per_class or 2)


@dataclass(frozen=True, kw_only=True)
class Augmentation(Section):
    """How training pictures are looked at, see ``nearfar.data.View``.

    ``size`` is the network's own unless told; ``resize`` "auto" is 8/7 of it, or the size itself for small pictures.
    ``color``, ``grey``, ``erase`` and ``rotate`` are off unless told.
    """

    section = "augmentation"
    crop: Literal["random", "random_resized", "center", "none"] = "random"
    size: int | None = None
    resize: int | Literal["auto"] | None = "auto"
    aspect: Literal["keep", "squash"] = "keep"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True
    color: float | None = None
    grey: float | None = None
    erase: float | None = None
    rotate: float | None = None

    def _check(self) -> None:
        self._whole("size")
        if isinstance(self.resize, int):
            self._whole("resize")
        if self.crop in ("random", "center"):
            _check_fits(self)
        for key, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if positive(f"augmentation.{key}", low) > high:
                raise ValueError(f"augmentation.{key} is {[low, high]}; the first must not be larger than the second")
        number("augmentation.scale", self.scale[1], high=1.0)
        for key, value in self.effects.items():
            number(f"augmentation.{key}", value, low=0.0, high=LIMITS[key], open_low=True)

    @property
    def effects(self) -> dict[str, float]:
        """What happens to pictures beside crops and flips, as far as anything does."""
        given = {key: getattr(self, key) for key in LIMITS}
        return {key: value for key, value in given.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Network(Section):
    """Which network, see ``nearfar.networks.create``; ``members`` of them make an ensemble.

    ``dim`` is that of one level and one member. Of the backbone's ``settings``, ``in_dim``, ``channels`` and ``size``
    are read off the data where they are not given.
    """

    section = "network"
    name: str
    dim: int | None = 512
    pooling: Literal["avg", "max", "avg+max", "gem", "token"] = "avg"
    normalize: bool = True
    head: Literal["linear", "linear_norm", "mlp", "none"] = "linear"
    levels: tuple[Literal["low", "mid", "high"], ...] | None = None
    pretrained: bool | str = False
    freeze_batchnorm: bool = False
    members: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)

    def _check(self) -> None:
        self._whole("dim")
        self._whole("members")
        if self.levels is not None and (not self.levels or len(set(self.levels)) < len(self.levels)):
            raise ValueError(f"network.levels is {list(self.levels)}; each level once, and at least one, is needed")


@dataclass(frozen=True, kw_only=True)
class Loss(Section):
    """A loss and its settings; in the file they stand side by side.

    ``num_classes`` and ``dim`` come from data and network. ``mining`` is a name, or a table of a name and settings.
    """

    section = "loss"
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Optimizer(Section):
    """How parameters move; multipliers are of the learning rate.

    ``loss_multiplier`` is for the loss's own parameters (proxies); None leaves it to the loss, see its lr_multiplier.
    """

    section = "optimizer"
    name: Literal["sgd", "adam", "adamw", "radam"] = "adamw"
    lr: float
    weight_decay: float = 0.0
    momentum: float = 0.9
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    head_multiplier: float = 1.0
    loss_multiplier: float | None = None

    def _check(self) -> None:
        for key in ("lr", "head_multiplier", "loss_multiplier"):
            self._positive(key)
        non_negative("optimizer.weight_decay", self.weight_decay)
        for key, value in (("momentum", self.momentum), ("betas", self.betas[0]), ("betas", self.betas[1])):
            number(f"optimizer.{key}", value, low=0.0, high=1.0 - 1e-9)
        if self.nesterov and self.momentum == 0:
            raise ValueError("optimizer.nesterov is true; it needs a momentum above 0")


@dataclass(frozen=True, kw_only=True)
class Schedule(Section):
    """How the learning rate changes, counted in epochs or iterations (``per``); ``warmup`` is in iterations.

    "step" multiplies by ``gamma`` every ``step_size``, "multi_step" at ``milestones``; "cosine" falls to ``minimum``
    times the learning rate; "plateau" multiplies by ``gamma`` when the validation metric has not grown for more than
    ``patience`` evaluations, down to ``minimum`` times.
    """

    section = "schedule"
    name: Literal["constant", "step", "multi_step", "cosine", "plateau"] = "constant"
    per: Literal["epoch", "iteration"] = "epoch"
    step_size: int | None = None
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1
    minimum: float = 0.0
    patience: int = 3
    warmup: int = 0

    def _check(self) -> None:
        self._whole("step_size")
        self._whole("patience", low=0)
        self._whole("warmup", low=0)
        number("schedule.gamma", self.gamma, low=0.0, high=1.0, open_low=True)
        number("schedule.minimum", self.minimum, low=0.0, high=1.0)
        if any(b <= a for a, b in zip((0, *self.milestones), self.milestones, strict=False)):
            raise ValueError(f"schedule.milestones is {list(self.milestones)}; needed are rising numbers above 0")


@dataclass(frozen=True, kw_only=True)
class Training(Section):
    """How long and how: ``epochs`` or ``iterations``.

    ``warmup_epochs`` train head and loss alone. ``chunk`` is how many pictures go through the network at once where
    the batch is too large for that. ``graphs`` replays the network's kernels on a GPU, see
    ``nearfar.training.loop.cuda_graphs``. ``memory`` is how many embeddings of earlier batches are compared with, from
    iteration ``memory_warmup`` on. ``checkpoint_steps`` saves within epochs as well.
    """

    section = "training"
    epochs: int | None = None
    iterations: int | None = None
    warmup_epochs: int = 0
    clip: float | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    chunk: int | None = None
    compile: bool = False
    graphs: bool = True
    channels_last: bool = True
    device: str = "auto"
    on_nonfinite: Literal["stop", "skip"] = "stop"
    memory: int = 0
    memory_warmup: int = 0
    deterministic: bool = False
    checkpoint_steps: int | None = None

    def _check(self) -> None:
        for key in ("epochs", "iterations", "chunk", "checkpoint_steps"):
            self._whole(key)
        for key in ("warmup_epochs", "seed", "memory", "memory_warmup"):
            self._whole(key, low=0)
        self._positive("clip")


@dataclass(frozen=True, kw_only=True)
class Stage(Section):
    """Some epochs with another loss or at another learning rate (``lr_factor`` times the optimizer's)."""

    section = "stages"
    epochs: int | None = None
    loss: Loss | None = None
    lr_factor: float = 1.0

    def _check(self) -> None:
        self._whole("epochs")
        self._positive("lr_factor")


@dataclass(frozen=True, kw_only=True)
class Evaluation(Section):
    """When the model is measured and how: ``every`` so many epochs, and always at the end (0: only then).

    Without ``test`` the test classes are never looked at: for trials, which only the validation classes may judge.
    ``size`` is the augmentation's unless told. Things look larger in random-resized crops than in whole pictures, so
    that one a quarter larger than that often finds more.
    """

    section = "evaluation"
    every: int = 1
    test: bool = True
    ks: tuple[int, ...] = (1, 2, 4, 8)
    clustering: bool = False
    train_recall: bool = False
    batch_size: int = 256
    measure: Literal["cosine", "euclidean"] = "cosine"
    size: int | None = None
    resize: int | Literal["auto"] | None = "auto"
    crop: Literal["center", "none"] = "center"

    def _check(self) -> None:
        self._whole("every", low=0)
        self._whole("batch_size")
        for k in self.ks:
            whole("evaluation.ks", k)
        if not self.ks:
            raise ValueError("evaluation.ks is empty; at least one number is needed")
        self._whole("size")
        if isinstance(self.resize, int):
            self._whole("resize")
        if self.crop == "center":
            _check_fits(self)


def _check_fits(view: Augmentation | Evaluation) -> None:
    if isinstance(view.resize, int) and view.size is not None and view.resize < view.size:
        raise ValueError(f"{view.section}.resize is {view.resize}; a crop of size {view.size} needs at least that")


@dataclass(frozen=True, kw_only=True)
class Selection(Section):
    """The metric of the *validation* classes that names the best epoch; without validation the last one counts."""

    section = "selection"
    metric: str = "recall@1"
