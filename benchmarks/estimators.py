"""Linear metrics: held-out accuracy and time beside metric-learn and scikit-learn's NCA.

The peers run in a Python environment of their own, since metric-learn 0.7 needs scikit-learn before 1.6:

    python -m venv peers && peers/bin/pip install metric-learn==0.7.0 "scikit-learn<1.6" "numpy<2.2"
    python benchmarks/estimators.py --peers peers/bin/python
    python benchmarks/estimators.py --peers peers/bin/python --data large --limit 900
    python benchmarks/estimators.py --peers peers/bin/python --methods NCA --details
    python benchmarks/estimators.py --validation --splits 20 --methods MMC --tol 1e-6   # to choose a default

Each method is fitted on the same scaled training data by both, one after the other, and judged by the accuracy of a
3-nearest-neighbor classifier on held-out data, as a mean over splits. On a machine that others use, compare the CPU
seconds. --validation holds out a part of the training data instead, so that test data choose nothing. --details prints
a row for each library, with the peak memory of its process and, for NCA, the value that the method maximizes: the
expected share of samples that choose a neighbor of their class.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

METHODS = ("Mahalanobis", "NCA", "LMNN", "ITML", "LSML", "MMC", "RCA", "LFDA", "MLKR", "MCML", "POLA", "LinearMetric")
PEER = {"Mahalanobis": "Covariance", "ITML": "ITML_Supervised", "LSML": "LSML_Supervised", "MMC": "MMC_Supervised"}
PEER |= {"RCA": "RCA_Supervised", "LMNN": "LMNN", "LFDA": "LFDA", "MLKR": "MLKR", "NCA": "NCA"}


def load(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return samples and labels of a data set."""
    from sklearn import datasets

    if name != "large":
        return getattr(datasets, f"load_{name}")(return_X_y=True)
    return datasets.make_classification(
        28_572,  # of which 20,000 are for training
        100,
        n_informative=20,
        n_redundant=20,
        n_classes=10,
        n_clusters_per_class=2,
        class_sep=2.0,
        random_state=0,
    )


def split(samples: np.ndarray, labels: np.ndarray, seed: int) -> tuple[np.ndarray, ...]:
    """Return scaled training and test data; constant features are removed."""
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import StandardScaler

    train, test, train_labels, test_labels = train_test_split(
        samples, labels, test_size=0.3, stratify=labels, random_state=seed
    )
    varies = train.std(axis=0) > 0
    scaler = StandardScaler().fit(train[:, varies])
    return scaler.transform(train[:, varies]), scaler.transform(test[:, varies]), train_labels, test_labels


def make(method: str, *, peer: bool) -> object:
    """Return an estimator of nearfar or of the peer, with its own defaults."""
    if not peer:
        from nearfar import estimators

        seeded = method in ("ITML", "LSML", "MMC", "POLA", "LinearMetric")
        return getattr(estimators, method)(**({"random_state": 0} if seeded else {}))
    if method == "NCA sklearn":
        from sklearn.neighbors import NeighborhoodComponentsAnalysis

        return NeighborhoodComponentsAnalysis(random_state=0)
    import metric_learn

    kind = getattr(metric_learn, PEER[method])
    return kind() if method in ("Mahalanobis", "LFDA") else kind(random_state=0)


def expected_accuracy(points: np.ndarray, labels: np.ndarray) -> float:
    """Return NCA's objective as a share of the samples."""
    total, norms = 0.0, np.square(points).sum(axis=1)
    for start in range(0, len(points), 500):
        rows = np.arange(start, min(start + 500, len(points)))
        distances = norms[rows, None] + norms - 2 * points[rows] @ points.T
        distances[np.arange(len(rows)), rows] = np.inf
        chosen = np.exp(distances.min(axis=1, keepdims=True) - distances)
        total += float((chosen * (labels[rows, None] == labels)).sum(axis=1) @ (1 / chosen.sum(axis=1)))
    return total / len(points)


def measure(file: Path, method: str, *, peer: bool, settings: dict[str, float]) -> dict[str, float | str]:
    """Fit one method on stored data and return its time and accuracy."""
    from sklearn.neighbors import KNeighborsClassifier

    data = np.load(file)
    estimator = make(method, peer=peer).set_params(**settings)
    start, used = time.perf_counter(), time.process_time()
    try:
        estimator.fit(data["train"], data["train_labels"])
        seconds, cpu = time.perf_counter() - start, time.process_time() - used
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        points = estimator.transform(data["train"])
        classifier = KNeighborsClassifier(3).fit(points, data["train_labels"])
        score = classifier.score(estimator.transform(data["test"]), data["test_labels"])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"}
    found = {"seconds": seconds, "cpu": cpu, "accuracy": float(score), "peak": peak}
    return found | ({"objective": expected_accuracy(points, data["train_labels"])} if method.startswith("NCA") else {})


