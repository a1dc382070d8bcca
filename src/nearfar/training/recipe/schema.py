"""Recipes as pydantic models: strict, frozen and closed to unknown keys, one model for each section.

Settings of losses, networks and datasets are checked against the signatures of what their registries hold at that
moment, so that those of plugins are checked as well. :func:`json_schema` describes a whole recipe for editors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationInfo,
    WithJsonSchema,
    create_model,
    model_validator,
)

from nearfar import data, losses, networks
from nearfar.data.datasets import base as datasets
from nearfar.data.transforms.view import LIMITS
from nearfar.networks import registry as backbones
from nearfar.training.recipe.checks import FILE, problems, read, unknown_name
from nearfar.utils.tensors import shapes_only

NONE = "none"  # stands for None in TOML, which has no word for it
FILLED = ("num_classes", "dim")  # settings of losses that data and network determine
WRAPPERS = ("matryoshka", "plus", "weight", "regularizer", "regularizer_weight")  # keys beside the settings of a loss

Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Aspect = Literal["keep", "squash"]
Resize = Count | Literal["auto"] | None


class Section(BaseModel):
    """A table of a recipe."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )
    section: ClassVar[str]  # name of the table
    # By name, the keys that belong to it; keys in none of these lists belong to every name.
    keys: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    required: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # by name, the keys that must be given

    @model_validator(mode="before")
    @classmethod
    def _from_toml(cls, table: Any) -> Any:
        """Lists become tuples, and "none" becomes None in fields that may be None."""
        if not isinstance(table, Mapping):
            return table
        changed = dict(table)
        for key, value in table.items():
            if isinstance(value, list):
                changed[key] = tuple(value)
            elif isinstance(value, Mapping):
                changed[key] = dict(value)
            elif key in cls.model_fields and NoneType in get_args(cls.model_fields[key].annotation) and value == NONE:
                changed[key] = None
        return changed

    @model_validator(mode="after")
    def _check(self) -> Section:
        name, conflicts = getattr(self, "name", ""), []
        for key in type(self).model_fields:
            if key in self.model_fields_set and self.is_foreign(name, key):
                others = [other for other, keys in self.keys.items() if key in keys]
                has = f", which has {', '.join(self.keys[name])}" if self.keys[name] else ""
                conflicts.append(
                    f"{self.section}.{key} belongs to {' and '.join(others)}; {self.section}.name is {name!r}{has}"
                )
        for key in self.required.get(name, ()):
            if not getattr(self, key):
                conflicts.append(f"{self.section}.{key} is missing; {self.section}.name = {name!r} needs it")
        conflicts += self.conflicts()
        if conflicts:
            raise ValueError("\n".join(conflicts))
        return self

    @classmethod
    def is_foreign(cls, name: str, key: str) -> bool:
        """Whether a key belongs to other names of the section only."""
        own = cls.keys.get(name)
        return own is not None and key not in own and any(key in keys for keys in cls.keys.values())

    def conflicts(self) -> Iterator[str]:
        """Values of the section that contradict each other, one line each."""
        yield from ()


class DataSection(Section):
    """The dataset, and how its images are stored."""

    section = "data"
    name: str = "digits"
    """A dataset; ``nearfar data list`` lists them."""
    root: str | tuple[str, ...] | None = None
    """Where it is: a folder or an archive, or a list of archives. May contain ~ and $VARIABLES."""
    side: Count = 256
    """Images are stored with this shorter side."""
    aspect: Aspect = "keep"
    """"squash" stores square images."""
    channels: Literal[1, 3] | None = None
    """1 or 3; as in the files if not given."""
    on_error: Literal["fail", "skip"] = "fail"
    """"skip" leaves out images that cannot be read, and lists them."""
    mode: Literal["auto", "resident", "streaming"] = "auto"
    """Keep all images in device memory, or load batches."""
    pad: bool = False
    """Pad images to squares with black, so that resizing the shorter side resizes the longer one."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the dataset; ``nearfar data info NAME`` lists them."""

    @property
    def decoding(self) -> dict[str, Any]:
        """How images are decoded and stored."""
        return self.model_dump(include={"side", "aspect", "channels", "on_error"})

    def conflicts(self) -> Iterator[str]:
        if self.name not in data.names():
            yield unknown_name("data.name", self.name, data.names())
            return
        yield from read(data_settings(self.name), self.settings, where="data.settings", owner=self.name)[1]
        if self.root is not None and datasets.takes_root(self.name) is None:
            yield f"data.root is {self.root!r}; {self.name} takes none"


