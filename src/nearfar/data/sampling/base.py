"""Base class of the batch samplers: steps, ranks and resuming.

A batch is a function of (labels, settings, seed, epoch, step). A sampler keeps no state between batches, so a run that
is resumed in the middle of an epoch continues with exactly the batch it would have seen. All ranks of a distributed run
draw the same batch and each takes its share, so no two ranks ever train on the same item in one step.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nearfar.utils.registry import Registry
from nearfar.utils.tensors import ArrayInput, as_array, as_labels
from nearfar.utils.validation import whole

Indices = NDArray[np.int64]
Labels = ArrayInput | Sequence[int]


class Sampler(ABC):
    """Draws batches of positions in ``labels``.

    Args:
        labels: Integer labels [n], one per item: an array, a tensor, a list or a Series. Batches hold positions, from 0
            to n − 1.
        batch_size: Items per batch, over all ranks.
        steps: Batches per epoch; None for n // batch_size.
        seed: Seed of all random draws.
        rank: Which share of each batch this sampler returns, from 0.
        ranks: Number of shares.
    """

    key = ""
    learns = (
        ""  # what the trainer calls ``update`` with after every epoch: "classes" (their means), "items", or nothing
    )

    def __init__(self, labels: Labels, batch_size: int, *, steps: int | None, seed: int, rank: int, ranks: int) -> None:
        self.labels = checked_labels(labels)
        self.batch_size = batch_size
        self.seed = whole("seed", seed, low=0, high=2**63 - 1)
        self.ranks = whole("ranks", ranks)
        self.rank = whole("rank", rank, low=0, high=ranks - 1)
        self.steps = max(1, len(self.labels) // batch_size) if steps is None else whole("steps", steps)

    def __len__(self) -> int:
        """Number of batches per epoch."""
        return self.steps

    @abstractmethod
    def _batch_function(self, epoch: int) -> Callable[[int], Indices]:
        """Return a function that maps a step to the batch of all ranks."""

    def batch_function(self, epoch: int) -> Callable[[int], Indices]:
        """Return a function that maps a step of an epoch to this rank's share of the batch.

        The function is thread-safe and uses the state the sampler has now: later updates do not change it.

        Args:
            epoch: Epoch, from 0.
        """
        whole("epoch", epoch, low=0)
        full_batch = self._batch_function(epoch)

        def share(step: int) -> Indices:
            whole("step", step, low=0, high=len(self) - 1)
            batch = full_batch(step)
            size = len(batch) // self.ranks
            return batch[self.rank * size : (self.rank + 1) * size]

        return share

    def batch(self, epoch: int, step: int) -> Indices:
        """Return this rank's share of one batch, [batch_size / ranks].

        Args:
            epoch: Epoch, from 0.
            step: Step within the epoch, from 0.
        """
        return self.batch_function(epoch)(step)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Indices]:
        """Iterate over the batches of an epoch.

        Args:
            epoch: Epoch, from 0.
            start: First step, to continue an interrupted epoch.
        """
        whole("start", start, low=0, high=len(self))
        return map(self.batch_function(epoch), range(start, len(self)))

    def batches(self, epoch: int = 0) -> BatchSampler:
        """Return a ``batch_sampler`` for PyTorch's DataLoader: lists of positions, epoch after epoch.

        Args:
            epoch: First epoch.

        Example:
            >>> from torch.utils.data import DataLoader
            >>> from nearfar.data import sampling
            >>> sampler = sampling.create("pairs", [0, 0, 1, 1, 2, 2], classes=2, steps=3)
            >>> [len(batch) for batch in DataLoader(range(6), batch_sampler=sampler.batches())]
            [4, 4, 4]
        """
        return BatchSampler(self, epoch)

    def __iter__(self) -> NoReturn:
        raise TypeError(
            f"a {self.key} sampler has no current epoch and cannot be iterated: use sampler.epoch(0), or pass "
            "sampler.batches() to a DataLoader as its batch_sampler"
        )

    def settings(self) -> dict[str, Any]:
        """Return what the batches depend on besides labels and seed."""
        return {"batch_size": self.batch_size, "steps": self.steps}

    def fingerprint(self) -> str:
        """Return a hash of labels and settings; it is the same on all ranks."""
        digest = hashlib.sha256(repr((self.key, sorted(self.settings().items()))).encode())
        digest.update(self.labels.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        """Return what :meth:`restore` needs: the position of the next batch and what it depends on.

        Args:
            epoch: Epoch of the next batch.
            step: Step of the next batch.
        """
        _check_position(epoch, step, len(self))
        return {"epoch": epoch, "step": step, "seed": self.seed, "fingerprint": self.fingerprint()}

    def restore(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Return the epoch and step to continue from.

        Args:
            state: A result of :meth:`state`.

        Raises:
            ValueError: If the state belongs to a sampler with other labels, settings or seed.

        Example:
            >>> from nearfar.data import sampling
            >>> sampler = sampling.create("random", np.arange(10), batch_size=2)
            >>> sampling.create("random", np.arange(10), batch_size=2).restore(sampler.state(epoch=1, step=3))
            (1, 3)
        """
        for name, own in (("seed", self.seed), ("fingerprint", self.fingerprint())):
            if state.get(name) != own:
                raise ValueError(
                    f"state has {name} {state.get(name)!r} and this {self.key} sampler {own!r}; "
                    "a run can only be resumed with the labels, settings and seed it started with"
                )
        _check_position(state["epoch"], state["step"], len(self))
        return state["epoch"], state["step"]