def ask(
    python: str, files: list[Path], method: str, limit: float, *, peer: bool, settings: dict[str, float]
) -> list[dict[str, float | str]]:
    """Run ``measure`` for all splits in a process of the given Python."""
    command = [python, "-W", "ignore", __file__, "--worker", method, *map(str, files)] + (["--peer"] if peer else [])
    command += ["--settings", json.dumps(settings)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return [{"error": f"not finished after {limit:.0f} s"}]
    found: list[dict[str, float | str]] = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"]
    return found if len(found) == len(files) else [{"error": (done.stderr.splitlines() or ["no output"])[-1][:80]}]


def cell(results: list[dict[str, float | str]]) -> tuple[str, str, str]:
    """Return mean accuracy, median seconds and median CPU seconds as text, or the error."""
    failed = [result["error"] for result in results if "error" in result]
    if failed:
        return str(failed[0]), "", ""
    accuracies = [float(result["accuracy"]) for result in results]
    times = [f"{np.median([float(result[key]) for result in results]):.2f}" for key in ("seconds", "cpu")]
    return f"{100 * np.mean(accuracies):.2f}", times[0], times[1]


def detailed(results: list[dict[str, float | str]]) -> list[str]:
    """Return what ``cell`` does, the peak memory in GiB and the objective, as far as it is there."""
    texts = list(cell(results))
    for key, form in (("peak", ".1f"), ("objective", ".5f")):
        values = [float(result[key]) for result in results if key in result]
        texts.append(format(np.median(values), form) if values else "–")
    return texts


def main() -> None:
    """Print one table for each data set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="Python with metric-learn; without it only nearfar is measured")
    parser.add_argument("--data", nargs="+", default=["wine", "breast_cancer", "digits"])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--limit", type=float, default=600, help="seconds for all fits of one method")
    parser.add_argument("--iterations", type=int, help="the largest number of iterations, of methods that have one")
    parser.add_argument(
        "--details", action="store_true", help="a row for each library, with memory and NCA's objective"
    )
    parser.add_argument("--tol", type=float, help="when iterations end, of methods that have it")
    parser.add_argument("--validation", action="store_true", help="hold out a part of the training data")
    parser.add_argument("--settings", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs="+", metavar="METHOD FILES", help=argparse.SUPPRESS)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        for file in options.worker[1:]:
            print(json.dumps(measure(Path(file), options.worker[0], peer=options.peer, settings=options.settings)))
        return
    given = {"max_iter": options.iterations, "tol": options.tol}
    settings = {name: value for name, value in given.items() if value is not None}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.data:
            files = []
            for seed in range(options.splits):
                files.append(Path(folder) / f"{name}-{seed}.npz")
                parts = split(*load(name), seed)
                if options.validation:
                    parts = split(parts[0], parts[2], seed)
                np.savez(files[-1], **dict(zip(("train", "test", "train_labels", "test_labels"), parts, strict=True)))
            print(f"\n{name}: {parts[0].shape[0]} × {parts[0].shape[1]} training samples, {options.splits} splits\n")
            if options.details:
                print("| method | library | accuracy % | s | CPU s | peak GiB | objective |")
                print("|---|---" + "|--:" * 5 + "|")
            else:
                print("| method | nearfar % | s | CPU s | metric-learn % | s | CPU s | scikit-learn % | s | CPU s |")
                print("|---" + "|--:" * 9 + "|")
            for method in options.methods:
                columns: list[str] = []
                peers = [(options.peers, method)] if method in PEER else []
                peers += [(options.peers, "NCA sklearn")] if method == "NCA" else []
                for python, asked in [(sys.executable, method), *(peers if options.peers else [])]:
                    peer = python != sys.executable
                    results = ask(python, files, asked, options.limit, peer=peer, settings=settings)
                    columns += cell(results)
                    if options.details:
                        library = "scikit-learn" if asked != method else "metric-learn" if peer else "nearfar"
                        print(f"| {method} | {library} | " + " | ".join(detailed(results)) + " |", flush=True)
                if not options.details:
                    print(f"| {method} | " + " | ".join(columns + ["–"] * (9 - len(columns))) + " |", flush=True)


if __name__ == "__main__":
    main()
