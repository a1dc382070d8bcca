"""nearfar: train, compare and serve embedding models. Near what is alike, far what is not."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nearfar import bench, data, losses, metrics, mining, networks
    from nearfar.search import Index
    from nearfar.training import load, train
    from nearfar.training.evaluation.evaluate import evaluate
    from nearfar.utils.plugins import use

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

_ROOMS = ("bench", "data", "losses", "metrics", "mining", "networks")
_ELSEWHERE = {
    "Index": ("search", "Index"),
    "evaluate": ("training.evaluation.evaluate", "evaluate"),
    "load": ("training", "load"),
    "train": ("training", "train"),
    "use": ("utils.plugins", "use"),
}


def __getattr__(name: str) -> Any:
    """Rooms are opened when they are asked for: `nearfar --help` does not wait for PyTorch."""
    if name in _ROOMS:
        return import_module(f"nearfar.{name}")
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room, there = _ELSEWHERE[name]
    return getattr(import_module(f"nearfar.{room}"), there)


def __dir__() -> list[str]:
    return __all__
