"""The user's own pictures and vectors: class folders, tables and arrays."""

import sys

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from trees_on_disk import write, write_tar, write_zip

from nearfar import data
from nearfar.data import from_arrays
from nearfar.data.store.decode import decode
from nearfar.search.embedding_files import EmbeddedImages

# --- folder --------------------------------------------------------------------------------------------------------


def test_one_folder_for_each_class(tmp_path):
    birds = data.open("folder", write(tmp_path, ["wren/1.jpg", "jay/b.JPEG", "jay/a.png"]), name="birds")
    assert birds.name == "birds"
    assert birds.classes == ("jay", "wren")
    assert birds.labels.tolist() == [0, 0, 1]
    assert [birds.source.read(index).decode() for index in range(3)] == ["jay/a.png", "jay/b.JPEG", "wren/1.jpg"]
    assert birds.parts["all"].tolist() == [0, 1, 2]
    assert birds.notes == ()


def test_class_folders_in_archives_are_the_same(tmp_path):
    names = ["wren/1.jpg", "jay/b.jpg", "jay/a.jpg"]
    write_zip(tmp_path / "a.zip", names)
    tars = [write_tar(tmp_path / "tars/0.tar", names[:1]), write_tar(tmp_path / "tars/1.tar", names[1:])]
    for root in (tmp_path / "a.zip", tmp_path / "tars", tars[::-1]):
        birds = data.open("folder", root)
        assert [birds.source.name(index) for index in range(3)] == ["jay/a.jpg", "jay/b.jpg", "wren/1.jpg"]
        assert birds.labels.tolist() == [0, 0, 1]


def test_class_folders_below_parts(tmp_path):
    root = write(tmp_path, ["Train/jay/1.jpg", "val/tit/1.jpg", "test/wren/1.jpg", "test/jay/2.jpg"])
    birds = data.open("folder", root)
    assert birds.classes == ("jay", "tit", "wren")
    assert {part: rows.tolist() for part, rows in birds.parts.items()} == {
        "train": [0],
        "validation": [2],
        "test": [1, 3],
    }


def test_pictures_beside_train_and_test_are_not_guessed_about(tmp_path):
    root = write(tmp_path, ["train/jay/1.jpg", "test/jay/1.jpg", "more/jay/1.jpg"])
    with pytest.raises(ValueError, match="train and test folders, and other folders with images next to them: more"):
        data.open("folder", root)


@pytest.mark.parametrize(
    ("files", "classes", "labels"),
    [
        (["jay/2019/1.jpg", "jay/1.jpg", "wren/1.jpg"], ("jay", "wren"), [0, 0, 1]),
        (["train/1.jpg", "bus/1.jpg", "car/old/1.jpg"], ("bus", "car", "train"), [0, 1, 2]),
        (["10/1.jpg", "9/1.jpg"], ("9", "10"), [0, 1]),
        (["10/1.jpg", "9/1.jpg", "x/1.jpg"], ("10", "9", "x"), [0, 1, 2]),
    ],
    ids=["folders in a class", "a class called train", "numbers", "numbers and names"],
)
def test_classes_are_folders_sorted_by_name_or_number(files, classes, labels, tmp_path):
    found = data.open("folder", write(tmp_path, files))
    assert (found.classes, found.labels.tolist()) == (classes, labels)


def test_what_is_left_out_of_a_folder_is_named(tmp_path):
    files = ["loose.jpg", "jay/1.jpg", "jay/favicon.ico", "jay/notes.txt", "wren/1"]
    birds = data.open("folder", write(tmp_path, files))
    assert len(birds) == 1
    assert birds.notes == (
        "loose.jpg: not in a class folder; left out",
        "jay/favicon.ico: no image by its file extension; left out",
        "jay/notes.txt: no image by its file extension; left out",
        "wren/1: no image by its file extension; left out",
    )
    birds = data.open("folder", write(tmp_path / "parts", ["train/jay/1.jpg", "test/1.jpg"]))
    assert birds.notes == ("test/1.jpg: not in a class folder; left out",)


def test_a_folder_without_class_folders_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"looked for class folders with images.*--pattern.*found 1\.jpg"):
        data.open("folder", write(tmp_path, ["1.jpg"]))


