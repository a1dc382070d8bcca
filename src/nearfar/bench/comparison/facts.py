"""What a manifest says, key by key, and what each key means for a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Facts = dict[str, Any]

# The loss and its own settings: what a comparison is about. The multiplier is of the loss's parameters alone.
LOSS = ("recipe.loss", "recipe.optimizer.loss_multiplier")

# These follow from which repetition it is: they are compared between runs of the same seed and fold.
REPETITION = (
    "seed",
    "recipe.training.seed",
    "recipe.split.fold",
    "data.fingerprint",
    "data.rows",
    "data.classes",
    "network.first_weights",
    "batch.sampler",
    "length.epochs",
    "length.steps",
    "length.steps_per_epoch",
)

# Worth knowing, and no reason to doubt who is better: the same numbers up to rounding, at other speeds.
NOTED = (
    "versions",
    "hardware",
    "commit",
    "code",  # a loss that it holds is told apart by its name
    "recipe.training.channels_last",
    "recipe.training.chunk",
    "recipe.training.compile",
    "recipe.training.deterministic",
    "recipe.training.graphs",
    "recipe.training.on_nonfinite",
)

# These change no number that is compared.
IGNORED = (
    "format",
    "baseline",
    "data.left_out",  # "data.fingerprint" is of what is left
    "data.notes",
    "hardware.threads",
    "network.format",
    "network.version",
    "recipe.data.mode",
    "recipe.data.root",
    "recipe.evaluation.batch_size",
    "recipe.evaluation.clustering",
    "recipe.evaluation.ks",
    "recipe.evaluation.test",
    "recipe.evaluation.train_recall",
    "recipe.training.checkpoint_steps",
    "recipe.training.device",
    "recipe.network.pretrained",  # "weights" has its content
    "weights.file",
)

NORMALIZE = ("recipe.network.normalize", "network.model.normalize")

# What a baseline shares with those it stands beside: it was not trained, and may have no head.
UNTRAINED = (
    "data",
    "weights",
    "network.preprocessing",
    "recipe.data",
    "recipe.split",
    "recipe.network",
    "recipe.evaluation.crop",
    "recipe.evaluation.measure",
    "recipe.evaluation.resize",
    "recipe.evaluation.size",
)


def flat(manifest: Mapping[str, Any]) -> Facts:
    """A manifest as one table; lists of tables are numbered.

    >>> flat({"network": {"dim": 512}, "stages": [{"epochs": 2}], "ks": [1, 2]})
    {'network.dim': 512, 'stages.0.epochs': 2, 'ks': [1, 2]}
    """
    found: Facts = {}
    for key, value in manifest.items():
        if isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
            value = {str(place): one for place, one in enumerate(value)}
        if isinstance(value, Mapping):
            found |= {f"{key}.{inner}": each for inner, each in flat(value).items()}
        else:
            found[key] = value
    return found


def within(key: str, places: tuple[str, ...]) -> bool:
    """Whether a key is one of these, or stands below one.

    >>> within("versions.torch", NOTED), within("recipe.training.seeds", REPETITION)
    (True, False)
    """
    return any(key == place or key.startswith(f"{place}.") for place in places)


def is_loss(key: str) -> bool:
    """Whether a key belongs to the loss; stages have losses of their own.

    >>> is_loss("recipe.loss.margin"), is_loss("recipe.stages.0.loss.name"), is_loss("recipe.stages.0.epochs")
    (True, True, False)
    """
    words = key.split(".")
    return within(key, LOSS) or (words[:2] == ["recipe", "stages"] and words[3:4] == ["loss"])


def that_matter(manifest: Mapping[str, Any]) -> Facts:
    """What can change a number and is no matter of the loss, the repetition, the machine or the place."""
    facts = flat(manifest)
    left_out = (*REPETITION, *NOTED, *IGNORED)
    kept = {key: value for key, value in facts.items() if not within(key, left_out) and not is_loss(key)}
    if not validates(manifest):  # nothing is chosen, so it does not matter when and by what
        kept = {key: value for key, value in kept.items() if not within(key, ("recipe.selection",))}
        kept.pop("recipe.evaluation.every", None)
    if facts.get("recipe.evaluation.measure", "cosine") == "cosine" and not _side_by_side(facts):
        # Compared by angles, embeddings need no length: whether a loss sees one is its own matter.
        for key in NORMALIZE:
            kept.pop(key, None)
    return kept


def _side_by_side(facts: Facts) -> bool:
    """Whether several embeddings make one, in which their lengths are their weights."""
    return len(facts.get("recipe.network.levels") or ()) > 1 or (facts.get("recipe.network.members") or 1) > 1


def validates(manifest: Mapping[str, Any]) -> bool:
    """Whether an epoch is chosen, which takes validation classes."""
    return str(manifest.get("selection", "")).startswith("best")
