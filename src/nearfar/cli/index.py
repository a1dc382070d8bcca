"""nearfar index"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearfar.cli.app import app
from nearfar.cli.output import SHOWN, STDOUT, print_json, print_list, print_table, say
from nearfar.utils.progress import bars
from nearfar.utils.validation import few

if TYPE_CHECKING:
    from nearfar.search import Index
    from nearfar.search.pictures import Labels, Pictures
    from nearfar.search.update import Update

index = typer.Typer(rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})
app.add_typer(index, name="index", short_help="Build, change and look into an index of pictures.")

Place = Annotated[Path, typer.Argument(metavar="INDEX", help="The folder of an index.")]
Photos = Annotated[
    Path | None,
    typer.Argument(metavar="PHOTOS", help="A folder or an archive of pictures; classes are folders in it."),
]
Backend = Annotated[
    str, typer.Option(help="auto, exact, faiss (or faiss:flat, :ivf, :hnsw), milvus, or milvus:http://HOST:19530.")
]
Device = Annotated[str, typer.Option(help="Where the model computes: auto, cpu, cuda, cuda:1, …")]
Metadata = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A .csv or .jsonl file with more about pictures, by 'name'.")
]
NoLabels = Annotated[bool, typer.Option("--no-labels", help="Folders are no classes.")]
Data = Annotated[str | None, typer.Option(metavar="NAME", help="PHOTOS is this data set: see nearfar data list.")]
Part = Annotated[str | None, typer.Option(metavar="PART", help="With --data: only this part, such as test.")]


@index.callback(invoke_without_command=True)
def index_root(context: typer.Context) -> None:
    """Build, change and look into an index of pictures.

    Example: nearfar index build runs/birds photos/ -o my.index
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


@index.command(name="build", short_help="Embed pictures and make an index of them.")
def build(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A run folder, or one with model.safetensors.")],
    photos: Photos = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FOLDER", help="The folder of the index, a new one.")
    ] = Path("my.index"),
    backend: Backend = "auto",
    measure: Annotated[str, typer.Option(help="What is near: cosine or euclidean.")] = "cosine",
    metadata: Metadata = None,
    no_labels: NoLabels = False,
    data: Data = None,
    part: Part = None,
    device: Device = "auto",
    batch_size: Annotated[int, typer.Option(help="Pictures that the model reads at once.")] = 64,
) -> None:
    """Embed pictures and make an index of them. What was interrupted is gone on with by: nearfar index update

    Example: nearfar index build runs/birds photos/ -o my.index

    Example: nearfar index build runs/birds CUB_200_2011/ --data cub --part test -o cub.index

    Example: nearfar index build runs/digits --data digits -o digits.index
    """
    from nearfar.search import Index
    from nearfar.training.api import model_folder

    pictures, labels, about = _described(photos, metadata, no_labels, data, part)
    with (
        bars() as watch,
        Index.build(
            model_folder(model),
            pictures,
            out=out,
            backend=backend,
            labels=labels,
            metadata=about,
            measure=measure,
            device=device,
            batch_size=batch_size,
            watch=watch,
        ) as made,
    ):
        facts, skipped = made.info(), made.skipped
    recall = facts.get("recall@10")
    say(
        f"{out}: {facts['count']:,} pictures of {facts['classes']:,} classes, {facts['dim']} dimensions, "
        f"{facts['backend']}" + ("" if recall is None else f", finds {100 * recall:.1f} % of the ten nearest")
    )
    print_list("files were left out", [f"{name}: {reason}" for name, reason in skipped])
    say(f"Search it with: nearfar search {out} PICTURE   or in a browser with: nearfar serve {out}")


@index.command(name="add", short_help="Add pictures.")
def add(
    place: Place,
    photos: Annotated[list[Path], typer.Argument(metavar="PHOTOS...", help="A folder, or picture files.")],
    metadata: Metadata = None,
    no_labels: NoLabels = False,
    device: Device = "auto",
) -> None:
    """Add pictures. Those that are there already, under the same name, are passed over.

    Example: nearfar index add my.index new/ --metadata new.csv
    """
    several = photos[0] if len(photos) == 1 else photos
    pictures, labels, about = _described(several, metadata, no_labels)
    with bars() as watch, _open(place, device=device) as opened:
        _tell(place, opened, opened.add(pictures, labels=labels, metadata=about, watch=watch))
        opened.save(watch=watch)


