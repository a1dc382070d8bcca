"""The sections of a report, each as HTML, empty where the run has nothing to say."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import torch

from nearfar import plots
from nearfar.losses import PairLoss
from nearfar.reports.charts import Line, line_chart, scatter, shown_number, smoothed, whiskers
from nearfar.reports.gallery import MOST_PLACED, Found, flatten, neighbours, spread, thumbnail
from nearfar.reports.run_data import PARTS, Measured, loss_points, metric_points
from nearfar.training.recipe import losses
from nearfar.training.run.loggers import flat
from nearfar.training.run.reader import RunData

SHOWN_BESIDE = 8  # neighbours of a query
MOST_NAMES = 16  # classes whose names stand on the map
NICE_NAMES = {
    "map@r": "MAP@R",
    "map": "mean average precision",
    "r_precision": "R-precision",
    "mrr": "mean reciprocal rank",
    "nmi": "NMI",
    "ami": "AMI",
    "f1": "F1 of pairs",
}
METHOD_NAMES = {
    "pca": "the two directions with the most spread (PCA)",
    "tsne": "t-SNE, which keeps neighbours together and tells little of distances",
    "umap": "UMAP, which keeps neighbours together and tells little of distances",
}


def nice(metric: str) -> str:
    """A metric's name for people.

    >>> nice("recall@1"), nice("map@r")
    ('Recall@1', 'MAP@R')
    """
    return NICE_NAMES.get(metric, metric[:1].upper() + metric[1:])


def figures(run: RunData, found: Measured | None) -> str:
    """The numbers one looks for first."""
    entries: list[tuple[str, str, str]] = []
    if found is not None:
        for name in ("recall@1", "map@r", "nmi"):
            if name in found.values:
                interval = found.intervals.get(name)
                between = (
                    f"{100 * interval.low:.1f} – {100 * interval.high:.1f}" if interval else "of clusters by k-means"
                )
                entries.append((nice(name), f"{100 * found.values[name]:.1f} %", between))
    if run.queries is not None:
        looked = run.queries if run.gallery is None else run.gallery
        classes = f"of {len(torch.unique(looked.labels)):,} classes not seen in training"
        entries.append(("Tested on", f"{len(looked.labels):,}", classes))
    if "epoch" in run.metrics:
        entries.append(("Epoch", f"{run.metrics['epoch'] + 1:,}", str(run.metrics.get("selection", ""))))
    if run.metrics.get("seconds"):
        entries.append(("Trained for", _clock(run.metrics["seconds"]), f"{run.metrics.get('steps', 0):,} steps"))
    if not entries:
        return '<section><p class="soft">This run has not been evaluated yet.</p></section>'
    cards = [
        f'<div class="figure{" first" if not number else ""}"><dt>{escape(name)}</dt>'
        f"<dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for number, (name, value, more) in enumerate(entries)
    ]
    return f'<dl class="figures">{"".join(cards)}</dl>'


def curves(run: RunData) -> str:
    """The loss, and recall of all parts that were measured."""
    charts = []
    points = loss_points(run.log)
    if points:
        lines = [Line("loss", points)]
        if len(points) >= 40:
            lines = [Line("loss", points, faint=True), Line("average", smoothed(points, max(5, len(points) // 25)))]
        charts.append(("Loss", line_chart(lines, title="Loss by step", x="step", y="loss")))
    lines = [
        Line(part, found, color=color, dots=True)
        for color, part in enumerate(PARTS, start=1)
        if (found := metric_points(run.log, part, "recall@1"))
    ]
    if lines:
        chart = line_chart(lines, title="Recall@1 by epoch", x="epoch", y="recall@1", percent=True)
        charts.append(("Recall@1", chart))
    if not charts:
        return ""
    drawn = "".join(f"<div><h3>{escape(title)}</h3>{chart}</div>" for title, chart in charts)
    only = (
        ""
        if "validation" in (run.metrics or {})
        else " Nothing was selected on the test classes: the last epoch counts."
    )
    return _section("How it learned", f"Curves of training.{only}", f'<div class="two">{drawn}</div>')


def metric_table(run: RunData, found: Measured | None) -> str:
    """All metrics with their intervals."""
    if found is None:
        return ""
    others = [part for part in ("train", "validation") if part in run.metrics]
    rows = []
    for name, value in found.values.items():
        interval = found.intervals.get(name)
        between = f"{100 * interval.low:.2f} – {100 * interval.high:.2f}" if interval else "–"
        picture = whiskers(interval.low, value, interval.high) if interval else whiskers(value, value, value)
        beside = "".join(_percent(run.metrics[part].get(name)) for part in others)
        rows.append(
            f'<tr><th scope="row">{escape(nice(name))}</th>{_percent(value)}'
            f'<td class="number soft">{between}</td><td>{picture}</td>{beside}</tr>'
        )
    heads = "".join(f'<th scope="col" class="number">{part}, %</th>' for part in others)
    table = (
        '<div class="scroll"><table><thead><tr><th scope="col">metric</th><th scope="col" class="number">test, %</th>'
        f'<th scope="col" class="number">95 % interval</th><th scope="col">0 – 100 %</th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
    told = (
        "On classes that were not seen in training. Intervals are of the choice of queries (bootstrap); of another "
        "training or of other classes they say nothing."
    )
    return _section("Metrics", told, table)


def retrieval(run: RunData, found: Measured | None, count: int, seed: int) -> str:
    """Some queries and what they find."""
    if run.queries is None or found is None or not count:
        return ""
    chosen = spread(run.queries.labels, count, seed)
    told = (
        "Queries drawn at random from different classes, and their nearest neighbours, nearest first. "
        "✓ and a solid frame: the same class. ✗ and a dashed frame: another one."
    )
    return _section("What it finds", told + _what_is_shown(run), _grid(run, chosen))


def worst_queries(run: RunData, found: Measured | None, count: int) -> str:
    """The queries that find their class worst."""
    if run.queries is None or found is None or not count:
        return ""
    order = found.precision.nan_to_num(nan=torch.inf).argsort(stable=True)
    chosen = order[: min(count, int((~found.precision.isnan()).sum()))].tolist()
    notes = {
        row: f"AP {shown_number(float(found.precision[row]), True)}, first match at {round(float(found.first[row])):,}"
        for row in chosen
    }
    told = "The queries with the least average precision (AP). Wrong labels and odd pictures tend to gather here."
    return _section("Where it fails", told, _grid(run, chosen, notes))


def class_map(run: RunData, method: str, seed: int) -> str:
    """Embeddings of unseen classes on a plane."""
    looked = run.queries if run.gallery is None else run.gallery
    if looked is None or len(looked.labels) < 3:
        return ""
    rows = sorted(spread(looked.labels, MOST_PLACED, seed))
    labels, points = looked.labels[rows], looked.points[rows]
    if run.recipe.evaluation.measure == "cosine":
        points = torch.nn.functional.normalize(points)
    places = flatten(points, method, seed)
    numbers = torch.unique(labels).tolist()
    groups = [
        (
            run.class_name(label),
            round(360 * (order * 0.618034 % 1)),  # neighbours in number get different hues
            [(float(x), float(y)) for x, y in places[(labels == label).numpy()]],
        )
        for order, label in enumerate(numbers)
    ]
    named = len(groups) <= MOST_NAMES
    some = "" if len(rows) == len(looked.labels) else f" {len(rows):,} of {len(looked.labels):,} are shown."
    hint = "" if named else " Point at one to read its class."
    told = (
        f"Every point is an embedding of a class not seen in training, laid out by {METHOD_NAMES[method]}.{some}{hint}"
    )
    return _section("Map of unseen classes", told, scatter(groups, title="Map of embeddings", labels=named))


def weights(run: RunData) -> str:
    """How much the loss makes of a pair, by its similarity."""
    number = max(0, len(run.recipe.stages) - 1)
    section = run.recipe.loss_of(number)
    loss = losses.create(section, num_classes=plots.CLASSES, dim=plots.DIMENSIONS)
    if not plots.has_weights(type(loss)):
        return ""
    found = plots.curves(loss, steps=101)
    lines = []
    for color, (name, values) in enumerate((("positive", found.positive), ("negative", found.negative)), start=2):
        largest = float(values.abs().amax())
        shown = values / largest if largest > 0 else values
        points = list(zip(found.similarity.tolist(), shown.tolist(), strict=True))
        lines.append(Line(name, points, color=5 - color))
    chart = line_chart(
        lines, title="Pair weight by similarity", x="cosine similarity", y="weight, relative", from_zero=True
    )
    pulls, pushes = (
        ("a positive pair together", "a negative pair apart")
        if isinstance(loss, PairLoss)
        else ("a sample to the proxy of its class", "it away from that of another")
    )
    told = (
        f"How strongly {section.name} pulls {pulls} and pushes {pushes}, by how similar "
        "the two are. Each curve is relative to its maximum, and was measured beside a positive at 0.5 and a negative "
        "at 0.3."
    )
    return _section("The loss, pair by pair", told, chart)


def settings(run: RunData) -> str:
    """Recipe and manifest, whole."""
    facts = flat({key: value for key, value in run.manifest.items() if key != "recipe"}, ".", any_value=True)
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(_plain(value))}</td></tr>' for name, value in facts.items()
    )
    manifest = ""
    if facts:
        manifest = (
            "<details><summary>Manifest: everything that can change a number</summary>"
            f'<div class="scroll"><table class="facts"><tbody>{rows}</tbody></table></div></details>'
        )
    recipe = f"<details open><summary>Recipe</summary><pre>{escape(run.recipe_text)}</pre></details>"
    return _section("Settings", "Enough to train it again.", recipe + manifest)


def _grid(run: RunData, chosen: Sequence[int], notes: dict[int, str] | None = None) -> str:
    assert run.queries is not None
    gallery = None if run.gallery is None else run.gallery.points
    found = neighbours(run.queries.points, chosen, gallery, count=SHOWN_BESIDE, measure=run.recipe.evaluation.measure)
    rows = "".join(_row(run, one, (notes or {}).get(one.query, "")) for one in found)
    return f'<div class="scroll">{rows}</div>'


def _row(run: RunData, found: Found, note: str) -> str:
    assert run.queries is not None
    looked = run.gallery or run.queries
    label = int(run.queries.labels[found.query])
    cells = [_figure(run, int(run.queries.rows[found.query]), label, "asked", note)]
    for row, value in zip(found.neighbours, found.values, strict=True):
        other = int(looked.labels[row])
        kind = "good" if other == label else "bad"
        cells.append(_figure(run, int(looked.rows[row]), other, kind, f"{round(value, 2) + 0.0:.2f}"))  # no -0.00
    return f'<div class="hits">{"".join(cells)}</div>'


def _figure(run: RunData, index: int, label: int, kind: str, note: str) -> str:
    name = run.class_name(label)
    picture = None if run.dataset is None else thumbnail(run.dataset, index)
    file = f"row {index}" if run.dataset is None or run.dataset.is_vectors else run.dataset.source.name(index)
    if picture is None:
        inside = f"<span>{index:,}</span>"
    else:
        small = ' class="small"' if picture.startswith("data:image/png") else ""
        inside = f'<img{small} src="{picture}" alt="{escape(name)}" loading="lazy">'
    sign = {"good": ("✓", "same class"), "bad": ("✗", "another class")}.get(kind)
    mark = f'<span class="sign" role="img" aria-label="{sign[1]}">{sign[0]}</span>' if sign else ""
    more = f"<br>{escape(note)}" if note else ""
    tip = escape(f"{name} · {file}")
    return (
        f'<figure class="hit {kind}" title="{tip}"><div class="picture">{inside}</div>{mark}'
        f"<figcaption><b>{escape(name)}</b>{more}</figcaption></figure>"
    )


def _what_is_shown(run: RunData) -> str:
    if run.dataset is None:
        return f" The data is not there, so there are numbers of rows instead of pictures ({run.missing})."
    return " A vector is drawn as a square of its numbers." if run.dataset.is_vectors else ""


def _section(title: str, told: str, content: str) -> str:
    return f'<section><h2>{escape(title)}</h2><p class="soft">{escape(told)}</p>{content}</section>'


def _percent(value: float | None) -> str:
    return f'<td class="number">{"–" if value is None else f"{100 * value:.2f}"}</td>'


def _plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "–" if value is None else str(value)


def _clock(seconds: float) -> str:
    """
    >>> _clock(75), _clock(3.24), _clock(7300)
    ('1 min 15 s', '3.2 s', '2 h 01 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
