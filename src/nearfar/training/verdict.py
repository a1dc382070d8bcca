"""Whether a training helped: the test classes before and after it, as one line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearfar.metrics.intervals import by_class, crossed_means, mean_squares

BEFORE = "before "  # in the names of the metrics of queries: by the network before the training
METRICS = ("map@r", "recall@1")  # the first one decides
HELPS, UNCLEAR, WORSE = "helps", "no clear gain", "worse"
KEPT = {0.25: "a quarter", 0.5: "half", 0.75: "three quarters", 1.0: "all"}


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
        gain = f"{100 * blend['gain']:+.1f} ± {100 * blend['error']:.1f}".replace("-", "−")
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
    words = [f"{100 * number:+.1f}".replace("-", "−") if math.isfinite(number) else "?" for number in numbers]
    return f"{words[0]} [{words[1]}, {words[2]}]"