class SplitSection(Section):
    """Which training classes are used for validation."""

    section = "split"
    keys = {
        "standard": (),
        "fixed_validation": ("share", "seed"),
        "k_fold": ("folds", "fold", "seed"),
        "closed_set": (),
        "train_only": (),
        "everything": (),
    }
    name: Literal["standard", "fixed_validation", "k_fold", "closed_set", "train_only", "everything"] = "standard"
    """"standard": none; "fixed_validation": a share of the training classes; "k_fold": one fold of them; "closed_set":
    none, and other images of the training classes are tested; "train_only": those of the dataset's validation part, and
    all other classes are for training, none for the test; "everything": none, all classes are for training."""
    share: Fraction = 0.1
    """Share of the training classes used for validation, at least two classes."""
    folds: Annotated[int, Field(ge=2)] = 10
    """Number of folds."""
    fold: Index = 0
    """The fold used for validation."""
    seed: Index = 0
    """Seed of the choice of classes."""

    def conflicts(self) -> Iterator[str]:
        if self.fold >= self.folds:
            yield f"split.fold is {self.fold}; it must be < split.folds, {self.folds}"


class SamplerSection(Section):
    """What a batch consists of."""

    section = "sampler"
    keys = {
        "groups": ("classes", "per_class", "batch_size"),
        "pairs": ("classes",),
        "random": ("batch_size",),
        "given": ("batch_size",),
        "hard_classes": ("classes", "per_class", "candidates"),
        "neighbor_classes": ("classes", "per_class", "anchors"),
        "importance": ("classes", "per_class", "batch_size", "neighbors"),
        "hard_triplets": ("batch_size",),
        "smart_triplets": ("batch_size", "neighbors"),
    }
    # The first key of a name is needed; for "groups" see `conflicts`.
    required = {name: first[:1] for name, first in keys.items()} | {
        "groups": ("per_class",),
        "importance": ("classes", "batch_size"),
    }
    name: Literal[
        "groups",
        "pairs",
        "random",
        "given",
        "hard_classes",
        "neighbor_classes",
        "importance",
        "hard_triplets",
        "smart_triplets",
    ] = "groups"
    """"groups": ``per_class`` images of each of ``classes`` classes; "pairs": two of each; "random": any images;
    "given": pairs or triplets that the dataset gives;
    "hard_classes": classes that are close to each other; "neighbor_classes": random classes and their neighbors;
    "importance": images of some classes and their hardest negatives; "hard_triplets" and "smart_triplets": anchors,
    each with a positive and the nearest negative, or one of the nearest."""
    classes: Count | None = None
    """Classes in a batch."""
    per_class: Count | None = None
    """Images of each class."""
    batch_size: Count | None = None
    """Images in a batch; for "groups" in place of ``classes``: as many classes as fit, or as there are."""
    candidates: Count | None = None
    """Classes among which "hard_classes" selects."""
    anchors: Count | None = None
    """Classes of "neighbor_classes" that are drawn at random."""
    neighbors: Count | None = None
    """Nearest images of other classes that are known of each image."""
    steps: Count | None = None
    """Batches in an epoch; about as many as show every image once if not given."""

    @property
    def images(self) -> int:
        """Images in a batch, over all processes."""
        return self.batch_size or (self.classes or 0) * (self.per_class or 2)

    def conflicts(self) -> Iterator[str]:
        if self.name != "groups":
            return
        if self.classes is None and self.batch_size is None:
            yield "sampler.classes is missing; sampler.name = 'groups' needs it, or sampler.batch_size"
        elif self.classes is not None and self.batch_size is not None:
            yield "sampler.classes and sampler.batch_size are both given; only one of them can set the batch size"
        elif self.batch_size is not None and self.batch_size < 2 * (self.per_class or 1):
            yield (
                f"sampler.batch_size is {self.batch_size}; it must hold two classes of sampler.per_class = "
                f"{self.per_class} images"
            )


