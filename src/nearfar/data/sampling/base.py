"""Base class of the batch samplers, resuming, and samplers by name.

A batch is a function of (labels, settings, seed, epoch, step). A sampler keeps no state between batches, so a run that
is resumed in the middle of an epoch continues with exactly the batch it would have seen. All processes of a distributed
run draw the same batch and each takes its share, so no two ever train on the same item in one step.
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
        batch_size: Items per batch, over all processes.
        steps: Batches per epoch; None for n // batch_size.
        seed: Seed of all random draws.
    """

    key = ""
    learns = ""  # what the trainer calls ``update`` with after every epoch: "classes" (their means), "items" or nothing
    learned: NDArray[Any] | None = None  # what ``update`` was called with; batches of an epoch do not change with it
    depends_on: tuple[str, ...] = ("batch_size", "steps")  # what determines the batches, besides labels and seed
    divided = "batch_size"  # what must be a multiple of the number of processes
    parts = 1  # parts of equal size of a batch, of each of which a process gets its share

    def __init__(self, labels: Labels, batch_size: int, steps: int | None, seed: int) -> None:
        self.labels = checked_labels(labels)
        self.batch_size = whole("batch_size", batch_size)
        self.seed = whole("seed", seed, low=0, high=2**63 - 1)
        self.steps = max(1, len(self.labels) // batch_size) if steps is None else whole("steps", steps)

    def __len__(self) -> int:
        """Number of batches per epoch."""
        return self.steps

    @abstractmethod
    def _batch_function(self, epoch: int) -> Callable[[int], Indices]:
        """Return a function that maps a step to its batch."""

    def batch_function(self, epoch: int) -> Callable[[int], Indices]:
        """Return a function that maps a step of an epoch, both counted from 0, to its batch.

        The function is thread-safe and uses the state the sampler has now: later updates do not change it.
        """
        draw = self._batch_function(whole("epoch", epoch, low=0))
        return lambda step: draw(whole("step", step, low=0, high=len(self) - 1))

    def batch(self, epoch: int, step: int) -> Indices:
        """Return the batch of a step of an epoch, both counted from 0: [batch_size]."""
        return self.batch_function(epoch)(step)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Indices]:
        """Iterate over the batches of an epoch; ``start`` is the first step, to continue an interrupted epoch."""
        whole("start", start, low=0, high=len(self))
        return map(self.batch_function(epoch), range(start, len(self)))

    def batches(self, epoch: int = 0, *, rank: int = 0, ranks: int = 1) -> BatchSampler:
        """Return a ``batch_sampler`` for PyTorch's DataLoader: lists of positions, epoch after epoch.

        Args:
            epoch: First epoch.
            rank: Number of this process, from 0.
            ranks: Number of processes, each of which gets its share of the batches.

        Example:
            >>> from torch.utils.data import DataLoader
            >>> from nearfar.data import sampling
            >>> sampler = sampling.create("pairs", [0, 0, 1, 1, 2, 2], classes=2, steps=3)
            >>> [len(batch) for batch in DataLoader(range(6), batch_sampler=sampler.batches())]
            [4, 4, 4]
        """
        return BatchSampler(self, epoch, rank, ranks)

    def __iter__(self) -> NoReturn:
        raise TypeError(
            f"a {self.key} sampler has no current epoch and cannot be iterated: use sampler.epoch(0), or pass "
            "sampler.batches() to a DataLoader as its batch_sampler"
        )

    def check_ranks(self, ranks: int) -> None:
        """Raise a ValueError unless batches can be divided among so many processes."""
        if getattr(self, self.divided) % whole("ranks", ranks):
            raise ValueError(
                f"{self.divided} is {getattr(self, self.divided)}; it must be a multiple of ranks, {ranks}"
            )

    def share(self, batch: Indices, rank: int, ranks: int) -> Indices:
        """Return the share of process number ``rank`` of a batch, [batch_size / ranks]."""
        self.check_ranks(ranks)
        return batch.reshape(self.parts, ranks, -1)[:, whole("rank", rank, low=0, high=ranks - 1)].reshape(-1)

    def update(self, learned: NDArray[Any] | None) -> None:
        """Set what the next epochs draw by; an epoch that has started keeps what it started with.

        Args:
            learned: What ``learns`` names: one vector for each class, or the hard items of each item as
                :func:`hard_items` returns them; None draws at random again.
        """
        self.learned = learned

    def settings(self) -> dict[str, Any]:
        """Return what the batches depend on besides labels and seed."""
        return {name: getattr(self, name) for name in self.depends_on}

    def fingerprint(self) -> str:
        """Return a hash of labels and settings."""
        digest = hashlib.sha256(repr((self.key, sorted(self.settings().items()))).encode())
        digest.update(self.labels.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def state(self, epoch: int, step: int) -> dict[str, Any]:
        """Return what :meth:`restore` needs: epoch and step of the next batch, and what it depends on."""
        position = {"epoch": whole("epoch", epoch, low=0), "step": whole("step", step, low=0, high=len(self))}
        return {**position, "seed": self.seed, "fingerprint": self.fingerprint(), "means": self.learned}

    def restore(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Return the epoch and step to continue from, given a result of :meth:`state`.

        Raises:
            ValueError: If the state belongs to a sampler with other labels, settings or seed.

        Example:
            >>> from nearfar.data import sampling
            >>> sampler = sampling.create("random", np.arange(10), batch_size=2)
            >>> sampling.create("random", np.arange(10), batch_size=2).restore(sampler.state(epoch=1, step=3))
            (1, 3)
        """
        present = self.state(state["epoch"], state["step"])
        for name in ("seed", "fingerprint"):
            if state.get(name) != present[name]:
                raise ValueError(
                    f"state has {name} {state.get(name)!r} and this {self.key} sampler {present[name]!r}; "
                    "a run can only be resumed with the labels, settings and seed it started with"
                )
        if self.learns:
            self.update(state.get("means"))
        return state["epoch"], state["step"]


class BatchSampler:
    """Adapter of a sampler to PyTorch's DataLoader: each iteration is one epoch, then the next.

    An epoch that was started counts, even if it was not finished. Creating an iterator without taking a batch does not
    start an epoch.

    Args:
        sampler: The sampler that draws the batches.
        epoch: First epoch.
        rank: Number of this process, from 0.
        ranks: Number of processes, each of which gets its share of the batches.

    Example:
        >>> from nearfar.data import sampling
        >>> batches = sampling.create("random", list(range(6)), batch_size=2).batches()
        >>> first, second = list(batches), list(batches)
        >>> batches.set_epoch(0)
        >>> list(batches) == first, first == second
        (True, False)
    """

    def __init__(self, sampler: Sampler, epoch: int = 0, rank: int = 0, ranks: int = 1) -> None:
        sampler.check_ranks(ranks)
        self.sampler, self.rank, self.ranks = sampler, rank, ranks
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch, from 0."""
        self.epoch = whole("epoch", epoch, low=0)

    def __len__(self) -> int:
        """Number of batches per epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        # A DataLoader with workers creates two iterators before its first epoch, so the epoch must not advance until a
        # batch is requested.
        epoch, self.epoch = self.epoch, self.epoch + 1
        for batch in self.sampler.epoch(epoch):
            yield self.sampler.share(batch, self.rank, self.ranks).tolist()


def checked_labels(labels: Labels) -> Indices:
    """Return integer labels [n] as an int64 copy."""
    array = np.array(labels) if isinstance(labels, (list, tuple)) else as_array("labels", labels)
    if not isinstance(array, (Tensor, np.ndarray)):
        raise TypeError(f"labels is a {type(labels).__name__}; an array, a tensor or a list of whole numbers is needed")
    if isinstance(array, np.ndarray) and array.size and array.dtype.kind not in "iu":
        raise TypeError(f"labels is of {array.dtype}; whole numbers are needed")  # as_labels would accept text
    return as_labels("labels", array).cpu().numpy().copy()


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


class Independent(Sampler):
    """Draws a batch for each member of an ensemble and concatenates them, so that members are trained independently.

    Args:
        name: The sampler of each member.
        labels: Integer labels [n], one per item.
        settings: Keyword arguments of that sampler.
        members: Number of members; the batch has as many parts of equal size.
        seed: Seed of the first member; the others have the numbers after it, as if each was trained alone.

    Reference:
        Elezi et al., "The Group Loss for Deep Metric Learning", ECCV 2020, section 4.4.

    Example:
        >>> sampler = Independent("pairs", [0, 0, 1, 1, 2, 2], {"classes": 2}, members=3)
        >>> len(sampler.batch(epoch=0, step=0))
        12
    """

    key = "independent"

    def __init__(self, name: str, labels: Labels, settings: Mapping[str, Any], members: int, *, seed: int = 0) -> None:
        self.samplers = [create(name, labels, **settings, seed=seed + member) for member in range(members)]
        self.parts, self.learns = members, self.samplers[0].learns
        super().__init__(labels, members * self.samplers[0].batch_size, len(self.samplers[0]), seed)

    def check_ranks(self, ranks: int) -> None:
        self.samplers[0].check_ranks(ranks)

    def update(self, learned: NDArray[Any] | None) -> None:
        for sampler in self.samplers:
            sampler.update(learned)
        self.learned = self.samplers[0].learned

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "members": [sampler.fingerprint() for sampler in self.samplers]}

    def _batch_function(self, epoch: int) -> Callable[[int], Indices]:
        draws = [sampler.batch_function(epoch) for sampler in self.samplers]
        return lambda step: np.concatenate([draw(step) for draw in draws])
