"""nearfar: train, compare and serve embedding models. Near what is alike, far what is not."""

from typing import TYPE_CHECKING, Any

from nearfar import data, losses, metrics, mining, networks

if TYPE_CHECKING:
    from nearfar.training import load, train

__version__ = "0.1.0"
__all__ = ["__version__", "data", "load", "losses", "metrics", "mining", "networks", "train"]


def __getattr__(name: str) -> Any:
    """Training is brought when it is asked for, so that a loss or a metric is there at once."""
    if name in ("load", "train"):
        from nearfar import training

        return getattr(training, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