NESTED = [f"{group}/{bird}/{number}.jpg" for group, bird in ("ab", "ac", "dc", "de") for number in (1, 2)]
LEAVES = [name.replace("d/c", "d/f") for name in NESTED]  # no two folders of one name


@pytest.mark.parametrize(
    ("files", "settings", "classes", "groups"),
    [
        (LEAVES, {}, ("b", "c", "e", "f"), {"group_1": list("aaaadddd")}),
        (NESTED, {}, ("a", "d"), {}),  # two folders c: parts of the classes a and d
        (NESTED, {"classes": "leaves"}, ("a/b", "a/c", "d/c", "d/e"), {"group_1": list("aaaadddd")}),
        (LEAVES, {"classes": "top"}, ("a", "d"), {}),
        ([*LEAVES, "a/1.jpg"], {}, ("a", "d"), {}),  # not equally deep
        ([f"z/{name}" for name in LEAVES], {}, ("b", "c", "e", "f"), {"group_1": list("aaaadddd")}),
        (
            [f"{name[0]}{at % 2}/{name}" for at, name in enumerate(LEAVES)],
            {"classes": "leaves"},
            ("a0/a/b", "a0/a/c", "a1/a/b", "a1/a/c", "d0/d/e", "d0/d/f", "d1/d/e", "d1/d/f"),
            {"group_1": ["a0", "a0", "a1", "a1", "d0", "d0", "d1", "d1"], "group_2": list("aaaadddd")},
        ),
    ],
)
def test_classes_at_the_leaves_have_the_folders_above_as_columns(files, settings, classes, groups, tmp_path):
    birds = data.open("folder", write(tmp_path, files), **settings)
    assert (birds.classes, {key: column.tolist() for key, column in birds.columns.items()}) == (classes, groups)
    guessed = bool(groups) and not settings
    assert birds.guess == ("folder: guessed that classes is 'leaves'" if guessed else "")


def test_leaves_below_parts(tmp_path):
    birds = data.open("folder", write(tmp_path, [f"{part}/{name}" for part in ("train", "test") for name in LEAVES]))
    assert birds.classes == ("b", "c", "e", "f")
    assert {part: len(rows) for part, rows in birds.parts.items()} == {"train": 8, "test": 8}


