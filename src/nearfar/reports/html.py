"""Pages that are complete in themselves: one style sheet, for day and night, screen and paper."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

# Even a mistake in escaping could neither run a script nor fetch anything.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f7f7f5; --card: #ffffff; --ink: #1d2126; --soft: #5b636d; --edge: #e2e3e0; --track: #e8e9e6;
  --accent: #1f5fa8; --good: #167a48; --bad: #c0392b; --mark: #ffffff;
  --c1: #1f5fa8; --c2: #b4540a; --c3: #167a48; --c4: #8a3f9e; --light: 42%; --rich: 62%;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --card: #1c2025; --ink: #e7e9ec; --soft: #a0a8b2; --edge: #2e343b; --track: #30363d;
    --accent: #7fb5f0; --good: #4fc78c; --bad: #ff7d70; --mark: #14171b;
    --c1: #7fb5f0; --c2: #f2a65a; --c3: #5fd09a; --c4: #cf9be0; --light: 68%; --rich: 60%;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink); -webkit-text-size-adjust: 100%;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Helvetica Neue", sans-serif;
}
main, header.top, footer { max-width: 1120px; margin: 0 auto; padding: 0 28px; }
header.top { padding-top: 52px; }
h1 { font-size: 30px; line-height: 1.2; font-weight: 650; letter-spacing: -0.015em; margin: 0 0 6px;
  overflow-wrap: anywhere; }
h2 { font-size: 20px; font-weight: 630; letter-spacing: -0.01em; margin: 0 0 4px; }
h3 { font-size: 15px; font-weight: 600; margin: 0 0 8px; }
p { margin: 0 0 14px; max-width: 74ch; }
.soft, .lead, figcaption, footer { color: var(--soft); }
.lead { font-size: 17px; margin-bottom: 26px; overflow-wrap: anywhere; }
section { background: var(--card); border: 1px solid var(--edge); border-radius: 12px; padding: 26px 28px;
  margin: 0 0 22px; }
section > p.soft { margin-bottom: 18px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 14px; margin: 0 0 22px; }
.figure { background: var(--card); border: 1px solid var(--edge); border-radius: 12px; padding: 16px 20px; }
.figure dt { color: var(--soft); font-size: 14px; }
.figure dd { margin: 0; font-size: 27px; font-weight: 640; letter-spacing: -0.02em;
  font-variant-numeric: tabular-nums; }
.figure dd small { display: block; font-size: 13px; font-weight: 400; letter-spacing: 0; color: var(--soft); }
.figure.first { border-color: var(--accent); }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 26px; }
.two > div { min-width: 0; }
svg { display: block; max-width: 100%; height: auto; }
svg text { font-family: inherit; fill: var(--soft); font-size: 12px; }
svg .rule { stroke: var(--edge); }
svg .tick.up { text-anchor: end; } svg .tick.across, svg .axis { text-anchor: middle; }
svg .line { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; }
svg .faint { stroke-width: 1; opacity: 0.35; }
svg .dot { fill: currentColor; stroke: var(--card); }
svg .name { fill: currentColor; font-weight: 600; }
.c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); } .c4 { color: var(--c4); }
svg.chart { max-width: min(100%, 560px); width: 100%; }
svg.map { margin: 0 auto; width: 760px; }
svg .group circle { fill: hsl(var(--hue) var(--rich) var(--light)); fill-opacity: 0.75; stroke: var(--card);
  stroke-width: 0.6; }
svg .group.s1 circle { fill-opacity: 0.4; stroke: hsl(var(--hue) var(--rich) var(--light)); stroke-width: 1; }
svg .group.s2 circle { fill: var(--card); stroke: hsl(var(--hue) var(--rich) var(--light)); stroke-width: 1.6; }
svg .place { fill: var(--ink); font-size: 13px; font-weight: 650; text-anchor: middle; paint-order: stroke;
  stroke: var(--card); stroke-width: 4px; stroke-linejoin: round; }
.whiskers .track { stroke: var(--track); stroke-width: 2; stroke-linecap: round; }
.whiskers .reach { fill: var(--accent); opacity: 0.4; }
.whiskers .value { stroke: var(--accent); stroke-width: 2; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 7px 18px 7px 0; border-bottom: 1px solid var(--edge); vertical-align: middle; }
thead th { color: var(--soft); font-weight: 500; font-size: 14px; }
tbody th { font-weight: 500; }
td.number, th.number { text-align: right; white-space: nowrap; }
tbody tr:last-child > * { border-bottom: 0; }
.facts th { width: 34%; font-weight: 400; color: var(--soft); } .facts td { overflow-wrap: anywhere; }
.facts { font-size: 14px; }
.hits { display: grid; grid-template-columns: 118px repeat(8, minmax(72px, 1fr)); gap: 10px; min-width: 820px;
  align-items: start; padding: 12px 8px 12px 0; border-top: 1px solid var(--edge); }
.hits:first-of-type { border-top: 0; }
.hit { margin: 0; position: relative; min-width: 0; }
.hit .picture { aspect-ratio: 1; border-radius: 8px; border: 3px solid var(--edge); overflow: hidden; display: flex;
  background: var(--track); align-items: center; justify-content: center; color: var(--soft); font-size: 12px; }
.hit img { width: 100%; height: 100%; object-fit: contain; display: block; }
.hit img.small { image-rendering: pixelated; }
.hit.good .picture { border-color: var(--good); } .hit.bad .picture { border-color: var(--bad); border-style: dashed; }
.hit .sign { position: absolute; top: -5px; right: -5px; width: 19px; height: 19px; border-radius: 50%;
  color: var(--mark); font-size: 12px; font-weight: 700; line-height: 19px; text-align: center; }
.hit.good .sign { background: var(--good); } .hit.bad .sign { background: var(--bad); }
.hit figcaption { font-size: 12px; line-height: 1.35; margin-top: 5px; overflow: hidden; text-overflow: ellipsis;
  display: -webkit-box; -webkit-line-clamp: 2; -webkit-box-orient: vertical; overflow-wrap: anywhere; }
.hit.asked { padding-right: 14px; border-right: 1px solid var(--edge); }
b { font-weight: 500; }
.hit.asked figcaption { display: block; } .hit.asked b { color: var(--ink); font-weight: 600; }
details { margin-top: 12px; } details:first-of-type { margin-top: 0; }
summary { cursor: pointer; font-weight: 600; padding: 4px 0; }
summary:focus-visible { outline: 2px solid var(--accent); outline-offset: 3px; border-radius: 4px; }
pre { background: var(--page); border: 1px solid var(--edge); border-radius: 8px; padding: 16px 18px; overflow-x: auto;
  font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; margin: 8px 0 0; }
footer { font-size: 14px; padding-top: 4px; padding-bottom: 48px; }
@media print { body { background: none; } section, .figure { break-inside: avoid; } }
"""


def document(
    title: str,
    lead: str,
    sections: Sequence[str],
    *,
    foot: str = "Written by nearfar.",
    style: str = "",
    policy: str = POLICY,
    script: str = "",
) -> str:
    """A whole page.

    Args:
        title, lead: Text above everything.
        sections: HTML; empty ones are left out.
        foot: Text below everything.
        style: Rules beyond ``STYLE``.
        policy: What the page may do; a script has to be allowed by its digest.
        script: At the end of the page.

    >>> "<h1>A &amp; B</h1>" in document("A & B", "two letters", ["<section></section>"])
    True
    """
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{escape(title)} · nearfar</title>
<style>{STYLE}{style}</style>
</head>
<body>
<header class="top">
<h1>{escape(title)}</h1>
{f'<p class="lead">{escape(lead)}</p>' if lead else ""}
</header>
<main>
{chr(10).join(section for section in sections if section)}
</main>
<footer><p>{escape(foot)} This page is complete in itself and asks nothing of the network.</p></footer>
{f"<script>{script}</script>" if script else ""}
</body>
</html>
"""
