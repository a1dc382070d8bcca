"""Folds of a seed, separated or with their embeddings side by side."""

import numpy as np
import pytest
import torch
from runs import finished

import nearfar as nf
from nearfar.bench import compare
from nearfar.bench.comparison.folds import concatenated
from nearfar.training.evaluation.embeddings import EmbeddingSet

LABELS = torch.arange(40) % 8


def embeddings(loss, seed, fold):
    generator = torch.Generator().manual_seed(100 * len(loss) + 10 * seed + fold)
    return torch.eye(8)[LABELS] + (fold + 1) * 0.4 * torch.randn(40, 8, generator=generator)


def write_folds(folder, losses, seeds):
    found = []
    for loss in losses:
        for seed in range(seeds):
            for fold in range(2):
                points = embeddings(loss, seed, fold)
                answers = nf.metrics.retrieval(points, LABELS, ks=(1,), per_query=True)["per_query"]["recall@1"]
                split = {"split.name": "k_fold", "split.folds": 2, "split.fold": fold, "training.seed": seed}
                run = finished(folder / f"{loss}-{seed}-{fold}", loss, queries=answers, classes=8, overrides=split)
                EmbeddingSet(points, LABELS).save(run.folder / "embeddings.safetensors")
                found.append(run)
    return found


def test_concatenated_folds_are_tested_as_one_embedding(tmp_path):
    found = concatenated(write_folds(tmp_path, ("nra", "triplet"), seeds=3))
    assert [(run.loss, run.seed) for run in found] == [(loss, seed) for loss in ("nra", "triplet") for seed in range(3)]
    both = torch.cat([torch.nn.functional.normalize(embeddings("nra", 1, fold)) for fold in range(2)], dim=1)
    expected = nf.metrics.retrieval(both, LABELS, per_query=True)
    assert found[1].score() == pytest.approx(expected["recall@1"])
    assert found[1].seconds == 25.0  # both trainings
    kept = found[1].queries()
    np.testing.assert_allclose(kept["map@r"], expected["per_query"]["map@r"], atol=1e-6)
    assert kept["labels"].tolist() == LABELS.tolist()


def test_both_ways_are_compared(tmp_path):
    runs = write_folds(tmp_path, ("nra", "triplet"), seeds=3)
    for found in (compare(runs), compare(concatenated(runs))):
        assert found.verdict.fair
        assert found.classes is not None
        assert (found.classes, found.seeds) == (8, 3)
        assert found.groups is not None
    apart, together = compare(runs).rows[0].score, compare(concatenated(runs)).rows[0].score
    assert together > apart  # an ensemble


def test_folds_without_embeddings_cannot_be_concatenated(tmp_path):
    runs = write_folds(tmp_path, ("nra",), seeds=1)
    (runs[0].folder / "embeddings.safetensors").unlink()
    with pytest.raises(ValueError, match="did not keep its embeddings"):
        concatenated(runs)
    plain = [finished(tmp_path / "plain")]
    assert concatenated(plain) == plain
