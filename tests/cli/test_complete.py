"""Tab completion: names that come with nearfar, runs and indexes."""

import os
import subprocess
import sys

import nearfar as nf
from nearfar.cli import options
from nearfar.utils import shipped


def completed(words, folder):
    environment = {**os.environ, "COMP_WORDS": f"nearfar {words}", "COMP_CWORD": str(len(words.split(" ")))}
    environment["_NEARFAR_COMPLETE"] = "complete_bash"
    code = "from nearfar.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment, cwd=folder
    )
    return ended.stdout.split()


def test_the_shell_gets_commands_options_and_values(tmp_path):
    (tmp_path / "my.index").mkdir()
    (tmp_path / "my.index" / "index.sqlite").touch()
    assert completed("serv", tmp_path) == ["serve"]
    assert completed("tune digits/proxy_anchor --spa", tmp_path) == ["--space"]
    assert completed("search ", tmp_path) == ["my.index"]
    assert completed("tune digits/nr", tmp_path) == completed("train digits/nr", tmp_path) == ["digits/nra"]
    assert completed("tune digits/nra --space grou", tmp_path) == ["group"]
    assert completed("losses proxy_anch", tmp_path) == ["proxy_anchor"]


def test_losses_are_those_of_the_library():
    assert options.complete_losses("") == sorted(nf.losses.names())


def test_recipes_and_runs_are_offered(tmp_path, monkeypatch):
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "recipe.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert options.complete_runs("") == ["runs/first"]
    assert set(options.complete_recipes("")) == {*shipped.names("recipe"), "runs/first"}
    assert options.complete_recipes("digits/nr") == ["digits/nra"]
    assert options.complete_grids("digi") == ["digits"]
