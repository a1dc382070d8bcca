"""What the documentation names is there."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from PIL import Image

import nearfar as nf
from nearfar.networks.weights import save
from nearfar.training.recipe.schema import SECTIONS, StageSection

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([\w-]+))?\)")
CODE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RUN = [page for page in (ROOT / "docs").rglob("*.md") if PYTHON.search(page.read_text(encoding="utf-8"))]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def anchors(page):
    """What headings can be linked by."""
    heads = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for place, anchor in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        if place.startswith("reference/"):  # made by the site, which checks its links
            continue
        target = (page.parent / place) if place else page
        assert target.exists(), place
        assert not anchor or anchor in anchors(target), f"{place}#{anchor}"


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """A folder with what the pages name: photos/, query.jpg, a model and an index."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEARFAR_CACHE", str(tmp_path / "cache"))
    for name in ("jay", "wren"):
        Path("photos", name).mkdir(parents=True)
        Image.new("L", (28, 28), len(name) * 20).save(f"photos/{name}/1.png")
    Image.new("L", (28, 28), 50).save("query.jpg")
    save.save(nf.networks.create("small_cnn", dim=8).eval(), "model")
    nf.Index.build("model", "photos", out="my.index").close()


@pytest.mark.usefixtures("photos")
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_from_top_to_bottom(page):
    names = {"__name__": "page"}
    for block in PYTHON.findall(page.read_text(encoding="utf-8")):
        exec(compile(block, page.name, "exec"), names)


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs_and_has_no_outputs(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("NEARFAR_CACHE", str(tmp_path / "cache"))
    cells = [cell for cell in json.loads(file.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [(cell["outputs"], cell["execution_count"]) for cell in cells] == [([], None)] * len(cells)
    names = {"__name__": "notebook"}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"{file.name}, cell {number}", "exec"), names)


def test_there_are_three_notebooks():
    assert len(NOTEBOOKS) == 3


def test_the_page_of_papers_names_recipes_and_grids():
    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    grids = set(re.findall(r"grid `(\w+)`", text))
    kept = {file.stem for file in (ROOT / "recipes" / "grids").glob("*.toml")}
    ours = {"digits", "cub", "cub_dims", "cub_group", "cub_mining", "cars196"}  # of no paper
    assert grids == kept - ours
    for data, name in re.findall(r"`(cub|cars196|sop|inshop)/([\w*]+)`", text):
        assert list((ROOT / "recipes" / data).glob(f"{name}.toml")), f"{data}/{name}"


def test_every_key_of_a_recipe_is_told_with_its_default():
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    parts = dict(re.findall(r"^## \[+(\w+)\]+$(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))
    assert parts.keys() == {*SECTIONS, "stages"}
    for name, kind in {**SECTIONS, "stages": StageSection}.items():
        told = dict(re.findall(r"^\| `(\w+)` \|(.*?)\|", parts[name], re.MULTILINE))
        wanted = {} if name == "loss" else {key: default(field) for key, field in kind.model_fields.items()}
        assert {key: value.strip() for key, value in told.items()} == wanted


def test_every_extra_is_in_the_table():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", text.partition("## Supported systems")[0], re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"\w+", row)} == extras.keys()


def default(field):
    value = field.get_default(call_default_factory=True)
    if field.is_required() or value is None:
        return "" if field.is_required() else "none"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, tuple):
        return str([round(each, 3) if isinstance(each, float) else each for each in value]).replace("1.333", "1.333…")
    return str(value).lower() if isinstance(value, bool) else str(value)
