"""Figures of docs/estimators.md: XOR with and without a kernel (Figure 2 of the thesis), and digits in the plane.

python docs/figures/estimators.py --out docs/images
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.model_selection import train_test_split
from sklearn.neighbors import KNeighborsClassifier

from nearfar import estimators as E
from nearfar.metrics import retrieval


def xor(n: int = 200) -> tuple[Any, Any]:
    """Return four groups at the corners of a square; opposite corners are one class."""
    random = np.random.RandomState(0)
    signs = random.choice([-1, 1], size=(n, 2))
    return signs * 2 + random.normal(size=(n, 2)) * 0.6, (signs[:, 0] * signs[:, 1] > 0).astype(int)


def draw_xor(file: Path) -> None:
    """Draw XOR as it is, after a linear metric, and in two kernels; titles have the R-precision of held-out samples."""
    samples, labels = xor()
    methods = {
        "Euclidean": None,
        "RCA": E.RCA(),
        "RCA, polynomial kernel": E.KernelMetric(E.RCA(n_components=2), kernel="polynomial", degree=2),
        "RCA, RBF kernel": E.KernelMetric(E.RCA(n_components=2), kernel="rbf", gamma=0.1, n_components=10),
    }
    _, axes = plt.subplots(1, len(methods), figsize=(12, 3.2))
    for axis, (name, method) in zip(axes, methods.items(), strict=True):
        mapped = samples if method is None else method.fit(samples[:120], labels[:120]).transform(samples)
        precision = retrieval(mapped[120:], labels[120:], measure="euclidean")["r_precision"]
        axis.scatter(*mapped[:, :2].T, c=labels, cmap="coolwarm", s=8)
        axis.set_title(f"{name}: {100 * precision:.0f} %", fontsize=10)
        axis.set(xticks=[], yticks=[])
        print(f"XOR, {name}: R-precision {100 * precision:.1f} %")
    plt.tight_layout()
    plt.savefig(file, dpi=90)
    plt.close()


def draw_digits(file: Path) -> None:
    """Draw held-out digits in the plane by each kind of metric; titles have the accuracy of three neighbors."""
    samples, labels = load_digits(return_X_y=True)
    train, test, train_labels, test_labels = train_test_split(
        samples / 16, labels, test_size=0.3, stratify=labels, random_state=0
    )
    methods = {
        "Euclidean (PCA)": PCA(2),
        "Mahalanobis": E.Mahalanobis(n_components=2),
        "LMNN": E.LMNN(n_components=2),
        "LFDA, RBF kernel": E.KernelMetric(E.LFDA(n_components=2), gamma=0.05, n_components=100),
        "deep": E.DeepMetric(n_components=2, epochs=60, random_state=0, device="cpu"),
    }
    _, axes = plt.subplots(1, len(methods), figsize=(15, 3.2))
    for axis, (name, method) in zip(axes, methods.items(), strict=True):
        known = method.fit(train, train_labels).transform(train)
        mapped = method.transform(test)
        accuracy = KNeighborsClassifier(3).fit(known, train_labels).score(mapped, test_labels)
        axis.scatter(*mapped.T, c=test_labels, cmap="tab10", s=6)
        axis.set_title(f"{name}: {100 * accuracy:.0f} %", fontsize=10)
        axis.set(xticks=[], yticks=[])
        print(f"digits, {name}: accuracy {100 * accuracy:.1f} %")
    plt.tight_layout()
    plt.savefig(file, dpi=90)
    plt.close()


def main() -> None:
    """Write both figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    out = parser.parse_args().out
    draw_xor(out / "estimators-xor.png")
    draw_digits(out / "estimators-digits.png")


if __name__ == "__main__":
    main()
