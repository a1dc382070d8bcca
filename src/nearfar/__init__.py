"""nearfar: train, compare and serve embedding models.

Sub-packages and the functions below are imported when they are first used, so that ``import nearfar`` and
``nearfar --help`` do not wait for PyTorch.

Example:
    >>> import nearfar as nf
    >>> nf.losses.create("multi_similarity", alpha=2.0).alpha
    2.0
"""

from typing import TYPE_CHECKING

from nearfar.utils.lazy import lazy

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

__all__ = [
    "Index", "__version__", "bench", "data", "distributed", "engine", "estimators", "evaluate", "load", "losses",
    "metrics", "migrate", "mining", "networks", "plots", "reports", "search", "serve", "supervision", "train",
    "training", "use", "utils",
]  # fmt: skip
_NAMES = {
    "Index": "search",
    "evaluate": "training.evaluation.evaluate",
    "load": "training",
    "train": "training",
    "use": "utils.plugins",
}
__getattr__ = lazy(__name__, {*__all__} - {*_NAMES}, _NAMES)


def __dir__() -> list[str]:
    return __all__
