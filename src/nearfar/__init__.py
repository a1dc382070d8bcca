"""nearfar: train, compare and serve embedding models.

Sub-packages and the functions below are imported when they are first used, so that ``import nearfar`` and
``nearfar --help`` do not wait for PyTorch.

Example:
    >>> import nearfar as nf
    >>> nf.losses.create("multi_similarity", alpha=2.0).alpha
    2.0
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nearfar import (
        bench,
        data,
        distributed,
        engine,
        estimators,
        losses,
        metrics,
        migrate,
        mining,
        networks,
        plots,
        reports,
        search,
        serve,
        supervision,
        training,
        utils,
    )
    from nearfar.search import Index
    from nearfar.training import load, train
    from nearfar.training.evaluation.evaluate import evaluate
    from nearfar.utils.plugins import use

__version__ = "0.1.0"

_NAMES = {
    "Index": ("search", "Index"),
    "evaluate": ("training.evaluation.evaluate", "evaluate"),
    "load": ("training", "load"),
    "train": ("training", "train"),
    "use": ("utils.plugins", "use"),
}
__all__ = [
    "Index",
    "__version__",
    "bench",
    "data",
    "distributed",
    "engine",
    "estimators",
    "evaluate",
    "load",
    "losses",
    "metrics",
    "migrate",
    "mining",
    "networks",
    "plots",
    "reports",
    "search",
    "serve",
    "supervision",
    "train",
    "training",
    "use",
    "utils",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _NAMES:  # a sub-package
        return import_module(f"nearfar.{name}")
    module, attribute = _NAMES[name]
    return getattr(import_module(f"nearfar.{module}"), attribute)


def __dir__() -> list[str]:
    return __all__