@pytest.mark.parametrize(
    ("pattern", "classes", "columns"),
    [
        ("{class}_*.jpg", ("great_tit", "jay"), {}),
        ("{class}_{camera}.j?g", ("great_tit", "jay"), {"camera": ["2", "1", "3"]}),
        (r"(?P<class>[a-z]+)_", ("great", "jay"), {}),
        (r"(?P<class>[a-z]+)(_tit)?_(?P<camera>\d)", ("great", "jay"), {"camera": ["2", "1", "3"]}),
        ("{split}/{class}_*.jpg", ("great_tit", "jay"), {}),
    ],
)
def test_classes_in_the_names_of_images(pattern, classes, columns, tmp_path):
    names = ["jay_1.jpg", "great_tit_2.jpg", "jay_3.jpg"]
    parts = ["test/", "train/", "test/"] if "split" in pattern else ["", "", ""]
    root = write(tmp_path, [part + name for part, name in zip(parts, names, strict=True)] + ["odd.jpg"])
    birds = data.open("folder", root, pattern=pattern)
    assert (birds.classes, birds.labels.tolist()) == (classes, [0, 1, 1])
    assert {key: column.tolist() for key, column in birds.columns.items()} == columns
    assert {part: rows.tolist() for part, rows in birds.parts.items()} == (
        {"train": [0], "test": [1, 2]} if "split" in pattern else {"all": [0, 1, 2]}
    )
    assert birds.left_out == [f"odd.jpg: its name is not {pattern}; left out"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("[a-z]+", "it needs the class, as in"),
        ("(?P<class>", "no regular expression"),
        ("{class}x", "images with names as {class}x"),
    ],
)
def test_patterns_that_find_no_class_are_refused(pattern, message, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        data.open("folder", write(tmp_path, ["jay_1.jpg"]), pattern=pattern)


# --- table ---------------------------------------------------------------------------------------------------------

ROWS = ["wren/1.jpg,wren,train,3,0.5,tall", "jay/1.jpg,jay,test,4,,", "jay/2.jpg,jay,test,5,2,a"]
HEAD = "path,label,split,count,weight,word"


def table(root, rows, head=HEAD, name="birds.csv"):
    write(root, ["wren/1.jpg", "jay/1.jpg", "jay/2.jpg"])
    write(root, {name: "\n".join([head, *rows]) + "\n"})
    return root / name


def check(birds):
    assert [birds.source.read(index).decode() for index in range(3)] == ["wren/1.jpg", "jay/1.jpg", "jay/2.jpg"]
    assert birds.classes == ("jay", "wren")
    assert birds.labels.tolist() == [1, 0, 0]
    assert {part: rows.tolist() for part, rows in birds.parts.items()} == {"train": [0], "test": [1, 2]}
    assert birds.columns["count"].tolist() == [3, 4, 5]
    assert birds.columns["weight"].tolist() == pytest.approx([0.5, np.nan, 2.0], nan_ok=True)
    assert birds.columns["word"].tolist() == ["tall", "", "a"]
    assert birds.notes == ()


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_table_in_text(separator, tmp_path):
    rows = [row.replace(",", separator) for row in ROWS]
    check(data.open("table", table(tmp_path, rows, HEAD.replace(",", separator))))


def test_a_table_written_by_a_spreadsheet(tmp_path):
    file = table(tmp_path, [])
    file.write_bytes(("\ufeff" + "\r\n".join([HEAD, *ROWS]) + "\r\n\r\n").encode())
    check(data.open("table", file))


def test_a_table_in_parquet(tmp_path):
    pytest.importorskip("pyarrow")
    table(tmp_path, [])
    columns = {"path": ["wren/1.jpg", "jay/1.jpg", "jay/2.jpg"], "label": ["wren", "jay", "jay"]}
    columns |= {"split": ["train", "test", "test"], "count": [3, 4, 5], "weight": [0.5, None, 2.0]}
    pandas.DataFrame({**columns, "word": ["tall", None, "a"]}).to_parquet(tmp_path / "birds.parquet")
    check(data.open("table", tmp_path / "birds.parquet"))


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    write(tmp_path, {"birds.parquet": b""})
    with pytest.raises(ImportError, match=r"needs pyarrow; install it with: pip install 'nearfar\[parquet\]'"):
        data.open("table", tmp_path / "birds.parquet")


@pytest.mark.parametrize(
    ("head", "guessed"),
    [
        ("file,label,split", {"path": "file"}),
        ("Image Path,class,subset", {"path": "Image Path", "label": "class", "split": "subset"}),
        ("filename,category,set", {"path": "filename", "label": "category", "split": "set"}),
        ("x,bird,fold", {"path": "x", "label": "bird", "split": "fold"}),  # by what they contain
        ("path,label,split", {}),
    ],
)
def test_columns_of_usual_names_are_guessed_and_said(head, guessed, tmp_path):
    rows = [",".join(row.split(",")[:3]) for row in ROWS]
    birds = data.open("table", table(tmp_path, rows, head))
    assert birds.guessed == guessed
    assert birds.labels.tolist() == [1, 0, 0]
    assert list(birds.parts) == ["train", "test"]
    assert birds.guess == (
        f"table: guessed that {', '.join(f'{k} is {v!r}' for k, v in guessed.items())}" if guessed else ""
    )


def test_a_column_that_holds_other_words_is_no_split(tmp_path):
    file = table(tmp_path, ["wren/1.jpg,a,red,test", "jay/1.jpg,a,blue,train"], "path,label,set,part")
    assert data.open("table", file).guessed == {"split": "part"}
    unsplit = data.open("table", file, split="")
    assert list(unsplit.parts) == ["all"]
    assert unsplit.columns.keys() == {"set", "part"}
    with pytest.raises(ValueError, match="has no column 'kind'; it has path, label, set, part"):
        data.open("table", file, split="kind")


def test_columns_that_are_named_are_not_guessed(tmp_path):
    file = table(tmp_path, ["wren/1.jpg,a,red", "jay/1.jpg,a,blue"], "file,class,color")
    birds = data.open("table", file, label="color")
    assert (birds.classes, birds.guessed) == (("blue", "red"), {"path": "file"})


def test_a_table_is_opened_in_place_of_a_folder(tmp_path):
    birds = data.open("folder", table(tmp_path, ["wren/1.jpg,a", "jay/1.jpg,b"], "file,class"))
    assert (birds.name, birds.classes) == ("folder", ("a", "b"))


def test_columns_of_other_names_and_pictures_elsewhere(tmp_path):
    write_zip(tmp_path / "all.zip", ["jay/1.jpg", "wren/1.jpg"])
    write(tmp_path, {"t.csv": "file,bird\nwren/1.jpg,2\njay/1.jpg,10\n"})
    birds = data.open("table", tmp_path / "t.csv", path="file", label="bird", images=tmp_path / "all.zip")
    assert birds.classes == ("2", "10")
    assert birds.source.read(1) == b"jay/1.jpg"
    assert list(birds.parts) == ["all"]


def test_paths_may_be_absolute_or_of_another_system(tmp_path):
    birds = data.open("table", table(tmp_path, [f"{tmp_path}/jay/1.jpg,a", "jay\\2.jpg,a"], "path,label"))
    assert [birds.source.name(index) for index in range(2)] == ["jay/1.jpg", "jay/2.jpg"]


@pytest.mark.parametrize("path", ["/etc/passwd", "../jay/1.jpg"])
def test_paths_outside_the_folder_of_pictures_are_refused(path, tmp_path):
    with pytest.raises(ValueError, match=r"row 1, .* is not below .*; set images to a folder further up"):
        data.open("table", table(tmp_path, [f"{path},a"], "path,label"))


def test_rows_that_are_left_out_are_named(tmp_path):
    rows = [
        "jay/1.jpg,jay",
        "gone.jpg,jay",
        "wren/1.jpg,",
        ",jay",
        "jay/1.jpg,jay",
        "./jay/1.jpg,wren",
        "jay/2.jpg,jay",
    ]
    birds = data.open("table", table(tmp_path, rows, "path,label"))
    assert len(birds) == 2
    assert birds.notes == (
        "row 2, gone.jpg: missing; left out",
        "row 3, wren/1.jpg: no label; left out",
        "row 4: no path; left out",
        "row 5, jay/1.jpg: listed before in row 1; left out",
        "row 6, ./jay/1.jpg: listed before in row 1 (there with label jay, here with wren); left out",
    )


def test_rows_without_a_part_are_reported(tmp_path):
    rows = ["wren/1.jpg,a,train", "jay/1.jpg,a,", "jay/2.jpg,b,test"]
    birds = data.open("table", table(tmp_path, rows, "path,label,split"))
    assert birds.parts["train"].tolist() == [0]
    assert "1 images are in no part" in data.problems(birds)


@pytest.mark.parametrize(
    ("rows", "head", "message"),
    [
        (
            ["jay/1,a"],
            "x,label",
            "no column that is known to hold the path; it has x, label; --columns path=COLUMN, or",
        ),
        (["jay/1.jpg,a,3"], "path,bird,size", "no column that is known to hold the label; it has path, bird, size;"),
        (["jay/1.jpg,a,b"], "path,label", "line 2: 3 fields, but 2 columns"),
        (["jay/1.jpg,a,b"], "path,label,label", "two columns of the same name"),
        (["jay/1.jpg,a,dev"], "path,label,split", "split has 'dev' in row 0; allowed are train"),
        (["gone.jpg,a"], "path,label", "none of 1 rows has a label and an image below"),
    ],
)
def test_tables_that_do_not_fit_are_refused(rows, head, message, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        data.open("table", table(tmp_path, rows, head))


@pytest.mark.parametrize(
    ("one", "other"),
    [("0123", "00123"), ("1.1", "1.10"), ("12000", "12e3"), ("12345678901234567890", "12345678901234567891")],
)
def test_labels_that_look_like_one_number_are_two_classes(one, other, tmp_path):
    rows = [f"wren/1.jpg,{one}", f"jay/1.jpg,{other}", f"jay/2.jpg,{one}"]
    birds = data.open("table", table(tmp_path, rows, "path,label"))
    assert set(birds.classes) == {one, other}
    assert [birds.classes[label] for label in birds.labels] == [one, other, one]


def test_whole_numbers_written_with_a_point_are_the_same_class(tmp_path):
    pytest.importorskip("pyarrow")
    table(tmp_path, [])
    columns = {"path": ["wren/1.jpg", "jay/1.jpg", "jay/2.jpg"], "label": [10.0, 9.0, None]}
    pandas.DataFrame(columns).to_parquet(tmp_path / "t.parquet")
    birds = data.open("table", tmp_path / "t.parquet")
    assert birds.classes == ("9", "10")
    assert birds.notes == ("row 3, jay/2.jpg: no label; left out",)


# --- tables of OpenMetricLearning ------------------------------------------------------------------------------------

OML = "label,path,split,is_query,is_gallery"


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        (["wren/1.jpg,train,,", "jay/1.jpg,validation,True,True", "jay/2.jpg,validation,True,True"], {"test": [1, 2]}),
        (
            ["wren/1.jpg,train,,", "jay/1.jpg,validation,True,False", "jay/2.jpg,validation,0,1"],
            {"query": [1], "gallery": [2]},
        ),
    ],
)
def test_validation_rows_of_oml_are_for_the_test(rows, parts, tmp_path):
    birds = data.open("table", table(tmp_path, [f"{row.split('/')[0]},{row}" for row in rows], OML))
    assert {part: found.tolist() for part, found in birds.parts.items()} == {"train": [0], **parts}


