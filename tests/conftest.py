"""Settings of the whole suite, and a browser."""

import gc
import json
import os
import re
import shutil
import sys

import pytest

# Many tests start another Python. Without bytecode on the disk, each of them would compile PyTorch again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Tests run side by side, and their batches are tiny: one thread each, also in the processes that they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from nearfar.cli import main  # noqa: E402

torch.set_num_threads(1)
if not torch.cuda.is_available():
    # torch.manual_seed notes the stack for every kind of GPU that may yet turn up: milliseconds each time
    torch.manual_seed = torch.default_generator.manual_seed


# Files whose tests share something that takes seconds to set up: with --dist loadgroup one process has it, once.
TOGETHER = (
    "test_distributed",
    "test_leaderboard_page",
    "test_other_trainers",
    "test_page",
    "test_ray_engine",
    "test_running",
    "test_serve_schema",
    "test_site",
)


def pytest_collection_modifyitems(items):
    """What needs a GPU is skipped where there is none; what shares a costly start stays together."""
    for item in items:
        if item.path.stem in TOGETHER:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """After each file, take what is left out of garbage collection: tests and libraries, a million objects.

    A full collection would look at all of them, which takes about a second, and there are many.
    """
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture
def nearfar(capsys):
    """Run a command in this process, check its exit code (None: any but 0), and return what it printed."""

    def run(*words, code=0):
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        printed = capsys.readouterr()
        assert ended.value.code == code if code is not None else ended.value.code, printed.err
        return printed

    return run


@pytest.fixture
def refused(nearfar):
    """Run a command that fails, and return its one line of error."""

    def run(*words):
        error = nearfar(*words, code=None).err.strip()
        assert error.startswith("nearfar: ")
        assert "\n" not in error
        return error

    return run


@pytest.fixture
def evaluated(nearfar):
    """Run ``nearfar evaluate`` and return its JSON."""
    return lambda *words: json.loads(nearfar("evaluate", *words, "--json", "-").out)


def _chromium():
    given = os.environ.get("NEARFAR_CHROMIUM")
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))
    return given or next((each for each in found if each), None)


MISSING = """
*********************************************************************
*  NO CHROMIUM FOUND: the tests of the page in a browser are        *
*  SKIPPED. Install it (apt-get install chromium) or set            *
*  NEARFAR_CHROMIUM to its path.                                    *
*********************************************************************"""


def pytest_terminal_summary(terminalreporter):
    """Name the tests that were skipped because a program is missing, and report a missing browser."""
    skipped = terminalreporter.stats.get("skipped", [])
    missing = [report for report in skipped if re.search("NO CHROMIUM FOUND|needs nginx", str(report.longrepr))]
    for report in missing:
        terminalreporter.write_line(f"skipped: {report.nodeid}")
    if any("NO CHROMIUM FOUND" in str(report.longrepr) for report in missing):
        terminalreporter.write_line(MISSING, red=True, bold=True)


@pytest.fixture(scope="session")
def browser():
    """A real Chromium."""
    program = _chromium()
    if program is None:
        if os.environ.get("NEARFAR_NEED_BROWSER"):
            pytest.fail("NO CHROMIUM FOUND, and NEARFAR_NEED_BROWSER is set")
        pytest.skip("NO CHROMIUM FOUND: browser tests are skipped")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()
