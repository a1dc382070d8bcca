"""The command line as its users meet it: exit codes, one-line errors, readable output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

import nearfar as nf
from nearfar.cli import main
from nearfar.cli.app import app
from nearfar.cli.output import print_list


def test_version(nearfar):
    assert nearfar("--version").out == f"nearfar {nf.__version__}\n"


@pytest.mark.parametrize("words", [[], ["--help"], ["demo", "--help"], ["losses", "-h"], ["evaluate", "-h"]])
def test_help_has_an_example(words, nearfar):
    assert "Example: nearfar " in nearfar(*words).out


def test_every_output_option_has_its_short_form():
    def options(command):
        for each in getattr(command, "commands", {}).values():
            yield from options(each)
        yield from ((command.name, found.opts) for found in command.params if "--out" in found.opts)

    found = list(options(typer.main.get_command(app)))
    assert len(found) > 10
    assert [name for name, words in found if "-o" not in words] == []


def test_the_list_has_every_loss_and_its_meaning(nearfar, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    lines = nearfar("losses").out.splitlines()
    for key in nf.losses.names():
        (line,) = [line for line in lines if line.split()[:1] == [key]]
        assert nf.losses.summary(key) in line
        assert nf.losses.get(key).source in line


@pytest.mark.parametrize("key", nf.losses.names())
def test_a_loss_is_described(key, nearfar):
    assert nearfar("losses", key).out == nf.losses.describe(key)


def test_all_losses_are_described_with_formula_and_reference(nearfar):
    printed = nearfar("losses", "--all").out
    for key in nf.losses.names():
        assert nf.losses.describe(key) in printed
        assert {"  Formula:", "  Reference:"} <= set(nf.losses.describe(key).splitlines())


def test_a_plot_is_written(tmp_path, nearfar):
    file = tmp_path / "two.svg"
    words = ["losses", "raw", "triplet", "--set", "mining=hard", "--plot", str(file)]
    assert nearfar(*words).out == f"wrote {file}\n"
    assert ">triplet<" in file.read_text()


def test_the_plot_of_no_loss_in_particular_shows_the_classic_ones(nearfar, tmp_path):
    file = tmp_path / "weights.svg"
    nearfar("losses", "--plot", str(file))
    drawn = file.read_text()
    for name in ("contrastive", "triplet, all triplets", "lifted_structure_generalized", "binomial_deviance", "raw"):
        assert f">{name}<" in drawn


@pytest.mark.parametrize(("kind", "words"), [("transfer", "α = 8"), ("ranks", "similarity s, drawn at 1 − s (α = 8)")])
def test_what_nra_makes_of_ranks_is_drawn(nearfar, kind, words, tmp_path):
    file = tmp_path / "nra.svg"
    nearfar("losses", "nra", "--plot", str(file), "--kind", kind, "--set", "alpha=8")
    assert f">{words}<" in file.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["losses", "rwa"], "loss is 'rwa' (did you mean 'raw'?)"),
        (["losses", "raw", "--plot", "raw.gif"], "must end in .png, .svg, .pdf"),
        (["losses", "raw", "--set", "alpha=3"], "--set needs a loss to draw"),
        (["losses", "raw", "--plot", "a.png", "--set", "alpha"], "--set is 'alpha'; NAME=VALUE is needed"),
        (["losses", "raw", "--plot", "a.png", "--set", "alhpa=3"], "(did you mean 'alpha'?)"),
        (["losses", "raw", "--plot", "a.png", "--set", "alpha=-3"], "alpha is -3"),
        (
            ["losses", "nra", "--plot", "a.png", "--kind", "rank"],
            "--kind is 'rank'; allowed are weights, transfer, ranks",
        ),
        (["losses", "raw", "--plot", "a.png", "--kind", "ranks"], "--kind ranks exists for nra only"),
        (["losses", "nra", "--kind", "transfer"], "as in: nearfar losses nra --plot nra.svg --kind transfer"),
        (["losses", "raw", "--all"], "--all explains every loss"),
        (["losses", "group", "--plot", "a.png"], "group is not a loss of pairs"),
        (["losses", "--colour"], "--colour"),
        (["demo", "--epochs", "0"], "training.epochs is 0"),
        (["demo", "--epochs", "many"], "--epochs"),
        (["demo", "--losses", "raw,nope"], "loss is 'nope'"),
        (["demo", "--losses", ","], "losses is empty"),
        (["demo", "--seed", "-1"], "training.seed is -1"),
        (["dome"], "No such command 'dome'"),
    ],
)
def test_bad_input_ends_in_one_line(
    words: list[str], message: str, nearfar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = nearfar(*words, code=None)
    assert printed.out == ""
    assert printed.err.startswith("nearfar: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_system_names_the_file_and_no_number(nearfar, tmp_path, monkeypatch):
    def refuse(*words, **settings):
        raise PermissionError(13, "Permission denied", "runs/first")

    monkeypatch.setattr("nearfar.training.trainer.train", refuse)
    err = nearfar("train", "folder", "--data", str(tmp_path), code=1).err
    assert err == "nearfar: runs/first: Permission denied\n"


@pytest.mark.parametrize("words", [["--debug", "losses", "nope"], ["losses", "nope", "--debug"]])
def test_debug_shows_the_traceback(words):
    with pytest.raises(ValueError, match="loss is 'nope'"):
        main(words)


@pytest.mark.parametrize(
    ("lines", "title"), [(["a"], "1 file was skipped:\n"), (["a", "b"], "2 files were skipped:\n")]
)
def test_a_list_counts_its_lines(lines, title, capsys):
    print_list("file was skipped", "files were skipped", lines)
    assert capsys.readouterr().out.startswith(title)


def test_the_import_is_light():
    heavy = {"matplotlib", "sklearn", "scipy", "rich", "typer", "PIL", "safetensors", "faiss", "pyarrow"}
    code = f"""if True:
        import sys, nearfar as nf, nearfar.cli
        print(*sorted(set(sys.modules) & {{"torch", "numpy"}}))
        nf.losses, nf.metrics, nf.mining, nf.data, nf.networks
        print(*sorted(set(sys.modules) & {heavy - {"typer"}!r}))"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def test_the_package_lists_what_it_has():
    assert set(dir(nf)) == set(nf.__all__)
    assert all(getattr(nf, name) is not None for name in nf.__all__)


def test_python_dash_m_is_the_command_line():
    run = subprocess.run([sys.executable, "-m", "nearfar", "losses", "nope"], capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.startswith("nearfar: loss is 'nope'")