def test_rows_of_oml_that_are_query_and_gallery_beside_others_are_refused(tmp_path):
    rows = ["wren,wren/1.jpg,train,,", "jay,jay/1.jpg,validation,True,True", "jay,jay/2.jpg,validation,False,True"]
    with pytest.raises(ValueError, match="either all or none must be both"):
        data.open("table", table(tmp_path, rows, OML))


def test_images_are_cut_to_the_boxes_of_oml(tmp_path):
    pixels = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)
    Image.fromarray(pixels).save(tmp_path / "both.png")
    rows = ["a,both.png,1,2,5,6", "b,both.png,0,0,8,3", "c,both.png,,,,", "d,both.png,1,2,5,6"]
    (tmp_path / "t.csv").write_text("\n".join(["label,path,x_1,y_1,x_2,y_2", *rows]))
    found = data.open("table", tmp_path / "t.csv")
    boxes = [pixels[2:6, 1:5], pixels[0:3, 0:8], pixels]
    for row, expected in enumerate(boxes):
        np.testing.assert_array_equal(decode(found.source.read(row), channels=3), expected)
    assert found.left_out == ["row 4, both.png: listed before in row 1 (there with label a, here with d); left out"]
    whole = data.open("table", tmp_path / "t.csv", boxes=False)
    np.testing.assert_array_equal(decode(whole.source.read(0), channels=3), pixels)


