"""Pages of images: search results, contact sheets of clusters, and the audit of labeled images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nearfar.reports.pages import render
from nearfar.search.items import Item
from nearfar.search.results import Results
from nearfar.utils.formatting import percent, plural

if TYPE_CHECKING:
    from nearfar.search.audit import Audit
    from nearfar.search.clusters import Clusters
    from nearfar.search.index import Index

KINDS = {None: "", True: "good", False: "bad"}


def results_page(answers: Sequence[Results]) -> str:
    """A page with the neighbors of each query, framed green if they have its class and red otherwise."""
    judged = [right for results in answers for right in results.right if right is not None]
    lead = f"{len(answers):,} {'query' if len(answers) == 1 else 'queries'}, nearest neighbors first."
    if judged:
        lead += f" {sum(judged):,} of {len(judged):,} neighbors have the class of their query."
    queries = [{"results": results, "figures": _figures(results)} for results in answers]
    return render("search_results.html", "Neighbors", lead=lead, queries=queries)


def cluster_page(clusters: Clusters, shown: int) -> str:
    """A page with a contact sheet of each cluster."""
    items = plural(sum(len(group.items) for group in clusters.groups), "item")
    lead = f"{items} in {plural(len(clusters), 'cluster')}, the largest first, with the most typical images."
    if clusters.purity is not None:
        lead += f" {percent(clusters.purity)} have the most frequent class of their cluster."
    contact_sheets = [
        {"group": group, "figures": [_of_item(clusters.index, item) for item in group.items[:shown]]}
        for group in clusters.groups
    ]
    return render("clusters.html", "Clusters", lead=lead, clusters=contact_sheets)


def audit_page(audit: Audit, shown: int) -> str:
    """A page with duplicates, and with images whose neighbors all have other classes."""
    index = audit.index
    suspects = []
    for suspect in audit.suspects[:shown]:
        figures = [_of_item(index, suspect.item, "asked")]
        figures += [_of_item(index, neighbor, "bad") for neighbor in suspect.neighbors]
        suspects.append({"suspect": suspect, "figures": figures})
    groups = [
        {"group": group, "figures": [_of_item(index, item) for item in group.items]}
        for group in audit.duplicates[:shown]
    ]
    lead = (
        f"{plural(len(index), 'image')}: {plural(len(audit.suspects), 'image')} whose neighbors all have other "
        f"classes, and {plural(len(audit.duplicates), 'group')} of duplicates."
    )
    return render("audit.html", "Audit", lead=lead, audit=audit, suspects=suspects, groups=groups)


def _figures(results: Results) -> list[dict[str, Any]]:
    """The query and its neighbors."""
    images = results.pictures or (b"",) * (len(results) + 1)
    figures = [_figure(images[0], "query", results.label or "", results.name, "asked")]
    for neighbor, right, image in zip(results, results.right, images[1:], strict=True):
        item = neighbor.item
        label = item.label if item.label is not None else _short(item.name)
        figures.append(_figure(image, f"{neighbor.score:.3f}", label, item.name, KINDS[right]))
    return figures


def _of_item(index: Index, item: Item, kind: str = "") -> dict[str, Any]:
    return _figure(index.thumbnail(item.id), item.label or "", _short(item.name), item.name, kind)


def _figure(image: bytes, caption: str, label: str, tooltip: str, kind: str) -> dict[str, Any]:
    return {"image": image, "caption": caption, "label": label, "tooltip": tooltip, "kind": kind}


def _short(name: str) -> str:
    return name.rpartition("/")[2]
