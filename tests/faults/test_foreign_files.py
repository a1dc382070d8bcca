"""Nothing of others is lost: every creator of files, among files that are not its own, is run, fails and is killed."""

import inspect
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import get_args

import creators
import numpy as np
import pytest
from creators import CREATORS
from typer.models import OptionInfo

from nearfar.cli import app, main
from nearfar.search.embedding_files import embed

# Options with paths that are only read, and outputs that are tested below.
INPUTS = {"--gallery", "--gallery-labels", "--index", "--metadata", "--model", "--resume", "--runs", "--space"}
INPUTS |= {"--certificate", "--images", "--key", "--threshold"}
ELSEWHERE = {("serve", "--access-log"), ("demo", "--out"), ("papers run", "--out")}  # papers run starts other commands


def outputs():
    """The outputs of creators: pairs of a command and an option."""
    pairs = set()
    for words in (creator.split() for creator in CREATORS.values() if isinstance(creator, str)):
        command = " ".join(words[:2] if words[0] in ("bench", "data", "index", "papers", "recipe") else words[:1])
        pairs |= {
            (command, "--out" if option == "-o" else option)
            for option, value in pairwise(words)
            if option.startswith("-") and ("{out}" in value or "{up}" in value)
        }
    return pairs


def declared(commands, path=""):
    """Pairs of a command and one of its options for a path."""
    for group in commands.registered_groups:
        yield from declared(group.typer_instance, f"{group.name}")
    for command in commands.registered_commands:
        for parameter in inspect.signature(command.callback, eval_str=True).parameters.values():
            kind, option = get_args(parameter.annotation)
            if isinstance(option, OptionInfo) and (kind is Path or Path in get_args(kind)):
                names = [name for name in (option.default, *option.param_decls) if isinstance(name, str)]
                long = max(names, key=len, default=f"--{parameter.name.replace('_', '-')}")
                yield f"{path} {command.name or command.callback.__name__}".strip(), long


def test_every_option_for_an_output_has_a_creator():
    written = {(command, option) for command, option in declared(app) if option not in INPUTS}
    caches = {pair for pair in written if pair[1] == "--cache"}  # one of them is tested
    assert outputs() & caches == {("data prepare", "--cache")}
    assert written - caches == outputs() - caches | ELSEWHERE


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    words = [sys.executable, str(Path(creators.__file__)), str(tmp_path_factory.mktemp("creators"))]
    paths = os.pathsep.join([str(Path(creators.__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CREATORS)
def test_files_of_others_stay(report, name):
    assert report[name]["writes"] > 0, "the hook has seen nothing"
    assert not report[name]["wrong"], "\n".join(report[name]["wrong"])


def test_shares_of_workers_are_kept_in_a_folder_of_their_own(tmp_path):
    np.save(tmp_path / "vectors.npy", np.eye(3))
    (tmp_path / "a.npz.parts").mkdir()
    (tmp_path / "a.npz.parts" / "000000.npz").write_text("mine")
    with pytest.raises(FileExistsError, match=r"a\.npz\.parts contains '000000\.npz'"):
        embed("model", tmp_path / "vectors.npy", engine="ray", parts=tmp_path / "a.npz.parts")
    assert (tmp_path / "a.npz.parts" / "000000.npz").read_text() == "mine"


def test_a_log_of_others_gets_no_lines(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit):
        main(["serve", str(tmp_path / "index"), "--access-log", str(tmp_path / "notes.txt")])
    assert "notes.txt exists and was not written by this command; name another file" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "mine"
