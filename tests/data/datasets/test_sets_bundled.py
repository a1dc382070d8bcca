"""MNIST from IDX files, and the sets that need no files: digits and glyphs."""

import numpy as np
import pytest
from trees_on_disk import write, write_idx

from nearfar import data

# --- MNIST ---------------------------------------------------------------------------------------------------------

PICTURES = np.random.default_rng(0).integers(256, size=(14, 28, 28)).astype(np.uint8)
LABELS = np.array([*range(10), 0, 9, 4, 5])


def mnist(root, separator="-", packed=False):
    ending = ".gz" if packed else ""
    for prefix, rows in (("train", slice(0, 10)), ("t10k", slice(10, 14))):
        write_idx(root / f"{prefix}-images{separator}idx3-ubyte{ending}", PICTURES[rows], packed)
        write_idx(root / f"{prefix}-labels{separator}idx1-ubyte{ending}", LABELS[rows], packed)
    return root


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("separator", ["-", "."])
@pytest.mark.parametrize("below", ["", "raw", "MNIST/raw", "FashionMNIST/raw"])
def test_idx_files_in_every_spelling(name, packed, separator, below, tmp_path):
    mnist(tmp_path / below, separator, packed)
    found = data.open(name, tmp_path)
    assert np.array_equal(found.source.array, PICTURES)
    assert found.labels.tolist() == LABELS.tolist()


def test_mnist_is_halved_by_class_and_keeps_the_official_parts_as_a_column(tmp_path):
    found = data.open("mnist", mnist(tmp_path))
    assert found.labels[found.parts["train"]].tolist() == [0, 1, 2, 3, 4, 0, 4]
    assert found.labels[found.parts["test"]].tolist() == [5, 6, 7, 8, 9, 9, 5]
    assert found.columns["official"].tolist() == ["train"] * 10 + ["test"] * 4
    assert found.notes == (
        "the official train part has 10 images; published are 60,000",
        "the official test part has 4 images; published are 10,000",
    )


def test_one_of_the_official_parts_is_enough_but_noted(tmp_path):
    mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    found = data.open("mnist", tmp_path)
    assert len(found) == 10
    assert "the official test images (t10k-images-idx3-ubyte and its labels) are missing" in found.notes


def test_a_folder_without_idx_files_is_refused(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=f"mnist was not recognized in {tmp_path}; looked for train-images-idx3"
    ):
        data.open("mnist", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not an IDX file of bytes in 3 dimensions"),
        (b"\0\0\x08\x01\0\0\0\x02ab", "is not an IDX file of bytes in 3 dimensions"),
        (b"\0\0\x08\x03\0\0\0\x02\0\0\0\x02\0\0\0\x02ab", "has 2 bytes of data; its header says 8"),
        (b"\0\0\x08\x03" + b"\xff" * 8 + b"\0\0\0\x02ab", "has 2 bytes of data; its header says 36893488130239234050"),
        (b"\0\0\x08\x03\0\0\0\x01\0\0\0\x01\0\0\0\x01ab", "has 2 bytes of data; its header says 1"),
        (b"\0\0\x08\x03\0\0", "is not an IDX file of bytes in 3 dimensions"),
        (b"\x1f\x8b\x08\0broken", "cannot be read"),
    ],
)
def test_damaged_idx_files_are_refused_by_name(content, message, tmp_path):
    mnist(tmp_path)
    write(tmp_path, {"train-images-idx3-ubyte": content})
    with pytest.raises(ValueError, match=f"train-images-idx3-ubyte {message}"):
        data.open("mnist", tmp_path)


