"""Pages of pictures: what queries found, and contact sheets of clusters. One file each, which needs no network."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from nearfar.reports import contact_sheet
from nearfar.reports.html import document
from nearfar.search.results import Results
from nearfar.utils.atomic import write_text

if TYPE_CHECKING:
    from nearfar.search.clusters import Clusters

STYLE = """
.sheet { display: grid; grid-template-columns: repeat(auto-fill, minmax(112px, 1fr)); gap: 12px; }
figure { margin: 0; position: relative; min-width: 0; }
.picture { aspect-ratio: 1; border-radius: 8px; border: 3px solid var(--edge); overflow: hidden; display: flex;
  background: var(--track); align-items: center; justify-content: center; color: var(--soft); font-size: 12px; }
.picture img { width: 100%; height: 100%; object-fit: contain; display: block; }
.good .picture { border-color: var(--good); } .bad .picture { border-color: var(--bad); border-style: dashed; }
.asked .picture { border-color: var(--ink); }
.sign { position: absolute; top: -5px; right: -5px; width: 19px; height: 19px; border-radius: 50%; color: var(--mark);
  font-size: 12px; font-weight: 700; line-height: 19px; text-align: center; }
.good .sign { background: var(--good); } .bad .sign { background: var(--bad); }
figcaption { font-size: 12px; line-height: 1.35; margin-top: 5px; color: var(--soft); overflow-wrap: anywhere; }
figcaption b { color: var(--ink); font-weight: 600; }
@media (max-width: 560px) { .sheet { grid-template-columns: repeat(auto-fill, minmax(84px, 1fr)); gap: 9px; } }
"""


def write_results(found: Sequence[Results], file: str | Path) -> None:
    """Write search results as a page (.html) or as one image (.png, .jpg, .webp).

    Args:
        found: Results of one or several queries.
        file: The file; its extension selects the format.
    """
    file = Path(file)
    if file.suffix.lower() in (".html", ".htm"):
        write_text(file, results_page(found))
    else:
        contact_sheet.write(found, file)


def results_page(found: Sequence[Results], title: str = "Neighbours") -> str:
    """A page with a row for each query: green where a neighbour has the query's class, red where another."""
    judged = [right for results in found for right in results.right if right is not None]
    lead = f"{len(found):,} {'query' if len(found) == 1 else 'queries'}; the nearest stands first."
    if judged:
        lead += f" {sum(judged):,} of {len(judged):,} neighbours are of the query's class."
    return document(title, lead, [_results(results) for results in found], style=STYLE)


def cluster_page(found: Clusters, shown: int) -> str:
    """A page with a contact sheet for each cluster."""
    count = sum(len(group.items) for group in found.groups)
    lead = f"{count:,} items in {len(found):,} clusters, the largest first; the most typical pictures of each."
    if found.purity is not None:
        lead += f" {100 * found.purity:.1f} % have the class that is most frequent in their cluster."
    sections = []
    for number, group in enumerate(found.groups, start=1):
        words = f"{len(group.items):,} item{'s' * (len(group.items) > 1)}"
        if group.share is not None:
            words += f" · mostly {group.label}, {100 * group.share:.0f} %"
        figures = [
            figure(found.index.thumbnail(item.id), f"<b>{escape(item.label or '')}</b> {escape(_short(item.name))}")
            for item in group.items[:shown]
        ]
        sections.append(_section(f"Cluster {number}", words, figures))
    return document("Clusters", lead, sections, style=STYLE)


def figure(picture: bytes, caption: str, kind: str = "", sign: str = "") -> str:
    """A picture with a caption, which is HTML; ``kind`` is "good", "bad", "asked" or nothing."""
    image = "no picture"
    if picture:
        image = f'<img loading="lazy" alt="" src="data:image/jpeg;base64,{base64.b64encode(picture).decode()}">'
    mark = f'<span class="sign" aria-hidden="true">{sign}</span>' if sign else ""
    return f'<figure class="{kind}"><div class="picture">{image}</div>{mark}<figcaption>{caption}</figcaption></figure>'


def _results(results: Results) -> str:
    pictures = results.pictures or (b"",) * (len(results) + 1)
    asked = f"<b>query</b> {escape(results.label or '')}"
    figures = [figure(pictures[0], asked, "asked")]
    for each, right, picture in zip(results, results.right, pictures[1:], strict=True):
        kind, sign = {None: ("", ""), True: ("good", "✓"), False: ("bad", "✗")}[right]
        name = each.item.label if each.item.label is not None else _short(each.item.name)
        caption = f'<span title="{escape(each.item.name)}"><b>{each.score:.3f}</b> {escape(name)}</span>'
        figures.append(figure(picture, caption, kind, sign))
    judged = [right for right in results.right if right is not None]
    words = f"{sum(judged)} of {len(judged)} of its class" if judged else f"{len(results)} neighbours"
    return _section(results.name, words, figures)


def _section(title: str, words: str, figures: Sequence[str]) -> str:
    head = f"<section><h2>{escape(title)}</h2><p>{escape(words)}</p>"
    return head + f'<div class="sheet">{"".join(figures)}</div></section>'


def _short(name: str) -> str:
    return name.rpartition("/")[2]
