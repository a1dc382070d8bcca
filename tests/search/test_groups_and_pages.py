"""Duplicates, clusters, and what is shown of them and of searches."""

import re

import numpy as np
import pytest
from search_cases import digit, model, photos, vectors

from nearfar.reports.search_pages import cluster_page, results_page
from nearfar.search import Index, Item, Results, duplicates
from nearfar.search.encoder import thumbnail
from nearfar.search.results import Neighbor


def pairs_by_hand(points, threshold):
    """Groups that near pairs link, by joining sets."""
    units = points / np.linalg.norm(points, axis=1, keepdims=True)
    groups = [{row} for row in range(len(points))]
    for i in range(len(points)):
        for j in range(i):
            if units[i] @ units[j] >= threshold:
                one, other = (next(group for group in groups if row in group) for row in (i, j))
                if one is not other:
                    groups.remove(other)
                    one |= other
    return sorted((group for group in groups if len(group) > 1), key=min)


@pytest.mark.parametrize("all_pairs", [True, False])
def test_near_duplicates(tmp_path, monkeypatch, all_pairs):
    monkeypatch.setattr(duplicates, "TILE", 32)
    if not all_pairs:
        monkeypatch.setattr(duplicates, "ALL_PAIRS", 0)
    points = vectors(120)
    with Index.from_vectors(points, out=tmp_path / "i") as index:
        found = index.near_duplicates(0.9)
        assert sorted(({item.id for item in group.items} for group in found), key=min) == pairs_by_hand(points, 0.9)
        assert all(group.similarity >= 0.9 for group in found)
        assert [len(group.items) for group in found] == sorted((len(group.items) for group in found), reverse=True)
        with pytest.raises(ValueError, match=r"threshold is 1\.5"):
            index.near_duplicates(1.5)


def test_the_same_file_twice_is_a_duplicate(tmp_path):
    photos(tmp_path / "photos", 4)
    (tmp_path / "photos" / "again.png").write_bytes((tmp_path / "photos" / "digit 1" / "001.png").read_bytes())
    with Index.build(model(), tmp_path / "photos", out=tmp_path / "i", device="cpu") as index:
        (group,) = index.near_duplicates(1.0)
        assert {item.name for item in group.items} == {"again.png", "digit 1/001.png"}
        assert group.identical


def test_clusters_of_groups_that_lie_apart(tmp_path):
    labels = np.arange(60) // 20
    points = 10 * np.eye(3)[labels] + np.random.default_rng(0).standard_normal((60, 3))
    words = [None if row == 59 else f"class {label}" for row, label in enumerate(labels)]
    with Index.from_vectors(points.astype(np.float32), out=tmp_path / "i", labels=words) as index:
        found = index.clusters(3)
        assert {group.label for group in found.groups} == {"class 0", "class 1", "class 2"}
        assert found.purity == 1.0
        assignment = found.assignment()
        assert [len({assignment[id] for id in range(start, start + 20)}) for start in (0, 20, 40)] == [1, 1, 1]
        # The most typical stand first.
        units = points / np.linalg.norm(points, axis=1, keepdims=True)
        ids = [item.id for item in found.groups[0].items]
        centre = units[ids].mean(0)
        far = [np.linalg.norm(units[id] - centre) for id in ids]
        assert far == sorted(far)
        page = cluster_page(found, 4)
        assert len(index.clusters()) == round((60 / 2) ** 0.5)
    assert page.count("<figure") == 12
    assert "mostly class 1, 100 %" in page


def results(label="jay"):
    picture = thumbnail(digit(0))
    names = [("jay", "<b>&.jpg"), ("wren", "b.jpg"), (None, "c.jpg")]
    found = [Neighbor(Item(n, name, own), 0.9 - 0.1 * n) for n, (own, name) in enumerate(names)]
    return Results("query.jpg", label, tuple(found), (picture,) * 4)


def test_a_page_is_whole_and_harmless():
    assert results().right == [True, False, None]
    assert results(None).right == [None, None, None]
    page = results_page([results(), results(None)])
    assert page.count('<figure class="good"') == 1
    assert page.count('<figure class="bad"') == 1
    assert "<b>&.jpg" not in page
    assert "&lt;b&gt;&amp;.jpg" in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)  # nothing from elsewhere


def test_results_as_json():
    found = results().to_json()
    assert found["neighbors"][0] == {
        "id": 0, "name": "<b>&.jpg", "label": "jay", "score": 0.9, "right": True, "metadata": {}, "match": None,
    }  # fmt: skip
