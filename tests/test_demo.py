"""The demo keeps its word: unseen classes, one recipe, the same numbers every time, and all it names is there."""

import json

import pytest
import torch

from nearfar import data, demo
from nearfar.metrics.intervals import Interval
from nearfar.search import Index
from nearfar.training.recipe.files import to_dict


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(demo, "STEPS", 4)
    monkeypatch.setattr(demo, "CHARACTERS", {**demo.CHARACTERS, "classes": 32, "per_class": 5})


def test_losses_differ_in_nothing_but_the_loss():
    one, other = (to_dict(demo.recipe(loss)) for loss in ("contrastive", "proxy_anchor"))
    assert {name for name in one if one[name] != other[name]} == {"loss"}
    assert one["split"]["name"] == "standard"
    assert one["evaluation"]["every"] == 0  # the test is looked at once


@pytest.mark.usefixtures("short")
def test_what_is_untrained():
    before, characters = torch.random.get_rng_state(), data.open("glyphs", **demo.CHARACTERS)
    first, second = (list(demo.baselines(characters, seed=seed)) for seed in (0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert [(result.name, result.dimensions) for result in first] == [
        ("raw pixels", 28 * 28),
        ("PCA", 64),
        ("untrained network", 64),
    ]
    assert first[0].scores["queries"] == 16 * 5
    assert [one == other for one, other in zip(first, second, strict=True)] == [True, True, False]


@pytest.mark.usefixtures("short")
def test_a_run_learns_characters_and_is_tested_on_others(tmp_path):
    seen = []
    result = demo.train("proxy_anchor", tmp_path / "run", epochs=2, watch=lambda work: lambda *of: seen.append(of))
    assert seen[-1] == (8, 8)
    assert result.folder == tmp_path / "run"
    measured = json.loads((tmp_path / "run" / "metrics.json").read_text())["test"]
    assert result.scores["recall@1"] == pytest.approx(measured["recall@1"])
    assert result.interval.low <= result.scores["recall@1"] <= result.interval.high
    again = demo.train("proxy_anchor", tmp_path / "again", epochs=2)
    assert again.scores == result.scores
    other = demo.train("proxy_anchor", tmp_path / "other", epochs=2, seed=1)
    assert other.scores != result.scores


def test_the_best_come_first():
    def result(name, recall, precision):
        return demo.DemoResult(name, 16, {"recall@1": recall, "map@r": precision}, Interval(recall, recall, recall, 5))

    results = [result("c", 0.9, 0.5), result("a", 0.95, 0.1), result("b", 0.9, 0.6)]
    assert [each.name for each in demo.ranked(results)] == ["a", "b", "c"]


@pytest.mark.usefixtures("short")
def test_printed_are_plain_lines_and_a_ranking_and_all_it_names_is_there(tmp_path, capsys):
    out, threads = tmp_path / "out", torch.get_num_threads()
    demo.show(["contrastive", "raw", "raw"], out, epochs=1)
    assert torch.get_num_threads() == threads
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    words = ("R@1", "95 %", "over 16 classes", "MAP@R", "raw pixels", "PCA", "untrained network", "80 queries")
    for word in (*words, f"serve {out}/characters.index"):
        assert word in printed
    assert sorted(folder.name for folder in out.iterdir()) == ["characters.index", "contrastive", "raw"]
    pages = list(out.glob("*/report.html"))
    assert len(pages) == 1
    assert str(pages[0]) in printed
    with Index.open(out / "characters.index", read_only=True) as found:
        assert len(found) == 80
        unseen = data.open("glyphs", **demo.CHARACTERS).classes[16:]
        assert {item.label for item in found.items} == set(unseen)
        assert len(found.search(0, k=3)) == 3


def test_what_is_wrong_shows_before_anything_is_trained(tmp_path):
    with pytest.raises(ValueError, match="loss is 'nope'"):
        demo.show(["raw", "nope"], tmp_path / "new")
    with pytest.raises(ValueError, match="losses is empty"):
        demo.show([], tmp_path / "new")
    with pytest.raises(ValueError, match=r"training.epochs is 0"):
        demo.show(["raw"], tmp_path / "new", epochs=0)
    assert not (tmp_path / "new").exists()
    (tmp_path / "letter.txt").touch()
    with pytest.raises(FileExistsError, match="is not empty"):
        demo.show(["raw"], tmp_path)


@pytest.mark.parametrize(
    ("called", "known", "said"),
    [
        (".venv/bin/nearfar", None, ".venv/bin/nearfar"),
        (".venv/bin/nearfar", "/usr/bin/nearfar", "nearfar"),
        ("/usr/lib/nearfar/__main__.py", None, "nearfar"),
    ],
)
def test_the_program_is_named_so_that_it_can_be_called(called, known, said, monkeypatch):
    monkeypatch.setattr("sys.argv", [called, "demo"])
    monkeypatch.setattr("shutil.which", lambda name: known)
    assert demo.program() == said
