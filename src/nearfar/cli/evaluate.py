"""nearfar evaluate"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from nearfar.cli.app import app
from nearfar.cli.words import whole_numbers
from nearfar.progress import bars
from nearfar.writing import write_json


@app.command(name="evaluate", short_help="Measure embeddings or a run: retrieval and clustering.")
def evaluate_files(
    embeddings: Annotated[
        Path,
        typer.Argument(
            metavar="EMBEDDINGS", help="Vectors: an .npy, .safetensors or .parquet file; or the folder of a run."
        ),
    ],
    labels: Annotated[
        Path | None, typer.Argument(metavar="[LABELS]", help="Their labels; may be left out if EMBEDDINGS holds both.")
    ] = None,
    gallery: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Vectors to look in instead of EMBEDDINGS.")
    ] = None,
    gallery_labels: Annotated[Path | None, typer.Option(metavar="FILE", help="Labels of the gallery.")] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DATA", help="What to test a run on instead: NAME, NAME:ROOT, or its own data's new ROOT."
        ),
    ] = None,
    ks: Annotated[
        str | None, typer.Option(help="The k of recall@k, separated by commas; 1,2,4,8 or as in the run's recipe.")
    ] = None,
    measure: Annotated[
        str | None, typer.Option(help="What is near: cosine or euclidean; cosine or as in the run's recipe.")
    ] = None,
    clustering: Annotated[
        bool, typer.Option("--clustering/--no-clustering", help="Cluster EMBEDDINGS by k-means: NMI, AMI, F1.")
    ] = True,
    normalization: Annotated[str, typer.Option(help="Of NMI: arithmetic, or geometric as in old papers.")] = (
        "arithmetic"
    ),
    intervals: Annotated[bool, typer.Option("--intervals", help="Add bootstrap intervals of 95 %.")] = False,
    worst: Annotated[int, typer.Option(metavar="N", help="List the N queries that find their class worst.")] = 0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write everything to this file as well.")] = None,
    key: Annotated[str | None, typer.Option(metavar="NAME", help="Tensor or column with the vectors.")] = None,
    labels_key: Annotated[str | None, typer.Option(metavar="NAME", help="Tensor or column with the labels.")] = None,
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda, cuda:1, …")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of clusters and intervals.")] = 0,
) -> None:
    """Measure how well embeddings find and cluster their classes.

    Example: nearfar evaluate embeddings.npy labels.npy --intervals --json metrics.json

    Example: nearfar evaluate runs/first --data folder:photos
    """
    from nearfar import evaluating as evaluation

    if gallery is None and gallery_labels is not None:
        raise ValueError("--gallery-labels goes with --gallery")
    if json is not None:
        evaluation.check_file(json)
    numbers: Sequence[int] = (1, 2, 4, 8) if ks is None else whole_numbers("--ks", ks)
    files = {"embeddings": embeddings, "labels": labels, "gallery": gallery, "gallery_labels": gallery_labels}
    given = {name: str(file) for name, file in files.items() if file is not None}
    with bars() as watch:
        if embeddings.is_dir():
            if len(given) > 1 or key is not None or labels_key is not None:
                raise ValueError(f"{embeddings} is a folder; a run knows its labels and its gallery")
            queries, asked, own_ks, own_measure = evaluation.load_run(embeddings, data=data, device=device, watch=watch)
            numbers, measure = own_ks if ks is None else numbers, measure or own_measure
            given = {"run": str(embeddings), **({} if data is None else {"data": data})}
        else:
            if data is not None:
                raise ValueError(f"--data goes with a run, and {embeddings} is no folder")
            queries, asked = (
                evaluation.load("embeddings", embeddings, labels, key=key, labels_key=labels_key, device=device),
                None,
            )
            if gallery is not None:
                asked = evaluation.load(
                    "gallery", gallery, gallery_labels, key=key, labels_key=labels_key, device=device
                )
        report = evaluation.evaluate(
            queries,
            asked,
            ks=numbers,
            measure=measure or "cosine",
            clustering=clustering,
            normalization=normalization,
            intervals=intervals,
            worst=worst,
            seed=seed,
            watch=watch,
        )
    evaluation.show(report)
    if json is not None:
        write_json(json, {"files": given, **report})
        print(f"wrote {json}")
