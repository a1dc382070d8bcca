"""First recipes: what a folder or table of images contains, and a recipe that fits it and the machine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from numpy.typing import NDArray

from nearfar import data, networks
from nearfar.data import Dataset, Split, Store, splits
from nearfar.data.datasets.table import TABLES
from nearfar.data.store import duplicates
from nearfar.data.store.duplicates import Duplicate
from nearfar.data.store.prepare import prepare
from nearfar.networks.weights import published
from nearfar.utils.formatting import duration, plural
from nearfar.utils.progress import Watch
from nearfar.utils.validation import few

NETWORK = "efficientnet_lite0"  # unless only the weights of another network are on this machine
EPOCHS = 20  # of a training of the whole network
PER_CLASS = 4
WHOLE_CLASSES = 40  # training classes, of which a fifth is held out, for a training of the whole network
WHOLE_NETWORK = (  # what a recipe of a head needs for that
    *("network.freeze=false", f"training.epochs={EPOCHS}", "training.warmup_epochs=1"),
    *("augmentation.crop=random_resized", "augmentation.scale=[0.25, 1.0]"),
    *("split.name=fixed_validation", "split.share=0.2"),
)
TIMED = 4  # images whose time is measured


@dataclass(frozen=True, eq=False)
class Findings:
    """What a folder or table of images contains."""

    root: Path  # the folder, archive or table
    dataset: Dataset  # the images and their classes
    settings: Mapping[str, str]  # of the dataset, given or guessed
    store: Store  # those that can be decoded
    split: Split  # which classes are for training, and which are tested
    duplicates: tuple[Duplicate, ...]  # images that are the same as an earlier one, as rows of the store
    network: str  # the network to start from; by default one whose weights are on this machine
    maps: bool  # whether it returns maps, and not vectors
    side: int  # of the images that it reads

    @property
    def counts(self) -> NDArray[np.int64]:
        """Number of decoded images of each class."""
        return np.bincount(self.dataset.labels[self.store.rows], minlength=self.dataset.num_classes)

    def trains_whole(self, gpu: bool) -> bool:
        """Whether the whole network is trained: on a GPU, if enough classes can be held out."""
        return gpu and len(np.unique(self.dataset.labels[self.split.train])) >= WHOLE_CLASSES

    def lines(self) -> list[str]:
        """What was found, a line for each fact."""
        counts, size = self.counts, self.side
        found = [
            f"{self.root}: {plural(len(self.store), 'image')} of {plural(self.dataset.num_classes, 'class', 'es')}, "
            f"{counts.min():,}{f' to {counts.max():,}' if counts.max() > counts.min() else ''} of each"
        ]
        found += [self.dataset.guess] if self.dataset.guess else []
        for column, values in self.dataset.columns.items():
            if column.startswith("group_"):
                found.append(
                    f"{column}, a column of the folders above the classes: {few(np.unique(values).tolist(), 3)}"
                )
        shorter = self.store.sizes.min(axis=1)
        if small := int((shorter < size).sum()):
            found.append(f"{plural(small, 'image')} with a shorter side below {size} pixels, down to {shorter.min()}")
        if single := [self.dataset.classes[label] for label in np.flatnonzero(counts == 1)]:
            found.append(f"{plural(len(single), 'class', 'es')} with one image, which has no match: {few(single, 3)}")
        if self.duplicates:
            exact = sum(one.exact for one in self.duplicates)
            labels = self.dataset.labels[self.store.rows]
            across = [one for one in self.duplicates if labels[one.first] != labels[one.second]]
            found.append(
                f"{plural(len(self.duplicates), 'duplicate')}: {exact:,} exact, {len(self.duplicates) - exact:,} near; "
                f"{len(across):,} in two classes"
            )
        tested = np.concatenate([*self.split.test.values()])
        parts = [len(np.unique(self.dataset.labels[rows])) for rows in (self.split.train, tested)]
        found.append(
            f"{plural(parts[0], 'class', 'es')} for training, {plural(parts[1], 'other class', 'es')} for the test"
        )
        return found


def examine(
    root: str | Path,
    *,
    settings: Mapping[str, str] | None = None,
    network: str | None = None,
    cache: str | Path | None = None,
    watch: Watch = lambda work: None,
) -> Findings:
    """Open a folder, archive or table of images and decode all of them into the cache."""
    root, settings = Path(root), dict(settings or {})
    dataset = data.open("table" if root.suffix.lower() in TABLES else "folder", root, **settings)
    if dataset.num_classes < 2 * splits.MIN_CLASSES:
        raise ValueError(
            f"{root} has {plural(dataset.num_classes, 'class', 'es')}; at least {2 * splits.MIN_CLASSES} are needed, "
            "as half of them are for the test"
        )
    split = splits.standard(dataset)
    store = prepare(dataset, cache=cache, on_error="skip", progress=watch("decoding"))
    found = duplicates.within(duplicates.signatures(store, progress=watch("comparing")))
    here = [known.name for known in published.KNOWN if published.locate(known) is not None]
    network = network or (NETWORK if NETWORK in here or not here else here[0])
    backbone = networks.get(network) if network in networks.names() else networks.create_backbone(network)
    about = (network, backbone.gives_maps, backbone.input_size or 0)
    return Findings(root, dataset, {**dataset.guessed, **settings}, store, split, tuple(found), *about)


def measure_seconds(name: str) -> tuple[float, float]:
    """Return the seconds that an image takes on this CPU, in a forward pass and in a training step."""
    model = networks.create(name).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    size = model.input_size or 224
    images = torch.rand(TIMED, 3, size, size).contiguous(memory_format=torch.channels_last)
    found = []
    for train in (False, True):
        model.train(train)
        for _ in range(2):  # the first pass allocates memory
            start = time.perf_counter()
            with torch.set_grad_enabled(train):
                total = model(images).sum()
            if train:
                total.backward()
            seconds = (time.perf_counter() - start) / TIMED
        found.append(seconds)
    return found[0], found[1]


def starter(found: Findings, *, gpu: bool, seconds: tuple[float, float] = (0.0, 0.0)) -> str:
    """Return a recipe with comments, as TOML: features and a head for a CPU, the whole network for a GPU."""
    images, training = len(found.store), len(found.store.places(found.split.train))
    usual = int(np.median(found.counts[found.counts > 0]))
    once, full = (duration(part) for part in (images * seconds[0], EPOCHS * training * seconds[1]))
    text = WHOLE if found.trains_whole(gpu) else FEATURES
    settings = tomli_w.dumps({"data": {"settings": dict(found.settings)}}) if found.settings else ""
    values: dict[str, Any] = {
        "found": "\n".join(f"# {line}" for line in found.lines()),
        "data": tomli_w.dumps({"name": found.dataset.name, "root": str(found.root)}).strip(),
        "settings": settings and f"\n{settings}",
        "per_class": max(2, min(PER_CLASS, usual)),
        "network": tomli_w.dumps({"name": found.network}).strip(),
        "pooling": "avg+max" if found.maps else "avg",
        "why": f"The training of a whole network needs {WHOLE_CLASSES} classes" if gpu else "The quick path for a CPU",
        "once": "seconds" if gpu else f"about {once} here",
        "full": "seconds" if gpu else f"about {full} here",
        "epochs": EPOCHS,
    }
    return (HEAD + text).format_map(values)


HEAD = """\
{found}