# --- arrays --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int32, np.uint8])
def test_vectors_become_float32(dtype):
    vectors = np.arange(12).reshape(4, 3).astype(dtype)
    source = from_arrays(vectors, [0, 0, 1, 1]).source
    assert source.array.dtype == np.float32
    assert source.array.tolist() == vectors.tolist()
    assert np.shares_memory(source.array, vectors) == (dtype == np.float32)


def test_tensors_are_arrays_too():
    vectors = from_arrays(torch.eye(4, requires_grad=True), torch.tensor([3, 3, 7, 7]))
    assert vectors.is_vectors
    assert vectors.classes == ("3", "7")


def test_pictures_in_memory():
    assert from_arrays(np.zeros((4, 8, 8, 1), dtype=np.uint8), list("abab")).source.array.shape == (4, 8, 8)
    assert not from_arrays(np.zeros((4, 8, 8, 3), dtype=np.uint8), list("abab")).is_vectors


def test_arrays_from_a_file(tmp_path):
    np.savez(tmp_path / "a.npz", X=np.eye(3), y=np.array(["b", "a", "a"]), split=np.array(["train", "test", "test"]))
    vectors = data.open("arrays", tmp_path / "a.npz")
    assert vectors.labels.tolist() == [1, 0, 0]
    assert vectors.parts["test"].tolist() == [1, 2]


def test_tables_of_pandas_are_vectors():
    frame = pandas.DataFrame({"height": [1, 2, 3], "width": [0.5, 0.25, 0.125]}, index=[5, 6, 7])
    found = from_arrays(frame, pandas.Series(["b", "a", "a"]), split=pandas.Series(["train", "Test", "query"]))
    assert found.source.array.tolist() == frame.to_numpy().tolist()
    assert found.labels.tolist() == [1, 0, 0]
    assert {part: rows.tolist() for part, rows in found.parts.items()} == {"train": [0], "test": [1], "query": [2]}


