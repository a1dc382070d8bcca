"""A page that is complete in itself: style, tables that sort, and nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from nearfar.reports import html

COLORS = 10  # lines of a chart that have a colour of their own
LONG = 11  # letters of a head that stay in one line

MORE_STYLE = """
:root { --c5: #a8326b; --c6: #5a6b00; --c7: #00707f; --c8: #7a4b2a; --c9: #5848b8; --c10: #5b636d; --warn: #8a5300;
  --warned: #fff4dc; }
@media (prefers-color-scheme: dark) {
  :root { --c5: #f590bb; --c6: #c3cf5d; --c7: #58cfdd; --c8: #dcae86; --c9: #b0a5f5; --c10: #a9b1bb; --warn: #ffcf7a;
    --warned: #33290f; }
}
.c5 { color: var(--c5); } .c6 { color: var(--c6); } .c7 { color: var(--c7); } .c8 { color: var(--c8); }
.c9 { color: var(--c9); } .c10 { color: var(--c10); }
svg.chart { max-width: min(100%, 640px); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 30px 26px; }
.charts > div { min-width: 0; }
thead th { vertical-align: bottom; }
td, tbody th { white-space: nowrap; }
.sorts :is(th, td):first-child { position: sticky; left: 0; background: var(--card); }
.figure dd { overflow-wrap: anywhere; } .figure dd.word { font-size: 20px; line-height: 1.3; padding-top: 3px; }
section > p.soft:last-child, details > p.soft:last-child { margin-bottom: 0; }
details > p.soft { font-size: 14px; margin-top: 8px; }
td.long { white-space: normal; min-width: 22ch; overflow-wrap: anywhere; }
.sorts :is(th, td) { padding-right: 15px; } .sorts :is(th, td):last-child { padding-right: 0; }
.sorts thead th { white-space: normal; line-height: 1.35; }
thead button { all: unset; cursor: pointer; border-radius: 4px; } thead button span { white-space: nowrap; }
svg.whiskers { width: 130px; max-width: none; }
thead button:hover { color: var(--ink); }
thead button:focus-visible { outline: 2px solid var(--accent); outline-offset: 3px; }
thead button span:last-child::after { content: " ↕"; opacity: 0.45; }
th[aria-sort] button { color: var(--ink); font-weight: 600; }
th[aria-sort="ascending"] button span:last-child::after { content: " ↑"; opacity: 1; }
th[aria-sort="descending"] button span:last-child::after { content: " ↓"; opacity: 1; }
tr.base > * { color: var(--soft); font-style: italic; }
tr.best > * { font-weight: 640; }
.verdict { border-left: 6px solid var(--good); } .verdict.unfair { border-left-color: var(--bad); }
.verdict ul { margin: 0; padding-left: 20px; } .verdict li { overflow-wrap: anywhere; margin-bottom: 4px; }
.verdict h2 .sign { color: var(--good); } .verdict.unfair h2 .sign { color: var(--bad); }
.stamp { display: inline-block; border: 2px solid var(--bad); color: var(--bad); border-radius: 6px; font-weight: 700;
  font-size: 13px; letter-spacing: 0.06em; padding: 0 8px; margin-left: 10px; vertical-align: 2px; }
.note { background: var(--warned); color: var(--warn); border-radius: 8px; padding: 10px 14px; max-width: none;
  margin-bottom: 22px; }
section > h3 { margin-top: 22px; } section > h3:first-of-type { margin-top: 8px; }
@media (max-width: 600px) {
  main, header.top, footer { padding-left: 14px; padding-right: 14px; }
  section { padding: 20px 16px; }
  .figures { grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); } .figure { padding: 12px 14px; }
  .figure dd.word { font-size: 17px; }
  svg.chart { width: 460px; max-width: none; }
}
"""

# Sorts a table by the column whose head is pressed; numbers largest first, then the other way round.
SCRIPT = """
document.querySelectorAll("table.sorts").forEach(function (table) {
  var heads = Array.from(table.tHead.rows[0].cells);
  heads.forEach(function (head, column) {
    var button = head.querySelector("button");
    if (!button) return;
    button.addEventListener("click", function () {
      var number = head.classList.contains("number");
      var before = head.getAttribute("aria-sort");
      var down = before ? before === "ascending" : number;
      heads.forEach(function (other) { other.removeAttribute("aria-sort"); });
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      var body = table.tBodies[0];
      var key = function (row) {
        var cell = row.cells[column];
        return cell.dataset.key === undefined ? cell.textContent.trim() : cell.dataset.key;
      };
      Array.from(body.rows).map(function (row, place) { return [key(row), place, row]; }).sort(function (a, b) {
        if (a[0] === "" || b[0] === "") return (a[0] === "") - (b[0] === "") || a[1] - b[1];
        var order = number ? a[0] - b[0] : a[0].localeCompare(b[0], "en", { numeric: true });
        return (down ? -order : order) || a[1] - b[1];
      }).forEach(function (entry) { body.appendChild(entry[2]); });
    });
  });
});
"""
_DIGEST = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
# Only this very script may run: even a mistake in escaping could add no other one, and nothing is fetched.
POLICY = f"{html.POLICY}; script-src 'sha256-{_DIGEST}'"


@dataclass(frozen=True)
class Cell:
    """What stands in a table.

    Args:
        text: What is shown.
        key: What is sorted by, if that is something else; numbers sort as numbers. None sorts last.
        markup: HTML instead of the text.
        long: Whether it may take more than a line.
    """

    text: str
    key: float | str | None = ""
    markup: str = ""
    long: bool = False


def number(value: float | None, places: int = 1, *, percent: bool = False) -> Cell:
    """A number for a column of numbers; a dash where there is none."""
    if value is None:
        return Cell("–", None)
    shown = 100 * value if percent else value
    return Cell(f"{shown:,.{places}f}", value)


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[Cell | str]],
    *,
    numbers: Sequence[int] = (),
    kinds: Sequence[str] = (),
    sorted_by: int | None = None,
) -> str:
    """A table that sorts by the head that is pressed; the first column names the row.

    Args:
        numbers: Which columns are of numbers.
        kinds: A class for each row: "base", "best" or none.
        sorted_by: The column that rows are given in the order of, largest first.
    """
    cells = []
    for column, head in enumerate(heads):
        kind = ' class="number"' if column in numbers else ""
        order = ' aria-sort="descending"' if column == sorted_by else ""
        # A long head breaks between its words and nowhere else; the arrow stays with the last one.
        words = " ".join(f"<span>{escape(word)}</span>" for word in (head.split(" ") if len(head) > LONG else [head]))
        cells.append(f'<th scope="col"{kind}{order}><button type="button">{words}</button></th>')
    lines = []
    for place, row in enumerate(rows):
        kind = f' class="{kinds[place]}"' if place < len(kinds) and kinds[place] else ""
        drawn = "".join(_cell(cell, column, column in numbers) for column, cell in enumerate(row))
        lines.append(f"<tr{kind}>{drawn}</tr>")
    return (
        f'<div class="scroll" tabindex="0"><table class="sorts"><thead><tr>{"".join(cells)}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _cell(cell: Cell | str, column: int, is_number: bool) -> str:
    cell = cell if isinstance(cell, Cell) else Cell(cell)
    classes = " ".join(name for name, there in (("number", is_number), ("long", cell.long)) if there)
    kind = f' class="{classes}"' if classes else ""
    if is_number or cell.key != "":
        kind += f' data-key="{escape("" if cell.key is None else str(cell.key))}"'
    content = cell.markup or escape(cell.text)
    return f'<th scope="row"{kind}>{content}</th>' if column == 0 else f"<td{kind}>{content}</td>"


def section(title: str, told: str, content: str, *, kind: str = "", stamp: str = "", mark: str = "") -> str:
    """A card with a title and a line that says what is to be seen."""
    opened = f'<section class="{kind}">' if kind else "<section>"
    stamped = f'<span class="stamp">{escape(stamp)}</span>' if stamp else ""
    said = f'<p class="soft">{escape(told)}</p>' if told else ""
    return f"{opened}<h2>{mark}{escape(title)}{stamped}</h2>{said}{content}</section>"


def charts(drawn: Sequence[tuple[str, str]]) -> str:
    """Charts under their titles, as many beside each other as there is room for."""
    parts = [f'<div><h3>{escape(name)}</h3><div class="scroll">{one}</div></div>' for name, one in drawn if one]
    return f'<div class="charts">{"".join(parts)}</div>'


def figures(entries: Sequence[tuple[str, str, str]]) -> str:
    """The numbers one looks for first: (name, value, more)."""
    cards = [
        f'<div class="figure{" first" if not place else ""}"><dt>{escape(name)}</dt>'
        f"<dd{_word(value)}>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for place, (name, value, more) in enumerate(entries)
    ]
    return f'<dl class="figures">{"".join(cards)}</dl>'


def _word(value: str) -> str:
    """Words are longer than numbers."""
    return ' class="word"' if len(value) > 8 else ""


def document(title: str, lead: str, sections: Sequence[str], *, foot: str = "Written by nearfar.") -> str:
    """The whole page."""
    return html.document(title, lead, sections, foot=foot, style=MORE_STYLE, policy=POLICY, script=SCRIPT)
