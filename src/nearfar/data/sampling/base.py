"""What all samplers share: steps, ranks, and how to go on with a run.

A batch is a function of (labels, settings, seed, epoch, step): nothing is remembered between two of them, so a run that
is resumed in the middle of an epoch goes on with the very batch it would have seen. All ranks of a distributed run draw
the same batch and each takes its share of it, so that no two ever have the same picture.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nearfar.utils.inputs import Array, as_labels
from nearfar.utils.validation import whole

Indices = NDArray[np.int64]
Labels = Array | Sequence[int]


class Sampler(ABC):
    """Draws batches of positions in ``labels``.

    Args:
        labels: [n], whole numbers, one for each picture, in an array, a tensor or a list; positions 0 to n − 1 are
            what is drawn.
        batch_size: Of all ranks together.
        steps: Batches in an epoch, n // batch_size unless told.
        seed: Of all randomness.
            rank, ranks which share of each batch is drawn, and of how many.
    """

    key = ""

    def __init__(self, labels: Labels, batch_size: int, *, steps: int | None, seed: int, rank: int, ranks: int) -> None:
        self.labels = checked_labels(labels)
        self.batch_size = batch_size
        self.seed = whole("seed", seed, low=0, high=2**63 - 1)
        self.ranks = whole("ranks", ranks)
        self.rank = whole("rank", rank, low=0, high=ranks - 1)
        self.steps = max(1, len(self.labels) // batch_size) if steps is None else whole("steps", steps)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self.steps

    @abstractmethod
    def _drawing(self, epoch: int) -> Callable[[int], Indices]:
        """What draws the batch of a step for all ranks, with what is known now."""

    def drawing(self, epoch: int) -> Callable[[int], Indices]:
        """What draws this rank's share of the batch of a step, with what is known now; any thread may ask it."""
        whole("epoch", epoch, low=0)
        draw = self._drawing(epoch)

        def share(step: int) -> Indices:
            whole("step", step, low=0, high=len(self) - 1)
            batch = draw(step)
            size = len(batch) // self.ranks
            return batch[self.rank * size : (self.rank + 1) * size]

        return share

    def batch(self, epoch: int, step: int) -> Indices:
        """This rank's share of one batch, [batch_size / ranks]."""
        return self.drawing(epoch)(step)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Indices]:
        """The batches of an epoch, or what is left of it from step ``start`` on."""
        whole("start", start, low=0, high=len(self))
        return map(self.drawing(epoch), range(start, len(self)))

    def batches(self, epoch: int = 0) -> BatchSampler:
        """What torch's DataLoader takes as its ``batch_sampler``: lists of positions, epoch after epoch.

        >>> from torch.utils.data import DataLoader
        >>> from nearfar.data.sampling.registry import create
        >>> sampler = create("pairs", [0, 0, 1, 1, 2, 2], classes=2, steps=3)
        >>> [len(batch) for batch in DataLoader(range(6), batch_sampler=sampler.batches())]
        [4, 4, 4]
        """
        return BatchSampler(self, epoch)

    def __iter__(self) -> NoReturn:
        raise TypeError(
            f"a {self.key} sampler draws any epoch and is in none: go through sampler.epoch(0), or give a DataLoader "
            "sampler.batches() as its batch_sampler"
        )

    def settings(self) -> dict[str, Any]:
        """What batches depend on besides labels and seed."""
        return {"batch_size": self.batch_size, "steps": self.steps}

    def fingerprint(self) -> str:
        """Of labels and settings; the same on all ranks, however many there are."""
        digest = hashlib.sha256(repr((self.key, sorted(self.settings().items()))).encode())
        digest.update(self.labels.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        """What to keep for :meth:`restore`: the place of the next batch and what it depends on."""
        _check_place(epoch, step, len(self))
        return {"epoch": epoch, "step": step, "seed": self.seed, "fingerprint": self.fingerprint()}

    def restore(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Epoch and step to go on with; refuses the state of a sampler that drew other batches.

        >>> from nearfar.data.sampling.registry import create
        >>> sampler = create("random", np.arange(10), batch_size=2)
        >>> create("random", np.arange(10), batch_size=2).restore(sampler.state(epoch=1, step=3))
        (1, 3)
        """
        for name, own in (("seed", self.seed), ("fingerprint", self.fingerprint())):
            if state.get(name) != own:
                raise ValueError(
                    f"state has {name} {state.get(name)!r} and this {self.key} sampler {own!r}; "
                    "a run goes on only with the labels, settings and seed it began with"
                )
        _check_place(state["epoch"], state["step"], len(self))
        return state["epoch"], state["step"]


class BatchSampler:
    """One epoch of a sampler each time it is gone through, and the next one the next time.

    An epoch that was begun counts, also where it was left early; one that is only asked for does not.

    Args:
        sampler: What draws; with ranks, its share of each batch.
        epoch: The first one.

    >>> from nearfar.data.sampling.registry import create
    >>> batches = create("random", list(range(6)), batch_size=2).batches()
    >>> first, second = list(batches), list(batches)
    >>> batches.set_epoch(0)
    >>> list(batches) == first, first == second
    (True, False)
    """

    def __init__(self, sampler: Sampler, epoch: int = 0) -> None:
        self.sampler = sampler
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Which epoch comes next."""
        self.epoch = whole("epoch", epoch, low=0)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        # A DataLoader with workers asks twice before its first epoch: nothing must happen until a batch is wanted.
        epoch, self.epoch = self.epoch, self.epoch + 1
        for batch in self.sampler.epoch(epoch):
            yield batch.tolist()


def checked_labels(labels: Labels) -> Indices:
    """Labels [n] as int64, in memory of their own.

    >>> checked_labels([3, 1]).tolist()
    [3, 1]
    """
    found = np.array(labels) if isinstance(labels, (list, tuple)) else labels
    if not isinstance(found, (Tensor, np.ndarray)):
        raise TypeError(f"labels is a {type(labels).__name__}; an array, a tensor or a list of whole numbers is needed")
    if isinstance(found, np.ndarray) and found.size and found.dtype.kind not in "iu":
        raise TypeError(f"labels is of {found.dtype}; whole numbers are needed")  # others take words as well
    return as_labels("labels", found).cpu().numpy().copy()


def _check_place(epoch: int, step: int, last: int) -> None:
    whole("epoch", epoch, low=0)
    whole("step", step, low=0, high=last)