class BatchSampler:
    """Adapter of a sampler to PyTorch's DataLoader: each iteration is one epoch, then the next.

    An epoch that was started counts, even if it was not finished. Creating an iterator without taking a batch does not
    start an epoch.

    Args:
        sampler: The sampler that draws the batches.
        epoch: First epoch.

    Example:
        >>> from nearfar.data import sampling
        >>> batches = sampling.create("random", list(range(6)), batch_size=2).batches()
        >>> first, second = list(batches), list(batches)
        >>> batches.set_epoch(0)
        >>> list(batches) == first, first == second
        (True, False)
    """

    def __init__(self, sampler: Sampler, epoch: int = 0) -> None:
        self.sampler = sampler
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch.

        Args:
            epoch: Epoch, from 0.
        """
        self.epoch = whole("epoch", epoch, low=0)

    def __len__(self) -> int:
        """Number of batches per epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        # A DataLoader with workers creates two iterators before its first epoch, so the epoch must not advance until a
        # batch is requested.
        epoch, self.epoch = self.epoch, self.epoch + 1
        for batch in self.sampler.epoch(epoch):
            yield batch.tolist()


def checked_labels(labels: Labels) -> Indices:
    """Return integer labels [n] as an int64 copy."""
    found = np.array(labels) if isinstance(labels, (list, tuple)) else as_array("labels", labels)
    if not isinstance(found, (Tensor, np.ndarray)):
        raise TypeError(f"labels is a {type(labels).__name__}; an array, a tensor or a list of whole numbers is needed")
    if isinstance(found, np.ndarray) and found.size and found.dtype.kind not in "iu":
        raise TypeError(f"labels is of {found.dtype}; whole numbers are needed")  # as_labels would accept text
    return as_labels("labels", found).cpu().numpy().copy()


def _check_position(epoch: int, step: int, last: int) -> None:
    whole("epoch", epoch, low=0)
    whole("step", step, low=0, high=last)


Kind = TypeVar("Kind", bound=type[Sampler])
_SAMPLERS: Registry[type[Sampler]] = Registry("sampler", "labels")
names = _SAMPLERS.names
"""Return the names of all samplers, sorted."""


def register(sampler: Kind) -> Kind:
    """Register a sampler under its ``key``, as a decorator."""
    _SAMPLERS.register(sampler.key, sampler)
    return sampler


def create(name: str, labels: Labels, **settings: Any) -> Sampler:
    """Create a sampler by name.

    Args:
        name: "groups" (class-balanced), "pairs", "random" or "hard_classes".
        labels: Integer labels [n], one per item.
        settings: Keyword arguments of the sampler.

    Example:
        >>> labels = np.repeat(np.arange(5), 4)
        >>> batch = create("groups", labels, classes=3, per_class=2).batch(epoch=0, step=0)
        >>> np.unique(labels[batch], return_counts=True)[1].tolist()
        [2, 2, 2]
    """
    sampler: Sampler = _SAMPLERS.create(name, labels, **settings)
    return sampler


def fitting_classes(labels: Labels, batch_size: int, per_class: int, ranks: int = 1) -> int:
    """Return the number of classes that fill a batch with ``per_class`` items each, or as many as there are.

    Args:
        labels: Integer labels [n], one per item.
        batch_size: Items per batch, over all ranks.
        per_class: Items of each class.
        ranks: The result is a multiple of this.

    Example:
        >>> labels = np.array([0, 0, 0, 1, 1, 2])
        >>> fitting_classes(labels, batch_size=64, per_class=2)  # two of class 0, two of class 1
        2
    """
    counts = np.unique(checked_labels(labels), return_counts=True)[1]
    most = int(np.minimum(counts[counts > 1], per_class).sum())
    return max(1, min(whole("batch_size", batch_size), most) // whole("per_class", per_class) // ranks) * ranks
