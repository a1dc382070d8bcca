"""A deep metric as a scikit-learn estimator: a run of nearfar on arrays."""

from __future__ import annotations

import random
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.utils import Tags, check_random_state
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from nearfar.data.datasets.arrays import ARRAYS
from nearfar.estimators.base import MetricLearner, class_numbers
from nearfar.metrics import retrieval
from nearfar.networks.weights import save
from nearfar.networks.weights.save import Model
from nearfar.training.recipe.files import load
from nearfar.training.recipe.schema import NetworkSection, Recipe
from nearfar.training.run.folder import RunFolder
from nearfar.training.run.reader import read_json
from nearfar.training.trainer import open_model, train
from nearfar.utils.folders import claim
from nearfar.utils.tensors import as_device
from nearfar.utils.validation import known

Array = NDArray[Any]
# Of a network, by from_run.
KEPT = ("pooling", "normalize", "head", "levels", "members", "independent", "concatenation")
START = "start"  # folder of the network that a further training starts from
# Functions that remove the last temporary run folder of an estimator.
_TEMPORARY: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


@dataclass(kw_only=True, eq=False, repr=False)
class DeepMetric(MetricLearner):
    """Trains a network whose embeddings are close for samples of one class.

    ``fit`` trains a recipe in a run folder, so that reports, indexes and the server can use what was learned.
    Vectors should be scaled before, as for any network.

    Args:
        loss: A loss; ``nearfar losses`` lists them.
        network: "mlp" or "linear" for vectors, "small_cnn", "resnet50", … for images.
        n_components: Dimensions of an embedding; of each member, if the recipe asks for an ensemble.
        loss_settings: Settings of the loss.
        network_settings: Settings of the network, such as ``{"hidden": [128]}`` for "mlp".
        epochs: The largest number of passes over the samples.
        batch_size: Samples in a batch.
        per_class: Samples of each class in a batch.
        lr: Learning rate of AdamW.
        validation: Share of the classes that are set aside to select the best epoch; 0 for none.
        patience: Training stops after so many epochs in which the validation classes have not improved.
        metric: What ``score`` and the selection of the epoch measure: "recall@1", "map@r" or another retrieval metric.
        recipe: Further sections of a recipe, such as ``{"schedule": {"name": "cosine"}}``.
        runs: The folder in which each fit creates a run folder. Without it the run is in a temporary folder, which
            ``to_run`` copies and which is removed together with the estimator.
        random_state: Seed of weights, batches and validation classes.
        device: "auto", "cpu", "cuda", …

    Example:
        >>> from sklearn.datasets import load_digits
        >>> X, y = load_digits(return_X_y=True)
        >>> model = DeepMetric(n_components=8, epochs=1, random_state=0, device="cpu").fit(X / 16, y)
        >>> model.transform(X / 16).shape
        (1797, 8)
    """

    loss: str = "multi_similarity"
    network: str = "mlp"
    n_components: int = 64
    loss_settings: Mapping[str, Any] | None = None
    network_settings: Mapping[str, Any] | None = None
    epochs: int = 20
    batch_size: int = 128
    per_class: int = 4
    lr: float = 1e-3
    validation: float = 0.0
    patience: int | None = None
    metric: str = "recall@1"
    recipe: Mapping[str, Any] | None = None
    runs: str | Path | None = None
    random_state: Any = None
    device: str = "auto"

    def __sklearn_tags__(self) -> Tags:
        """Return scikit-learn's tags: labels are required, and embeddings are float32."""
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.transformer_tags.preserves_dtype = ["float32"]
        return tags

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Train a new network.

        Args:
            X: Vectors of shape (n, features), or uint8 images of shape (n, h, w) or (n, h, w, 3).
            y: Class labels.
        """
        return self._train(X, y, self.epochs, None)

    def partial_fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Train the network for one more pass, also on other samples and classes; the first call creates it.

        The optimizer and the parameters of the loss begin anew.

        Args:
            X: Vectors or images of the shape of the first call.
            y: Class labels.
        """
        return self._train(X, y, 1, getattr(self, "model_", None))

    def transform(self, X: ArrayLike) -> Array:
        """Return the embeddings of samples.

        Args:
            X: Vectors or images, as in ``fit``.

        Returns:
            A float32 array with one row of length 1 for each sample.
        """
        check_is_fitted(self)
        samples = self._samples(X, reset=False)
        model = self.model_.to(as_device("device", self.device))
        return np.asarray(model.embed(samples.astype(np.float32) if samples.ndim == 2 else samples))

    def score(self, X: ArrayLike, y: ArrayLike) -> float:
        """Search each sample among the others and return the metric; classes may be new.

        Args:
            X: Vectors or images.
            y: Class labels.

        Returns:
            The value of ``metric``, from 0 to 1.
        """
        codes = np.unique(column_or_1d(y), return_inverse=True)[1]
        return float(known("metric", self.metric, retrieval(self.transform(X), codes)))

    def to_run(self, folder: str | Path) -> Path:
        """Copy the run folder, for ``nearfar.load``, ``nearfar report``, ``nearfar index`` and ``nearfar serve``.

        The samples are in its file data.npz. Its recipe names where they were during the fit, since a finished run is
        never changed; set ``runs`` to fit in a folder that stays.

        Args:
            folder: The folder to create.

        Returns:
            The folder.
        """
        check_is_fitted(self)
        source, target = Path(self.run_), Path(folder).absolute()
        if not source.is_dir():
            raise FileNotFoundError(f"the temporary run folder {source} was removed; set runs to keep run folders")
        if target.exists():
            raise FileExistsError(f"folder is {str(folder)!r}, which exists already; name a new one")
        shutil.copytree(source, target)
        return target

    @classmethod
    def from_run(cls, folder: str | Path) -> Self:
        """Return a fitted estimator with the network of a run folder.

        Args:
            folder: A run folder that ``to_run``, ``nearfar.train`` or ``nearfar train`` wrote.
        """
        recipe = load(folder)
        plain = NetworkSection(name=recipe.network.name)
        kept = {key: getattr(recipe.network, key) for key in KEPT}
        kept = {key: value for key, value in kept.items() if value != getattr(plain, key)}
        validation = _validation_share(recipe, Path(folder))
        made = cls(
            loss=recipe.loss.name,
            network=recipe.network.name,
            loss_settings=recipe.loss.settings or None,
            network_settings=recipe.network.settings or None,
            epochs=recipe.training.epochs or cls().epochs,
            batch_size=recipe.sampler.images,
            per_class=recipe.sampler.per_class or cls().per_class,
            lr=recipe.optimizer.lr,
            validation=validation,
            patience=recipe.selection.patience if validation else None,
            metric=recipe.selection.metric,
            recipe={"network": kept} if kept else None,
            random_state=recipe.training.seed,
            device=recipe.training.device,
        )
        model = open_model(folder)
        made.n_components = recipe.network.dim or model.dim
        if save.preprocessing_of(model) is None:
            made.n_features_in_ = model.in_channels
        return made._set(model, Path(folder))

    @property
    def _n_features_out(self) -> int:
        return self.model_.dim

    def _set(self, model: Model, folder: Path) -> Self:
        self.model_: Model = model
        self.run_ = str(folder)
        self.metrics_ = read_json(RunFolder(folder).metrics)
        self.n_iter_ = max(1, int(self.metrics_.get("epoch", 0)) + 1)
        return self

    def _samples(self, X: ArrayLike, y: ArrayLike | None = None, *, reset: bool) -> Array:
        """Return vectors as float64, checked by scikit-learn, or images as they are."""
        if getattr(X, "ndim", 2) > 2:
            images = np.asarray(X)
            if images.dtype != np.uint8:
                raise ValueError(f"X is {images.dtype} of shape {images.shape}; images must be uint8, from 0 to 255")
            return images
        if y is None:
            return np.asarray(validate_data(self, X, reset=reset, dtype=np.float64))
        samples, _ = validate_data(self, X, y, reset=reset, dtype=np.float64, ensure_min_samples=2)
        return np.asarray(samples)

    def _train(self, X: ArrayLike, y: ArrayLike, epochs: int, model: Model | None) -> Self:
        if y is None:
            raise ValueError("DeepMetric requires y to be passed, but the target y is None")
        samples = self._samples(X, y, reset=model is None)
        if self.patience is not None and not self.validation:
            raise ValueError(
                f"patience is {self.patience} and validation 0; only validation classes can stop a training"
            )
        classes, codes = class_numbers(y, self)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        parts = np.full(len(codes), "train", dtype="U10")
        parts[np.isin(codes, self._validation_classes(len(classes), seed))] = "validation"
        remove = None
        if self.runs is None:
            folder = Path(tempfile.mkdtemp(prefix="nearfar-"))
            remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        else:
            runs = Path(self.runs)
            runs.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=f"arrays-{self.loss}-", dir=runs)).absolute()
        pretrained: dict[str, Any] = {}
        if model is not None:
            claim(folder, "run")  # before the first file is in it
            pretrained = {"pretrained": str(save.save(model, folder / START))}
        settings = {
            "split": {"name": "train_only"},
            "sampler": {"batch_size": self.batch_size, "per_class": self.per_class},
            "augmentation": {"flip": False},
            "network": {
                "name": self.network,
                "dim": self.n_components,
                "settings": dict(self.network_settings or {}),
                **pretrained,
            },
            "loss": {"name": self.loss, **(self.loss_settings or {})},
            "optimizer": {"lr": self.lr},
            "training": {"epochs": epochs, "seed": seed, "device": self.device},
            "selection": {
                "metric": self.metric,
                **({} if self.patience is None else {"patience": self.patience}),
            },
        }
        with _kept_random_state():
            data = samples, classes.astype(str)[codes], parts
            train(load(settings, overrides=self.recipe or ()), out=folder, data=data)
            trained = open_model(folder)
        self.classes_ = classes
        self._set(trained, folder)
        _TEMPORARY.pop(self, lambda: None)()
        if remove is not None:
            _TEMPORARY[self] = remove
        return self

    def _validation_classes(self, count: int, seed: int) -> Array:
        """Choose the classes that select the epoch: at least two, and at least two others remain."""
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation is {self.validation}; it must be from 0 to below 1")
        if not self.validation:
            return np.empty(0, dtype=np.int64)
        chosen = max(2, round(self.validation * count))
        if count - chosen < 2:
            raise ValueError(
                f"validation is {self.validation}, {chosen} of {count} classes; at least two must remain for training"
            )
        return np.random.RandomState(seed).permutation(count)[:chosen]


def _validation_share(recipe: Recipe, folder: Path) -> float:
    """Return the share of the training classes that a run used for validation."""
    split = recipe.split
    if split.name == "fixed_validation":
        return split.share
    if split.name == "k_fold":
        return 1 / split.folds
    if split.name != "train_only" or not (folder / ARRAYS).is_file():
        return 0.0
    with np.load(folder / ARRAYS) as data:
        held = np.unique(data["y"][data["split"] == "validation"])
        return len(held) / len(np.unique(data["y"]))


@contextmanager
def _kept_random_state() -> Iterator[None]:
    """Restore the global random generators, which a training seeds."""
    python, array, generator = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
        torch.set_rng_state(generator)
