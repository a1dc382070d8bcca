"""What ``import nearfar as nf`` offers, and the shape of the package."""

import ast
import re
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

import nearfar as nf

ROOT = Path(__file__).parents[1]
SOURCE = Path(nf.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
PACKAGES = sorted(file.parent.name for file in SOURCE.glob("*/__init__.py"))
# Names of the field that happen to end in -ing.
NOUNS = {"batching", "clustering", "formatting", "mining", "pooling", "ranking", "reranking", "sampling", "tuning"}
NOUNS |= {"preprocessing"}
MOST_MODULES = 16  # in one package, losses and commands excepted: they have a file each


def test_a_plain_import_reaches_every_public_name():
    program = "import nearfar as nf\nfor name in nf.__all__: getattr(nf, name)\nassert dir(nf) == sorted(nf.__all__)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_sub_package_is_public():
    assert {*PACKAGES} - {"cli"} <= {*nf.__all__}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'loses'"):
        nf.loses  # noqa: B018


def test_importing_does_not_import_torch():
    program = "import sys, nearfar; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_no_two_public_classes_share_a_name():
    names = Counter(
        node.name
        for file in FILES
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_modules_are_named_by_nouns():
    assert [str(file) for file in FILES if file.stem.endswith("ing") and file.stem.rsplit("_")[-1] not in NOUNS] == []


def test_every_combination_of_test_folders_can_be_collected(request):
    """Modules outside packages are imported by their basename, so no two that pytest collects may share one."""
    ignored = request.config.getoption("ignore_glob") or []
    files = [file for file in (ROOT / "tests").rglob("*.py") if not any(file.match(glob) for glob in ignored)]
    names = [file.name for file in files]
    assert [str(file) for file in files if names.count(file.name) > 1] == []


def test_packages_stay_small_enough_to_look_through():
    folders = {file.parent for file in FILES} - {SOURCE / "losses", SOURCE / "cli"}
    sizes = {str(folder): sum(1 for file in folder.glob("*.py") if file.stem != "__init__") for folder in folders}
    assert {folder: size for folder, size in sizes.items() if size > MOST_MODULES} == {}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, unpacked."""
    place = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with zipfile.ZipFile(next(place.glob("*.whl"))) as file:
        file.extractall(place)
    return place


def test_the_wheel_finds_its_recipes_by_name(wheel):
    program = (
        "import nearfar as nf\n"
        "from nearfar.utils import shipped\n"
        "print(nf.__file__, *(shipped.find(name, kind) for kind in shipped.FOLDERS for name in shipped.names(kind)))"
    )
    command = [sys.executable, "-P", "-c", program]
    found = subprocess.run(
        command, cwd=wheel, env={"PYTHONPATH": str(wheel)}, check=True, capture_output=True, text=True
    )
    package, *recipes = map(Path, found.stdout.split())
    assert package == wheel / "nearfar" / "__init__.py"
    wanted = (file.relative_to(ROOT) for file in (ROOT / "recipes").rglob("*.toml"))
    assert {*recipes} == {wheel / "nearfar" / file for file in wanted}


def test_the_description_on_pypi_has_no_path_into_the_checkout(wheel):
    text = next(wheel.glob("*.dist-info/METADATA")).read_text(encoding="utf-8")
    assert "nearfar trains, compares and serves" in text
    assert re.findall(r"\]\((?!https:)[^)]*\)", text) == []


def test_the_citation_has_the_version():
    assert f"\nversion: {nf.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def interpreter(version, path):
    """What ``make matrix`` finds for a version of Python where only these folders are on the PATH."""
    command = ["/bin/bash", str(ROOT / "tests" / "helpers" / "interpreter.sh"), version]
    return subprocess.run(command, env={"PATH": str(path)}, capture_output=True, text=True)


def script(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
    file.chmod(0o755)
    return file


def test_the_matrix_passes_over_a_shim_that_does_not_run(tmp_path):
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    script(tmp_path / "shims" / f"python{version}", "exit 127")
    found = interpreter(version, tmp_path / "shims")
    assert (found.returncode, found.stdout) == (1, "")
    assert f"Python {version} was found, but does not run: SKIPPED" in found.stderr
    real = script(tmp_path / "real" / f"python{version}", f'exec {sys.executable} "$@"')
    found = interpreter(version, Path(f"{tmp_path}/shims:{tmp_path}/real"))
    assert found.stdout == f"{real}\n"


def test_the_matrix_says_which_python_is_missing(tmp_path):
    found = interpreter("3.99", tmp_path)
    assert (found.returncode, found.stderr) == (1, "!!! Python 3.99 is not installed: SKIPPED !!!\n")
