"""nearfar: train, compare and serve embedding models. Near what is alike, far what is not."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nearfar import data, losses, metrics, mining, networks

if TYPE_CHECKING:
    from nearfar import bench
    from nearfar.evaluating import evaluate_model as evaluate
    from nearfar.plugins import use
    from nearfar.search import Index
    from nearfar.training import load, train

__version__ = "0.1.0"
__all__ = [
    "Index",
    "__version__",
    "bench",
    "data",
    "evaluate",
    "load",
    "losses",
    "metrics",
    "mining",
    "networks",
    "train",
    "use",
]

_ELSEWHERE = {
    "Index": ("search", "Index"),
    "evaluate": ("evaluating", "evaluate_model"),
    "load": ("training", "load"),
    "train": ("training", "train"),
    "use": ("plugins", "use"),
}


def __getattr__(name: str) -> Any:
    """Training, comparing and searching are brought when they are asked for: a loss or a metric is there at once."""
    if name == "bench":
        return import_module("nearfar.bench")
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room, there = _ELSEWHERE[name]
    return getattr(import_module(f"nearfar.{room}"), there)
