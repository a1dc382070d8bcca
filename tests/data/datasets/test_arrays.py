"""Datasets in memory, written to files that a recipe can name; datasets of Hugging Face."""

import numpy as np
import pytest
from PIL import Image

from nearfar import data
from nearfar.data.datasets.arrays import as_dataset, save_dataset

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 5, 6, 3), dtype=np.uint8)
LABELS, SPLIT = ["9", "10", "9", "10"], ["train", "test", "train", "query"]


def reopened(dataset, folder):
    section = save_dataset(dataset, folder)
    return data.open(section["name"], section["root"], **section["settings"])


@pytest.mark.parametrize("kind", ["vectors", "pixels", "pillow", "paths"])
def test_what_is_opened_again_is_what_was_written(kind, tmp_path):
    files = [tmp_path / f"{row}.png" for row in range(4)]
    for file, pixels in zip(files, PIXELS, strict=True):
        Image.fromarray(pixels).save(file)
    values = {
        "vectors": np.arange(12.0).reshape(4, 3),
        "pixels": PIXELS,
        "pillow": [Image.fromarray(pixels) for pixels in PIXELS],
        "paths": files,
    }
    (tmp_path / "run").mkdir()
    before = as_dataset((values[kind], LABELS, SPLIT))
    after = reopened(before, tmp_path / "run")
    assert (after.name, after.classes) == ("arrays", ("9", "10"))
    assert after.labels.tolist() == before.labels.tolist() == [0, 1, 0, 1]
    assert {part: rows.tolist() for part, rows in after.parts.items()} == {"train": [0, 2], "test": [1], "query": [3]}
    if kind in ("vectors", "pixels"):
        np.testing.assert_array_equal(after.source.array, values[kind])
    else:
        store = data.prepare(after, cache=tmp_path / "cache")
        np.testing.assert_array_equal(np.stack([store.image(row) for row in range(4)]), PIXELS)


def test_rows_without_parts_have_none_afterwards(tmp_path):
    assert list(reopened(as_dataset((np.eye(2), [0, 1])), tmp_path).parts) == ["all"]


@pytest.mark.parametrize("wrong", [np.eye(3), (np.eye(3),), {"X": np.eye(3)}, "photos"])
def test_anything_else_is_refused(wrong):
    with pytest.raises(TypeError, match=r"data is a \w+; needed is \(X, y\)"):
        as_dataset(wrong)


# --- Hugging Face --------------------------------------------------------------------------------------------------


class ClassLabel:
    """A stand-in for the feature of the same name."""

    def __init__(self, names):
        self.names = names


class Rows:
    """A stand-in for ``datasets.Dataset``."""

    def __init__(self, columns, features=None):
        self.columns, self.column_names = columns, list(columns)
        self.features = dict.fromkeys(columns) | (features or {})

    def __getitem__(self, column):
        return self.columns[column]


def test_a_dataset_of_hugging_face():
    rows = Rows({"img": [Image.new("L", (4, 4))] * 3, "kind": [1, 0, 1]}, {"kind": ClassLabel(["wren", "jay"])})
    found = as_dataset(rows)
    assert (found.classes, found.labels.tolist(), found.is_vectors) == (("jay", "wren"), [0, 1, 0], False)
    both = as_dataset({"train": rows, "test": Rows({"img": [Image.new("L", (2, 2))], "label": ["owl"]})})
    assert {part: part_rows.tolist() for part, part_rows in both.parts.items()} == {"train": [0, 1, 2], "test": [3]}
    assert both.classes == ("jay", "owl", "wren")


def test_vectors_and_images_that_are_not_decoded():
    assert as_dataset(Rows({"embedding": [[0.5, 1.0], [2.0, 3.0]], "label": [0, 1]})).is_vectors
    file = {"bytes": b"an image file", "path": None}
    assert as_dataset(Rows({"image": [file], "label": [3]})).source.read(0) == b"an image file"


def test_columns_that_are_not_recognized_are_asked_for():
    with pytest.raises(ValueError, match="data has the columns a, label, and 0 of them may hold the images"):
        as_dataset(Rows({"a": [1], "label": [0]}))
    with pytest.raises(ValueError, match="2 of them may hold the labels; pass two columns instead"):
        as_dataset(Rows({"image": [1], "label": [0], "y": [0]}))


def test_the_library_itself():
    library = pytest.importorskip("datasets", reason="needs the library datasets")
    if not hasattr(library, "Features"):  # this folder, which has the same name
        pytest.skip("needs the library datasets")
    features = library.Features({"image": library.Image(), "label": library.ClassLabel(names=["wren", "jay"])})
    images = [Image.fromarray(pixels) for pixels in PIXELS]
    rows = library.Dataset.from_dict({"image": images, "label": [0, 0, 1, 1]}, features=features)
    found = as_dataset(library.DatasetDict({"train": rows, "test": rows}))
    assert (len(found), found.classes, list(found.parts)) == (8, ("jay", "wren"), ["train", "test"])
    assert as_dataset((rows["image"], rows["label"])).labels.tolist() == [0, 0, 1, 1]