class AugmentationSection(Section):
    """How training images are cropped and changed; see ``nearfar.data.View``."""

    section = "augmentation"
    crop: Literal["random", "random_resized", "center", "none"] = "random"
    """How the crop is chosen."""
    size: Count | None = None
    """Side of the crop; that of the network if not given."""
    resize: Resize = "auto"
    """Shorter side before cropping; "auto" is 8/7 of the size, or the size itself for small images."""
    aspect: Aspect = "keep"
    """"squash" resizes to a square."""
    scale: tuple[Positive, Fraction] = (0.08, 1.0)
    """Smallest and largest share of the image in a "random_resized" crop."""
    ratio: tuple[Positive, Positive] = (3 / 4, 4 / 3)
    """Smallest and largest width divided by height of such a crop."""
    flip: bool = True
    """Mirror half of the images."""
    color: Annotated[float, Field(gt=0, le=LIMITS["color"])] | None = None
    """Brightness, contrast and saturation are multiplied by random factors from 1 − ``color`` to 1 + ``color``."""
    grey: Annotated[float, Field(gt=0, le=LIMITS["grey"])] | None = None
    """Share of the images turned into grayscale."""
    erase: Annotated[float, Field(gt=0, le=LIMITS["erase"])] | None = None
    """Share of the images in which a random rectangle is replaced by the mean."""
    rotate: Annotated[float, Field(gt=0, le=LIMITS["rotate"])] | None = None
    """Largest rotation in degrees, in either direction."""

    @property
    def effects(self) -> dict[str, float]:
        """The values of color, grey, erase and rotate that are set."""
        given = {key: getattr(self, key) for key in LIMITS}
        return {key: value for key, value in given.items() if value is not None}

    def conflicts(self) -> Iterator[str]:
        if self.crop in ("random", "center"):
            yield from _check_resize(self)
        for key, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if low > high:
                yield f"augmentation.{key} is {[low, high]}; the first must not be larger than the second"


class NetworkSection(Section):
    """The network; see ``nearfar.networks.create``."""

    section = "network"
    name: str
    """A backbone, such as "resnet50", or "timm:NAME"."""
    dim: Count | None = 512
    """Dimensions of an embedding, of each level and member; "none": as many as the backbone has."""
    pooling: Literal["avg", "max", "avg+max", "gem", "token"] = "avg"
    """Pooling of the last feature map; "token" is the class token of a transformer."""
    normalize: bool = True
    """Whether embeddings have length 1."""
    head: Literal["linear", "linear_norm", "mlp", "residual", "none"] = "linear"
    """Layers after pooling; "residual" adds a linear layer to the pooled features, for ``dim = "none"``."""
    levels: tuple[Literal["low", "mid", "high"], ...] | None = None
    """Depths of the backbone that have an embedding and a loss each."""
    pretrained: bool | str = False
    """true: published weights; or a file with weights of the backbone, or a saved model with those of its head, too."""
    freeze_batchnorm: bool = False
    """Keep statistics and parameters of batch norms."""
    freeze: bool = False
    """Train the head only, on features that the pretrained backbone computes once for each image, without
    augmentation."""
    members: Count = 1
    """Networks in an ensemble."""
    independent: bool = False
    """Members of an ensemble get batches of their own, as if each was trained alone; otherwise they share them."""
    concatenation: Literal["normalized", "raw"] = "normalized"
    """How members are concatenated: each with length 1, or as it is; also by ``nearfar evaluate --ensemble``."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the backbone; ``in_dim``, ``channels`` and ``size`` come from the data if not given."""

    def conflicts(self) -> Iterator[str]:
        if ":" not in self.name and self.name not in networks.names():  # others are checked by their library
            yield unknown_name("network.name", self.name, networks.names())
        elif ":" not in self.name:
            yield from read(network_settings(self.name), self.settings, where="network.settings", owner=self.name)[1]
        if self.levels is not None and (not self.levels or len(set(self.levels)) < len(self.levels)):
            yield f"network.levels is {list(self.levels)}; allowed: each level once, and at least one"
        if self.members == 1 and self.independent:
            yield "network.independent is true; it needs network.members > 1"
        if self.freeze:
            needed = {
                "network.pretrained": self.pretrained is not False,
                "network.head": self.head == "residual" or (self.head != "none" and self.dim is not None),
            }
            yield from (f"network.freeze is true; it needs {key}" for key, given in needed.items() if not given)
            if self.pooling == "gem":
                yield "network.pooling is 'gem', which is trained; with network.freeze only the head is"
            if self.members > 1 or (self.levels or ("high",)) != ("high",):
                yield "network.freeze is true; it is for one network with the level 'high'"


