"""How much of a training is kept: a point between the weights before and after it, chosen on classes it did not see.

New classes are what a training is for, and a long training may lose for them what the pretrained network knew. The
weights w₀ + s (w₁ − w₀) between those before and after a training, for shares s from 0 to 1, are often better for new
classes than both. Shares are compared by the map@r of classes that were held out of the training; the best one is kept
if its gain is larger than its standard error over these classes, and otherwise the network is left as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nearfar.data import splits
from nearfar.metrics.intervals import by_class, mean_squares
from nearfar.training.checkpoint import State
from nearfar.training.evaluation import embeddings
from nearfar.training.recipe.files import load
from nearfar.training.setup import Setup, build, on_features
from nearfar.utils.progress import Watch

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
FOLDS = 4  # of the training classes, if there are no validation classes
METRIC = "map@r"
LEAST = 0.001  # the gain that a share needs, however small its standard error
UNTESTED = {"test": False, "test_every": 0, "before": False, "train_recall": False}

Weights = Mapping[str, Tensor]
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Blend:
    """The share of a training that is kept, and what it was chosen by."""

    share: float  # that is kept: 0 is the network before the training, 1 the one after it
    best: float  # the share with the largest gain of map@r over the network before the training
    gain: float  # its mean over the queries of held-out classes
    error: float  # its standard error over these classes; 0 if nothing was held out
    classes: int  # the number of held-out classes; 0 if the share was given
    folds: int  # trainings that held them out; 0 if they were validation classes


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copy the parameters that are trained."""
    return {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}


@torch.no_grad()
def interpolate(model: nn.Module, before: Weights, after: Weights, share: float) -> None:
    """Set the trained parameters of a network between those before (0) and after (1) the training."""
    parameters = dict(model.named_parameters())
    for name, start in before.items():
        parameters[name].copy_(after[name] if share == 1.0 else torch.lerp(start, after[name], share))


def choose(gains: Values, folds: int) -> Blend:
    """Choose a share by the gains [classes, len(SHARES)] of held-out classes.

    With few classes the standard error itself is uncertain, so it counts as much more as Student's t is wider.
    """
    from scipy import special

    squares = mean_squares(gains[:, None])
    best = int(squares.mean.argmax())
    gain, error = float(squares.mean[best]), math.sqrt(squares.of_class[best])
    wider = special.stdtrit(len(gains) - 1, special.ndtr(1.0))  # 1.84 for two classes, 1 for many
    return Blend(
        SHARES[best] if gain > max(LEAST, wider * error) else 0.0, SHARES[best], gain, error, len(gains), folds
    )


def blend(setup: Setup, before: Weights, *, watch: Watch) -> Blend:
    """Set a trained network to the share of its training that the recipe gives, or that held-out classes choose."""
    given, after = setup.recipe.selection.blend, trained_weights(setup.model)
    if not isinstance(given, bool):
        chosen = Blend(given, given, 0.0, 0.0, 0, 0)
    elif len(setup.rows["validation"]):
        chosen = choose(_gains(setup, before), 0)
    else:
        folds = max(1, min(FOLDS, setup.num_classes // splits.MIN_CLASSES))
        chosen = Blend(0.0, 0.0, 0.0, 0.0, 0, folds)
        if folds > 1:
            chosen = choose(np.concatenate([*_fold_gains(setup, folds, watch)]), folds)
    interpolate(setup.model, before, after, chosen.share)
    return chosen


def _fold_gains(setup: Setup, folds: int, watch: Watch) -> Iterator[Values]:
    """Train once without each fold of the training classes, and yield the gains of its classes."""
    progress = watch("held-out classes")
    for fold in range(folds):
        changed = {"split": {"name": "k_fold", "folds": folds, "fold": fold}, "evaluation": UNTESTED}
        held_out = build(load(setup.recipe, overrides=changed), world=setup.world, opened=setup)
        if setup.recipe.network.freeze:
            held_out = on_features(held_out, watch)
        before, state = trained_weights(held_out.model), State()
        for stage in held_out.stages:
            step = held_out.train_step(stage)
            for state.epoch in range(stage.first, stage.first + stage.epochs):
                held_out.set_learning_rates(state)
                with closing(held_out.train_epoch(state, step)) as results:
                    for _ in results:
                        if state.iteration >= held_out.steps:
                            break
                state.step = 0
                embeddings.update_learned(held_out)
                if progress is not None:
                    progress(fold * held_out.epochs + state.epoch + 1, folds * held_out.epochs)
        yield _gains(held_out, before)


def _gains(setup: Setup, before: Weights) -> Values:
    """Return the gain of each validation class by each share, [classes, len(SHARES)]."""
    after, measured, labels = trained_weights(setup.model), [], None
    for share in SHARES:
        interpolate(setup.model, before, after, share)
        embedded = embeddings.embed_parts(setup, ["validation"])["validation"]
        result = embeddings.measure_embeddings(embedded, ks=(1,), measure=setup.recipe.evaluation.measure)
        measured.append(result.per_query[METRIC].double().cpu().numpy())
        labels = torch.as_tensor(embedded.labels).cpu().numpy()
    interpolate(setup.model, before, after, 1.0)
    assert labels is not None
    values = np.stack(measured, axis=1)
    answered = ~np.isnan(values[:, 0])
    return by_class(values[answered] - values[answered, :1], labels[answered])
