"""How an index follows pictures that come, go, move and change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nearfar.search.encoder import Encoder, Pixels, ahead
from nearfar.search.items import Item
from nearfar.search.pictures import FOLDER, Labels, Listed, Pictures, digest, folder_label, gather
from nearfar.search.storage.table import checked_vectors
from nearfar.utils.progress import Watch

if TYPE_CHECKING:
    from nearfar.search.index import Index


@dataclass
class Update:
    """What became of pictures.

    Args:
        added: Ids of pictures that are new, or new at this place.
        moved: Ids of pictures that are called otherwise now.
        replaced: Ids that are gone, as other pictures have come in their place.
        kept: Ids of items that stay though their files cannot be read now, or are no pictures any more.
        missing: Ids of items whose pictures are not there.
        pruned: Whether those were removed.
        unchanged: How many are as they were.
        skipped: Name and reason of what is no picture.
    """

    added: list[int] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    replaced: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    pruned: bool = False
    unchanged: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)


def update(
    index: Index,
    pictures: Pictures,
    *,
    prune: bool = False,
    follow: bool = True,
    labels: Labels = FOLDER,
    metadata: Mapping[str, Mapping[str, Any]] | None = None,
    batch_size: int = 64,
    watch: Watch | None = None,
) -> Update:
    """See ``Index.update``; without ``follow`` nothing that is there is moved or removed."""
    listed, shelf, result = gather(pictures, labels), index._shelf, Update(pruned=prune)
    about = dict(metadata or {})
    hashes = _hashes(listed, result, watch)
    unread = {name for name, _ in result.skipped}
    items = index.items
    there = {(item.name, item.hash): item for item in items}
    by_hash: dict[str, Item] = {item.hash: item for item in items if item.hash}
    left: dict[str, list[Item]] = {}  # pictures that are no longer where they were
    for item in items if follow else ():
        if item.name in unread:
            result.kept.append(item.id)
        elif hashes.get(item.name) != item.hash:
            left.setdefault(item.hash, []).append(item)
    changed, new = [], []
    for each in listed:
        if each.name not in hashes:
            continue
        mine = there.get((each.name, hashes[each.name]))
        if mine is not None:
            result.unchanged += 1
        elif left.get(hashes[each.name]):
            mine = left[hashes[each.name]].pop(0)
            result.moved.append(mine.id)
        else:
            new.append(each)
            continue
        now = Item(mine.id, each.name, _label(each, mine), mine.hash, dict(about.get(each.name, mine.metadata)))
        if now != mine:
            changed.append(now)
    shelf.change(changed)
    others = [item for group in left.values() for item in group]
    new = _inherit(new, others, about)
    result.added += _copy(index, [(each, by_hash.get(hashes[each.name])) for each in new], about)
    fresh = [each for each in new if hashes[each.name] not in by_hash]
    result.added += _embed(index, fresh, about, batch_size, result, watch)
    _sort_out(index, others, hashes, result)
    shelf.remove(result.replaced + (result.missing if prune else []))
    return result


def _label(each: Listed, mine: Item) -> str | None:
    """The class of a picture that is known: what somebody told of it counts for more than its folder."""
    return each.label if each.told or mine.label in (None, folder_label(mine.name)) else mine.label


def _inherit(new: Sequence[Listed], others: Sequence[Item], about: dict[str, Mapping[str, Any]]) -> list[Listed]:
    """New pictures, with what is known of those in whose places they come; ``about`` gets their metadata."""
    before, found = {item.name: item for item in others}, []
    for each in new:
        if each.name in before:
            each = replace(each, label=_label(each, before[each.name]))
            about.setdefault(each.name, before[each.name].metadata)
        found.append(each)
    return found


def _copy(
    index: Index, pairs: Sequence[tuple[Listed, Item | None]], about: Mapping[str, Mapping[str, Any]]
) -> list[int]:
    """Add pictures of which the index has another copy: they need no model."""
    copied = [(each, old) for each, old in pairs if old is not None]
    if not copied:
        return []
    return index._shelf.add(
        [each.name for each, _ in copied],
        np.stack([index.vector(old.id) for _, old in copied]),
        labels=[each.label for each, _ in copied],
        hashes=[old.hash for _, old in copied],
        metadata=[dict(about.get(each.name, {})) for each, _ in copied],
        pictures=[index.thumbnail(old.id) for _, old in copied],
    )


def _sort_out(index: Index, others: Sequence[Item], hashes: Mapping[str, str], result: Update) -> None:
    """What becomes of items whose pictures are not where they were."""
    holders = {(item.name, item.hash): item.id for item in index.items}
    came, skipped = {*result.added, *result.moved}, {name for name, _ in result.skipped}
    for item in others:
        holder = holders.get((item.name, hashes.get(item.name, "")), -1)
        # A file that was there before is not in the place of an item that came later and has just the same name.
        if holder in came or holder > item.id:
            result.replaced.append(item.id)
        elif item.name in skipped:
            result.kept.append(item.id)
        else:
            result.missing.append(item.id)


def _hashes(listed: Sequence[Listed], result: Update, watch: Watch | None) -> dict[str, str]:
    """Of all pictures that can be read, by name."""

    def work(each: Listed) -> str | OSError:
        try:
            return digest(each.read())
        except OSError as error:
            return error

    progress = None if watch is None else watch("reading")
    found = {}
    for done, (each, value) in enumerate(zip(listed, ahead(work, listed), strict=True), start=1):
        if isinstance(value, OSError):
            result.skipped.append((each.name, str(value)))
        else:
            found[each.name] = value
        if progress is not None:
            progress(done, len(listed))
    return found


def _embed(
    index: Index,
    fresh: Sequence[Listed],
    metadata: Mapping[str, Mapping[str, Any]],
    batch_size: int,
    result: Update,
    watch: Watch | None,
) -> list[int]:
    """Add pictures batch by batch; each batch is on disk before the next begins."""
    if not fresh:
        return []
    encoder, ids, done = index.encoder, [], 0
    progress = None if watch is None else watch("embedding")
    for batch in batches(fresh, encoder, batch_size):
        good: list[tuple[Listed, Pixels, bytes, str]] = []
        for each, seen in batch:
            if isinstance(seen, Exception):
                result.skipped.append((each.name, " ".join(str(seen).split()) or type(seen).__name__))
            else:
                good.append((each, *seen))
        if good:
            points = encoder.vectors([pixels for _, pixels, _, _ in good])
            ids += index._shelf.add(
                [each.name for each, _, _, _ in good],
                checked_vectors("vectors", points, index.dim, index.measure),
                labels=[each.label for each, _, _, _ in good],
                hashes=[hash for _, _, _, hash in good],
                metadata=[dict(metadata.get(each.name, {})) for each, _, _, _ in good],
                pictures=[picture for _, _, picture, _ in good],
            )
        done += len(batch)
        if progress is not None:
            progress(done, len(fresh))
    return ids


Seen = tuple[Pixels, bytes, str] | Exception


def batches(fresh: Sequence[Listed], encoder: Encoder, size: int) -> Iterator[list[tuple[Listed, Seen]]]:
    def work(each: Listed) -> Seen:
        try:
            picture = each.read()
            return (*encoder.look_twice(picture), digest(picture))
        except (OSError, ValueError) as error:  # no picture, or not to be read
            return error

    batch: list[tuple[Listed, Seen]] = []
    for each, seen in zip(fresh, ahead(work, fresh, most=2 * size), strict=True):
        batch.append((each, seen))
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