class LossSection(Section):
    """A loss and its settings, which are side by side in a file."""

    section = "loss"
    name: str
    """A loss; ``nearfar losses`` lists them."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the loss, as given."""
    matryoshka: tuple[Count, ...] = ()
    """Lengths of prefixes of the embedding that have the same loss, in addition to the whole embedding."""
    plus: tuple[LossSection, ...] = ()
    """Further losses that are added."""
    weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of a loss in ``plus``."""
    regularizer: Literal["l1", "l2", "zero_mean", "center_invariant", "orthogonal", "sparse_centers"] | None = None
    """Regularizer of embeddings or proxies."""
    regularizer_weight: Annotated[float, Field(ge=0)] = 1.0
    """Its weight."""

    @model_validator(mode="before")
    @classmethod
    def _settings_beside_name(cls, table: Any, info: ValidationInfo) -> Any:
        """In a file, the settings are in the table of the loss."""
        if info.context != FILE or not isinstance(table, Mapping):
            return table
        keys = ("name", *WRAPPERS)
        settings = {key: value for key, value in table.items() if key not in keys}
        return {**{key: table[key] for key in keys if key in table}, "settings": settings}

    def conflicts(self) -> Iterator[str]:
        if any(b <= a for a, b in zip(self.matryoshka, self.matryoshka[1:], strict=False)):
            yield f"loss.matryoshka is {list(self.matryoshka)}; allowed: increasing whole numbers ≥ 1"
        if self.name not in losses.names():
            yield unknown_name("loss.name", self.name, losses.names())
            return
        defaults, model = losses.defaults(self.name), loss_settings(self.name)
        filled = [key for key in FILLED if key in self.settings and key in defaults and key not in model.model_fields]
        yield from (f"loss.{key} cannot be set; it comes from data and network" for key in filled)
        given = {
            key: None if value == NONE and not isinstance(defaults.get(key), str) else value
            for key, value in self.settings.items()
            if key not in filled
        }
        wrong = read(model, given, where="loss", owner=self.name)[1]
        yield from wrong
        alone = self.model_copy(update={"matryoshka": (), "plus": (), "regularizer": None})
        if not (filled or wrong) and (error := alone.refused(2)):
            yield f"loss.{error}" if error.split(" ")[0] in defaults else f"loss: {error}"

    def refused(self, dim: int) -> str | None:
        """Why the loss cannot be created."""
        try:
            with shapes_only():
                self.create(num_classes=2, dim=dim)
        except (TypeError, ValueError) as error:
            return str(error)
        return None

    @property
    def terms(self) -> list[LossSection]:
        """The loss and all that are added to it."""
        return [self, *(term for section in self.plus for term in section.terms)]

    @property
    def names(self) -> list[str]:
        """The names of all losses in it."""
        return [term.name for term in self.terms]

    def create(self, *, num_classes: int, dim: int) -> losses.Loss:
        """Create the loss.

        A ``num_classes`` that a loss can do without (the boundaries for each class in "margin") is requested with
        true.
        """
        if self.matryoshka and self.matryoshka[-1] >= dim:
            raise ValueError(f"matryoshka is {list(self.matryoshka)}; it must be below the {dim} of the embedding")
        if self.matryoshka:
            dims = [*self.matryoshka, dim]
            loss: losses.Loss = losses.Matryoshka(
                lambda each: self._create(num_classes=num_classes, dim=each), dims=dims
            )
        else:
            loss = self._create(num_classes=num_classes, dim=dim)
        if self.plus:
            others = [section.create(num_classes=num_classes, dim=dim) for section in self.plus]
            loss = losses.MultipleLosses([loss, *others], weights=[1.0, *(section.weight for section in self.plus)])
        if self.regularizer is not None:
            loss = losses.Regularized(loss, self.regularizer, weight=self.regularizer_weight)
        return loss

    def _create(self, *, num_classes: int, dim: int) -> losses.Loss:
        allowed = losses.defaults(self.name)
        known = {"num_classes": num_classes, "dim": dim}
        settings = {key: known[key] for key in FILLED if allowed.get(key) is inspect.Parameter.empty}
        for key, value in self.settings.items():
            if key in FILLED and key in allowed:
                value = known[key] if value else None
            elif value == NONE and not isinstance(allowed.get(key), str):
                value = None
            settings[key] = value
        return losses.create(self.name, **settings)


class OptimizerSection(Section):
    """The optimizer; multipliers are multiples of the learning rate."""

    section = "optimizer"
    keys = {"sgd": ("momentum", "nesterov"), "adam": ("betas",), "adamw": ("betas",), "radam": ("betas",)}
    name: Literal["sgd", "adam", "adamw", "radam"] = "adamw"
    """The optimizer."""
    lr: Positive
    """Learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of the network; parameters of losses have none."""
    momentum: Decay = 0.9
    """Momentum of "sgd"."""
    nesterov: bool = False
    """Nesterov momentum of "sgd"."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of the moments of the others."""
    head_multiplier: Positive = 1.0
    """Multiple of the learning rate for the head."""
    loss_multiplier: Positive | None = None
    """Multiple for parameters of the loss (proxies); the loss's own if not given."""

    def conflicts(self) -> Iterator[str]:
        if self.nesterov and self.momentum == 0:
            yield "optimizer.nesterov is true; it needs optimizer.momentum > 0"


