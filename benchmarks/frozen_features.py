"""Recall of the pooled features of pretrained networks on unseen classes, before any training.

    python benchmarks/frozen_features.py --root CUB_200_2011/      # all networks whose weights are installed
    python benchmarks/frozen_features.py --root CUB_200_2011/ --device cuda
    python benchmarks/frozen_features.py --root cars/ --data cars196 --only resnet50 --weights resnet50.pth
    python benchmarks/frozen_features.py --root CUB_200_2011/ --classes 20         # a quick look

The images are those of the dataset's test classes: shorter side 256, center crop of 224 × 224 (or the sizes the
network expects), aspect ratio kept. Features are pooled from the last feature map, without a head, and compared by
cosine. Recalls are in percent; "least" is what a network has to reach on CUB-200-2011 with average + maximum pooling.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Clock, parse, report, show_line
from torch import Tensor

import nearfar as nf
from nearfar import data, networks
from nearfar.data.loader import Loader
from nearfar.data.store.prepare import prepare
from nearfar.data.transforms.view import View
from nearfar.networks.weights import published, save
from nearfar.utils.progress import bars

COLUMNS = ["network", "pooling", "pictures", "dim", "recall@1", "recall@2", "recall@4", "recall@8", "least", "seconds"]
KS = (1, 2, 4, 8)
LEAST = {"efficientnet_lite0": 56.0, "mobilenet_v2": 49.0}  # recall@1


def available(options: argparse.Namespace) -> list[str]:
    """The networks to measure: those selected, or all whose weights need no download."""
    if options.weights is not None:
        if not options.only:
            raise SystemExit("--weights needs --only: the network that the file belongs to")
        return [options.only]
    names = [known.name for known in published.KNOWN if options.only in known.name]
    here = [name for name in names if published.locate(published.get(name)) is not None]
    if not here:
        raise SystemExit(f"no weights of {', '.join(names) or options.only} are on this machine: nearfar weights list")
    return here


def test_pictures(dataset: data.Dataset, classes: int | None) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Indices of the images of the test classes, or of the first few classes."""
    split = data.splits.standard(dataset)
    indices = np.sort(np.concatenate(list(split.test.values())))
    if classes is None:
        return indices
    chosen = np.unique(dataset.labels[indices])[:classes]
    return indices[np.isin(dataset.labels[indices], chosen)]


@torch.inference_mode()
def features(model: networks.Embedder, loader: Loader, places: Any, batch: int) -> tuple[Tensor, Tensor]:
    """Features and labels of these pictures of the store."""
    found, labels = [], []
    with bars() as watch:
        tell, done = watch("pictures"), 0
        for part in loader.all(places, batch_size=batch):
            found.append(model(part.images.contiguous(memory_format=torch.channels_last)))
            labels.append(part.labels)
            done += len(part)
            if tell is not None:
                tell(done, len(places))
    return torch.cat(found), torch.cat(labels)


def measure(name: str, dataset: data.Dataset, options: argparse.Namespace) -> dict[str, Any]:
    """A row for a network."""
    pretrained = options.weights if options.weights is not None else True
    model = networks.create(name, dim=None, head="none", pooling=options.pooling, pretrained=pretrained)
    model = model.eval().to(options.device, memory_format=torch.channels_last)
    used = save.preprocessing_of(model)
    assert used is not None
    store = prepare(dataset, cache=options.cache, side=max(256, used.resize))
    view = View(size=used.size, resize=used.resize, crop="center", flip=False)
    labels = dataset.labels[store.rows]
    loader = Loader(store, labels, view=view, normalization=used.normalization, device=options.device)
    start = time.perf_counter()
    places = store.places(test_pictures(dataset, options.classes))
    embeddings, classes = features(model, loader, places, options.batch)
    metrics = nf.metrics.retrieval(embeddings, classes, ks=KS)
    row: dict[str, Any] = {"network": name, "pooling": options.pooling, "pictures": len(classes), "dim": model.dim}
    row |= {f"recall@{k}": 100 * metrics[f"recall@{k}"] for k in KS}
    if options.data == "cub" and options.pooling == "avg+max" and options.classes is None and name in LEAST:
        row["least"] = LEAST[name]
    row["seconds"] = time.perf_counter() - start
    show_line(row)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder or archive of the data set")
    parser.add_argument("--data", default="cub", help="name of the data set")
    parser.add_argument("--only", default="", help="only networks whose name contains this")
    parser.add_argument("--weights", type=Path, help="a file with weights of the one network")
    parser.add_argument("--pooling", default="avg+max")
    parser.add_argument("--classes", type=int, help="only the first few test classes")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cache", type=Path, help="folder of prepared pictures")
    options = parse(parser, COLUMNS)
    dataset = data.open(options.data, options.root)
    rows = [measure(name, dataset, options) for name in available(options)]
    report(rows, COLUMNS, Clock(options.device), options.out)
    missed = [row["network"] for row in rows if row["recall@1"] < row.get("least", 0.0)]
    if missed:
        raise SystemExit(f"below what is needed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
