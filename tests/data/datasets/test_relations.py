"""Tables of given pairs and triplets, LFW's lists, and the sampler that draws them."""

import numpy as np
import pandas
import pytest
from trees_on_disk import write, write_zip

from nearfar import data
from nearfar.data import sampling
from nearfar.data.datasets.base import ItemRelations

PAIRS = ["left,right,same,split", "a/1.jpg,a/2.jpg,1,train", "a/1.jpg,b/1.jpg,False,train", "c/1.jpg,c/2.jpg,true,test"]
IMAGES = ["a/1.jpg", "a/2.jpg", "b/1.jpg", "c/1.jpg", "c/2.jpg"]


def table(root, lines, name="pairs.csv"):
    write(root, {name: "\n".join(lines) + "\n"})
    return root / name


def named(dataset):
    return [[dataset.source.name(row) for row in members] for members in dataset.relations.rows.tolist()]


@pytest.mark.parametrize("packed", [False, True])
def test_pairs_of_images(packed, tmp_path):
    items = write_zip(tmp_path / "images.zip", IMAGES) if packed else write(tmp_path, IMAGES)
    found = data.open("pairs", table(tmp_path, PAIRS), items=items)
    assert named(found) == [["a/1.jpg", "a/2.jpg"], ["a/1.jpg", "b/1.jpg"], ["c/1.jpg", "c/2.jpg"]]
    assert found.relations.same.tolist() == [True, False, True]
    parts = {part: {found.source.name(row) for row in rows} for part, rows in found.parts.items()}
    assert parts == {"train": {"a/1.jpg", "a/2.jpg", "b/1.jpg"}, "test": {"c/1.jpg", "c/2.jpg"}}
    assert found.num_classes == 5


def test_scores_and_row_numbers_of_vectors(tmp_path):
    np.save(tmp_path / "v.npy", np.eye(4, dtype=np.float32))
    frame = pandas.DataFrame({"one": [0, 3], "two": [2, 1], "score": [0.75, 0.5]})
    frame.to_parquet(tmp_path / "p.parquet")
    settings = {"left": "one", "right": "two", "same": "score", "items": str(tmp_path / "v.npy"), "threshold": 0.6}
    found = data.open("pairs", tmp_path / "p.parquet", **settings)
    assert found.is_vectors
    assert (found.relations.rows.tolist(), found.relations.scores.tolist()) == ([[0, 2], [3, 1]], [0.75, 0.5])
    assert (found.relations.same.tolist(), list(found.parts)) == ([True, False], ["train"])


def test_triplets(tmp_path):
    write(tmp_path, IMAGES)
    found = data.open("triplets", table(tmp_path, ["anchor,positive,negative", "a/1.jpg,a/2.jpg,b/1.jpg"]))
    assert (named(found), found.relations.width) == ([["a/1.jpg", "a/2.jpg", "b/1.jpg"]], 3)


def test_lists_of_lfw(tmp_path):
    write(tmp_path, ["lfw/Ann_Lee/Ann_Lee_0001.jpg", "lfw/Ann_Lee/Ann_Lee_0004.jpg", "lfw/Bo/Bo_0002.jpg"])
    text = "2\t1\nAnn_Lee\t1\t4\nAnn_Lee\t1\tBo\t2\nAnn_Lee\t4\t1\nBo\t2\tAnn_Lee\t4\n"
    found = data.open("pairs", table(tmp_path, [text], "pairs.txt"))
    assert named(found)[1] == ["lfw/Ann_Lee/Ann_Lee_0001.jpg", "lfw/Bo/Bo_0002.jpg"]
    given = found.relations
    assert given.same.tolist() == [True, False, True, False]
    assert (given.folds.tolist(), list(found.parts)) == ([0, 0, 1, 1], ["test"])
    train = data.open("pairs", table(tmp_path, ["1", "Ann_Lee\t1\t4"], "pairsDevTrain.txt"))
    assert (list(train.parts), train.relations.folds) == (["train"], None)


@pytest.mark.parametrize(
    ("lines", "error", "message"),
    [
        (["left,right", "a/1.jpg,a/2.jpg"], ValueError, "has no column 'same'"),
        (["left,right,same", "a/1.jpg,a/2.jpg,perhaps"], ValueError, "same has perhaps; allowed are true, false"),
        (["left,right,same", "a/1.jpg,a/2.jpg,7"], ValueError, "same has 7; allowed are true, false and 0 to 1"),
        (["left,right,same", "a/1.jpg,x.jpg,1"], FileNotFoundError, "1 of 2 images are missing: x.jpg"),
        (["left,right,same", "a/1.jpg,,1"], ValueError, "row 1: right is missing"),
        (["left,right,same", "a/1.jpg,a/1.jpg,1"], ValueError, "row 1 names an item twice"),
        (["left,right,same", "a/1.jpg,../b.jpg,1"], ValueError, "is not below"),
        ([*PAIRS, "c/1.jpg,b/1.jpg,0,train"], ValueError, "is in relations of train and of test"),
        ([*PAIRS, "c/1.jpg,b/1.jpg,0,query"], ValueError, "split has 'query'; allowed are train, validation and test"),
    ],
)
def test_tables_that_do_not_fit(lines, error, message, tmp_path):
    write(tmp_path, IMAGES)
    with pytest.raises(error, match=message):
        data.open("pairs", table(tmp_path, lines))


def test_positions_among_some_rows():
    given = ItemRelations(np.array([[7, 2], [2, 5], [9, 7]]), np.ones(3), np.ones(3, dtype=bool), np.full(3, "train"))
    assert given.among(np.array([2, 7, 9])).rows.tolist() == [[1, 0], [2, 1]]


@pytest.mark.parametrize("width", [2, 3])
def test_every_relation_is_drawn_once_per_epoch(width):
    given = np.array([np.random.default_rng(row).choice(20, width, replace=False) for row in range(12)])
    sampler = sampling.create("given", np.arange(20), relations=given, batch_size=4 * width)
    assert len(sampler) == 3
    drawn = [sampler.drawn(1, step) for step in range(3)]
    assert sorted(np.concatenate(drawn).tolist()) == list(range(12))
    for step, numbers in enumerate(drawn):
        assert sampler.batch(1, step).reshape(width, 4).T.tolist() == given[numbers].tolist()


@pytest.mark.parametrize("size", [5, 26])
def test_batches_that_cannot_be_drawn(size):
    given = np.arange(24).reshape(12, 2)
    with pytest.raises(ValueError, match=r"batch_size is \d+; it must be a multiple of 2"):
        sampling.create("given", np.arange(24), relations=given, batch_size=size)
