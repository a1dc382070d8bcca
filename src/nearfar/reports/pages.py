"""HTML pages from the Jinja2 templates in ``templates/``.

Every page is a single file that loads nothing. Values from data and settings (names of classes, files and runs) are
escaped by the templates.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from typing import TYPE_CHECKING, Any

from nearfar.bench.comparison import tables
from nearfar.bench.comparison.tables import Table
from nearfar.utils import formatting
from nearfar.utils.validation import one_of

if TYPE_CHECKING:
    from jinja2 import Environment

FORMATS = (*tables.WRITERS, "html")  # of tables
COLORS = 10  # line colors defined in tables.css
METRIC_NAMES = {
    "map@r": "MAP@R",
    "map": "mean average precision",
    "r_precision": "R-precision",
    "mrr": "mean reciprocal rank",
    "nmi": "NMI",
    "ami": "AMI",
    "f1": "F1 of pairs",
}
# Even a mistake in escaping could neither run a script nor fetch anything.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def metric_name(metric: str) -> str:
    """The name of a metric as it is written in text.

    >>> metric_name("recall@1"), metric_name("map@r")
    ('Recall@1', 'MAP@R')
    """
    return METRIC_NAMES.get(metric, metric[:1].upper() + metric[1:])


def render(template: str, title: str, *, lead: str = "", script: bool = False, **values: Any) -> str:
    """Render a page.

    >>> page = render("base.html", "A & B", lead="two letters")
    >>> "<h1>A &amp; B</h1>" in page
    True
    """
    source, kind = script_source() if script else "", template.removesuffix(".html")
    page = _environment().get_template(template)
    return page.render(kind=kind, title=title, lead=lead, script=source, policy=policy(script=script), **values)


def write_table(table: Table, format: str = "text") -> str:
    """Write a table as text, CSV, LaTeX, or a page."""
    if one_of("format", format, FORMATS) != "html":
        return tables.WRITERS[format](table)
    title = f"{tables.UNFAIR}: {table.title}" if table.unfair else table.title
    return render("table.html", title, table=table)


def policy(*, script: bool) -> str:
    """The content security policy of a page, which may have the script that sorts tables."""
    if not script:
        return POLICY
    digest = base64.b64encode(hashlib.sha256(script_source().encode()).digest()).decode()
    return f"{POLICY}; script-src 'sha256-{digest}'"


def script_source() -> str:
    """The script that sorts tables."""
    loader = _environment().loader
    assert loader is not None
    return loader.get_source(_environment(), "sort.js")[0]


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("nearfar.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for write in (formatting.number, formatting.percent, formatting.interval, formatting.duration, metric_name):
        environment.filters[write.__name__] = write
    environment.filters["sentence"] = lambda text: f"{text[:1].upper()}{text[1:]}." if text else ""
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode()
    environment.globals["plural"] = formatting.plural
    return environment
