"""nearfar: train, compare and serve embedding models. Near what is alike, far what is not."""

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
    if name in ("load", "train"):
        from nearfar import training

        return getattr(training, name)
    if name == "bench":
        from importlib import import_module

        return import_module("nearfar.bench")
    if name == "Index":
        from nearfar.search import Index

        return Index
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