def test_pillow_images_of_any_size_and_pixels_of_several():
    images = [Image.new("RGB", (8, 4), "red"), Image.new("L", (3, 3)), Image.new("CMYK", (2, 2))]
    found = from_arrays(images, [0, 0, 1])
    assert [decode(found.source.read(row), channels=3).shape for row in range(3)] == [(4, 8, 3), (3, 3, 3), (2, 2, 3)]
    assert decode(found.source.read(0), channels=3)[0, 0].tolist() == [255, 0, 0]
    pixels = [np.zeros((4, 8, 3), dtype=np.uint8), np.zeros((5, 5, 3), dtype=np.uint8)]
    assert len(from_arrays(pixels, [0, 1]).source.read(1)) > 0
    assert from_arrays(pixels[:1] * 2, [0, 1]).source.array.shape == (2, 4, 8, 3)


@pytest.mark.parametrize("as_series", [False, True])
def test_paths_are_read_below_the_folder_they_share(as_series, tmp_path):
    for name in ("a/1.png", "b/c/2.png"):
        (tmp_path / name).parent.mkdir(parents=True)
        Image.new("L", (4, 4)).save(tmp_path / name)
    paths = [str(tmp_path / "a/1.png"), str(tmp_path / "b/c/2.png")]
    source = from_arrays(pandas.Series(paths) if as_series else paths, ["jay", "wren"]).source
    assert [source.name(row) for row in range(2)] == ["a/1.png", "b/c/2.png"]
    with pytest.raises(FileNotFoundError, match=r"X has '.*3\.png'; 1 of its files do not exist"):
        from_arrays([*paths, tmp_path / "3.png"], [0, 0, 1])


@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
def test_embeddings_that_nearfar_wrote_are_arrays(ending, tmp_path):
    vectors = np.eye(4, dtype=np.float32)
    written = EmbeddedImages(vectors, tuple("abcd"), ("wren", None, "jay", "wren"), (), "the model")
    written.write(tmp_path / f"e{ending}")
    found = data.open("arrays", tmp_path / f"e{ending}")
    assert found.source.array.tolist() == vectors[[0, 2, 3]].tolist()
    assert (found.classes, found.labels.tolist()) == (("jay", "wren"), [1, 0, 1])
    assert found.columns["name"].tolist() == ["a", "c", "d"]
    assert found.left_out == ["row 1: no class; left out"]


def test_vectors_in_parquet(tmp_path):
    frame = pandas.DataFrame({"embedding": [[1.0, 2.0], [3.0, 4.0]], "label": ["b", "a"], "split": ["train", "test"]})
    frame.to_parquet(tmp_path / "v.parquet")
    found = data.open("arrays", tmp_path / "v.parquet")
    assert found.source.array.tolist() == [[1, 2], [3, 4]]
    assert (found.labels.tolist(), found.parts["train"].tolist()) == ([1, 0], [0])


def test_files_of_other_arrays_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", X=np.eye(3), targets=np.arange(3))
    with pytest.raises(ValueError, match=r"a\.npz cannot be used as arrays: it has no y and no labels"):
        data.open("arrays", tmp_path / "a.npz")
    np.save(tmp_path / "a.npy", np.eye(3))
    with pytest.raises(ValueError, match=r"a\.npy cannot be used as arrays"):
        data.open("arrays", tmp_path / "a.npy")
    with pytest.raises(FileNotFoundError, match="does not exist; a file of arrays is needed"):
        data.open("arrays", tmp_path / "b.npz")


@pytest.mark.parametrize(
    ("X", "y", "error", "message"),
    [
        (np.eye(3), [0, 1], ValueError, r"y has shape \[2\]; needed is \[3\]"),
        (np.eye(2), [0.5, 1.5], TypeError, "y is of float64; whole numbers or text"),
        (np.array([[np.nan], [1.0]]), [0, 1], ValueError, "X contains NaN"),
        (np.zeros((2, 3, 3)), [0, 1], ValueError, r"X: .*needed is uint8 .*vectors are \[n, d\]"),
        ("words", [0], TypeError, "X is a str"),
        (None, [0], TypeError, "X is a NoneType"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(X, y, error, message):
    with pytest.raises(error, match=message):
        from_arrays(X, y)
