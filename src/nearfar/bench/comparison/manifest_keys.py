"""Which keys of a manifest matter for a comparison, and how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nearfar.training.recipe.files import flat

Facts = dict[str, Any]

# The loss and its own settings: the subject of a comparison. The multiplier applies to the loss's parameters only.
LOSS = ("recipe.loss", "recipe.optimizer.loss_multiplier", "code.loss.digest")

# These follow from the seed and the fold: they are compared between runs of the same seed and fold.
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

# Reported as a note. They change speed and rounding, but not which loss is better.
NOTED = (
    "versions",
    "hardware",
    "commit",
    "test_looks",
    "recipe.evaluation.test_every",
    "recipe.tuning.seconds",
    "recipe.tuning.space",  # each loss has settings of its own
    "recipe.training.channels_last",
    "recipe.training.chunk",
    "recipe.training.compile",
    "recipe.training.deterministic",
    "recipe.training.graphs",
    "recipe.training.on_nonfinite",
    "recipe.training.shard_classes",
)

# These do not change any compared number.
IGNORED = (
    "format",
    "baseline",
    "began",
    "code",  # compared as a whole, see ``nearfar.training.run.provenance.relevant_code``
    "data.duplicates",
    "data.left_out",  # "data.fingerprint" covers the images that were used
    "data.notes",
    "hardware.threads",
    "network.format",
    "network.version",
    "recipe.data.mode",
    "recipe.data.root",
    "recipe.data.settings.images",  # where they are; "data.fingerprint" identifies the content
    "recipe.evaluation.batch_size",
    "recipe.evaluation.clustering",
    "recipe.evaluation.ks",
    "recipe.evaluation.test",
    "recipe.evaluation.train_recall",
    "recipe.training.checkpoint_steps",
    "recipe.training.device",
    "recipe.network.pretrained",  # "weights" identifies the content
    "weights.file",
)

BLEND = "recipe.selection.blend"  # chooses by training classes where there are no validation classes
NORMALIZE = ("recipe.network.normalize", "network.model.normalize")

# Keys that a baseline shares with trained runs. It was not trained and may have no head.
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


def within(key: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a key is one of these, or lies below one of them.

    >>> within("versions.torch", NOTED), within("recipe.training.seeds", REPETITION)
    (True, False)
    """
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)


def is_loss(key: str) -> bool:
    """Whether a key belongs to the loss. Stages have losses of their own.

    >>> is_loss("recipe.loss.margin"), is_loss("recipe.stages.0.loss.name"), is_loss("recipe.stages.0.epochs")
    (True, True, False)
    """
    words = key.split(".")
    return within(key, LOSS) or (words[:2] == ["recipe", "stages"] and words[3:4] == ["loss"])


def is_luck(key: str) -> bool:
    """Whether a key of the recipe is a draw of chance.

    >>> is_luck("split.seed"), is_luck("split.share")
    (True, False)
    """
    return key == "split.fold" or key.rpartition(".")[2] == "seed"


def relevant(manifest: Mapping[str, Any]) -> Facts:
    """The entries of a manifest that have to be equal for a fair comparison.

    Entries about the loss, the repetition, the machine and file locations are left out.
    """
    facts = flat(manifest)
    left_out = (*REPETITION, *NOTED, *IGNORED)
    kept = {key: value for key, value in facts.items() if not within(key, left_out) and not is_loss(key)}
    if not selects_epoch(manifest):  # without selection, when and by which metric does not matter; a share does
        kept = {key: value for key, value in kept.items() if not within(key, ("recipe.selection",)) or key == BLEND}
        kept.pop("recipe.evaluation.every", None)
    if facts.get("recipe.evaluation.measure", "cosine") == "cosine" and not _concatenates(facts):
        # The cosine ignores the length of embeddings, so whether a loss normalizes them is its own setting.
        for key in NORMALIZE:
            kept.pop(key, None)
    return kept


def _concatenates(facts: Facts) -> bool:
    """Whether the embedding is a concatenation, in which lengths act as weights."""
    return len(facts.get("recipe.network.levels") or ()) > 1 or (facts.get("recipe.network.members") or 1) > 1


def selects_epoch(manifest: Mapping[str, Any]) -> bool:
    """Whether validation classes select the epoch, as in every split that has some."""
    name = manifest.get("recipe", {}).get("split", {}).get("name", "standard")
    return name not in ("standard", "closed_set")
