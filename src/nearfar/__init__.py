"""nearfar: train, compare and serve embedding models. Near what is alike, far what is not."""

from nearfar import data, losses, metrics, mining, networks

__version__ = "0.1.0"
__all__ = ["__version__", "data", "losses", "metrics", "mining", "networks"]
