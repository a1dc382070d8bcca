"""What sections of a recipe say together: names that are known, keys that belong, and no contradictions."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from nearfar import data, losses, networks
from nearfar.data.datasets import registry as data_sets
from nearfar.networks import registry as backbones
from nearfar.training.recipe.base import Section
from nearfar.training.recipe.losses import create
from nearfar.training.recipe.sections import Loss, Optimizer, Sampler, Schedule, SplitRule
from nearfar.training.recipe.values import fit
from nearfar.utils.validation import nearest

if TYPE_CHECKING:
    from nearfar.training.recipe.schema import Recipe

# Which keys go with which name; keys that are in no list go with all.
KEYS: dict[type[Section], dict[str, tuple[str, ...]]] = {
    Sampler: {
        "groups": ("classes", "per_class", "batch_size"),
        "pairs": ("classes",),
        "random": ("batch_size",),
        "hard_classes": ("classes", "per_class", "candidates"),
    },
    SplitRule: {"standard": (), "fixed_validation": ("share", "seed"), "k_fold": ("folds", "fold", "seed")},
    Optimizer: {"sgd": ("momentum", "nesterov"), "adam": ("betas",), "adamw": ("betas",), "radam": ("betas",)},
    Schedule: {
        "constant": (),
        "step": ("per", "step_size", "gamma"),
        "multi_step": ("per", "milestones", "gamma"),
        "cosine": ("per", "minimum"),
        "plateau": ("gamma", "minimum", "patience"),
    },
}
NEEDED: dict[str, tuple[str, ...]] = {
    "groups": ("per_class",),
    "pairs": ("classes",),
    "random": ("batch_size",),
    "hard_classes": ("classes",),
    "step": ("step_size",),
    "multi_step": ("milestones",),
}
RETRIEVAL = ("map", "map@r", "mrr", "precision@1", "r_precision")
CLUSTERING = ("ami", "f1", "nmi")


def check(recipe: Recipe) -> None:
    """Refuse a recipe that contradicts itself, and say all that is wrong with it."""
    found = list(problems(recipe))
    if found:
        raise ValueError("; ".join(found))


def problems(recipe: Recipe) -> Iterator[str]:
    """What is wrong with a recipe, one line each."""
    for section in (recipe.sampler, recipe.split, recipe.optimizer, recipe.schedule):
        yield from _misplaced(section)
    yield from _batch(recipe.sampler)
    yield from _names(recipe)
    yield from _losses(recipe)
    yield from _length(recipe)
    yield from _evaluation(recipe)


def foreign(section: type[Section], name: str, key: str) -> bool:
    """Whether a key of a section belongs to other names than this one."""
    table = KEYS.get(section, {})
    return name in table and key not in table[name] and any(key in keys for keys in table.values())


def not_of(section: type[Section], name: str, key: str) -> str:
    """What to say of such a key."""
    own = KEYS[section][name]
    others = [other for other, keys in KEYS[section].items() if key in keys]
    where = section.section
    said = f"{where}.{key} goes with {' and '.join(others)}, and {where}.name is {name!r}"
    return f"{said}, which has {', '.join(own)}" if own else said


def _batch(sampler: Sampler) -> Iterator[str]:
    if sampler.name != "groups":
        return
    if sampler.classes is None and sampler.batch_size is None:
        yield "sampler.classes is missing; sampler.name = 'groups' needs it, or sampler.batch_size"
    elif sampler.classes is not None and sampler.batch_size is not None:
        yield "sampler.classes and sampler.batch_size are both given; each of them says how large a batch is"
    elif sampler.batch_size is not None and sampler.batch_size < 2 * (sampler.per_class or 1):
        size, each = sampler.batch_size, sampler.per_class
        yield f"sampler.batch_size is {size}; it must hold two classes with sampler.per_class = {each} pictures"


def _misplaced(section: Sampler | SplitRule | Optimizer | Schedule) -> Iterator[str]:
    kind = type(section)
    name: str = section.name
    for one in dataclasses.fields(section):
        if foreign(kind, name, one.name) and getattr(section, one.name) != one.default:
            yield not_of(kind, name, one.name)
    for key in NEEDED.get(name, ()):
        if not getattr(section, key):
            yield f"{section.section}.{key} is missing; {section.section}.name = {name!r} needs it"


def _names(recipe: Recipe) -> Iterator[str]:
    name = recipe.data.name
    if name not in data.names():
        yield f"data.name is {name!r}{nearest(name, data.names())}; allowed are {', '.join(data.names())}"
    else:
        allowed = data_sets.settings_of(name)
        for key, value in recipe.data.settings.items():
            if key not in allowed:
                has = ", ".join(allowed) or "none"
                yield f"data.settings.{key} is unknown{nearest(key, allowed)}; {name} has {has}"
            elif isinstance(allowed[key], (bool, int, float, str)):
                try:
                    fit(f"data.settings.{key}", type(allowed[key]), value)
                except TypeError as error:
                    yield str(error)
        if recipe.data.root is not None and data_sets.takes_root(name) is None:
            yield f"data.root is {recipe.data.root!r}; {name} takes none"
    name = recipe.network.name
    if ":" in name:
        return
    if name not in networks.names():
        yield f"network.name is {name!r}{nearest(name, networks.names())}; allowed are {', '.join(networks.names())}"
        return
    own = backbones.defaults(name)
    for key in recipe.network.settings:
        if key not in own:
            yield f"network.settings.{key} is unknown{nearest(key, own)}; {name} has {', '.join(own) or 'none'}"


def _losses(recipe: Recipe) -> Iterator[str]:
    used: dict[str, Loss] = {"loss": recipe.loss}
    used |= {f"stages.{i}.loss": stage.loss for i, stage in enumerate(recipe.stages) if stage.loss is not None}
    for where, section in used.items():
        try:
            with torch.device("meta"):  # only to look at the settings: no memory, no random numbers
                loss = create(section, num_classes=2, dim=2)
        except (TypeError, ValueError) as error:
            yield f"{where}: {error}"
            continue
        pairs = isinstance(loss, losses.PairLoss)
        if pairs and recipe.sampler.per_class == 1 and not recipe.training.memory:
            yield f"sampler.per_class is 1; {section.name} needs positives, at least 2 of each class"
        if recipe.training.memory and not pairs:
            yield (
                f"training.memory is {recipe.training.memory} and {where} is {section.name}, which compares with no "
                "other embeddings; a memory is for pair losses"
            )


def _length(recipe: Recipe) -> Iterator[str]:
    training, stages = recipe.training, recipe.stages
    if (training.epochs is None) == (training.iterations is None):
        said = "both are given" if training.epochs else "neither is given"
        yield f"training.epochs or training.iterations says how long; {said}"
        return
    if training.epochs is not None and training.warmup_epochs >= training.epochs:
        yield f"training.warmup_epochs is {training.warmup_epochs}; it must be < training.epochs, {training.epochs}"
    if 0 < training.memory < recipe.sampler.images:
        yield f"training.memory is {training.memory}; it must hold at least a batch, {recipe.sampler.images} embeddings"
    if training.memory_warmup and not training.memory:
        yield "training.memory_warmup is for a memory, and training.memory is 0"
    if not stages:
        return
    if training.epochs is None:
        yield "stages are counted in epochs; give training.epochs instead of training.iterations"
        return
    for number, stage in enumerate(stages[:-1]):
        if stage.epochs is None:
            yield f"stages.{number}.epochs is missing; only the last stage may leave it out"
    lengths = sum(stage.epochs or 0 for stage in stages)
    if stages[-1].epochs is None and lengths >= training.epochs:
        yield f"the first stages take {lengths} epochs of training.epochs, {training.epochs}: none is left for the last"
    elif stages[-1].epochs is not None and lengths != training.epochs:
        yield f"the stages take {lengths} epochs and training.epochs is {training.epochs}; the last may leave it out"


def _evaluation(recipe: Recipe) -> Iterator[str]:
    metric, evaluation = recipe.selection.metric, recipe.evaluation
    ranks = [f"recall@{k}" for k in evaluation.ks]
    known = [*ranks, *RETRIEVAL, *CLUSTERING]
    if re.fullmatch(r"recall@\d+", metric) and metric not in ranks:
        yield f"selection.metric is {metric!r} and evaluation.ks is {list(evaluation.ks)}; add its k there"
    elif metric not in known:
        yield f"selection.metric is {metric!r}{nearest(metric, known)}; allowed are {', '.join(known)}"
    elif metric in CLUSTERING and not evaluation.clustering:
        yield f"selection.metric is {metric!r}; it needs evaluation.clustering = true"
    if not evaluation.test and recipe.split.name == "standard":
        yield (
            "evaluation.test is false and split.name is 'standard', which has no validation classes: nothing is left "
            "to measure; split.name = 'fixed_validation' sets some aside"
        )
    if recipe.schedule.name == "plateau" and evaluation.every == 0:
        yield "schedule.name is 'plateau', which watches evaluations, and evaluation.every is 0"
