"""Features of a frozen backbone: computed once for each image, so that only a head has to be trained."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np

from nearfar.data import Loader, Store
from nearfar.networks import Embedder
from nearfar.networks.weights import save
from nearfar.training.evaluation.embeddings import embed
from nearfar.training.loop.builder import Parts, Vectors
from nearfar.utils.atomic import whole_file
from nearfar.utils.progress import Watch

DIGITS = 16  # of the fingerprint in the name of a file


def on_features(parts: Parts, watch: Watch = lambda work: None) -> Parts:
    """Freeze the backbone, and let training and evaluation read its features instead of images.

    The features are those of the evaluation's view. They are kept in the folder of the store, by the fingerprint of
    backbone, pooling and preprocessing, so that further trainings on the same images start at once.
    """
    assert isinstance(parts.model, Embedder)
    assert isinstance(parts.store, Store)
    parts.model.freeze_backbone()
    network = Embedder(parts.model.backbone, dim=None, pooling=parts.recipe.network.pooling, normalize=False)
    loader = Loader(
        _features(network, parts, parts.store, watch),
        parts.labels,
        device=parts.device,
        mode=parts.recipe.data.mode,
        seed=parts.recipe.training.seed,
    )
    return replace(parts, loader=loader, eval_loader=loader)


def _features(network: Embedder, parts: Parts, store: Store, watch: Watch) -> Vectors:
    """Return the pooled features [len(store), c], from the folder of the store if they are there."""
    training = parts.recipe.training
    name = f"features-{save.fingerprint(network, parts.preprocessing)[:DIGITS]}-{training.precision}.npy"
    file = None if store.folder is None else store.folder / name
    if file is not None:
        with suppress(OSError, EOFError, ValueError):
            kept: Vectors = np.load(file, allow_pickle=False)
            if kept.shape == (len(store), network.dim):
                return kept
    found: Vectors = (
        embed(
            network,
            parts.eval_loader,
            np.arange(len(store)),
            batch_size=parts.recipe.evaluation.batch_size,
            precision=training.precision,
            channels_last=training.channels_last,
            progress=watch("features"),
        )
        .embeddings.cpu()
        .numpy()
    )
    if file is not None:
        with suppress(OSError), whole_file(file) as draft, open(draft, "wb") as content:
            np.save(content, found)
    return found
