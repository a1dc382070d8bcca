"""Updating an index from images that were added, removed, moved or changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from nearfar.search.engines import Embed, Embedded, Outcomes, embed_batches
from nearfar.search.images import FOLDER, Images, ImageSource, Labels, digest, folder_label, list_images
from nearfar.search.items import Item
from nearfar.search.storage import checked_vectors
from nearfar.utils.progress import Watch, begin
from nearfar.utils.system import prefetch

if TYPE_CHECKING:
    from nearfar.search.index import Index


@dataclass
class Update:
    """The outcome of an update."""

    added: list[int] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)  # these have new names
    replaced: list[int] = field(default_factory=list)  # removed, because the file now has other content
    kept: list[int] = field(default_factory=list)  # their files cannot be read now, or are no longer images
    missing: list[int] = field(default_factory=list)  # their files no longer exist
    pruned: bool = False  # whether the missing items were removed
    unchanged: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)  # files that are not images, and why


def update(
    index: Index,
    images: Images,
    *,
    most: float = 0.0,
    follow: bool = True,
    labels: Labels = FOLDER,
    metadata: Mapping[str, Mapping[str, Any]] | None = None,
    embed: Embed | None = None,
    watch: Watch | None = None,
) -> Update:
    """Make an index match a list of images; see ``Index.update``."""
    listed, storage, result = list_images(images, labels), index.storage, Update()
    details = dict(metadata or {})
    hashes = _hashes(listed, result, watch)
    unread = {name for name, _ in result.skipped}  # files, and folders with all that is in them
    items = index.items
    there = {(item.name, item.hash): item for item in items}
    by_hash: dict[str, Item] = {item.hash: item for item in items if item.hash}
    left: dict[str, list[Item]] = {}  # items whose file is gone or has other content, by hash
    for item in items if follow else ():
        if item.name in unread or (unread and not unread.isdisjoint(map(str, PurePosixPath(item.name).parents))):
            result.kept.append(item.id)
        elif hashes.get(item.name) != item.hash:
            left.setdefault(item.hash, []).append(item)
    changed, new = [], []
    for image in listed:
        if image.name not in hashes:
            continue
        known = there.get((image.name, hashes[image.name]))
        if known is not None:
            result.unchanged += 1
        elif left.get(hashes[image.name]):
            known = left[hashes[image.name]].pop(0)
            result.moved.append(known.id)
        else:
            new.append(image)
            continue
        more = dict(details.get(image.name, known.metadata))
        now = Item(known.id, image.name, _label(image, known), known.hash, more)
        if now != known:
            changed.append(now)
    storage.change(changed)
    others = [item for group in left.values() for item in group]
    new = _inherit(new, others, details)
    copies = [(image, by_hash[hashes[image.name]]) for image in new if hashes[image.name] in by_hash]
    if copies:
        result.added += storage.add(
            [(image.name, image.label, old.hash, dict(details.get(image.name, {}))) for image, old in copies],
            np.stack([index.vector(old.id) for _, old in copies]),
            [index.thumbnail(old.id) for _, old in copies],
        )
    unseen = [image for image in new if hashes[image.name] not in by_hash]
    if unseen:
        batches = embed(unseen) if embed else embed_batches(unseen, index.encoder)
        _add_batches(index, batches, len(unseen), details, result, watch)
    _classify_left(index, others, hashes, result)
    result.pruned = 0 < len(result.missing) <= most * (len(index) - len(result.replaced))
    storage.remove(result.replaced + (result.missing if result.pruned else []))
    return result


def _label(image: ImageSource, known: Item) -> str | None:
    """The class of an image that is already known: an explicit label takes precedence over its folder."""
    return image.label if image.explicit or known.label in (None, folder_label(known.name)) else known.label


def _inherit(
    new: Sequence[ImageSource], others: Sequence[Item], details: dict[str, Mapping[str, Any]]
) -> list[ImageSource]:
    """New images with the labels and metadata of the items that they replace; ``details`` receives the metadata."""
    before, images = {item.name: item for item in others}, []
    for image in new:
        if image.name in before:
            image = replace(image, label=_label(image, before[image.name]))
            details.setdefault(image.name, before[image.name].metadata)
        images.append(image)
    return images


def _classify_left(index: Index, others: Sequence[Item], hashes: Mapping[str, str], result: Update) -> None:
    """Decide whether items whose files are gone or changed were replaced, are kept, or are missing."""
    holders = {(item.name, item.hash): item.id for item in index.items}
    came, skipped = {*result.added, *result.moved}, {name for name, _ in result.skipped}
    for item in others:
        holder = holders.get((item.name, hashes.get(item.name, "")), -1)
        # A file that was there before did not replace an item that was added later under the same name.
        if holder in came or holder > item.id:
            result.replaced.append(item.id)
        elif item.name in skipped:
            result.kept.append(item.id)
        else:
            result.missing.append(item.id)


def _hashes(listed: Sequence[ImageSource], result: Update, watch: Watch | None) -> dict[str, str]:
    """Hashes of all images that can be read, by name."""

    def work(image: ImageSource) -> str | OSError:
        try:
            return digest(image.read())
        except OSError as error:
            return error

    progress = begin(watch, "reading")
    hashes = {}
    for done, (image, value) in enumerate(zip(listed, prefetch(work, listed), strict=True), start=1):
        if isinstance(value, OSError):
            result.skipped.append((image.name, str(value)))
        else:
            hashes[image.name] = value
        progress(done, len(listed))
    return hashes


def _add_batches(
    index: Index,
    batches: Outcomes,
    count: int,
    metadata: Mapping[str, Mapping[str, Any]],
    result: Update,
    watch: Watch | None,
) -> None:
    """Add embedded images; each batch is on disk before the next one begins."""
    progress, done = begin(watch, "embedding"), 0
    for batch in batches:
        result.skipped += [(image.name, outcome) for image, outcome in batch if isinstance(outcome, str)]
        good = [(image, outcome) for image, outcome in batch if isinstance(outcome, Embedded)]
        if good:
            points = np.stack([outcome.vector for _, outcome in good])
            result.added += index.storage.add(
                [
                    (image.name, image.label, outcome.hash, dict(metadata.get(image.name, {})))
                    for image, outcome in good
                ],
                checked_vectors("vectors", points, index.dim, index.measure),
                [outcome.thumbnail for _, outcome in good],
            )
        done += len(batch)
        progress(done, count)
