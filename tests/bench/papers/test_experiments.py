"""Every table and figure has commands that exist, or a reason."""

import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from nearfar.bench import grid, papers
from nearfar.bench.grid import expand
from nearfar.bench.papers.experiments import experiment, experiments
from nearfar.bench.tuning import space
from nearfar.cli import app
from nearfar.training import load_recipe

ROOT = Path(__file__).parents[3]
ALL = pytest.mark.parametrize("one", experiments(), ids=lambda one: one.id)


def words_of(one, out):
    data = {name: name.upper() for name in one.datasets}
    return one.commands(out=str(out), data=data)


@ALL
def test_an_experiment_has_commands_or_a_reason(one, tmp_path):
    assert one.id.partition(":")[0] in papers.KEYS
    assert bool(one.lines) != bool(one.reason)
    if one.result:
        assert (ROOT / one.result.split(" ")[0]).exists()
    if one.reason:
        with pytest.raises(ValueError, match="has no command"):
            words_of(one, tmp_path)
        return
    for words in words_of(one, tmp_path):
        assert not any("{" in word for word in words)
        assert all(Path(word).is_file() for word in words if word.endswith(".toml"))


@ALL
def test_commands_are_understood(one, tmp_path):
    """They are parsed with all their options, their recipes, grids and spaces are read, and nothing is run."""
    program = typer.main.get_command(app)
    for words in words_of(one, tmp_path) if one.lines else ():
        command, rest = program, list(words)
        while hasattr(command, "commands"):
            command = command.commands[rest.pop(0)]
        given = command.make_context(command.name, rest).params
        if words[0] in ("train", "tune"):
            recipe = load_recipe(given["recipe"], overrides=given["settings"] or ())
            if words[0] == "tune":
                searched = space.load(given["space"])
                space.check(searched, recipe)
                # Every setting starts at a value that the command names, not at one that the thesis found.
                named = {text.partition("=")[0] for text in given["settings"]} - {"split.name"}
                assert {one.key for one in searched} == named
        elif words[:2] == ("bench", "run"):
            assert expand(grid.load(given["grid"]), only=given["only"] or ())


def test_every_table_and_figure_of_the_papers_is_listed_once():
    last = {
        "nra": {"figure": 4, "table": ["I", "II"]},
        "unified_view": {"figure": 2, "table": 3},
        "thesis": {"figure": 32, "table": 21},
        "ranked_list": {"figure": 3, "table": 7},
        "group": {"figure": 8, "table": 2},
    }
    printed = [
        f"{key}:{kind}{number}"
        for key, kinds in last.items()
        for kind, numbers in kinds.items()
        for number in (range(1, numbers + 1) if isinstance(numbers, int) else numbers)
    ]
    assert sorted(each for one in experiments() for each in (one.id, *one.also)) == sorted(printed)
    assert all(experiment(each).document == each.partition(":")[0] for each in printed)


def test_every_published_table_is_an_experiment():
    for table in papers.tables():
        number = re.match(r"\d+|[IVX]+", table.id)
        assert number, table.id
        experiment(f"{table.document}:table{number[0]}")


def test_a_command_that_uses_a_run_is_left_out_with_it():
    commands = experiment("group:figure3").commands(out="o", data={"sop": "s"})
    assert [words[:2] for words in commands] == [("train", "sop/group"), ("report", "o/sop-group")]


def test_curves_of_training_and_test_are_measured_during_training():
    """Figures 6 to 8 of Group Loss; by default the test classes are evaluated at the end only."""
    recipes = [cell.recipe for cell in expand(grid.load("group_overfitting")) if not cell.is_baseline]
    words = experiment("group:figure8").commands(out="o", data={"sop": "s"})[0]
    recipes.append(load_recipe(words[1], overrides=[words[n + 1] for n, word in enumerate(words) if word == "--set"]))
    for recipe in recipes:
        assert recipe.evaluation.train_recall
        assert 0 < recipe.evaluation.test_every == recipe.evaluation.every


def test_only_commands_with_data_are_run():
    found = experiment("group:table2")
    commands = found.commands(out="o", data={"cub": "my birds"})
    assert commands[0] == ("train", "cub/group_ensemble_2", "--data", "my birds", "--out", "o/cub-group_ensemble_2")
    assert len(commands) == 2
    with pytest.raises(ValueError, match="group:table2 needs data: cub=ROOT, cars196=ROOT, sop=ROOT"):
        found.commands(out="o", data={})
    with pytest.raises(ValueError, match="data has 'inshop'; group:table2 uses cub, cars196, sop"):
        found.commands(out="o", data={"inshop": "x"})
    with pytest.raises(ValueError, match="group:tabel2"):
        experiment("group:tabel2")


def test_the_command_lists_all_and_prints_those_of_one(nearfar):
    printed = nearfar("papers").out
    assert all(one.id in printed for one in experiments())
    assert "Ranked List Loss for Deep Metric Learning (ranked_list)" in printed
    assert "thesis:figure3 to figure13  Perceptron" in printed
    assert "nearfar papers run unified_view:table2 --data cub=CUB --data cars196=CARS196" in printed
    lines = nearfar("papers", "run", "nra:figure4", "--data", "digits folder", "--dry-run").out.splitlines()
    assert shlex.split(lines[0])[:5] == ["nearfar", "train", "mnist/softmax", "--data", "digits folder"]
    err = nearfar("papers", "run", "group:table2", "--data", "somewhere", code=1).err
    assert "needed is NAME=ROOT, with one of cub, cars196, sop" in err


def test_the_command_runs_what_it_prints(nearfar, tmp_path):
    nearfar("papers", "run", "unified_view:figure1", "--out", str(tmp_path / "found"))
    assert (tmp_path / "found" / "pair-weights.png").stat().st_size > 1000
    nearfar("papers", "run", "unified_view:figure2", code=1)


def test_the_same_command_resumes(nearfar, tmp_path, monkeypatch):
    started = []

    def start(words, check):
        started.append(words)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", start)
    for name, files in (("cub", ["recipe.toml", "metrics.json"]), ("cars196", ["recipe.toml"])):
        folder = tmp_path / f"{name}-raw_valid_triplet"
        folder.mkdir()
        for file in files:
            (folder / file).touch()
    data = [word for name in ("cub", "cars196") for word in ("--data", f"{name}=x")]
    out = nearfar("papers", "run", "unified_view:table2", "--out", tmp_path, *data).out
    assert [words[3:] for words in started] == [["train", "--resume", str(tmp_path / "cars196-raw_valid_triplet")]]
    assert "finished already: nearfar train cub/raw_valid_triplet" in out