@index.command(name="update", short_help="Follow a folder: embed what is new, keep what was moved.")
def update(
    place: Place,
    photos: Photos = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove items whose pictures are not there, uploaded ones too.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them even if they are most of the index.")] = False,
    metadata: Metadata = None,
    no_labels: NoLabels = False,
    data: Data = None,
    part: Part = None,
    device: Device = "auto",
) -> None:
    """Follow a folder: what is new is embedded, what was moved keeps its id, what changed is replaced.

    Pictures are told apart by their content. Name the folder that the index was built of, not one inside it: where
    --prune would remove more than half of the items, it removes none unless --yes is given.

    Example: nearfar index update my.index photos/ --prune
    """
    pictures, labels, about = _described(photos, metadata, no_labels, data, part)
    with bars() as watch, _open(place, device=device) as opened:
        found = opened.update(pictures, labels=labels, metadata=about, watch=watch)
        missing = set(found.missing) if prune else set()
        gone, count = [item.name for item in opened.items if item.id in missing], len(opened)
        most = not yes and 2 * len(gone) > count
        if gone and not most:
            opened.remove(found.missing)
            found.pruned = True
        _tell(place, opened, found, removed=gone if found.pruned else ())
        opened.save(watch=watch)
    if most:
        raise ValueError(
            f"--prune would remove {len(gone):,} of {count:,} items, and has removed none: is this the folder that "
            f"{place} was built of? --yes removes them all the same"
        )


@index.command(name="remove", short_help="Remove items.")
def remove(
    place: Place,
    ids: Annotated[list[int] | None, typer.Argument(metavar="[ID]...", help="Numbers of items.")] = None,
    where: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Or all items like this; repeatable.")
    ] = None,
) -> None:
    """Remove items, by number or by filter. Their numbers are never given to others.

    Example: nearfar index remove my.index 17 18

    Example: nearfar index remove my.index --where 'name~blurred/*'
    """
    from nearfar.search import filters

    if bool(ids) == bool(where):
        raise ValueError("needed are the ids of items, or --where, and not both")
    with _open(place) as opened:
        filtered = filters.together([filters.parse(text) for text in where or ()])
        wanted = set(ids or opened.select(filtered).tolist())
        opened.remove(wanted)
        opened.save()
        say(f"{place}: {len(wanted):,} removed, {len(opened):,} left")


@index.command(name="info", short_help="Tell what an index holds.")
def info(
    place: Place,
    everything: Annotated[bool, typer.Option("--all", help=f"List all classes, not just the first {SHOWN}.")] = False,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it to this file as well; - prints it instead.")
    ] = None,
) -> None:
    """Tell what an index holds.

    Example: nearfar index info my.index
    """
    with _open(place, read_only=True) as opened:
        facts, labels = opened.info(), opened.items.labels()
    model = facts.pop("model")
    facts |= {"model": "none" if model is None else f"{model['name']} {model['fingerprint'][:12]}"}
    if json != STDOUT:
        print_table(("index", str(place)), [(key.replace("_", " "), _words(value)) for key, value in facts.items()])
        print_list("classes", [f"{label}: {count:,}" for label, count in labels.items()], everything)
    if json is not None:
        print_json(json, {**facts, "model": model, "labels": labels})