class ScheduleSection(Section):
    """How the learning rate changes."""

    section = "schedule"
    keys = {
        "constant": (),
        "step": ("per", "step_size", "gamma"),
        "multi_step": ("per", "milestones", "gamma"),
        "cosine": ("per", "minimum"),
        "plateau": ("gamma", "minimum", "patience"),
    }
    required = {"step": ("step_size",), "multi_step": ("milestones",)}
    name: Literal["constant", "step", "multi_step", "cosine", "plateau"] = "constant"
    """"step" multiplies by ``gamma`` every ``step_size``, "multi_step" at ``milestones``; "cosine" decreases to
    ``minimum``; "plateau" multiplies by ``gamma`` when the validation metric has not improved."""
    per: Literal["epoch", "iteration"] = "epoch"
    """Unit of ``step_size`` and ``milestones``, and how often "cosine" changes the rate."""
    step_size: Count | None = None
    """Epochs or iterations between two steps."""
    milestones: tuple[int, ...] = ()
    """Increasing epochs or iterations."""
    gamma: Fraction = 0.1
    """Factor of a step."""
    minimum: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Smallest multiple of the learning rate."""
    patience: Index = 3
    """Evaluations without improvement that "plateau" waits for."""
    warmup: Index = 0
    """Iterations in which the rate rises to its first value."""

    def conflicts(self) -> Iterator[str]:
        if any(b <= a for a, b in zip((0, *self.milestones), self.milestones, strict=False)):
            yield f"schedule.milestones is {list(self.milestones)}; allowed: increasing whole numbers ≥ 1"


class TrainingSection(Section):
    """How long to train, and how."""

    section = "training"
    epochs: Count | None = None
    """Length in epochs; either this or ``iterations`` is needed."""
    iterations: Count | None = None
    """Length in iterations."""
    warmup_epochs: Index = 0
    """First epochs, in which only head and loss are trained."""
    clip: Positive | None = None
    """Largest norm of the gradient."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the network."""
    seed: Index = 0
    """Seed of weights, batches and augmentation."""
    chunk: Count | None = None
    """Images that pass through the network at once, for batches that do not fit in memory."""
    compile: bool = False
    """Use ``torch.compile``."""
    graphs: bool = True
    """Record the network as CUDA graphs on a GPU."""
    channels_last: bool = True
    """Memory format of images."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1", …"""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """"skip" leaves out steps whose loss is NaN or infinite."""
    shard_classes: bool = False
    """Distribute the class vectors of the loss over the processes of ``torchrun``."""
    memory: Index = 0
    """Embeddings of earlier batches that the loss compares with."""
    memory_warmup: Index = 0
    """First iteration with the memory."""
    deterministic: bool = False
    """Use deterministic kernels only."""
    checkpoint_steps: Count | None = None
    """Save a checkpoint every so many steps, and not only after epochs."""

    def conflicts(self) -> Iterator[str]:
        if (self.epochs is None) == (self.iterations is None):
            given = "both are given" if self.epochs else "neither is given"
            yield f"training.epochs or training.iterations is needed; {given}"
        elif self.epochs is not None and self.warmup_epochs >= self.epochs:
            yield f"training.warmup_epochs is {self.warmup_epochs}; it must be < training.epochs, {self.epochs}"
        if self.memory_warmup and not self.memory:
            yield f"training.memory_warmup is {self.memory_warmup}; it needs training.memory > 0"


