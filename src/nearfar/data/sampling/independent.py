"""Batches of their own for the members of an ensemble."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nearfar.data.sampling.base import Indices, Labels, Sampler, create


class Independent(Sampler):
    """Draws a batch for each member of an ensemble and concatenates them, so that members are trained independently.

    Args:
        name: The sampler of each member.
        labels: Integer labels [n], one per item.
        settings: Keyword arguments of that sampler.
        members: Number of members; the batch has as many parts of equal size.
        seed: Seed of the first member; the others have the numbers after it, as if each was trained alone.
        rank: Which share of each batch this sampler returns.
        ranks: Number of shares.

    Reference:
        Elezi et al., "The Group Loss for Deep Metric Learning", ECCV 2020, section 4.4.

    Example:
        >>> sampler = Independent("pairs", [0, 0, 1, 1, 2, 2], {"classes": 2}, members=3)
        >>> len(sampler.batch(epoch=0, step=0))
        12
    """

    key = "independent"

    def __init__(
        self,
        name: str,
        labels: Labels,
        settings: Mapping[str, Any],
        members: int,
        *,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.samplers = [
            create(name, labels, **settings, seed=seed + member, rank=rank, ranks=ranks) for member in range(members)
        ]
        first = self.samplers[0]
        self.learns = first.learns
        super().__init__(labels, members * first.batch_size, steps=len(first), seed=seed, rank=rank, ranks=ranks)

    def update(self, learned: Any) -> None:
        """Pass on what the samplers of the members learn.

        Args:
            learned: Means of the classes, or hard items.
        """
        for sampler in self.samplers:
            sampler.update(learned)  # type: ignore[attr-defined]

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the state of :meth:`Sampler.state`, and what was learned.

        Args:
            epoch: Epoch of the next batch.
            step: Step of the next batch.
        """
        return {**self.samplers[0].state(epoch, step), **super().state(epoch, step)}

    def restore(self, state: Mapping[str, Any]) -> tuple[int, int]:
        position = super().restore(state)
        if self.learns:
            self.update(state.get("means"))
        return position

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "members": [sampler.fingerprint() for sampler in self.samplers]}

    def batch_function(self, epoch: int) -> Callable[[int], Indices]:
        """Return a function that maps a step of an epoch to this rank's share of each member's batch.

        Args:
            epoch: Epoch, from 0.
        """
        functions = [sampler.batch_function(epoch) for sampler in self.samplers]
        return lambda step: np.concatenate([function(step) for function in functions])

    def _batch_function(self, epoch: int) -> Callable[[int], Indices]:
        raise NotImplementedError("batch_function is defined by the members")
