"""The command line as its users meet it: exit codes, one-line errors, readable output."""

import subprocess
import sys

import pytest
import typer

import nearfar as nf
from nearfar.cli import main
from nearfar.cli.app import app
from nearfar.cli.output import print_list


def test_version(nearfar):
    assert nearfar("--version").out == f"nearfar {nf.__version__}\n"


def commands(command, *words):
    """All commands below a command, with their words."""
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, *words, name)


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_has_an_example(words, nearfar):
    assert " ".join(("Example: nearfar", *words)) in " ".join(nearfar(*words, "--help").out.split())


def test_every_output_option_has_its_short_form():
    options = [(words, option.opts) for words, command in COMMANDS.items() for option in command.params]
    outputs = [(words, names) for words, names in options if "--out" in names]
    assert len(outputs) > 10
    assert [words for words, names in outputs if "-o" not in names] == []


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
