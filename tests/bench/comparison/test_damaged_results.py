"""Damaged results: a comparison goes on or ends in one line that names the file; archives cannot fill the memory."""

import json
import re
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from runs import finished
from safetensors.numpy import save

from nearfar.bench import compare, find, tournament
from nearfar.training.run import provenance
from nearfar.training.run.folder import PER_QUERY, RunError, RunFolder
from nearfar.training.run.packed import pack
from nearfar.training.run.provenance import is_finished

JUNK = ('"text"', "1" + "0" * 400, "1e400", "NaN", "-1", "null", "true", "[]", "[[1]]", "{}", '{"": {"": "x"}}')
JUNK += ("[" * 10**5,)


@pytest.fixture
def grid(tmp_path):
    for loss, score in (("nra", 0.5), ("raw", 0.9)):
        found = np.random.default_rng(0).random(40) < score
        run = finished(tmp_path / "grid" / "cells" / loss, loss, queries=found, cell={"loss": loss})
        line = {"step": 1, "epoch": 0, "metrics": {"test": {"recall@1": found.mean()}}}
        (run.folder / "log.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "grid" / "grid.toml").write_text('name = "grid"\nseeds = [0]\n[settings]\n"loss.alpha" = [1.0]\n')
    return tmp_path / "grid"


def seal(folder):
    """Finish a run, as a training does."""
    run = RunFolder(folder)
    provenance.finish(run, json.loads(run.metrics.read_text()))


def places(value, at=()):
    """The paths to a value and to all values in it."""
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*at, key))


def with_junk(value, at, junk):
    """JSON in which the value at a path is junk."""
    whole = json.loads(json.dumps(value))
    if not at:
        return junk
    inner = whole
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = "HERE"
    return json.dumps(whole).replace('"HERE"', junk)


def use(place, file):
    """Compare, which works or ends in one line that names the run or says that no loss is in both experiments."""
    try:
        runs = find(place)
        _ = compare(runs).table, tournament(runs, anyway=True).table
    except ValueError as error:
        told = str(error)
    else:
        told = str(file)
    assert "\n" not in told
    assert str(file.parent) in told or "there is nothing to rank" in told
    is_finished(RunFolder(file.parent))


@pytest.mark.parametrize("name", ["manifest.json", "metrics.json", "cell.json", "log.jsonl"])
def test_any_value_of_a_table_may_be_junk(name, grid):
    file = grid / "cells" / "raw" / name
    whole = json.loads(file.read_text())
    for number, at in enumerate(places(whole)):
        for junk in JUNK if not at else JUNK[number % 4 :: 4]:
            file.write_text(with_junk(whole, at, junk) + "\n")
            use(grid, file)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((name, b"[" * 10**5) for name in ("manifest.json", "metrics.json", "cell.json", "digests.json", "log.jsonl")),
        *((name, b"a = " + b"[" * 10**5) for name in ("recipe.toml", "grid.toml")),
        *((name, b"\xff\xfe") for name in ("recipe.toml", "queries.safetensors")),
        ("recipe.toml", b"split.kind = [1]"),
        ("queries.safetensors", save({"rows": np.zeros(2), "recall@1": np.zeros((2, 2))})),
        ("queries.safetensors", save({name: np.zeros(()) for name in PER_QUERY})),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name, content, packed, grid):
    folder = grid if name == "grid.toml" else grid / "cells" / "raw"
    seal(grid / "cells" / "raw")
    (folder / name).write_bytes(content + b"\n")
    place = grid.with_suffix(".zip") if packed else grid
    if packed:
        pack(grid, place)
    with pytest.raises(RunError, match=f"{re.escape(str(place))}.*{name}"):
        compare(find(place))


def test_a_date_in_a_recipe_is_another_value(grid):
    file = grid / "cells" / "raw" / "recipe.toml"
    seal(file.parent)
    file.write_text(re.sub(r"seed = \d+", "seed = 2024-01-01", file.read_text()))
    with pytest.raises(RunError, match=r"recipe.toml changed after the run"):
        find(grid)


# --- archives that grow -----------------------------------------------------------------------------------------------


def bomb(file, *, declared):
    """A packed run whose queries take 256 MiB; its size in the archive may be given as a smaller one."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("run/queries.safetensors", "w", force_zip64=True) as member:
            for _ in range(256):
                member.write(bytes(2**20))
        for name in ("recipe.toml", "manifest.json", "metrics.json"):
            archive.writestr(f"run/{name}", "{}" if name.endswith("json") else "")
        if declared is not None:
            archive.filelist[0].file_size = declared


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        (None, "bomb.zip holds 268,435,460 bytes, and a packed file of its size at most"),
        (64, "queries.safetensors cannot be read"),
    ],
)
def test_a_packed_file_cannot_fill_the_memory(declared, told, tmp_path):
    bomb(tmp_path / "bomb.zip", declared=declared)
    program = f"""
import resource
from nearfar.bench import find
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    [run.queries() for run in find({str(tmp_path / "bomb.zip")!r})]
except ValueError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *lines, mebibytes = done.stdout.splitlines()
    assert told in lines[0]
    assert int(mebibytes) < 100


def test_nested_folders_of_a_packed_file_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "deep.zip", "w") as archive:
        archive.writestr("a/" * 3000 + "recipe.toml", "")
    with pytest.raises(RunError, match=r"deep.zip holds folders that are nested more than 32 deep"):
        find(tmp_path / "deep.zip")
