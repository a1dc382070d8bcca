"""Pages of the site that are made from other files: the reference, the notebooks, and files beside docs/."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "nearfar"
BESIDE = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+|(?=docs/))(?:docs/)?([^)#]*)(#[^)]*)?\)")


def modules_of(folder: Path) -> list[str]:
    """Full names of the public modules in a package, the package first."""
    package = ".".join(folder.relative_to(SOURCE.parent).parts)
    own = sorted(file.stem for file in folder.glob("*.py") if not file.stem.startswith("_"))
    return [package, *(f"{package}.{name}" for name in own)]


def exports(file: Path) -> list[str] | None:
    """The names that a module lists in ``__all__``; None without such a list."""
    names = re.search(r"^__all__ = (\[.*?\])", file.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return ast.literal_eval(names[1]) if names else None


def reference() -> dict[str, str]:
    """The pages of the reference: one for each package, with the modules that it exports and what these export.

    A package or module without ``__all__`` exports everything.
    """
    pages = {}
    for folder in sorted(file.parent for file in SOURCE.rglob("__init__.py")):
        title, *modules = modules_of(folder)
        public = exports(folder / "__init__.py")
        parts = [f"---\ntitle: {title}\n---", f"::: {title}\n    options:\n        heading_level: 1"]
        for module in modules:
            name = module.rpartition(".")[2]
            if public is not None and name not in public:
                continue
            members = exports(folder / f"{name}.py")
            options = "filters: ['!^_']" if members is None else f"members: {json.dumps(members)}"
            parts.append(f"::: {module}\n    options:\n        {options}")
        pages[f"reference/{title}.md"] = "\n\n".join(parts)
    return pages


def notebook(file: Path) -> str:
    """A notebook as Markdown, with a link to the file."""
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    shown = [
        f"```python\n{text}\n```" if cell["cell_type"] == "code" else text
        for cell, text in zip(cells, texts, strict=True)
    ]
    return "\n\n".join([*shown, f"[Download this notebook]({file.name})"])


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from other files, and list all pages in the navigation."""
    made = reference() | {name: (ROOT / name).read_text(encoding="utf-8") for name in BESIDE}
    for file in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        made[f"notebooks/{file.stem}.md"] = notebook(file)
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    pages = sorted((file.src_uri for file in files.documentation_pages()), key=lambda page: page.removesuffix(".md"))
    nav = [{title: listed(content, pages)} for entry in config.nav or () for title, content in entry.items()]
    rest = sorted({*pages} - {*named(nav)})
    config.nav = [*nav, {"More": rest}] if rest else nav
    return files


def listed(content: Any, pages: list[str]) -> Any:
    """An entry of the navigation, with all pages of a folder in place of its name; None if there is no page."""
    if isinstance(content, list):
        entries = [{title: listed(inner, pages)} for entry in content for title, inner in entry.items()]
        return [entry for entry in entries if None not in entry.values()]
    if content.endswith("/"):
        return [page for page in pages if page.startswith(content)] or None
    return content if content in pages else None


def named(entry: Any) -> Iterator[str]:
    """The pages in an entry of the navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from named(inner)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files beside docs/ lead to their page, or be plain text where there is none."""
    up = "../" * page.file.src_uri.count("/")

    def link(found: re.Match[str]) -> str:
        text, steps, path, anchor = found.groups()
        outside = steps == "" or len(steps) // 3 > page.file.src_uri.count("/")
        if not outside:
            return found[0]
        target = files.get_file_from_path(path)
        return f"[{text}]({up}{path}{anchor or ''})" if target else text

    return OUTSIDE.sub(link, markdown)
