"""nearfar index"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from nearfar.cli.app import group
from nearfar.cli.derive import derived
from nearfar.cli.options import (
    Device,
    Download,
    Everything,
    Force,
    IndexFolder,
    Json,
    Model,
    NoLabels,
    Where,
)
from nearfar.cli.output import STDOUT, output_file, print_json, print_list, print_table, say
from nearfar.utils.atomic import FULL_DISK, write_text
from nearfar.utils.folders import claim_file, keep_apart
from nearfar.utils.formatting import command, plural
from nearfar.utils.progress import bars
from nearfar.utils.validation import few, whole

if TYPE_CHECKING:
    from nearfar.search import Index
    from nearfar.search.images import Images, Labels
    from nearfar.search.update import Update

index = group("index", "Build, change and inspect an index of images.", example="build runs/birds photos/ -o my.index")

Photos = Annotated[
    Path | None,
    Argument(metavar="PHOTOS", help="A folder or archive of images, whose subfolders are the classes; or vectors."),
]
Metadata = Annotated[
    Path | None, Option(metavar="FILE", help="A .csv or .jsonl file with labels and metadata, by 'name'.")
]
Data = Annotated[str | None, Option(metavar="NAME", help="PHOTOS is this dataset; see nearfar data list.")]
Part = Annotated[str | None, Option(metavar="PART", help="With --data: only this part, such as test.")]


@index.command(name="build", short_help="Embed images and build an index.")
@derived("nearfar.search.index:Index.build", positional={"model": "MODEL"}, leave_out=("labels", "threshold", "watch"))
def build(
    model: Model,
    measure: str,
    engine: str,
    images: Photos = None,
    out: Annotated[Path, Option("-o", "--out", metavar="FOLDER", help="The new folder of the index.")] = Path(
        "my.index"
    ),
    metadata: Metadata = None,
    no_labels: NoLabels = False,
    data: Data = None,
    part: Part = None,
    download: Download = False,
    **given: Any,
) -> None:
    """Embed images and build an index. Resume an interrupted build with: nearfar index update

    Example: nearfar index build runs/birds photos/ -o my.index

    Example: nearfar index build runs/birds CUB_200_2011/ --data cub --part test -o cub.index

    Example: nearfar index build efficientnet_lite0 photos/ -o my.index

    Example: nearfar index build runs/digits --data digits -o digits.index
    """
    from nearfar.search import Index
    from nearfar.training import load_threshold
    from nearfar.training.trainer import open_model

    threshold = load_threshold(model)
    if threshold is not None and threshold.measure != measure:
        threshold = None
    keep_apart(out, (model, images, metadata))
    listed, labels, about = _sources(images, metadata, no_labels, data, part)
    opened = model if engine == "ray" else open_model(model, download=download)
    settings = {**given, "measure": measure, "engine": engine, "labels": labels, "metadata": about}
    with bars() as watch, Index.build(opened, listed, out=out, threshold=threshold, watch=watch, **settings) as made:
        facts, skipped, of_vectors = made.info(), made.skipped, made.in_dim is not None
    recall = facts.get("recall@10")
    say(
        f"{out}: {plural(facts['count'], 'vector' if of_vectors else 'image')} of "
        f"{plural(facts['classes'], 'class', 'es')}, {plural(facts['dim'], 'dimension')}, "
        f"{facts['backend']}" + ("" if recall is None else f", finds {100 * recall:.1f} % of the ten nearest")
    )
    print_list("file was skipped", "files were skipped", [f"{name}: {reason}" for name, reason in skipped])
    query = ("--id", "ID") if of_vectors else ("IMAGE",)
    say(f"Search it with: {command('search', out, *query)}, or in a browser with: {command('serve', out)}")


@index.command(name="add", short_help="Add images.")
def add(
    place: IndexFolder,
    photos: Annotated[list[Path], Argument(metavar="PHOTOS...", help="A folder, or image files.")],
    metadata: Metadata = None,
    no_labels: NoLabels = False,
    device: Device = "auto",
) -> None:
    """Add images. Images that are already in the index under the same name are skipped.

    Example: nearfar index add my.index new/ --metadata new.csv
    """
    several = photos[0] if len(photos) == 1 else photos
    pictures, labels, about = _sources(several, metadata, no_labels)
    with bars() as watch, _open(place, device=device) as opened:
        _report(place, opened, opened.add(pictures, labels=labels, metadata=about, watch=watch))
        opened.compact(watch=watch)


@index.command(name="update", short_help="Update an index from a folder.")
def update(
    place: IndexFolder,
    photos: Photos = None,
    prune: Annotated[
        bool, Option("--prune", help="Remove items whose images are not in the folder, including uploads.")
    ] = False,
    yes: Annotated[bool, Option("--yes", help="Remove them even if they are more than half of the index.")] = False,
    metadata: Metadata = None,
    no_labels: NoLabels = False,
    data: Data = None,
    part: Part = None,
    device: Device = "auto",
) -> None:
    """Update an index from a folder: new images are embedded, moved ones keep their ids, changed ones are replaced.

    Images are identified by their content. Name the folder that the index was built from, not one inside it: if --prune
    would remove more than half of the items, it removes none unless --yes is given.

    Example: nearfar index update my.index photos/ --prune
    """
    pictures, labels, about = _sources(photos, metadata, no_labels, data, part)
    with bars() as watch, _open(place, device=device) as opened:
        found = opened.update(pictures, labels=labels, metadata=about, watch=watch)
        missing = set(found.missing) if prune else set()
        gone, count = [item.name for item in opened.items if item.id in missing], len(opened)
        most = not yes and 2 * len(gone) > count
        if gone and not most:
            opened.remove(found.missing)
            found.pruned = True
        _report(place, opened, found, removed=gone if found.pruned else ())
        opened.compact(watch=watch)
    if most:
        raise ValueError(
            f"--prune would remove {len(gone):,} of {count:,} items, so none was removed. Is this the folder that "
            f"{place} was built from? Use --yes to remove them"
        )


@index.command(name="remove", short_help="Remove items.")
def remove(
    place: IndexFolder,
    ids: Annotated[list[int] | None, Argument(metavar="[ID]...", help="Ids of items.")] = None,
    where: Where = None,
) -> None:
    """Remove items, by id or by filter. Ids are never reused.

    Example: nearfar index remove my.index 17 18

    Example: nearfar index remove my.index --where 'name~blurred/*'
    """
    from nearfar.search import filters

    if bool(ids) == bool(where):
        raise ValueError("give either the ids of items or --where")
    with _open(place) as opened:
        filtered = filters.combine([filters.parse(text) for text in where or ()])
        wanted = set(ids or opened.select(filtered).tolist())
        opened.remove(wanted)
        say(f"{place}: {len(wanted):,} removed, {len(opened):,} left")
        try:
            opened.compact()
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            say(f"their space is not free yet: the disk has no room for the compaction ({error})")


@index.command(name="info", short_help="Show what an index contains.")
def info(
    place: IndexFolder,
    everything: Everything = False,
    json: Json = None,
    force: Force = False,
) -> None:
    """Show what an index contains.

    Example: nearfar index info my.index
    """
    json = output_file(json, "index info", place, force=force)
    with _open(place, read_only=True) as opened:
        facts, labels, threshold = opened.info(), opened.items.labels(), opened.threshold
    told = {
        "model": "none" if facts["model"] is None else "{name} {fingerprint:.12}".format(**facts["model"]),
        "threshold": "none" if threshold is None else threshold.describe(),
    }
    if json != STDOUT:
        print_table(
            ("index", str(place)),
            [(key.replace("_", " "), _text(told.get(key, value))) for key, value in facts.items()],
        )
        print_list("class", "classes", [f"{label}: {count:,}" for label, count in labels.items()], everything)
    print_json(json, {**facts, "labels": labels})


@index.command(name="check", short_help="Look for damaged files.")
def check(
    place: IndexFolder,
    repair: Annotated[bool, Option("--repair", help="Build the backend again if its files are damaged.")] = False,
    device: Device = "auto",
) -> None:
    """Compare all files of an index with their digests. The exit code is 1 if something is damaged.

    Example: nearfar index check my.index
    """
    with bars() as watch, _open(place, read_only=not repair, device=device) as opened:
        damage = opened.check()
        if damage and repair:
            opened.compact(backend=opened.storage.settings["backend"], watch=watch)
            say(f"{place}: {opened.info()['backend']} was built again from the vectors")
            damage = opened.check()
        if damage:
            raise ValueError("; ".join(damage))
        say(f"{place}: {plural(len(opened), 'item')} and all files are as they were written")


@index.command(name="duplicates", short_help="List near duplicates.")
@derived("nearfar.search.index:Index.near_duplicates", leave_out=("watch",))
def duplicates(
    place: IndexFolder,
    threshold: float,
    everything: Everything = False,
    json: Json = None,
    force: Force = False,
) -> None:
    """List groups of images that are nearly the same.

    Example: nearfar index duplicates my.index --threshold 0.98 --json same.json
    """
    json = output_file(json, "duplicates", place, force=force)
    with bars() as watch, _open(place, read_only=True) as opened:
        groups = opened.near_duplicates(threshold, watch=watch)
    lines = []
    for same in groups:
        how = "identical files" if same.identical else f"{same.similarity:.3f}"
        lines.append(f"{how}: " + ", ".join(f"{item.name} ({item.id})" for item in same.items))
    if not groups and json != STDOUT:
        say(f"{place}: no two images have a cosine of {threshold} or more")
    print_list("group", "groups", lines if json != STDOUT else (), everything)
    rows = [
        {
            "similarity": group.similarity,
            "identical": group.identical,
            "items": [{"id": item.id, "name": item.name, "label": item.label} for item in group.items],
        }
        for group in groups
    ]
    print_json(json, {"threshold": threshold, "groups": rows})


@index.command(name="clusters", short_help="Cluster all images and write a page of contact sheets.")
@derived("nearfar.search.index:Index.clusters", leave_out=("watch",))
def clusters(
    place: IndexFolder,
    html: Annotated[Path, Option(metavar="FILE", help="The page.")] = Path("clusters.html"),
    shown: Annotated[int, Option(help="Images per cluster on the page.")] = 24,
    force: Force = False,
    **given: Any,
) -> None:
    """Cluster all images with k-means, and write a page with the most typical images of each cluster.

    Example: nearfar index clusters my.index -k 20 --html clusters.html
    """
    from nearfar.reports.search_pages import cluster_page

    html = claim_file(html, "clusters", [place], force=force)
    with bars() as watch, _open(place, read_only=True) as opened:
        found = opened.clusters(watch=watch, **given)
        write_text(html, cluster_page(found, whole("shown", shown)))
    pure = "" if found.purity is None else f", {100 * found.purity:.1f} % of the items have the class of their cluster"
    say(f"{html}: {len(found):,} clusters{pure}")


def _open(place: Path, *, read_only: bool = False, device: str = "auto") -> Index:
    from nearfar.search import Index

    return Index.open(place, read_only=read_only, device=device)


def _sources(
    photos: Path | list[Path] | None,
    metadata: Path | None,
    no_labels: bool,
    data: str | None = None,
    part: str | None = None,
) -> tuple[Images, Labels, dict[str, dict[str, Any]] | None]:
    """Images, their labels, and their metadata."""
    from nearfar.search.images import dataset_images, list_images
    from nearfar.search.metadata import read

    if part is not None and data is None:
        raise ValueError(f"--part is {part!r}; it requires --data")
    labels: Labels = None if no_labels else "folder"
    if data is not None:
        from nearfar.data import open as open_dataset

        listed = dataset_images(open_dataset(data, *(() if photos is None else (photos,))), part)
    elif photos is None:
        raise ValueError("PHOTOS is missing; give a folder of images, or --data")
    else:
        listed = list_images(photos, labels)
    if metadata is None:
        return listed, labels, None
    named, about = read(metadata)
    unknown = sorted(about.keys() - {each.name for each in listed})
    if unknown:
        say(f"{metadata}: {len(unknown):,} of {len(about):,} names match no image: {few(unknown, 3)}")
    known = [replace(each, label=named[each.name], explicit=True) if each.name in named else each for each in listed]
    return known, labels, about


def _report(place: Path, opened: Index, found: Update, removed: Sequence[str] = ()) -> None:
    words = [f"{len(found.added):,} added"]
    kept = "kept (cannot be read)"
    for name, ids in (("moved", found.moved), ("replaced", found.replaced), (kept, found.kept)):
        if ids:
            words.append(f"{len(ids):,} {name}")
    if found.missing:
        words.append(f"{len(found.missing):,} {'removed' if found.pruned else 'missing (--prune removes them)'}")
    say(f"{place}: {', '.join(words)}, {found.unchanged:,} unchanged; {len(opened):,} in all")
    print_list("item was removed", "items were removed", removed)
    print_list("file was skipped", "files were skipped", [f"{name}: {reason}" for name, reason in found.skipped])


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
