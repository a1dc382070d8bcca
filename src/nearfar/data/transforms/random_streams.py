"""Random numbers that depend on where they are needed, not on what was drawn before."""

from __future__ import annotations

import numpy as np

from nearfar.utils.validation import whole

EFFECTS = ("color", "grey", "erase", "rotate")
# Places in this list are keys of streams: what is new goes to its end.
PURPOSES = (
    "batches",
    "order",
    "views",
    "evaluation",
    *(f"{of} {name}" for of in ("views", "evaluation") for name in EFFECTS),
)


def stream(seed: int, purpose: str, epoch: int, step: int = 0, rank: int = 0) -> np.random.Generator:
    """The generator of one step of one epoch: always the same, and independent of every other step's.

    A run that is resumed needs to know no more than its epoch and step.

    >>> stream(0, "views", epoch=3, step=7).random() == stream(0, "views", epoch=3, step=7).random()
    True
    """
    whole("seed", seed, low=0, high=2**63 - 1)
    # Philox is a function of a key and a counter. Its lowest word counts what is drawn, the others say where.
    counter = np.array([0, rank, step, epoch], dtype=np.uint64)
    key = np.array([seed, PURPOSES.index(purpose)], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))