class StageSection(Section):
    """Some epochs with another loss or learning rate."""

    section = "stages"
    epochs: Count | None = None
    """Length of the stage; the last stage may omit it."""
    loss: LossSection | None = None
    """Loss of the stage; that of the recipe if not given."""
    lr_factor: Positive = 1.0
    """Multiple of the learning rate."""


class EvaluationSection(Section):
    """When and how the model is evaluated."""

    section = "evaluation"
    every: Index = 1
    """Evaluate every so many epochs, and at the end; 0: only at the end."""
    test: bool = True
    """false: never use the test classes."""
    test_every: Index = 0
    """Also evaluate the test classes every so many epochs; 0: only at the end. The looks are counted."""
    ks: Annotated[tuple[Count, ...], Field(min_length=1)] = (1, 2, 4, 8)
    """The k of recall@k."""
    clustering: bool = False
    """Also compute NMI, AMI and F1."""
    train_recall: bool = False
    """Also evaluate the training classes."""
    before: bool = False
    """Before the first step, also evaluate the network on the test classes. The look is counted."""
    batch_size: Count = 256
    """Images in a batch."""
    measure: Literal["cosine", "euclidean"] = "cosine"
    """Similarity of embeddings."""
    size: Count | None = None
    """Side of the crop; that of the augmentation if not given."""
    resize: Resize = "auto"
    """Shorter side before cropping."""
    crop: Literal["center", "none"] = "center"
    """How the crop is chosen."""
    crops: Count = 1
    """Above 1, the embedding is the mean over as many random crops, mirrored at random, instead of ``crop``."""
    groups: str | None = None
    """A column of the dataset, such as "camera": items of the query's class and group are ignored."""

    def conflicts(self) -> Iterator[str]:
        if self.crop == "center":
            yield from _check_resize(self)
        for key in ("test_every", "before"):
            if (value := getattr(self, key)) and not self.test:
                yield f"evaluation.{key} is {str(value).lower()}, but evaluation.test is false; one of them must change"


class SelectionSection(Section):
    """How the best epoch is selected."""

    section = "selection"
    metric: str = "recall@1"
    """Metric of the validation classes; without validation classes the last epoch is selected."""
    blend: bool | Annotated[float, Field(ge=0, le=1)] = False
    """Keep the share of the training with the largest gain for classes it did not see, and none of it if that gain is
    below its standard error; the last epoch is selected. These are the validation classes, or folds of the training
    classes if only a head is trained. A number is the share, from 0 (the network before) to 1."""
    patience: Count | None = None
    """Stop after so many evaluations of the validation classes without improvement; never if not given."""


class TuningSection(Section):
    """How the settings of the recipe were chosen. It changes no number, but results are fair only for equal effort."""

    section = "tuning"
    trials: Index = 0
    """Trainings that were compared on validation classes to choose the settings."""
    space: str = ""
    """Hash of the search space."""
    seconds: Annotated[float, Field(ge=0)] = 0.0
    """Time that the trials took."""
    chosen_by: Literal["unknown", "paper", "hand", "study", "test"] = "unknown"
    """"paper": as published; "hand": without trials; "study": by ``nearfar tune``; "test": by test results."""


