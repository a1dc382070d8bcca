"""nearfar train: from a file to a run folder, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import nearfar.cli.train  # noqa: F401
from nearfar.cli import main
from nearfar.training import load, load_recipe

RECIPE = """
[data]
name = "digits"
settings = {vectors = true}
[sampler]
classes = 5
per_class = 4
steps = 3
[network]
name = "linear"
dim = 4
[loss]
name = "raw"
[optimizer]
lr = 0.01
[training]
epochs = 1
device = "cpu"
"""


def run(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.toml"
    file.write_text(RECIPE, encoding="utf-8")
    return file


def test_a_recipe_becomes_a_run_folder_and_a_model(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run("train", recipe, "--set", "loss.alpha=5", "--set", "network.dim=3", "--out", out) == 0
    assert capsys.readouterr().out.startswith(f"{out}: test recall@1 0.")
    assert load_recipe(out).loss.settings == {"alpha": 5}
    assert load(out).dim == 3


def test_a_run_is_exported(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run("train", recipe, "--out", out, "--quiet") == 0
    assert run("export", out, "--format", "safetensors", "--out", tmp_path / "model.safetensors") == 0
    exported, trained = (load(place).state_dict() for place in (tmp_path / "model.safetensors", out))
    assert exported.keys() == trained.keys()
    assert all(torch.equal(exported[name], trained[name]) for name in trained)


def test_a_run_is_named_after_its_recipe(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("train", recipe, "--quiet") == run("train", recipe, "--quiet") == 0
    assert sorted(folder.name for folder in (tmp_path / "runs").iterdir()) == [
        f"{tmp_path.name}-tiny",
        f"{tmp_path.name}-tiny-2",
    ]


def test_quiet_says_one_line(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("train", recipe, "--out", tmp_path / "run", "--quiet")
    said = capsys.readouterr()
    assert (said.err, said.out.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--set", "loss.alhpa=5"], "did you mean 'loss.alpha'"),
        (["--set", "alpha"], "SECTION.KEY=VALUE"),
        (["--data", "here"], "digits takes none"),
        (["--device", "tpu"], "training.device is 'tpu'; allowed are auto, cpu, cuda"),
        (["--set", "training.epochs=many"], "training.epochs is 'many'"),
        (["--resume", "nowhere", "--out", "there"], "a run is resumed in its own folder"),
    ],
)
def test_bad_input_is_one_line(recipe: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", recipe, *words) == 1
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_without_recipe_or_run_there_is_nothing_to_train(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("train") == 1
    assert "recipe is missing" in capsys.readouterr().err
    assert run("train", "--resume", tmp_path) == 1
    assert "holds no run to resume" in capsys.readouterr().err