@index.command(name="duplicates", short_help="List pictures that are nearly the same.")
def duplicates(
    place: Place,
    threshold: Annotated[float, typer.Option(help="The least cosine of two that are the same, from 0 to 1.")] = 0.95,
    everything: Annotated[bool, typer.Option("--all", help=f"List all groups, not just the first {SHOWN}.")] = False,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all groups to this file; - prints them instead.")
    ] = None,
) -> None:
    """List pictures that are nearly the same, in groups.

    Example: nearfar index duplicates my.index --threshold 0.98 --json same.json
    """
    with bars() as watch, _open(place, read_only=True) as opened:
        groups = opened.near_duplicates(threshold, watch=watch)
    lines = []
    for group in groups:
        how = "the same file" if group.identical else f"{group.similarity:.3f}"
        lines.append(f"{how}: " + ", ".join(f"{item.name} ({item.id})" for item in group.items))
    if not groups and json != STDOUT:
        say(f"{place}: no two pictures have a cosine of {threshold} or more")
    print_list("groups", lines if json != STDOUT else (), everything)
    if json is not None:
        rows = [
            {
                "similarity": group.similarity,
                "identical": group.identical,
                "items": [{"id": item.id, "name": item.name, "label": item.label} for item in group.items],
            }
            for group in groups
        ]
        print_json(json, {"threshold": threshold, "groups": rows})


@index.command(name="clusters", short_help="Group all pictures, and make a page of contact sheets.")
def clusters(
    place: Place,
    k: Annotated[int | None, typer.Option("-k", help="How many; the root of half the pictures unless told.")] = None,
    html: Annotated[Path, typer.Option(metavar="FILE", help="The page.")] = Path("clusters.html"),
    shown: Annotated[int, typer.Option(help="Pictures of each cluster on the page.")] = 24,
    seed: Annotated[int, typer.Option(help="Of the first centres.")] = 0,
) -> None:
    """Group all pictures by k-means, and make a page with the most typical pictures of each group.

    Example: nearfar index clusters my.index -k 20 --html clusters.html
    """
    with bars() as watch, _open(place, read_only=True) as opened:
        found = opened.clusters(k, seed=seed, watch=watch)
        found.write(html, shown=shown)
    pure = "" if found.purity is None else f", {100 * found.purity:.1f} % of their cluster's class"
    say(f"{html}: {len(found):,} clusters{pure}")


def _open(place: Path, *, read_only: bool = False, device: str = "auto") -> Index:
    from nearfar.search import Index

    return Index.open(place, read_only=read_only, device=device)


def _described(
    photos: Path | list[Path] | None,
    metadata: Path | None,
    no_labels: bool,
    data: str | None = None,
    part: str | None = None,
) -> tuple[Pictures, Labels, dict[str, dict[str, Any]] | None]:
    """Pictures, their classes, and what else is known of them."""
    from nearfar.search import metadata as notes
    from nearfar.search.pictures import gather, of_dataset

    if part is not None and data is None:
        raise ValueError(f"--part is {part!r}; it goes with --data")
    labels: Labels = None if no_labels else "folder"
    if data is not None:
        from nearfar import data as room

        listed = of_dataset(room.open(data, photos) if photos is not None else room.open(data), part)
    elif photos is None:
        raise ValueError("PHOTOS is missing; needed is a folder of pictures, or --data")
    else:
        listed = gather(photos, labels)
    if metadata is None:
        return listed, labels, None
    named, about = notes.read(metadata)
    unknown = sorted(about.keys() - {each.name for each in listed})
    if unknown:
        say(f"{metadata}: {len(unknown):,} of {len(about):,} names match no picture: {few(unknown, 3)}")
    known = [replace(each, label=named[each.name], told=True) if each.name in named else each for each in listed]
    return known, labels, about


def _tell(place: Path, opened: Index, found: Update, removed: Sequence[str] = ()) -> None:
    words = [f"{len(found.added):,} added"]
    kept = "kept (cannot be read now)"
    for name, ids in (("moved", found.moved), ("replaced", found.replaced), (kept, found.kept)):
        if ids:
            words.append(f"{len(ids):,} {name}")
    if found.missing:
        words.append(f"{len(found.missing):,} {'removed' if found.pruned else 'missing (--prune removes them)'}")
    say(f"{place}: {', '.join(words)}, {found.unchanged:,} unchanged; {len(opened):,} in all")
    print_list("items were removed", removed)
    print_list("files were left out", [f"{name}: {reason}" for name, reason in found.skipped])


def _words(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
