"""nearfar index, search, embed, calibrate and verify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

import nearfar as nf
from nearfar.cli.app import app, group
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
    derived,
)
from nearfar.cli.output import STDOUT, bad_files, output_file, print_json, print_list, print_table, say
from nearfar.utils import folders
from nearfar.utils.atomic import FULL_DISK, write_text
from nearfar.utils.folders import claim_file, keep_apart
from nearfar.utils.formatting import command, plural
from nearfar.utils.progress import bars
from nearfar.utils.validation import few, whole

if TYPE_CHECKING:
    from nearfar.search import Index
    from nearfar.search.images import Images, Labels
    from nearfar.search.results import Results
    from nearfar.search.update import Update


index = group("index", "Build, change and inspect an index of images.", example="build runs/birds photos/ -o my.index")

Photos = Annotated[
    Path | None,
    Argument(metavar="IMAGES", help="A folder or archive of images, whose subfolders are the classes; or vectors."),
]
Metadata = Annotated[
    Path | None, Option(metavar="FILE", help="A .csv or .jsonl file with labels and metadata, by 'name'.")
]
Data = Annotated[str | None, Option(metavar="NAME", help="IMAGES is this dataset; see nearfar data list.")]
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
    from nearfar.training.trainer import open_model

    threshold = nf.training.load_threshold(model)
    if threshold is not None and threshold.measure != measure:
        threshold = None
    keep_apart(out, (model, images, metadata))
    listed, labels, about = _sources(images, metadata, no_labels, data, part)
    opened = model if engine == "ray" else open_model(model, download=download)
    settings = {**given, "measure": measure, "engine": engine, "labels": labels, "metadata": about}
    with bars() as watch, nf.Index.build(opened, listed, out=out, threshold=threshold, watch=watch, **settings) as made:
        facts, skipped, of_vectors = made.info(), made.skipped, made.in_dim is not None
    recall = facts.get("recall@10")
    say(
        f"{out}: {plural(facts['count'], 'vector' if of_vectors else 'image')} of "
        f"{plural(facts['classes'], 'class', 'es')}, {plural(facts['dim'], 'dimension')}, "
        f"{facts['backend']}" + ("" if recall is None else f", finds {100 * recall:.1f} % of the ten nearest")
    )
    print_list("file was skipped", "files were skipped", [f"{name}: {reason}" for name, reason in skipped])
    if threshold is None and (model / "recipe.toml").is_file():
        say(f"It has no threshold; to tell match from no match, run: {command('calibrate', model, '--index', out)}")
    query = ("--id", "ID") if of_vectors else ("IMAGE",)
    say(f"Search it with: {command('search', out, *query)}, or in a browser with: {command('serve', out)}")


@index.command(name="add", short_help="Add images.")
def add(
    place: IndexFolder,
    photos: Annotated[list[Path], Argument(metavar="IMAGES...", help="A folder, or image files.")],
    metadata: Metadata = None,
    no_labels: NoLabels = False,
    device: Device = "auto",
) -> None:
    """Add images. Images that are already in the index under the same name are skipped.

    Example: nearfar index add my.index new/ --metadata new.csv
    """
    several = photos[0] if len(photos) == 1 else photos
    pictures, labels, about = _sources(several, metadata, no_labels)
    with bars() as watch, nf.Index.open(place, device=device) as opened:
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
    with bars() as watch, nf.Index.open(place, device=device) as opened:
        names = {item.id: item.name for item in opened.items}
        most = 1.0 if yes else 0.5
        done = opened.update(pictures, prune=prune, most=most, labels=labels, metadata=about, watch=watch)
        _report(place, opened, done, removed=[names[id] for id in sorted(done.missing)] if done.pruned else ())
        opened.compact(watch=watch)
        count = len(opened)
    if prune and done.missing and not done.pruned:
        raise ValueError(
            f"--prune would remove {len(done.missing):,} of {count:,} items, so none was removed. Is this the folder "
            f"that {place} was built from? Use --yes to remove them"
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
    with nf.Index.open(place) as opened:
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
    with nf.Index.open(place, read_only=True) as opened:
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
    with bars() as watch, nf.Index.open(place, read_only=not repair, device=device) as opened:
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
    with bars() as watch, nf.Index.open(place, read_only=True) as opened:
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
    with bars() as watch, nf.Index.open(place, read_only=True) as opened:
        groups = opened.clusters(watch=watch, **given)
        write_text(html, cluster_page(groups, whole("shown", shown)))
    purity = groups.purity
    pure = "" if purity is None else f", {100 * purity:.1f} % of the items have the class of their cluster"
    say(f"{html}: {len(groups):,} clusters{pure}")


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
        raise ValueError("IMAGES is missing; give a folder of images, or --data")
    else:
        listed = list_images(photos, labels)
    if metadata is None:
        return listed, labels, None
    named, about = read(metadata)
    unknown = sorted(about.keys() - {image.name for image in listed})
    if unknown:
        say(f"{metadata}: {len(unknown):,} of {len(about):,} names match no image: {few(unknown, 3)}")
    for at, image in enumerate(listed):
        if image.name in named:
            listed[at] = replace(image, label=named[image.name], explicit=True)
    return listed, labels, about


def _report(place: Path, opened: Index, done: Update, removed: Sequence[str] = ()) -> None:
    words = [f"{len(done.added):,} added"]
    kept = "kept (cannot be read)"
    for name, ids in (("moved", done.moved), ("replaced", done.replaced), (kept, done.kept)):
        if ids:
            words.append(f"{len(ids):,} {name}")
    if done.missing:
        words.append(f"{len(done.missing):,} {'removed' if done.pruned else 'missing (--prune removes them)'}")
    say(f"{place}: {', '.join(words)}, {done.unchanged:,} unchanged; {len(opened):,} in all")
    print_list("item was removed", "items were removed", removed)
    print_list("file was skipped", "files were skipped", [f"{name}: {reason}" for name, reason in done.skipped])


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


SIGNS = {None: "", True: "✓", False: "✗"}
DECISIONS = {True: "match", False: "no match"}


@app.command(name="search", short_help="Find the images of an index that are most similar to an image.")
@derived("nearfar.search.index:Index.search", leave_out=("query",))
def search_index(
    place: IndexFolder,
    images: Annotated[
        list[Path] | None, Argument(metavar="[IMAGE]...", help="Query images.", show_default=False)
    ] = None,
    ids: Annotated[
        list[int] | None, Option("--id", metavar="ID", help="Search by the id of an item; repeatable.")
    ] = None,
    where: Where = None,
    html: Annotated[Path | None, Option(metavar="FILE", help="Write a page with the results.")] = None,
    json: Json = None,
    force: Force = False,
    model: Annotated[Path | None, Option(metavar="MODEL", help="Use this copy of the model of the index.")] = None,
    device: Device = "auto",
    **given: Any,
) -> None:
    """Find the images of an index that are most similar to an image, or to one of its own items.

    Example: nearfar search my.index query.jpg -k 10 --html found.html
    """
    from nearfar.reports.search_pages import results_page
    from nearfar.search import filters
    from nearfar.training.trainer import open_model
    from nearfar.utils.atomic import write_text

    queries: list[Path | int] = [*(images or ()), *(ids or ())]
    if not queries:
        raise ValueError("IMAGE is missing; give an image, or the --id of an item")
    page = output_file(html, "search_results", place, *queries, force=force)
    json = output_file(json, "search", place, *queries, force=force)
    wanted = filters.combine([filters.parse(text) for text in where or ()]) or None
    network = None if model is None else open_model(model)
    with nf.Index.open(place, read_only=True, device=device, model=network) as opened:
        answers = [opened.search(query, where=wanted, **given) for query in queries]
    for query, results in zip(queries, answers, strict=True) if json != STDOUT else ():
        if len(answers) > 1:
            say(results.name)
        if len(results):
            _show(results)
        else:
            none = f"the index has no {'other ' if isinstance(query, int) else ''}items"
            say(f"no item meets --where {' --where '.join(where)}" if where else none)
    if page is not None:
        write_text(page, results_page(answers))
        say(f"wrote {page}")
    print_json(json, [results.to_json() for results in answers])


def _show(results: Results) -> None:
    """Print the neighbors of a query, and whether they match if the index has a threshold."""
    threshold = results.threshold
    rows = [
        (str(place), f"{hit.score:.4f}", *([] if match is None else [DECISIONS[match]]), hit.item.label or "",
         SIGNS[right], hit.item.name, str(hit.item.id))
        for place, (hit, right, match) in enumerate(zip(results, results.right, results.matches, strict=True), start=1)
    ]  # fmt: skip
    heads = ("", "score", *([] if threshold is None else ["decision"]), "class", "", "name", "id")
    print_table(heads, rows, right=(0, 1, len(heads) - 1))
    if threshold is not None:
        nearest = "" if results.unknown else results.labels[0] or results.names[0]
        say(f"match: {nearest}" if nearest else "No match")
        say(threshold.describe())


@app.command(name="embed", short_help="Write the embeddings of images or vectors.")
@derived(
    "nearfar.search.embedding_files:embed",
    positional={"model": "MODEL"},
    leave_out=("labels", "parts", "watch"),
    texts={
        "batch_size": "Number of images per forward pass.",
        "engine": "local, or ray: workers of a Ray cluster, with files on shared storage.",
        "jobs": "Number of Ray workers; default: one per GPU, or per CPU.",
        "ray_address": "Address of a Ray cluster.",
    },
)
def embed_images(
    model: Model,
    images: Annotated[
        Path, Argument(metavar="IMAGES", help="A folder or archive of images, one image, or a file of vectors.")
    ],
    engine: str,
    batch_size: int,
    out: Annotated[Path, Option("-o", "--out", metavar="FILE", help="An .npz, .safetensors or .npy file.")] = Path(
        "embeddings.npz"
    ),
    no_labels: NoLabels = False,
    download: Download = False,
    force: Force = False,
    **given: Any,
) -> None:
    """Write the embeddings, names and classes of images, or of the vectors in a file.

    With --engine ray, workers keep what is done in FILE.parts; the same command resumes an interrupted one.

    Example: nearfar embed runs/birds photos/ -o birds.safetensors && nearfar evaluate birds.safetensors

    Example: nearfar embed runs/wines wines.npz -o embeddings.npz
    """
    from nearfar.search.embedding_files import check_file, embed
    from nearfar.search.engines import part_names
    from nearfar.training.trainer import open_model

    out = check_file(out, [model, images], force=force)
    parts = out.with_name(f"{out.name}.parts")
    opened = model if engine == "ray" else open_model(model, download=download)
    settings = {**given, "engine": engine, "batch_size": batch_size, "labels": None if no_labels else "folder"}
    with bars() as watch:
        embedded = embed(opened, images, parts=parts, watch=watch, **settings)
    embedded.write(out, force=force)
    if engine == "ray":
        folders.remove(parts, part_names(len(embedded.names) + len(embedded.skipped), batch_size))
    print_list("file was skipped", "files were skipped", [f"{name}: {reason}" for name, reason in embedded.skipped])
    say(f"wrote {out}: {plural(len(embedded.names), 'embedding')} of {embedded.vectors.shape[1]:,} dimensions")


@app.command(name="calibrate", short_help="Choose the similarity from which on two images match.")
@derived("nearfar.training.evaluation.evaluate:calibrate", positional={"where": "MODEL"}, leave_out=("watch",))
def calibrate_model(
    where: Path,
    criterion: str,
    force: bool,
    index: Annotated[Path | None, Option(metavar="INDEX", help="Store it in this index of MODEL, too.")] = None,
    json: Json = None,
    **given: Any,
) -> None:
    """Choose the similarities from which on images match: two images, and the results of a search.

    They are chosen on the validation classes of a run and stored with it, for verify and for every index that is built
    with it; an index uses the one for its number of images. Test classes are never used. Without validation classes, a
    run is calibrated on those that it was trained on, which is said; a network needs --data. A network that is given by
    name has no folder and needs --out.

    Example: nearfar calibrate runs/birds

    Example: nearfar calibrate runs/birds --unknown 0.01 --items 5000

    Example: nearfar calibrate runs/birds --criterion 0.001 --data folder:more_birds/

    Example: nearfar calibrate efficientnet_lite0 --data folder:birds/ -o birds.json
    """

    json = output_file(json, "threshold", where, force=force)
    with bars() as watch, bad_files("--on-error skip"):
        threshold = nf.training.calibrate(where, criterion=_criterion(criterion), force=force, watch=watch, **given)
    if index is not None:
        with nf.Index.open(index, device="cpu") as opened:
            opened.set_threshold(threshold)
    if json != STDOUT:
        say(threshold.describe())
        say(f"{threshold.positives:,} pairs of one class, {threshold.negatives:,} of two; F1 {threshold.f1:.3f}")
        if threshold.search is not None:
            say(threshold.search.describe())
            say("An index uses the threshold for its own number of items.")
        written = ("--threshold", given["out"]) if "out" in given else ()
        say(f"Compare two images with: {command('verify', where, 'A.jpg', 'B.jpg', *written)}")
    print_json(json, threshold.to_json())


def _criterion(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


@app.command(name="verify", short_help="Decide whether two images are of one class.")
def verify_images(
    model: Model,
    first: Annotated[Path, Argument(metavar="A", help="An image.")],
    second: Annotated[Path | None, Argument(metavar="B", help="Another image.", show_default=False)] = None,
    threshold: Annotated[
        Path | None, Option(metavar="FILE", help="What calibrate --out wrote; default: the threshold of MODEL.")
    ] = None,
    json: Json = None,
    force: Force = False,
    device: Device = "auto",
) -> None:
    """Decide whether two images are of one class: match or no match, with the error rates of the decision.

    The threshold is that of: nearfar calibrate MODEL

    Example: nearfar verify runs/birds A.jpg B.jpg
    """
    from nearfar.data.store.decode import BadImage
    from nearfar.networks.weights.save import is_network
    from nearfar.search.encoder import Encoder
    from nearfar.training.evaluation.evaluate import calibrate_command

    if second is None:
        raise ValueError("B is missing; the form is: nearfar verify MODEL A B, with a calibrated model and two images")
    json = output_file(json, "verification", first, second, threshold, force=force)
    calibrated = nf.training.load_threshold(model, threshold)
    if calibrated is None:
        missing = f"--threshold is missing; {model} is the name of a network; write one"
        missing = missing if is_network(model) else f"{model} has no threshold; choose one"
        raise ValueError(f"{missing} with: {calibrate_command(model)}")
    encoder = Encoder(nf.load(model), device=device)
    vectors = []
    for file in (first, second):
        try:
            vectors.append(encoder.encode([file])[0])
        except BadImage as error:
            raise BadImage(f"{file}: {error}") from None
    score = calibrated.score(*vectors)
    match = calibrated.matches(score)
    if json != STDOUT:
        say(f"{'match' if match else 'no match'}: similarity {score:.4f}")
        say(calibrated.describe())
    print_json(json, {"match": match, "similarity": score, "threshold": calibrated.to_json()})
