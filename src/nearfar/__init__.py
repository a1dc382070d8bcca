"""nearfar: train, compare and serve embedding models. Near what is alike, far what is not."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nearfar import data, losses, metrics, mining, networks

if TYPE_CHECKING:
    from nearfar import bench
    from nearfar.search import Index
    from nearfar.training import load, train

__version__ = "0.1.0"
__all__ = ["Index", "__version__", "bench", "data", "load", "losses", "metrics", "mining", "networks", "train"]


def __getattr__(name: str) -> Any:
    """Training, comparing and searching are brought when they are asked for: a loss or a metric is there at once."""
    room = {"Index": "search", "bench": "bench", "load": "training", "train": "training"}.get(name)
    if room is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = import_module(f"nearfar.{room}")
    return found if name == room else getattr(found, name)
