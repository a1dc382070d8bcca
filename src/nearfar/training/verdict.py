"""Whether a training helped, as one line: the test classes before and after it. And what to do next."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearfar.metrics.intervals import by_class, crossed_means, mean_squares
from nearfar.utils.formatting import command, duration, percent, signed
from nearfar.utils.validation import few

if TYPE_CHECKING:
    from nearfar.training.run.reader import Run

BEFORE = "before "  # in the names of the metrics of queries: by the network before the training
METRICS = ("map@r", "recall@1")  # the first one decides
HELPS, UNCLEAR, WORSE = "helps", "no clear gain", "worse"
LOSSES = ("multi_similarity", "proxy_anchor")  # one of them is suggested as another loss
GIVEN = ("pairs", "triplets")  # datasets without images of their own
SHOWN = 3  # classes in a line
KEPT = {0.25: "a quarter", 0.5: "half", 0.75: "three quarters", 1.0: "all"}


class ClassChange(NamedTuple):
    """The mean map@r of the queries of a test class before and after a training."""

    label: int
    before: float
    after: float

    @property
    def gain(self) -> float:
        """The change as a share of 1."""
        return self.after - self.before


class Advice(NamedTuple):
    """What to do next, and the command that does it, if there is one."""

    text: str
    command: str = ""

    def __str__(self) -> str:
        return f"{self.text}: {self.command}" if self.command else self.text


def compare(queries: Mapping[str, NDArray[Any]]) -> dict[str, Any] | None:
    """Compare the metrics of each query before and after a training, by paired intervals over classes.

    Returns None where the network was not measured before, or if there is a single class.
    """
    if any(f"{BEFORE}{name}" not in queries for name in METRICS):
        return None
    labels, changes = queries["labels"], {}
    classes = len(np.unique(labels))
    if classes < 2:
        return None
    for name in METRICS:
        before, after = (queries[key].astype(np.float64) for key in (f"{BEFORE}{name}", name))
        table = by_class((after - before)[:, None], labels)
        low, high = (float(end[0]) for end in crossed_means(mean_squares(table[:, None])).intervals())
        changes[name] = {"before": before.mean(), "after": after.mean(), "low": low, "high": high}
    decided = changes[METRICS[0]]
    says = HELPS if decided["low"] > 0 else WORSE if decided["high"] < 0 else UNCLEAR
    return {"says": says, "classes": classes, **changes}


def text(metrics: Mapping[str, Any]) -> str | None:
    """Return the verdict of a run in one line, from its metrics; None if there is none."""
    verdict, blend, final = metrics.get("verdict"), metrics.get("blend"), metrics.get("final")
    if final is not None:
        return f"untested: trained on all classes with what {final['of']} chose, of which is known: {final['verdict']}"
    if verdict is None:
        return None
    if blend is not None and is_unchanged(metrics) and blend["folds"] == 1:
        return f"{UNCLEAR}: too few training classes to hold some out, so the network was left as it was"
    if blend is not None and is_unchanged(metrics) and blend["classes"]:
        gain = f"{signed(100 * blend['gain'])} ± {100 * blend['error']:.1f}"
        return f"{UNCLEAR} on {blend['classes']} held-out classes (map@r {gain}): the network was left as it was"
    first, *others = METRICS
    changes = [f"{first} of unseen classes {_percent(verdict[first], 'before')} → {_percent(verdict[first], 'after')}"]
    changes[0] += f", {_change(verdict[first])}"
    changes += [f"{name} {_change(verdict[name])}" for name in others]
    about = [f"{verdict['classes']} test classes"]
    if blend is not None:
        chosen = "validation" if not blend["folds"] else "training"
        about.append(f"{kept(blend['share'])} of what was learned is kept")
        about[-1] += f", chosen on {chosen} classes" if blend["classes"] else ""
    return f"{verdict['says']}: {'; '.join(changes)} ({'; '.join(about)})"


def class_changes(run: Run) -> list[ClassChange]:
    """Return the change of each test class, the largest gain first; none if the network was not measured before."""
    queries, name = run.queries(), METRICS[0]
    if queries is None or f"{BEFORE}{name}" not in queries:
        return []
    labels, codes, counts = np.unique(queries["labels"], return_inverse=True, return_counts=True)
    before, after = (np.bincount(codes, weights=queries[key]) / counts for key in (f"{BEFORE}{name}", name))
    changes = map(ClassChange, labels.tolist(), before.tolist(), after.tolist())
    return sorted(changes, key=lambda change: -change.gain)


def advice(run: Run) -> list[Advice]:
    """Return what to do next with a run: use it or the network as it was, and what may make it better."""
    verdict, recipe = run.metrics.get("verdict"), run.recipe
    data, is_folder = recipe.data, recipe.data.name == "folder" and isinstance(recipe.data.root, str)
    images: list[Any] = ["IMAGES"]
    if isinstance(data.root, str) and not data.settings and data.name not in GIVEN:
        images = [data.root] if is_folder else [data.root, "--data", data.name]
    as_it_was = is_unchanged(run.metrics) or (verdict is not None and verdict["says"] == WORSE)
    model: Any = recipe.network.name if as_it_was and recipe.network.pretrained is True else run.folder
    use = "use the network as it is" if model is not run.folder else "search with it"
    lines = [Advice(use, command("index", "build", model, *images))]
    if not as_it_was and "map@r" in run.metrics.get("test", {}):
        lines.append(Advice("train on all classes with the same settings", command("train", run.folder, "--final")))
    if verdict is not None:
        with suppress(OSError, ValueError, RuntimeError, ImportError):  # the data may have changed since
            lines.extend(_improvements(run, data.root if is_folder else None))
    return lines


def _improvements(run: Run, root: Any) -> Iterator[Advice]:
    """Yield what may make a network better: another loss, the whole network, and images of which classes."""
    from nearfar.training.setup import create_split

    recipe, freeze = run.recipe, run.recipe.network.freeze
    if not recipe.stages:
        loss = next(name for name in LOSSES if name != recipe.loss.name)
        seconds = run.seconds * (1 + run.metrics.get("blend", {}).get("folds", 0))  # a training for each fold as well
        cost = f"about {duration(seconds)}{', as the features are kept' if freeze else ''}"
        yield Advice(f"another loss, {cost}", command("train", run.folder, "--set", f"loss.name={loss}"))
    if (dataset := run.dataset) is None:
        return
    rows = create_split(recipe, dataset).train
    counts = np.bincount(dataset.labels[rows])
    trained = np.flatnonzero(counts)
    if freeze:
        yield from _whole_network(run, len(rows), len(trained))
    least = max(recipe.sampler.per_class or 0, float(np.median(counts[trained])) / 2)
    small = [label for label in trained[counts[trained].argsort(kind="stable")].tolist() if counts[label] < least]
    if small:
        names = few([f"{run.class_name(label)} ({counts[label]})" for label in small], SHOWN)
        yield Advice(f"more images of the training classes with the fewest: {names}")
    worst = sorted(class_changes(run), key=lambda change: change.after)[:SHOWN]
    names = ", ".join(f"{run.class_name(change.label)} ({percent(change.after)})" for change in worst)
    audit = "" if root is None else command("data", "audit", root, "--model", run.folder)
    yield Advice(f"more images, or correct labels, of the test classes with the lowest map@r, {names}", audit)


def _whole_network(run: Run, images: int, classes: int) -> Iterator[Advice]:
    """Yield how to train the whole network where only a head was trained, with the time that it takes here."""
    import torch

    from nearfar.training.recipe.starter import EPOCHS, WHOLE_CLASSES, WHOLE_NETWORK, measure_seconds

    if classes < WHOLE_CLASSES:
        return
    seconds = 0.0 if torch.cuda.is_available() else EPOCHS * images * measure_seconds(run.recipe.network.name)[1]
    words = [word for setting in WHOLE_NETWORK for word in ("--set", setting)]
    about = f", about {duration(seconds)} here" if seconds else ""
    yield Advice(f"train the whole network{about}", command("train", run.folder, *words))


def is_unchanged(metrics: Mapping[str, Any]) -> bool:
    """Whether nothing of the training was kept."""
    blend = metrics.get("blend")
    return blend is not None and blend["share"] == 0.0


def kept(share: float) -> str:
    """Say a share in words."""
    return KEPT.get(share, f"{100 * share:g} %")


def _percent(change: Mapping[str, float], which: str) -> str:
    return f"{100 * change[which]:.1f}"


def _change(change: Mapping[str, float]) -> str:
    difference = change["after"] - change["before"]
    numbers = [difference, change["low"], change["high"]]
    words = [signed(100 * number) if math.isfinite(number) else "?" for number in numbers]
    return f"{words[0]} [{words[1]}, {words[2]}]"
