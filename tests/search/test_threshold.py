"""Thresholds of an index: match, no match, unknown."""

from dataclasses import replace

import numpy as np
import pytest
from fake_index import threshold

import nearfar as nf
from nearfar.search import Index
from nearfar.search.storage import BadIndex

POINTS = np.array([[1, 0], [0.8, 0.6], [0, 1]], dtype=np.float32)


def build(folder, **settings):
    return Index.from_vectors(POINTS, labels=["jay", "jay", "wren"], out=folder, **settings)


def test_items_from_the_threshold_on_match(tmp_path):
    with build(tmp_path / "i") as index:
        assert index.search(0).matches == [None, None]
        assert index.search(0).unknown is None
        index.set_threshold(threshold(0.8))
        assert (index.search(0).matches, index.search(0).unknown) == ([True, False], False)
        assert (index.search(2).matches, index.search(2).unknown) == ([False, False], True)
        assert index.search(0, expand=1).unknown is None
        assert index.search(0, rerank="k_reciprocal").matches == [None, None]
    with Index.open(tmp_path / "i") as index:
        assert index.threshold == threshold(0.8)
        assert index.info()["threshold"]["similarity"] == 0.8
        index.compact()
        assert index.search(0).to_json()["neighbors"][0]["match"] is True
        index.set_threshold(None)
    with Index.open(tmp_path / "i", read_only=True) as index:
        assert index.threshold is None
        with pytest.raises(BadIndex, match="read-only"):
            index.set_threshold(threshold(0.8))


def test_distances_match_up_to_the_threshold(tmp_path):
    with build(tmp_path / "i", measure="euclidean") as index:
        index.set_threshold(replace(threshold(-0.7), measure="euclidean"))
        assert index.search(0).matches == [True, False]  # distances 0.63 and 1.41


def test_a_threshold_of_other_scores_is_refused(tmp_path):
    with build(tmp_path / "i") as index, pytest.raises(ValueError, match="is of measure 'euclidean'"):
        index.set_threshold(replace(threshold(-0.7), measure="euclidean"))


def searches():
    """A threshold of searches for up to 150 items."""
    rng = np.random.default_rng(0)
    labels = np.arange(16).repeat(10)
    points = rng.normal(size=(16, 2))[labels] + 0.5 * rng.normal(size=(160, 2))
    return nf.metrics.calibrate_search(points, labels)


def test_the_threshold_of_a_search_follows_the_index(tmp_path):
    with build(tmp_path / "i") as index:
        index.set_threshold(replace(threshold(0.8), search=searches()))
        assert index.threshold == searches().at(3)
        with Index.open(tmp_path / "i", read_only=True) as reader:
            index.add_vectors(np.random.default_rng(1).normal(size=(93, 2)))
            assert index.threshold.items == 96
            assert index.threshold.similarity > searches().at(3).similarity
            assert reader.threshold == index.threshold == reader.search(0).threshold
        assert index.info()["threshold"]["known_found"] == searches().at(96).known_found
        index.add_vectors(np.random.default_rng(1).normal(size=(93, 2)))
        assert not index.threshold.is_measured
        index.remove(range(189 - 3))
        index.set_threshold(searches())
        assert index.threshold == searches().at(3)
        with pytest.raises(ValueError, match="is of measure 'euclidean'"):
            index.set_threshold(replace(searches(), measure="euclidean"))