class Recipe(Section):
    """Everything that determines a run. A recipe that exists is consistent.

    Example:
        >>> recipe = Recipe(
        ...     sampler=SamplerSection(classes=4, per_class=8),
        ...     network=NetworkSection(name="mlp", dim=16),
        ...     loss=LossSection(name="raw", settings={"alpha": 3.0}),
        ...     optimizer=OptimizerSection(lr=1e-3),
        ...     training=TrainingSection(epochs=5),
        ... )
        >>> recipe.data.name, recipe.selection.metric
        ('digits', 'recall@1')
    """

    section = ""
    data: DataSection = Field(default_factory=DataSection)
    split: SplitSection = Field(default_factory=SplitSection)
    sampler: SamplerSection
    augmentation: AugmentationSection = Field(default_factory=AugmentationSection)
    network: NetworkSection
    loss: LossSection
    optimizer: OptimizerSection
    schedule: ScheduleSection = Field(default_factory=ScheduleSection)
    training: TrainingSection
    stages: tuple[StageSection, ...] = ()
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    selection: SelectionSection = Field(default_factory=SelectionSection)
    tuning: TuningSection = Field(default_factory=TuningSection)

    def conflicts(self) -> Iterator[str]:
        yield from problems(self)

    def loss_of(self, stage: int) -> LossSection:
        """The loss of a stage: its own, or that of the recipe.

        Args:
            stage: Number of the stage, from 0.
        """
        own = self.stages[stage].loss if self.stages else None
        return self.loss if own is None else own


SECTIONS: dict[str, Any] = {name: field.annotation for name, field in Recipe.model_fields.items() if name != "stages"}


def _check_resize(view: AugmentationSection | EvaluationSection) -> Iterator[str]:
    if isinstance(view.resize, int) and view.size is not None and view.resize < view.size:
        yield f"{view.section}.resize is {view.resize}; it must be ≥ {view.section}.size, {view.size}"


# --- settings of losses, networks and datasets ------------------------------------------------------


def loss_settings(name: str) -> type[BaseModel]:
    """A model of the settings of a loss; true requests a number that comes from the data."""
    fields = _fields(losses.get(name).__init__)
    filled = {key: (bool | None, None) for key in FILLED if key in fields and fields[key][1] is not ...}
    return _settings(name, {key: field for key, field in fields.items() if key not in FILLED} | filled)


def network_settings(name: str) -> type[BaseModel]:
    """A model of the settings of a backbone; none is required, as some come from the data."""
    fields = _fields(backbones.get(name)).items()
    return _settings(name, {key: (kind, None if given is ... else given) for key, (kind, given) in fields})


def data_settings(name: str) -> type[BaseModel]:
    """A model of the settings of a dataset."""
    return _settings(name, {key: field for key, field in _fields(datasets.get(name)).items() if key != "root"})


def _settings(name: str, fields: Mapping[str, Any]) -> type[BaseModel]:
    config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)
    return create_model(name, __config__=config, **fields)


