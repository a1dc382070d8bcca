"""A run as one page: what was trained, what came of it, and where it fails.

The page is a single file without scripts that asks nothing of the network; what comes from data and settings (class
names, file names) is text and never markup.
"""

from __future__ import annotations

from pathlib import Path

from nearfar.reports import run_sections as parts
from nearfar.reports.gallery import METHODS
from nearfar.reports.html import document
from nearfar.reports.run_data import measured
from nearfar.training.run.reader import RunData, read_run
from nearfar.utils.atomic import write_text
from nearfar.utils.progress import Watch
from nearfar.utils.validation import one_of, whole

NAME = "report.html"


def report(
    folder: str | Path,
    *,
    out: str | Path | None = None,
    map: str = "pca",
    queries: int = 8,
    worst: int = 8,
    device: str = "cpu",
    seed: int = 0,
    watch: Watch = lambda work: None,
) -> Path:
    """Write the page of a run and say where it is.

    Args:
        folder: The run folder. A run that is under way has a page as well, without what is not known yet.
        out: The file; report.html in the run folder unless told.
        map: How embeddings are laid on a plane: "pca", "tsne" or "umap" (needs umap-learn).
        queries: How many are shown with what they find, drawn at random from different classes.
        worst: How many of those with the least average precision are shown.
        device: Where metrics are computed.
        seed: Of what is drawn.
        watch: Told what work begins.
    """
    one_of("map", map, METHODS)
    whole("queries", queries, low=0)
    whole("worst", worst, low=0)
    file = Path(out) if out is not None else Path(folder) / NAME
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ValueError(f"out is {str(file)!r}; needed is a file in a folder that exists")
    run = read_run(folder)
    found = measured(run, device=device, seed=seed, watch=watch)
    shown = [
        parts.curves(run),
        parts.metric_table(run, found),
        parts.retrieval(run, found, queries, seed),
        parts.worst_queries(run, found, worst),
        parts.class_map(run, map, seed),
        parts.weights(run),
        parts.settings(run),
    ]
    write_text(file, _page(run, [parts.figures(run, found), *shown]))
    return file


def _page(run: RunData, sections: list[str]) -> str:
    network = run.recipe.network
    pieces = [run.recipe.loss.name, network.name, run.manifest.get("data", {}).get("name", run.recipe.data.name)]
    version = run.manifest.get("versions", {}).get("nearfar")
    written = f"Trained by nearfar {version}." if version else "Written by nearfar."
    return document(run.name, " · ".join(map(str, pieces)), sections, foot=written)
