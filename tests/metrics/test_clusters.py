"""``clustering``: k-means, then the scores of its clusters."""

import numpy as np
import pytest
import torch

import nearfar as nf


def rays(classes=6, members=10, *, noise=0.05):
    """Vectors along one direction for each class, near and far from the origin."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(classes).repeat_interleave(members)
    directions = torch.eye(8)[:classes]
    vectors = directions[labels] + noise * torch.randn(len(labels), 8, generator=generator)
    return vectors * torch.rand(len(labels), 1, generator=generator).mul(4).exp(), labels


def test_directions_are_found():
    embeddings, labels = rays()
    assert nf.metrics.clustering(embeddings, labels) == {"nmi": 1.0, "ami": 1.0, "f1": 1.0, "clusters": 6}


def test_raw_embeddings_are_clustered_by_length_as_well():
    embeddings, labels = rays()
    assert nf.metrics.clustering(embeddings, labels, normalize=False)["nmi"] < 0.9


def test_the_scores_are_those_of_the_clusters():
    embeddings, labels = rays(noise=0.5)
    assignment = nf.metrics.kmeans(embeddings, 6, normalize=True, seed=3, restarts=2).assignment
    found = nf.metrics.clustering(embeddings, labels, seed=3, restarts=2)
    assert found == {
        "nmi": nf.metrics.nmi(labels, assignment),
        "ami": nf.metrics.ami(labels, assignment),
        "f1": nf.metrics.f1(labels, assignment),
        "clusters": 6,
    }
    geometric = nf.metrics.clustering(embeddings, labels, seed=3, restarts=2, normalization="geometric")
    assert geometric == {**found, "nmi": nf.metrics.nmi(labels, assignment, normalization="geometric")}


def test_another_number_of_clusters():
    embeddings, labels = rays()
    found = nf.metrics.clustering(embeddings, labels, k=3)
    assert found["clusters"] == 3
    assert found["nmi"] < 1.0


def test_every_class_with_one_member():
    embeddings, _ = rays()
    assert nf.metrics.clustering(embeddings, torch.arange(60)) == {"nmi": 1.0, "ami": 1.0, "f1": 1.0, "clusters": 60}


@pytest.mark.parametrize("kind", ["array", "map", "float16", "bfloat16", "float64", "words"])
def test_kinds_of_input(kind, tmp_path):
    embeddings, labels = rays(noise=0.4)
    given = embeddings
    given_labels = labels
    if kind in ("array", "map"):
        np.save(tmp_path / "embeddings.npy", embeddings.numpy())
        given = np.load(tmp_path / "embeddings.npy", mmap_mode="r" if kind == "map" else None)
        given_labels = labels.numpy()
    elif kind == "words":
        given_labels = np.array(["auk", "bee", "cat", "dog", "eel", "fox"])[labels.numpy()]
    else:
        given = embeddings.to(getattr(torch, kind))
    expected = nf.metrics.clustering(torch.as_tensor(given).float() if "16" in kind else embeddings, labels)
    assert nf.metrics.clustering(given, given_labels) == expected


def test_progress():
    calls = []
    nf.metrics.clustering(*rays(), progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1]


EMBEDDINGS, LABELS = torch.eye(4), torch.tensor([0, 0, 1, 1])


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"embeddings": EMBEDDINGS.tolist()}, TypeError, "embeddings is a list"),
        ({"embeddings": EMBEDDINGS * torch.nan}, ValueError, "embeddings contains NaN or infinity in 4 of 4 rows"),
        ({"labels": LABELS[:3]}, ValueError, r"labels has shape \(3,\); needed is \[4\]"),
        ({"labels": LABELS * 0}, ValueError, "labels have one class; at least two are required"),
        ({"k": 5}, ValueError, "k is 5; it must be ≥ 1 and ≤ 4"),
        ({"restarts": 0}, ValueError, "restarts is 0"),
        ({"normalization": "max"}, ValueError, "normalization is 'max'; allowed are arithmetic, geometric"),
    ],
)
def test_errors_name_the_argument(keywords, error, message):
    with pytest.raises(error, match=message):
        nf.metrics.clustering(**{"embeddings": EMBEDDINGS, "labels": LABELS, **keywords})