def test_pictures_and_labels_must_be_as_many_and_labels_of_ten_classes(tmp_path):
    mnist(tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte", LABELS[:9])
    with pytest.raises(ValueError, match=r"has 10 images, but .* 9 labels"):
        data.open("mnist", tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.arange(1, 11))
    with pytest.raises(ValueError, match="has the label 10; allowed are 0 to 9"):
        data.open("mnist", tmp_path)


# --- digits --------------------------------------------------------------------------------------------------------


def test_digits_are_pictures_or_vectors_of_the_same_pixels():
    pictures, vectors = data.open("digits"), data.open("digits", vectors=True)
    assert vectors.is_vectors
    assert pictures.source.array.shape == (1797, 8, 8)
    assert pictures.source.array.max() == 255
    np.testing.assert_allclose(pictures.source.array.reshape(-1, 64) / 255, vectors.source.array, atol=0.5 / 255 + 1e-6)
    assert sorted(set(pictures.labels[pictures.parts["train"]].tolist())) == [0, 1, 2, 3, 4]


def test_turned_digits_are_eight_classes_each_and_the_test_stays():
    upright, turned = data.open("digits"), data.open("digits", turned=True)
    assert (turned.num_classes, len(turned.parts["train"]), len(turned.parts["test"])) == (45, 8 * 901, 896)
    pictures = {name: turned.source.array[turned.labels == number] for number, name in enumerate(turned.classes)}
    zeros = upright.source.array[upright.labels == 0]
    assert np.array_equal(pictures["0"], zeros)
    assert np.array_equal(pictures["0 left"][:, 0, :], zeros[:, :, -1])  # the right column is on top
    assert np.array_equal(pictures["0 upside down"], zeros[:, ::-1, ::-1])
    assert np.array_equal(pictures["0 mirrored"], zeros[:, :, ::-1])
    assert np.array_equal(pictures["0 mirrored right"][:, 0, ::-1], zeros[:, :, -1])  # the left one, from below
    for digit in ("5", "9"):
        assert np.array_equal(pictures[digit], upright.source.array[upright.labels == int(digit)])
    tested = turned.parts["test"]
    assert {turned.classes[label] for label in turned.labels[tested]} == {"5", "6", "7", "8", "9"}


# --- glyphs --------------------------------------------------------------------------------------------------------


def drawn(**settings):
    return data.open("glyphs", **settings).source.array


def test_glyphs_are_the_same_for_the_same_seed_and_others_for_another():
    first = drawn(classes=5, per_class=4, seed=3)
    assert np.array_equal(first, drawn(classes=5, per_class=4, seed=3))
    assert not np.array_equal(first, drawn(classes=5, per_class=4, seed=4))


def test_glyphs_come_in_any_size_and_in_color():
    assert drawn(classes=3, per_class=2, side=17).shape == (6, 17, 17)
    assert drawn(classes=3, per_class=2, side=40, color="rgb").shape == (6, 40, 40, 3)


def test_more_classes_leave_the_first_ones_as_they_are():
    assert np.array_equal(drawn(classes=40, per_class=5)[:50], drawn(classes=10, per_class=5))


def test_glyphs_are_halved_by_class_and_siblings_share_a_name():
    glyphs = data.open("glyphs", classes=12, per_class=3, siblings=4)
    assert glyphs.classes[:5] == ("0a", "0b", "0c", "0d", "1a")
    assert np.unique(glyphs.labels[glyphs.parts["train"]]).tolist() == [0, 1, 2, 3, 4, 5]


def test_siblings_look_more_alike_than_strangers_but_never_the_same():
    # Without turns, shifts and colours the drawing itself is compared.
    from nearfar.data.datasets.glyphs import _characters, _cover

    cover = _cover(_characters(80, 4, 0.15, 0), 32, np.full(80, 0.03, dtype=np.float32)).reshape(80, -1)
    apart = np.abs(cover[:, None] - cover[None]).mean(axis=2)
    family = np.arange(80) // 4
    siblings = (family[:, None] == family) & ~np.eye(80, dtype=bool)
    assert np.quantile(apart[siblings], 0.02) > 0.01
    assert apart[siblings].mean() < 0.6 * apart[family[:, None] != family].mean()


def test_glyphs_can_be_told_apart_but_not_by_raw_pixels_alone():
    pictures = drawn(classes=20, per_class=20).reshape(400, -1).astype(np.float64)
    labels = np.repeat(np.arange(20), 20)
    pictures -= pictures.mean(axis=1, keepdims=True)
    pictures /= np.linalg.norm(pictures, axis=1, keepdims=True)
    alike = np.abs(pictures @ pictures.T)
    np.fill_diagonal(alike, -1)
    recall = (labels[alike.argmax(axis=1)] == labels).mean()
    assert 0.2 < recall < 0.95  # chance is 0.05


@pytest.mark.parametrize(
    "wrong", [{"classes": 1}, {"per_class": 0}, {"side": 4}, {"color": "red"}, {"difference": 0.0}]
)
def test_settings_outside_their_range_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        drawn(**wrong)