def _fields(function: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Type and default of each parameter; ``...`` is the default of one that has none."""
    target = function.__init__ if inspect.isclass(function) else function
    try:
        hints = get_type_hints(target)
    except (NameError, TypeError):  # names that only a type checker knows
        hints = {}
    found = {}
    for key, parameter in inspect.signature(target).parameters.items():
        if key == "self" or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        empty = parameter.default is parameter.empty
        guess = type(parameter.default) if isinstance(parameter.default, bool | int | float | str) else Any
        found[key] = (_plain_type(hints.get(key, guess)), ... if empty else parameter.default)
    return found


def _plain_type(hint: Any) -> Any:
    """A type hint as far as a file can satisfy it: what else is allowed is not checked here."""
    origin, inside = get_origin(hint), get_args(hint)
    if hint in (bool, int, float, str, NoneType, Any) or origin is Literal:
        return hint
    if origin in (list, tuple, Sequence) and inside and len({*inside} - {...}) == 1:
        return Sequence[_plain_type(inside[0])]  # type: ignore[misc]
    if origin in (Union, UnionType):
        kinds = [_plain_type(each) for each in inside]
        plain = [kind for kind in kinds if kind is not Any]
        if len(plain) == len(kinds):
            return reduce(or_, kinds)
        return Annotated[Any, WithJsonSchema(TypeAdapter(reduce(or_, plain)).json_schema())] if plain else Any
    if origin is not None and inspect.isclass(origin) and issubclass(origin, Mapping):
        return Mapping[str, Any]
    return Any


# --- JSON schema ------------------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    """A JSON schema of recipes, with the losses, networks and datasets that are registered now."""
    schema = Recipe.model_json_schema()
    tables = schema["$defs"]
    for kind in SECTIONS.values():
        if kind.keys:
            tables[kind.__name__] = _by_name(kind, tables[kind.__name__])
    for table, names, settings in (
        (tables["DataSection"], data.names(), data_settings),
        (tables["NetworkSection"], networks.names(), network_settings),
    ):
        table["allOf"] = [
            {
                "if": {"properties": {"name": {"const": name}}, "required": ["name"]},
                "then": {"properties": {"settings": settings(name).model_json_schema()}},
            }
            for name in names
        ]
        for variant in table["allOf"]:  # which settings are required, the constructor knows better
            variant["then"]["properties"]["settings"].pop("required", None)
    tables["DataSection"]["properties"]["name"]["enum"] = data.names()
    tables["NetworkSection"]["properties"]["name"]["anyOf"] = [{"enum": networks.names()}, {"pattern": ":"}]
    tables["LossWrappers"] = {"properties": {key: tables["LossSection"]["properties"][key] for key in WRAPPERS}}
    wrappers = {key: {"$ref": f"#/$defs/LossWrappers/properties/{key}"} for key in WRAPPERS}
    variants = []
    for name in losses.names():
        described = {"name": {"const": name, "description": losses.summary(name)}}
        variant = loss_settings(name).model_json_schema()
        properties = described | variant.get("properties", {}) | wrappers
        variants.append({**variant, "properties": properties, "required": ["name", *variant.get("required", ())]})
    tables["LossSection"] = {"description": tables["LossSection"]["description"], "oneOf": variants}
    base = {"description": "The recipe that this one changes, as a file or a name, or a list of them."}
    schema["properties"]["base"] = {**base, "type": ["string", "array"], "items": {"type": "string"}}
    partial = {name: {"type": "array" if name == "stages" else "object"} for name in Recipe.model_fields}
    complete = {key: schema.pop(key) for key in ("properties", "required", "additionalProperties")}
    inherits = {"properties": {"base": complete["properties"]["base"], **partial}, "additionalProperties": False}
    schema |= {"if": {"required": ["base"]}, "then": inherits, "else": complete}
    return file_schema(schema, "nearfar recipe")


def file_schema(schema: dict[str, Any], title: str) -> dict[str, Any]:
    """A JSON schema of pydantic as one of TOML files."""
    return {"$schema": "http://json-schema.org/draft-07/schema#", **_without_null(schema), "title": title}


def _by_name(kind: type[Section], table: dict[str, Any]) -> dict[str, Any]:
    """A table as alternatives, each with the keys that belong to one name."""
    default = kind.model_fields["name"].default
    variants = []
    for name in kind.keys:
        own = {key: value for key, value in table["properties"].items() if not kind.is_foreign(name, key)}
        needed = [*table.get("required", ()), *kind.required.get(name, ()), *(["name"] if name != default else [])]
        own["name"] = {**own["name"], "enum": [name]}
        variants.append(
            {"type": "object", "properties": own, "required": sorted(needed), "additionalProperties": False}
        )
    return {"description": table["description"], "oneOf": variants}


def _without_null(schema: Any) -> Any:
    """A schema for TOML, where "none" stands for null; without titles, which only repeat the keys."""
    if isinstance(schema, list):
        return [_without_null(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "null":
        return {"const": NONE}
    return {
        key: {name: _without_null(each) for name, each in value.items()}
        if key == "properties"
        else _without_null(value)
        for key, value in schema.items()
        if not (key == "default" and value is None) and not (key == "title" and isinstance(value, str))
    }
