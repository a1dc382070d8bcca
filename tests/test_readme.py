"""What the README and its pages of losses and commands say is true: code runs, commands work, the table is complete."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from safetensors.torch import save_file

import nearfar as nf
from nearfar.cli import main
from nearfar.cli.app import app
from nearfar.losses import base

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
LOSSES = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")
COMMAND_LINE = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


COMMANDS = [shlex.split(line, comments=True)[1:] for block in blocks(COMMAND_LINE, "sh") for line in block.splitlines()
            if line.startswith("nearfar ")]  # fmt: skip


def test_the_python_code_runs_from_top_to_bottom(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks(README, "python"):
        exec(compile(block, "README.md", "exec"), names)
    assert "RankedList(" in capsys.readouterr().out


@pytest.mark.parametrize("words", [words for words in COMMANDS if words != ["demo"]], ids=shlex.join)
def test_a_command_works(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vectors, labels = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 6
    save_file({"embeddings": vectors, "labels": labels}, "both.safetensors")
    for name in ("embeddings", "query", "shop"):
        np.save(f"{name}.npy", vectors.numpy())
    for name in ("labels", "query_labels", "shop_labels"):
        np.save(f"{name}.npy", labels.numpy())
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 0
    for option in {"--plot", "--json"} & set(words):
        assert (tmp_path / words[words.index(option) + 1]).stat().st_size > 0


@pytest.mark.parametrize("key", nf.losses.names())
def test_the_table_has_every_loss(key):
    assert f"\n| `{key}` | {nf.losses.summary(key)} | {nf.losses.get(key).source} |\n" in LOSSES


def test_the_table_has_no_other():
    assert re.findall(r"^\| `(\w+)` \|", LOSSES, flags=re.MULTILINE) == nf.losses.names()


def test_every_mining_is_named():
    for name in nf.mining.names():
        assert f"`{name}`" in LOSSES


def test_the_readme_counts_the_losses():
    assert "**Forty losses, one signature.**" in README
    assert len(nf.losses.names()) == 40


def test_the_page_of_commands_names_every_command():
    table = "\n".join(line for line in COMMAND_LINE.splitlines() if line.startswith("| `nearfar "))
    commands = typer.main.get_command(app).commands
    assert {*re.findall(r"`(?:nearfar )?(\w+)`", table)} == {*commands}


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"`make (\w+)", README)
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def test_the_loss_that_contributing_adds_works(monkeypatch):
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    monkeypatch.setattr(base.LOSSES, "entries", dict(base.LOSSES.entries))  # known here only
    exec(compile(code.group(1), "CONTRIBUTING.md", "exec"), {"__name__": "two_hinges"})
    embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.6, -0.8]], requires_grad=True)
    value = nf.losses.create("two_hinges", upper=0.7)(embeddings, torch.tensor([0, 0, 1]))
    value.backward()
    assert value.item() == pytest.approx((0.1 + 0.2 + 0.1 + 0.2) / 3)
    assert embeddings.grad.any()
