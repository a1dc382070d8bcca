"""nearfar tune and nearfar bench report: arguments in, files and one readable line out."""

import pytest
from runs import write_board, write_run
from training_runs import recipe, vectors

from nearfar.training.recipe.files import load, to_toml

pytest.importorskip("optuna")


@pytest.fixture
def files(tmp_path):
    """A recipe and a space."""
    one, other = tmp_path / "recipe.toml", tmp_path / "space.toml"
    chosen = {"split__name": "fixed_validation", "split__share": 0.34, "training__epochs": 1}
    one.write_text(to_toml(recipe(vectors(tmp_path), **chosen)))
    other.write_text('"loss.margin" = {low = 0.0, high = 0.5, step = 0.5}\n')
    return one, other


def test_tune_writes_a_recipe_that_trains(files, tmp_path, nearfar):
    out = tmp_path / "tuned"
    command = ["tune", files[0], "--space", files[1], "--sampler", "grid", "--out", out, "--set", "optimizer.lr=0.02"]
    said, told = nearfar(*command)
    assert "trial 2: " in told
    assert f"wrote {out / 'best.toml'}" in said
    assert f"test them once with: nearfar train {out / 'best.toml'}" in said
    assert "<svg" in (out / "tuning.html").read_text()
    best = load(out / "best.toml")
    assert best.optimizer.lr == 0.02
    assert f"loss.margin={best.loss.settings['margin']:g}" in said
    assert nearfar(*command, "--quiet").err == "", "nothing is left to do"
    assert "test recall@1" in nearfar("train", out / "best.toml", "--out", tmp_path / "run", "--quiet").out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--sampler", "magic"], "sampler is 'magic'; allowed are tpe, random, grid, in_turn"),
        (["--trials", "0"], "trials is 0; it must be ≥ 1"),
        (["--jobs", "0"], "jobs is 0; it must be ≥ 1"),
        (["--set", "split.name=standard"], "--set split.name=fixed_validation"),
        (["--set", "evaluation.test=false", "--set", "split.name=standard"], "evaluation.test is false"),
        (["--storage", "nonsense"], "the storage 'nonsense' cannot be opened"),
    ],
)
def test_tune_says_what_is_wrong_in_a_line(files, tmp_path, refused, change, words):
    assert words in refused("tune", files[0], "--space", files[1], "--out", tmp_path / "tuned", *change)


def test_tune_says_that_nothing_can_be_pruned(files, tmp_path, nearfar):
    out, rare = tmp_path / "tuned", "evaluation.every=0"
    told = nearfar("tune", files[0], "--space", files[1], "--out", out, "--trials", 1, "--set", rare).err
    assert "--set evaluation.every=1" in told


def test_report_writes_a_page(tmp_path, nearfar):
    write_board(tmp_path / "birds", {"triplet": 0.5, "margin": 0.6}, {"resnet50": 0.0}, [64], seeds=1)
    said = nearfar("bench", "report", tmp_path / "birds").out
    file = tmp_path / "birds" / "leaderboard.html"
    assert f"wrote {file}" in said
    assert "<h1>birds</h1>" in file.read_text()
    other = tmp_path / "other.html"
    arguments = ["bench", "report", tmp_path / "birds", "-o", other, "--title", "Ours", "--metric", "map@r"]
    nearfar(*arguments)
    assert "<h1>Ours</h1>" in other.read_text()
    assert "MAP@R" in other.read_text()


def test_report_says_what_is_wrong_in_a_line(tmp_path, refused):
    write_run(tmp_path / "one", "triplet", 0.5)
    assert "'nmi'" in refused("bench", "report", tmp_path / "one", "--metric", "nmi")
