"""Every table and figure has commands that exist, or a reason."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import typer

from nearfar.bench import papers
from nearfar.bench.papers.experiments import PaperExperiment, experiment, experiments
from nearfar.cli import app, main

ROOT = Path(__file__).parents[3]
ALL = pytest.mark.parametrize("one", experiments(), ids=lambda one: one.id)


def words_of(one: PaperExperiment, out: Path) -> list[tuple[str, ...]]:
    data = {name: name.upper() for name in one.datasets}
    return one.commands(out=str(out), data=data)


@ALL
def test_an_experiment_has_commands_or_a_reason(one: PaperExperiment, tmp_path: Path) -> None:
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
def test_commands_are_understood(one: PaperExperiment, tmp_path: Path) -> None:
    """They are parsed with all their options, and not run."""
    program = typer.main.get_command(app)
    for words in words_of(one, tmp_path) if one.lines else ():
        command, rest = program, list(words)
        while hasattr(command, "commands"):
            command = command.commands[rest.pop(0)]
        command.make_context(command.name, rest)


def test_every_printed_table_of_own_results_is_an_experiment() -> None:
    """Tables that are listed under the number of another are named in its title."""
    told = " ".join(f"{one.id} {one.title}" for one in experiments())
    for document in ("group", "ranked_list"):
        for number in {table.id.split("-")[0] for table in papers.document(document).tables}:
            assert f"{document}:table{number}" in told or f"Table {number}" in told, (document, number)


def test_only_commands_with_data_are_run() -> None:
    found = experiment("group:table2")
    commands = found.commands(out="o", data={"cub": "my birds"})
    assert commands[0] == (
        "train",
        "cub/group_ensemble_2",
        "--data",
        "my birds",
        "--out",
        "o/cub-group_ensemble_2",
    )
    assert len(commands) == 2
    with pytest.raises(ValueError, match="group:table2 needs data: cub=ROOT, cars196=ROOT, sop=ROOT"):
        found.commands(out="o", data={})
    with pytest.raises(ValueError, match="data has 'inshop'; group:table2 uses cub, cars196, sop"):
        found.commands(out="o", data={"inshop": "x"})
    with pytest.raises(ValueError, match="group:tabel2"):
        experiment("group:tabel2")


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["papers", *words])
    return int(stop.value.code or 0)


def test_the_command_lists_all_and_prints_those_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 0
    printed = capsys.readouterr().out
    assert all(one.id in printed for one in experiments())
    assert call("run", "nra:figure4", "--data", "digits folder", "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert shlex.split(lines[0])[:5] == ["nearfar", "train", "mnist/softmax", "--data", "digits folder"]
    assert call("run", "group:table2", "--data", "somewhere") == 1
    assert "needed is NAME=ROOT, with one of cub, cars196, sop" in capsys.readouterr().err


def test_the_command_runs_what_it_prints(tmp_path: Path) -> None:
    assert call("run", "unified_view:figure1", "--out", str(tmp_path / "found")) == 0
    assert (tmp_path / "found" / "pair-weights.png").stat().st_size > 1000
    assert call("run", "nra:tableII") == 1
