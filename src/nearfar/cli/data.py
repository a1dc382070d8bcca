"""nearfar data and nearfar weights: datasets, and published weights of networks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

import nearfar as nf
from nearfar.cli.app import group
from nearfar.cli.options import Cache, Device, Download, Everything, Force, Json, derived
from nearfar.cli.output import SHOWN, STDOUT, output_file, print_json, print_list, print_table, say, say_more, setting
from nearfar.utils.formatting import command, plural
from nearfar.utils.progress import bars

if TYPE_CHECKING:
    from nearfar.data.datasets.base import Dataset
    from nearfar.data.store.store import BadFile, Store


data = group("data", "List, check, prepare and preview datasets.", example="verify cub CUB_200_2011/")

Name = Annotated[str, Argument(metavar="NAME", help="Name of a dataset; nearfar data list shows them all.")]
Roots = Annotated[
    list[Path] | None,
    Argument(metavar="[ROOT]...", help="Path of the dataset: a folder, an archive or several archives."),
]
Settings = Annotated[list[str] | None, Option("--set", metavar="NAME=VALUE", help="A setting of the dataset.")]
Workers = Annotated[int | None, Option(help="Decoding threads; default: the number of processors.")]


@data.command(name="list", short_help="List the datasets.")
def list_sets() -> None:
    """List the datasets.

    Example: nearfar data list
    """
    from nearfar.data.datasets.base import takes_root

    needs = {True: "ROOT", False: "[ROOT]", None: "–"}
    rows = [(name, needs[takes_root(name)], nf.data.summary(name)) for name in nf.data.names()]
    print_table(("dataset", "path", "description"), rows)
    say("Layouts and settings of a dataset: nearfar data info NAME. Contents of your copy: nearfar data info NAME ROOT")


@data.command(name="info", short_help="Show what a dataset contains and whether it is prepared.")
def info(
    name: Name, roots: Roots = None, settings: Settings = None, cache: Cache = None, everything: Everything = False
) -> None:
    """Show what a dataset contains and whether it is prepared. Without ROOT, describe the dataset.

    Example: nearfar data info folder photos/
    """
    from nearfar.data.datasets.base import takes_root
    from nearfar.data.store.prepare import stores_of

    if not roots and not settings and takes_root(name) is not None:
        print(nf.data.describe(name))
        return
    dataset = _open(name, roots, settings)
    _print_parts(dataset)
    print_list("note", "notes", dataset.notes, everything)
    if dataset.columns:
        say(f"further columns: {', '.join(dataset.columns)}")
    if not dataset.is_encoded:
        say("The dataset is in memory; no preparation is needed.")
        return
    stores = stores_of(dataset, cache)
    if not stores:
        given = [word for text in settings or () for word in ("--set", text)]
        say(f"Not prepared. To prepare it, run: {command('data', 'prepare', name, *(roots or ()), *given)}")
        return
    for store in stores:
        about = store.about
        say(f"prepared: {_size(store)}, side {about['side']}, aspect {about['aspect']}, in {store.folder}")
    # All stores are made of the same files, so they skipped the same ones.
    _print_bad(max((store.bad for store in stores), key=len), len(dataset), everything)


@data.command(name="verify", short_help="Compare a dataset with its published numbers.")
def verify(
    name: Name,
    roots: Roots = None,
    settings: Settings = None,
    images: Annotated[
        bool, Option("--images/--no-images", help="Decode every image: finds bad files and duplicates.")
    ] = True,
    workers: Workers = None,
    everything: Everything = False,
) -> None:
    """Compare a dataset with its published lists and numbers. The exit code is 1 if anything differs.

    Also names test images that are in a training class as well, with the same pixels or nearly the same.

    Example: nearfar data verify cub CUB_200_2011/
    """
    from nearfar.data.store.prepare import check_images

    dataset = _open(name, roots, settings)
    _print_parts(dataset)
    problems = nf.data.problems(dataset)
    bad: Sequence[BadFile] = ()
    shared: Sequence[str] = ()
    if images:
        with bars() as watch:
            bad, shared = check_images(dataset, workers=workers, progress=watch("decoding"))
    print_list("difference", "differences", problems, everything)
    _print_bad(bad, len(dataset), everything)
    print_list(
        "test item is in a training class as well", "test items are in a training class as well", shared, everything
    )
    if problems or bad:
        raise typer.Exit(1)
    say(f"{dataset.name}: complete, no differences" + (", all images can be decoded." if images else "."))


@data.command(name="prepare", short_help="Decode a dataset into the cache.")
@derived("nearfar.data.store.prepare:prepare", leave_out=("dataset", "progress"))
def prepare_set(
    name: Name, roots: Roots = None, settings: Settings = None, everything: Everything = False, **given: Any
) -> None:
    """Decode a dataset once into the cache. It can be interrupted at any time and continues when called again.

    Example: nearfar data prepare folder photos/ --side 256 --on-error skip
    """
    from nearfar.data.store.prepare import BadFilesError, prepare

    dataset = _open(name, roots, settings)
    start = time.monotonic()
    worked = False

    try:
        with bars() as watch:
            bar = watch("decoding")

            def progress(done: int, total: int) -> None:
                nonlocal worked
                worked = True
                if bar is not None:
                    bar(done, total)

            store = prepare(dataset, progress=progress, **given)
    except BadFilesError as error:
        _print_bad(error.bad, error.count, everything)
        rest = "" if len(error.bad) == error.count else "; --on-error skip continues without them"
        raise ValueError(f"{len(error.bad):,} of {error.count:,} files could not be decoded{rest}") from error
    _print_bad(store.bad, len(dataset), everything)
    if store.folder is None:
        say(f"{_size(store)} are in memory; no preparation is needed.")
    elif worked:
        say(f"prepared {_size(store)} in {time.monotonic() - start:.1f} s: {store.folder}")
    else:
        say(f"{_size(store)} were prepared before: {store.folder}")


@data.command(name="show", short_help="Draw the first training batch as an image.")
@derived(
    "nearfar.data.preview:first_batch",
    leave_out=("dataset", "view"),
    texts={
        "part": "train, test, query, gallery, …",
        "classes": "Classes in the batch; default: 8.",
        "per_class": "Images of each class.",
        "side": "Shorter side in pixels; smaller images are not enlarged.",
    },
)
def show(
    name: Name,
    part: str,
    side: int,
    per_class: int,
    roots: Roots = None,
    out: Annotated[Path, Option("-o", "--out", metavar="FILE", help="A .png, .jpg or .webp file.")] = Path("grid.png"),
    view: Annotated[
        str, Option(help="random, random_resized, center or none; auto is random, or none for small images.")
    ] = "auto",
    size: Annotated[int | None, Option(help="Size of the network's input; default: 224.")] = None,
    resize: Annotated[int | None, Option(help="Shorter side before cropping; default: 256.")] = None,
    flip: Annotated[bool, Option("--flip/--no-flip", help="Mirror images at random.")] = True,
    cache: Cache = None,
    settings: Settings = None,
    force: Force = False,
    **given: Any,
) -> None:
    """Draw the first batch of a training, with its crops and flips, one line per class.

    Example: nearfar data show cub CUB_200_2011/ --view random_resized --out grid.png
    """
    from nearfar.data import preview
    from nearfar.utils.validation import whole

    out = preview.check_file(out, force=force)
    whole("per_class", per_class)
    dataset = _open(name, roots, settings)
    if dataset.is_vectors:
        raise ValueError(f"{name} holds vectors; there are no images to show")
    chosen = preview.training_view(dataset, view, size=size, resize=resize, flip=flip)
    side = max(side, chosen.resize or 0)
    images, labels = preview.first_batch(
        dataset, view=chosen, part=part, per_class=per_class, side=side, cache=cache, **given
    )
    preview.write(preview.grid(images, [dataset.classes[label] for label in labels]), out, force=force)
    height, width = chosen.window
    say(
        f"wrote {out}: {len(images)} images of {len(set(labels.tolist()))} classes of {part}, {chosen.crop} view, "
        f"{height} × {width} pixels"
    )


@data.command(name="audit", short_help="Find duplicates and images that may have a wrong class.")
@derived(
    "nearfar.search.audit:audit",
    leave_out=("index", "watch"),
    texts={"k": "Number of neighbors.", "threshold": "Lowest cosine of two duplicates, from 0 to 1."},
)
def audit_images(
    photos: Annotated[
        Path, Argument(metavar="IMAGES", help="A folder or archive of images; its subfolders are the classes.")
    ],
    model: Annotated[
        Path, Option(metavar="MODEL", help="What compares the images: a run folder, or the name of a network.")
    ],
    html: Annotated[Path, Option(metavar="FILE", help="The page.")] = Path("audit.html"),
    shown: Annotated[int, Option(help="Images, and groups of duplicates, on the page.")] = 100,
    json: Json = None,
    force: Force = False,
    device: Device = "auto",
    download: Download = False,
    **given: Any,
) -> None:
    """Find duplicates, and images whose nearest neighbors all have other classes; write them as a page.

    Example: nearfar data audit photos/ --model efficientnet_lite0 --html audit.html
    """
    from tempfile import TemporaryDirectory

    from nearfar.reports.search_pages import audit_page
    from nearfar.search.audit import audit
    from nearfar.training.trainer import open_model
    from nearfar.utils.atomic import write_text
    from nearfar.utils.folders import claim_file
    from nearfar.utils.validation import whole

    whole("shown", shown)
    html = claim_file(html, "audit", [photos], force=force)
    json = output_file(json, "audit results", photos, force=force)
    network = open_model(model, download=download)
    with (
        TemporaryDirectory() as place,
        bars() as watch,
        nf.Index.build(network, photos, out=Path(place) / "index", device=device, watch=watch) as index,
    ):
        audited = audit(index, watch=watch, **given)
        write_text(html, audit_page(audited, shown))
        skipped = index.skipped
    if json != STDOUT:
        print_list("file was skipped", "files were skipped", [f"{name}: {reason}" for name, reason in skipped])
        suspects = [
            f"{suspect.item.name}: labeled {suspect.item.label}, neighbors {suspect.label}"
            for suspect in audited.suspects
        ]
        print_list(
            "image whose neighbors all have other classes", "images whose neighbors all have other classes", suspects
        )
        names = [", ".join(item.name for item in group.items) for group in audited.duplicates]
        print_list("group of duplicates", "groups of duplicates", names)
        say(f"wrote {html}")
    rows = [
        {"name": suspect.item.name, "label": suspect.item.label, "neighbors": suspect.label, "share": suspect.share}
        for suspect in audited.suspects
    ]
    groups = [
        {"names": [item.name for item in group.items], "similarity": group.similarity, "identical": group.identical}
        for group in audited.duplicates
    ]
    print_json(json, {"suspects": rows, "duplicates": groups})


def _open(name: str, roots: Sequence[Path] | None, settings: Sequence[str] | None) -> Dataset:

    root = None if not roots else roots[0] if len(roots) == 1 else list(roots)
    return nf.data.open(name, root, **dict(setting(text) for text in settings or ()))


def _print_parts(dataset: Dataset) -> None:
    import numpy as np

    kind = "vectors" if dataset.is_vectors else "images"
    say(f"{dataset.name}: {plural(len(dataset), kind[:-1])} of {plural(dataset.num_classes, 'class', 'es')}")
    if dataset.guess:
        say(dataset.guess)
    rows = []
    for part, places in dataset.parts.items():
        counts = np.unique(dataset.labels[places], return_counts=True)[1]
        spread = f"{counts.min():,} – {counts.max():,}" if len(counts) else "–"
        rows.append((part, f"{len(places):,}", f"{len(counts):,}", spread))
    print_table(("part", kind, "classes", f"{kind} per class"), rows, right=(1, 2, 3))


def _print_bad(bad: Sequence[BadFile], count: int, everything: bool) -> None:
    if not bad:
        return
    shown = bad if everything else bad[:SHOWN]
    say(f"{len(bad):,} of {count:,} files could not be decoded:")
    print_table(("file", "reason"), [(file.name, file.reason) for file in shown])
    say_more(len(bad), len(shown))


def _size(store: Store) -> str:
    size = store.nbytes
    unit = next(
        (word, scale) for word, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if size >= scale or scale == 1e3
    )
    return f"{len(store):,} images ({size / unit[1]:.2f} {unit[0]})"


weights = group("weights", "List or locate published weights.", example="list")


@weights.command(name="list", short_help="List the networks with published weights.")
def list_weights() -> None:
    """List the networks with published weights, and which of these are on this machine.

    Example: nearfar weights list
    """
    from nearfar.networks.weights import published

    rows = []
    for weights in published.KNOWN:
        file = published.locate(weights)
        place = f"no: {weights.url or weights.install_command}" if file is None else str(file)
        rows.append((weights.name, weights.file, place))
    print_table(("network", "file", "on this machine"), rows)
    say(f"Cache: {published.folder()}")


@weights.command(name="path", short_help="Print the path of the weights of a network.")
def weights_path(
    name: Annotated[str, Argument(metavar="NETWORK", help="A network of: nearfar weights list")],
    download: Annotated[
        bool, Option("--download", help="Download the weights if they are not on this machine.")
    ] = False,
) -> None:
    """Print the path of the weights of a network, and nothing else.

    Example: nearfar weights path resnet50 --download
    """
    from nearfar.networks.weights import published

    weights = published.get(name)
    file = published.fetch(weights) if download else published.locate(weights)
    if file is None:
        how = f"nearfar weights path {name} --download" if weights.url else weights.install_command
        raise FileNotFoundError(f"the weights of {name} ({weights.file}) are not on this machine; run: {how}")
    print(file)
