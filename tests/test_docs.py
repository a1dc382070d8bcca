"""What the documentation names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo

from nearfar.training.recipe.schema import SECTIONS, StageSection

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([\w-]+))?\)")
CODE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
EXAMPLES = sorted([*(ROOT / "docs" / "examples").glob("*.md"), ROOT / "docs" / "distributed.md"])


def anchors(page: Path) -> set[str]:
    """What headings can be linked by."""
    heads = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for place, anchor in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        target = (page.parent / place) if place else page
        assert target.exists(), place
        assert not anchor or anchor in anchors(target), f"{place}#{anchor}"


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.stem)
def test_an_example_runs_from_top_to_bottom(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in PYTHON.findall(page.read_text(encoding="utf-8")):
        exec(compile(block, page.name, "exec"), names)
    assert names


def test_the_page_of_papers_names_recipes_and_grids() -> None:
    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    grids = set(re.findall(r"grid `(\w+)`", text))
    kept = {file.stem for file in (ROOT / "recipes" / "grids").glob("*.toml")}
    ours = {"digits", "cub", "cub_dims", "cub_group", "cub_mining"}  # of no paper
    assert grids == kept - ours
    for data, name in re.findall(r"`(cub|cars196|sop|inshop)/([\w*]+)`", text):
        assert list((ROOT / "recipes" / data).glob(f"{name}.toml")), f"{data}/{name}"


def test_every_key_of_a_recipe_is_told_with_its_default() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    parts = dict(re.findall(r"^## \[+(\w+)\]+$(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))
    assert parts.keys() == {*SECTIONS, "stages"}
    for name, kind in {**SECTIONS, "stages": StageSection}.items():
        told = dict(re.findall(r"^\| `(\w+)` \|(.*?)\|", parts[name], re.MULTILINE))
        wanted = {} if name == "loss" else {key: default(field) for key, field in kind.model_fields.items()}
        assert {key: value.strip() for key, value in told.items()} == wanted


def default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if field.is_required() or value is None:
        return "" if field.is_required() else "none"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, tuple):
        return str([round(each, 3) if isinstance(each, float) else each for each in value]).replace("1.333", "1.333…")
    return str(value).lower() if isinstance(value, bool) else str(value)