[data]
{data}
on_error = "skip"      # leaves out files that cannot be decoded, and lists them
{settings}
[sampler]              # a batch: as many classes as fit, and some images of each
name = "groups"
per_class = {per_class}
batch_size = 64        # smaller if there are fewer classes

[loss]                 # nearfar losses lists them
name = "multi_similarity"

[schedule]
name = "cosine"
per = "iteration"

[evaluation]           # the test classes are evaluated once, at the end
every = 0
before = true          # and so is the network without this training
"""
FEATURES = """
# {why}: the pretrained network computes the features of each image once, in {once}, and
# a head that starts from these features is trained in seconds.
# Training the whole network for {epochs} epochs would take {full}, and finds more where there are many classes.
# For that, remove freeze, and set: epochs = {epochs}, warmup_epochs = 1, [augmentation] crop = "random_resized", and
# [split] name = "fixed_validation", share = 0.2

[network]
{network}
pretrained = true
freeze = true
head = "residual"
dim = "none"           # as many as the network has features
pooling = "{pooling}"
freeze_batchnorm = true

[optimizer]
name = "adamw"
lr = 1e-4
weight_decay = 1e-4

[training]
epochs = 40

[selection]
blend = true           # keeps the share of the training that helps held-out classes, which may be none of it
"""
WHOLE = """
[augmentation]
crop = "random_resized"
scale = [0.25, 1.0]
flip = true            # set to false if left and right matter

[network]
{network}
pretrained = true
head = "residual"      # the training starts from the features of the network
dim = "none"           # as many as the network has features
pooling = "{pooling}"
freeze_batchnorm = true

[optimizer]
name = "adamw"
lr = 1e-4
weight_decay = 1e-4

[training]
epochs = {epochs}
warmup_epochs = 1      # trains the head only
precision = "bfloat16"

[split]                # some training classes are held out, to choose how much of the training is kept
name = "fixed_validation"
share = 0.2

[selection]
blend = true           # keeps the share of the training that helps these classes, which may be none of it
"""
