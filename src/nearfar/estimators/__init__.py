"""Metric learning before deep learning, as scikit-learn estimators.

Example:
    >>> import nearfar as nf
    >>> from sklearn.datasets import load_wine
    >>> from sklearn.neighbors import KNeighborsClassifier
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import StandardScaler
    >>> model = make_pipeline(StandardScaler(), nf.estimators.LMNN(), KNeighborsClassifier(3))
    >>> model.fit(*load_wine(return_X_y=True)).score(*load_wine(return_X_y=True)) > 0.95
    True
"""

from nearfar.estimators.base import LinearTransformer
from nearfar.estimators.closed_form import LFDA, RCA, Mahalanobis
from nearfar.estimators.deep import DeepMetric
from nearfar.estimators.kernel import KernelMetric
from nearfar.estimators.linear import LinearMetric
from nearfar.estimators.lmnn import LMNN
from nearfar.estimators.nca import MCML, MLKR, NCA
from nearfar.estimators.pair_methods import ITML, LSML, MMC, POLA

__all__ = [
    "ITML",
    "LFDA",
    "LMNN",
    "LSML",
    "MCML",
    "MLKR",
    "MMC",
    "NCA",
    "POLA",
    "RCA",
    "DeepMetric",
    "KernelMetric",
    "LinearMetric",
    "LinearTransformer",
    "Mahalanobis",
]
