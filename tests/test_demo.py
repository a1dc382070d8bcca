"""The demo keeps its word: unseen classes, the same numbers every time, learning that helps."""

from __future__ import annotations

import pytest
import torch

import nearfar as nf
from nearfar import demo


def test_no_digit_is_on_both_sides() -> None:
    seen, unseen = demo.load()
    assert set(seen.labels.tolist()) == {0, 1, 2, 3, 4}
    assert set(unseen.labels.tolist()) == {5, 6, 7, 8, 9}
    assert len(seen.labels) + len(unseen.labels) == 1797
    assert 0 <= float(seen.images.min()) < float(seen.images.max()) <= 1


def test_views_are_eight_classes_for_each_digit() -> None:
    seen, _ = demo.load()
    classes = demo.views(seen)
    assert len(classes) == 40
    zeros = seen.images[seen.labels == 0]
    assert torch.equal(classes[0], zeros)
    assert torch.equal(classes[1][:, 0, 0], zeros[:, 0, :, -1])  # a quarter turn: the right column is on top
    assert torch.equal(classes[20], zeros.flip(-1))


def test_results_are_the_baselines_then_the_losses_and_repeat() -> None:
    before = torch.random.get_rng_state()
    first, second = (list(demo.run(["contrastive", "margin"], steps=5, seed=3)) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert [(result.name, result.dimensions) for result in first] == [
        ("raw pixels", 64),
        ("PCA", 16),
        ("contrastive", 16),
        ("margin", 16),
    ]
    for one, other in zip(first, second, strict=True):
        assert list(one.recall) == ["recall@1", "recall@2", "recall@4", "recall@8"]
        assert one.recall == other.recall
    (other_seed,) = list(demo.run(["contrastive"], steps=5, seed=4))[2:]
    assert other_seed.recall != first[2].recall


def test_baselines_do_not_depend_on_the_seed() -> None:
    one, other = ([result.recall for result in demo.run(["raw"], steps=1, seed=seed)][:2] for seed in (0, 1))
    assert one == other


def test_learning_brings_training_digits_together() -> None:
    seen, _ = demo.load()
    same = seen.labels.unsqueeze(1) == seen.labels
    gaps = []
    for steps in (1, 100):
        torch.manual_seed(0)
        network = demo.train(nf.losses.create("contrastive"), seen, steps=steps)
        units = torch.nn.functional.normalize(network(seen.images).detach())
        similarity = units @ units.T
        gaps.append(float(similarity[same].mean() - similarity[~same].mean()))
    assert gaps[1] > gaps[0] + 0.1


def test_every_step_is_watched() -> None:
    steps: list[tuple[str, int]] = []
    list(demo.run(["raw"], steps=3, watch=lambda key, step: steps.append((key, step))))
    assert steps == [("raw", 1), ("raw", 2), ("raw", 3)]


def test_a_wrong_key_shows_before_anything_is_computed() -> None:
    with pytest.raises(ValueError, match="loss is 'nope'"):
        demo.run(["raw", "nope"])


def test_printed_are_plain_lines_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    demo.show(["raw"], steps=2, seed=0)
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "raw pixels: recall@1 99.1 %\n" in printed
    for word in ("R@1", "R@2", "R@4", "R@8", "raw pixels", "PCA"):
        assert word in printed
