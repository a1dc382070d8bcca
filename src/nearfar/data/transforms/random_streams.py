"""Counter-based random numbers: each step has its own generator, independent of what was drawn before."""

from __future__ import annotations

import numpy as np

from nearfar.utils.validation import whole

EFFECTS = ("color", "grey", "erase", "rotate")
# Positions in this list are part of the generator's key: only append to it.
PURPOSES = (
    "batches",
    "order",
    "views",
    "evaluation",
    *(f"{of} {name}" for of in ("views", "evaluation") for name in EFFECTS),
)


def stream(seed: int, purpose: str, epoch: int, step: int = 0, rank: int = 0) -> np.random.Generator:
    """Return the generator of one step of one epoch.

    It depends on the arguments only, so a resumed run needs no more than its epoch and step.
    """
    whole("seed", seed, low=0, high=2**63 - 1)
    # Philox is a function of a key and a counter. The lowest word of the counter counts draws, the others are free.
    counter = np.array([0, rank, step, epoch], dtype=np.uint64)
    key = np.array([seed, PURPOSES.index(purpose)], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))
