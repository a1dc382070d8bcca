"""The documentation site: builds without a warning, has every public name, and can be read without a network."""

import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from filelock import FileLock
from test_docstrings import exported_objects, modules, package

ROOT = Path(__file__).parents[1]
RESOURCE = re.compile(r'<(?:script|img|iframe|source|link)[^>]*?\s(?:src|href)="(https?:)?//', re.IGNORECASE)

# The contrast of every visible text with the background behind it, as WCAG 2 computes it; returns what is too faint.
FAINT = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const over = (top, bottom) => {
    const a = top[3] ?? 1;
    return [0, 1, 2].map((i) => top[i] * a + bottom[i] * (1 - a));
  };
  const behind = (element) => {
    const layers = [];
    for (let each = element; each; each = each.parentElement) {
      layers.push(parse(getComputedStyle(each).backgroundColor));
    }
    return layers.reverse().reduce((below, layer) => (layer.length ? over(layer, below) : below), [255, 255, 255]);
  };
  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    const style = getComputedStyle(element);
    const box = element.getBoundingClientRect();
    if (!node.textContent.trim() || !element.checkVisibility({ opacityProperty: true }) || !box.width) continue;
    if (element.closest('script, style, noscript, svg, .headerlink, [aria-hidden=true]')) continue;
    let color = parse(style.color);
    let alpha = color[3] ?? 1;
    for (let each = element; each; each = each.parentElement) alpha *= Number(getComputedStyle(each).opacity);
    const ground = behind(element);
    color = over([...color.slice(0, 3), alpha], ground);
    const [high, low] = [light(color), light(ground)].sort((a, b) => b - a);
    const size = parseFloat(style.fontSize);
    const needed = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
    const ratio = (high + 0.05) / (low + 0.05);
    const text = node.textContent.trim().slice(0, 40);
    if (ratio < needed - 0.01) faint.push(`${ratio.toFixed(2)} ${element.className} ${text}`);
  }
  return [...new Set(faint)].slice(0, 12);
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as ``make site`` builds it, once for all processes that run tests."""
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site"
    with FileLock(f"{out}.lock"):
        if not (out / "objects.inv").is_file():
            build(out)
    return out


def build(out):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-4000:]


def documented(site):
    """The names in the inventory that other sites link by."""
    content = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {line.split(" ", 1)[0] for line in zlib.decompress(content).decode().splitlines()}


def test_the_reference_has_every_public_name(site):
    wanted = {thing.path for module in modules(package()) for thing in exported_objects(module)}
    wanted |= {
        f"{module.path}.{name}"
        for module in modules(package())
        for name in module.exports or ()
        if is_documented(module, str(name))
    }
    assert sorted(wanted - documented(site) - {"nearfar.__main__"}) == []


def is_documented(module, name):
    """Whether an exported name has a docstring to show; constants and type aliases may have none."""
    thing = module[name]
    return bool((thing.final_target if thing.is_alias else thing).has_docstring)


def test_every_page_is_in_the_navigation(site):
    home = (site / "index.html").read_text(encoding="utf-8")
    pages = {str(page.relative_to(site)) for page in site.rglob("*.html")} - {
        "404.html",
        "results/cub-leaderboard.html",
    }
    assert sorted(page for page in pages - {"index.html"} if f'href="{page}"' not in home) == []


def test_nothing_is_loaded_from_elsewhere(site):
    pages = [page for page in site.rglob("*.html") if RESOURCE.search(page.read_text(encoding="utf-8"))]
    assert pages == []
    assert not re.search(r"@import|url\(['\"]?https?:", (site / "site.css").read_text(encoding="utf-8"))


class Reader:
    """A page of the site, opened from its file; requests to anywhere else fail the test."""

    def __init__(self, browser, site, **settings):
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, **settings)
        self.page = self.context.new_page()
        self.problems = []
        self.page.on("console", lambda line: self.problems.append(line.text) if line.type == "error" else None)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on(
            "request",
            lambda asked: (
                None if asked.url.startswith(("file:", "data:", "blob:")) else self.problems.append(asked.url)
            ),
        )
        self.site = site

    def open(self, page):
        self.page.goto((self.site / page).as_uri())
        return self.page

    def close(self):
        self.context.close()
        assert self.problems == []


READ = ("index.html", "choose-a-loss.html", "migrate.html", "results/cub.html", "reference/nearfar.metrics.html")


@pytest.mark.parametrize("colors", ["light", "dark"])
def test_pages_have_no_errors_and_enough_contrast(browser, site, colors):
    reader = Reader(browser, site, color_scheme=colors)
    faint = {name: found for name in READ if (found := reader.open(name).evaluate(FAINT))}
    assert faint == {}
    reader.close()


def test_pages_fit_a_telephone(browser, site):
    reader = Reader(browser, site)
    reader.page.set_viewport_size({"width": 390, "height": 800})
    for name in READ:
        assert reader.open(name).evaluate("() => document.documentElement.scrollWidth") <= 390, name
    reader.close()


def test_a_keyboard_is_enough_to_skip_to_search_and_to_read(browser, site):
    reader = Reader(browser, site)
    page = reader.open("index.html")
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.matches('.md-skip')")
    page.keyboard.press("/")
    page.keyboard.type("distance weighted")
    page.wait_for_selector(".md-search-result__link mark")
    page.keyboard.press("Enter")
    page.wait_for_url(lambda address: "index.html" not in address and "h=distance" in address)
    reader.close()


def test_pages_have_a_language_one_title_and_names_for_images(browser, site):
    reader = Reader(browser, site)
    for name in READ:
        page = reader.open(name)
        assert page.evaluate("() => document.documentElement.lang") == "en"
        assert page.locator("h1").count() == 1, name
        assert page.locator("img:not([alt]), img[alt='']").count() == 0, name
        buttons = page.locator("button:not([title]):not([aria-label]):visible")
        assert all(text.strip() for text in buttons.all_inner_texts()), name
    reader.close()
