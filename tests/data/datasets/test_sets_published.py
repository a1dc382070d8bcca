"""The published sets in every layout: who is trained on, who is asked, and every difference named."""

import io
from dataclasses import replace

import numpy as np
import pytest
from trees_on_disk import write, write_tar, write_zip

from nearfar import data
from nearfar.data.datasets import published


def as_tars(root, names):
    for at in range(3):
        write_tar(root / f"part-{at}.tar", names[at::3])
    return root


PLACES = pytest.mark.parametrize(
    "place",
    [
        write,
        lambda root, names: write(root / "outer", [f"inner/{name}" for name in names]),
        lambda root, names: write_zip(root / "a.zip", [f"birds/{name}" for name in names]),
        lambda root, names: write_tar(root / "a.tgz", names, "w:gz"),
        as_tars,
    ],
    ids=["folder", "wrapped", "zip", "tgz", "tars"],
)


def named(dataset, part):
    return [dataset.source.name(index).rpartition("/")[2] for index in dataset.parts[part]]


def counted(dataset):
    """The notes that are not about counts, of which a small tree has many."""
    return [note for note in dataset.notes if "published" not in note]


# --- CUB ---------------------------------------------------------------------------------------------------------

CUB = ["100.B/b1.jpg", "101.A/a1.webp", "101.A/a2.jpg", "2.Z/z1.png", "002b/../ignored"][:4]


@PLACES
def test_cub_class_folders_are_ordered_and_halved_by_number(place, tmp_path):
    cub = data.open("cub", place(tmp_path, CUB))
    assert cub.classes == ("2.Z", "100.B", "101.A")
    assert cub.labels.tolist() == [0, 1, 2, 2]
    assert named(cub, "train") == ["z1.png", "b1.jpg"]
    assert named(cub, "test") == ["a1.webp", "a2.jpg"]


def test_cub_below_train_and_test_is_the_same_and_a_misplaced_picture_is_named(tmp_path):
    cub = data.open("cub", write(tmp_path, ["train/002.Z/z.jpg", "test/101.A/a.jpg", "test/003.Y/y.jpg"]))
    assert named(cub, "train") == ["z.jpg", "y.jpg"]
    assert named(cub, "test") == ["a.jpg"]
    assert counted(cub) == ["test/003.Y/y.jpg: below test/, but its class belongs to train"]


def official_cub(root, listed, there):
    write(root, [f"images/{path}" for path in there])
    write(root, [f"segmentations/{path[:-4]}.png" for path in listed])
    tables = {
        "images.txt": listed,
        "image_class_labels.txt": [str(int(path[:3])) for path in listed],
        "train_test_split.txt": [str(at % 2) for at in range(len(listed))],
    }
    return write(
        root, {name: "".join(f"{at} {row}\n" for at, row in enumerate(rows, 1)) for name, rows in tables.items()}
    )


LISTED = ["101.A/a1.jpg", "101.A/a2.jpg", "002.Z/z1.jpg"]


def test_cub_official_lists_are_followed(tmp_path):
    official_cub(tmp_path / "CUB_200_2011", LISTED, LISTED)
    cub = data.open("cub", tmp_path)
    assert [cub.source.name(index) for index in range(3)] == [
        f"CUB_200_2011/images/{path}" for path in ("002.Z/z1.jpg", "101.A/a1.jpg", "101.A/a2.jpg")
    ]
    assert cub.classes == ("002.Z", "101.A")
    assert named(cub, "train") == ["z1.jpg"]
    assert cub.columns["official"].tolist() == ["test", "test", "train"]
    assert counted(cub) == []


def test_cub_names_listed_pictures_that_are_missing_and_others_that_are_not_listed(tmp_path):
    cub = data.open("cub", official_cub(tmp_path, LISTED, [*LISTED[1:], "101.A/new.jpg"]))
    assert len(cub) == 2
    assert counted(cub) == [
        "101.A/a1.jpg: listed in images.txt, but missing",
        "images/101.A/new.jpg: not listed in images.txt; left out",
    ]


def test_cub_official_copies_may_be_of_another_format(tmp_path):
    cub = data.open("cub", official_cub(tmp_path, LISTED, [path.replace("jpg", "webp") for path in LISTED]))
    assert [cub.source.name(0), len(cub)] == ["images/002.Z/z1.webp", 3]


def test_cub_lists_without_any_picture_are_refused(tmp_path):
    write(tmp_path, {"images.txt": "1 001.A/a.jpg\n", "image_class_labels.txt": "1 1\n"})
    with pytest.raises(FileNotFoundError, match=r"images\.txt lists 1 images, but none is below .*001\.A/a\.jpg"):
        data.open("cub", tmp_path)


@pytest.mark.parametrize(
    ("listing", "text", "message"),
    [
        ("image_class_labels.txt", "1 101\n2 101\n", r"no class for 1 images; the first is 002\.Z/z1\.jpg"),
        ("image_class_labels.txt", "1 101\n2 bird\n3 2\n", "has 'bird' in place of a whole number"),
        ("images.txt", "1 101.A/a1.jpg\n2\n", "line 2: '2' has fewer than 2 fields"),
    ],
)
def test_cub_lists_that_are_damaged_are_refused_with_the_place(listing, text, message, tmp_path):
    write(official_cub(tmp_path, LISTED, LISTED), {listing: text})
    with pytest.raises(ValueError, match=message):
        data.open("cub", tmp_path)


def test_a_complete_cub_has_no_notes_and_a_lack_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(published, "CUB", replace(published.CUB, parts={"train": (5, 2), "test": (4, 1)}))
    counts = {1: 3, 100: 2, 101: 4}
    names = [f"{label:03d}.Bird/{at}.jpg" for label, count in counts.items() for at in range(count)]
    assert data.problems(data.open("cub", write_zip(tmp_path / "a.zip", names))) == []
    lacking = data.open("cub", write_zip(tmp_path / "b.zip", [*names[1:], "101.Bird/more.jpg", "102.Bird/1.jpg"]))
    assert data.problems(lacking)[:-1] == [
        "train has 4 images; published are 5",
        "test has 6 images; published are 4",
        "test has 2 classes; published are 1",
    ]


def test_masks_beside_the_pictures_are_never_taken_for_them(tmp_path):
    shrunk = [path.replace("jpg", "webp") for path in LISTED[1:]]
    cub = data.open("cub", official_cub(tmp_path, LISTED, shrunk))
    assert [cub.source.name(index) for index in range(len(cub))] == [f"images/{path}" for path in shrunk[::-1]]


def test_cub_classes_without_or_with_the_same_number_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no number at the start of Jay"):
        data.open("cub", write(tmp_path / "a", ["Jay/1.jpg", "001.Wren/1.jpg"]))
    with pytest.raises(ValueError, match=r"several class folders have the same number"):
        data.open("cub", write(tmp_path / "b", ["001.Jay/1.jpg", "001.Wren/1.jpg"]))


# --- Cars ----------------------------------------------------------------------------------------------------------

CARS = ["Acura/000009.jpg", "Acura/000010.jpg", "Volvo/000003.jpg", "BMW/000011.jpg", "Audi/000002.jpg", "Audi/12.jpg"]


@PLACES
def test_cars_class_folders_are_ordered_by_the_smallest_picture_number(place, tmp_path):
    cars = data.open("cars196", place(tmp_path, CARS))
    assert cars.classes == ("Audi", "Volvo", "Acura", "BMW")


def test_all_196_classes_of_cars_are_halved_by_number_and_not_by_name(tmp_path):
    names = [f"{(at * 89) % 196:03d}/{at + 1:06d}.jpg" for at in range(196)]
    cars = data.open("cars196", write_tar(tmp_path / "a.tar", names))
    assert named(cars, "train") == [f"{at:06d}.jpg" for at in range(1, 99)]
    assert named(cars, "test") == [f"{at:06d}.jpg" for at in range(99, 197)]


def test_cars_below_train_and_test_keep_their_parts(tmp_path):
    cars = data.open("cars196", write(tmp_path, ["train/Volvo/000001.jpg", "test/Audi/9000.jpg", "test/BMW/8999.jpg"]))
    assert cars.classes == ("Volvo", "BMW", "Audi")
    assert named(cars, "test") == ["8999.jpg", "9000.jpg"]


def test_cars_with_all_classes_in_train_and_test_are_halved_by_class(tmp_path):
    names = [
        f"{part}/{at:03d}/{at + 1 + 200 * (part == 'test'):06d}.jpg" for at in range(196) for part in ("train", "test")
    ]
    cars = data.open("cars196", write_tar(tmp_path / "a.tar", names))
    assert np.unique(cars.labels[cars.parts["train"]]).tolist() == list(range(98))
    assert len(cars.parts["train"]) == 196


def test_cars_name_every_picture_number_that_is_missing_or_there_twice(tmp_path):
    names = [f"Audi/{at:06d}.jpg" for at in range(1, 100) if at != 57]
    notes = data.open("cars196", write(tmp_path, [*names, "BMW/000099.png", "BMW/000098.png"])).notes
    assert [note for note in notes if "twice" in note] == ["000098: occurs twice", "000099: occurs twice"]
    assert [note for note in notes if "missing" in note][:2] == ["000057: missing", "000100: missing"]
    assert "016185: missing" in notes


def test_cars_without_numbers_or_with_numbers_that_begin_again_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"Audi/front\.jpg has no number"):
        data.open("cars196", write(tmp_path / "a", ["Audi/front.jpg"]))
    with pytest.raises(ValueError, match="smallest image numbers of Audi, BMW are the same"):
        data.open("cars196", write(tmp_path / "b", ["Audi/00001.jpg", "BMW/00001.jpg"]))


def annotations(rows, path="relative_im_path"):
    from scipy.io import savemat

    table = np.zeros((1, len(rows)), dtype=[(path, object), ("class", object), ("test", object)])
    for at, row in enumerate(rows):
        table[0, at] = row
    stream = io.BytesIO()
    names = np.array([f"Car {at}" for at in range(1, 197)], dtype=object)
    savemat(stream, {"annotations": table, "class_names": names.reshape(1, -1)})
    return stream.getvalue()


def test_cars_official_annotations_are_followed(tmp_path):
    rows = [("car_ims/000001.jpg", 98, 1), ("car_ims/000002.jpg", 99, 0), ("car_ims/000003.jpg", 1, 0)]
    write(tmp_path, [path for path, _, _ in rows])
    write(tmp_path, {"cars_annos.mat": annotations(rows)})
    cars = data.open("cars196", tmp_path)
    assert cars.classes == ("Car 1", "Car 98", "Car 99")
    assert named(cars, "train") == ["000003.jpg", "000001.jpg"]
    assert named(cars, "test") == ["000002.jpg"]
    assert cars.columns["official"].tolist() == ["train", "test", "train"]
    assert counted(cars) == []


def test_cars_later_archives_with_a_devkit_are_followed(tmp_path):
    write(tmp_path, ["cars_train/00001.jpg", "cars_test/00001.jpg", "cars_test/00002.jpg"])
    train, test = [("00001.jpg", 150, 0)], [("00001.jpg", 3, 0), ("00002.jpg", 150, 0)]
    write(tmp_path, {"devkit/cars_train_annos.mat": annotations(train, "fname")})
    write(tmp_path, {"cars_test_annos_withlabels.mat": annotations(test, "fname")})
    cars = data.open("cars196", tmp_path)
    assert [cars.source.name(index) for index in cars.parts["train"]] == ["cars_test/00001.jpg"]
    assert len(cars.parts["test"]) == 2
    assert counted(cars) == []


def test_cars_annotations_of_another_kind_are_refused(tmp_path):
    write(tmp_path, {"cars_annos.mat": b"no mat file", "car_ims/000001.jpg": b""})
    with pytest.raises(ValueError, match=r"cars_annos\.mat in .* cannot be read as a \.mat file"):
        data.open("cars196", tmp_path)
    write(tmp_path, {"cars_annos.mat": annotations([("a.jpg", 1, 0)], "picture")})
    with pytest.raises(ValueError, match=r"has no annotations with class .* it has picture, class, test"):
        data.open("cars196", tmp_path)


# --- SOP -----------------------------------------------------------------------------------------------------------


def test_sop_official_lists_are_followed(tmp_path):
    head = "image_id class_id super_class_id path\n"
    lists = {
        "Ebay_train.txt": head
        + "1 1 1 bicycle_final/11_0.JPG\n2 1 1 bicycle_final/11_1.JPG\n3 2 12 sofa_final/7_0.JPG\n",
        "Ebay_test.txt": head + "4 11319 12 sofa_final/9_0.JPG\n5 11319 12 sofa_final/9_1.JPG\n",
    }
    root = write(tmp_path / "Stanford_Online_Products", lists)
    write(
        root,
        [f"{path}.JPG" for path in ("bicycle_final/11_0", "bicycle_final/11_1", "sofa_final/7_0", "sofa_final/9_0")],
    )
    sop = data.open("sop", tmp_path)
    assert sop.classes == ("1", "2", "11319")
    assert named(sop, "train") == ["11_0.JPG", "11_1.JPG", "7_0.JPG"]
    assert named(sop, "test") == ["9_0.JPG"]
    assert sop.columns["super_class"].tolist() == ["bicycle", "bicycle", "sofa", "sofa"]
    assert sop.notes == (
        "sofa_final/9_1.JPG: listed in Ebay_train.txt or Ebay_test.txt, but missing",
        "train has 3 images; published are 59,551",
        "train has 2 classes; published are 11,318",
        "test has 1 images; published are 60,502",
        "test has 1 classes; published are 11,316",
    )


def test_sop_class_folders_below_train_and_test(tmp_path):
    sop = data.open("sop", write(tmp_path, ["train/bike/1.jpg", "test/sofa/1.jpg", "test/chair/1.jpg"]))
    assert [sop.classes[label] for label in sop.labels[sop.parts["test"]]] == ["chair", "sofa"]


def test_sop_class_folders_named_by_number(tmp_path):
    sop = data.open("sop", write(tmp_path, ["9/a.jpg", "11318/b.jpg", "11319/c.jpg"]))
    assert sop.classes == ("9", "11318", "11319")
    assert named(sop, "test") == ["c.jpg"]


# --- In-Shop -------------------------------------------------------------------------------------------------------

SHOP = [
    ("img/WOMEN/Dresses/id_00000002/02_1_front.jpg", "id_00000002", "train"),
    ("img/MEN/Pants/id_00000001/01_1_front.jpg", "id_00000001", "query"),
    ("img/MEN/Pants/id_00000001/01_2_side.jpg", "id_00000001", "gallery"),
]


@pytest.mark.parametrize("folder", ["", "Eval/", "Anno/"])
def test_inshop_has_queries_and_a_gallery_of_the_same_classes(folder, tmp_path):
    text = "3\nimage_name item_id evaluation_status\n" + "".join("    ".join(row) + "\n" for row in SHOP)
    write(tmp_path, [path for path, _, _ in SHOP])
    write(tmp_path, {f"{folder}list_eval_partition.txt": text})
    shop = data.open("inshop", tmp_path)
    assert shop.classes == ("id_00000002", "id_00000001")
    assert {part: named(shop, part) for part in shop.parts} == {
        "train": ["02_1_front.jpg"],
        "query": ["01_1_front.jpg"],
        "gallery": ["01_2_side.jpg"],
    }
    assert counted(shop) == []
    assert data.splits.standard(shop).test.keys() == {"query", "gallery"}
    assert "query has 1 images; published are 14,218" in shop.notes


def test_inshop_class_folders(tmp_path):
    shop = data.open("inshop", write(tmp_path, ["train/b/1.jpg", "query/a/2.jpg", "gallery/a/3.jpg"]))
    assert shop.classes == ("b", "a")
    assert named(shop, "gallery") == ["3.jpg"]


def test_inshop_lists_with_other_parts_are_refused(tmp_path):
    write(tmp_path, {"list_eval_partition.txt": "1\nhead\nimg/a.jpg id_1 probe\n", "img/a.jpg": b""})
    with pytest.raises(ValueError, match="has the part 'probe'; allowed are train, query, gallery"):
        data.open("inshop", tmp_path)


# --- Market-1501 ---------------------------------------------------------------------------------------------------

MARKET = [
    "bounding_box_train/0007_c3s1_000001_00.jpg",
    "bounding_box_train/0002_c1s1_000451_03.jpg",
    "query/0001_c1s1_001051_00.jpg",
    "bounding_box_test/0001_c6s2_000376_03.jpg",
    "bounding_box_test/0000_c2s1_000001_00.jpg",
    "bounding_box_test/-1_c1s1_000401_03.jpg",
    "gt_bbox/0001_c1s1_001051_00.jpg",
]


@pytest.mark.parametrize("below", ["", "Market-1501-v15.09.15/"])
def test_market_has_cameras_distractors_and_no_junk(below, tmp_path):
    market = data.open("market1501", write(tmp_path, [*(below + name for name in MARKET), f"{below}query/Thumbs.jpg"]))
    assert market.classes == ("0002", "0007", "0000", "0001")
    assert {part: named(market, part) for part in market.parts} == {
        "train": ["0002_c1s1_000451_03.jpg", "0007_c3s1_000001_00.jpg"],
        "query": ["0001_c1s1_001051_00.jpg"],
        "gallery": ["0000_c2s1_000001_00.jpg", "0001_c6s2_000376_03.jpg"],
    }
    by_name = {market.source.name(row).split("/")[-1][:7]: int(market.columns["camera"][row]) for row in range(5)}
    assert by_name == {"0002_c1": 1, "0007_c3": 3, "0000_c2": 2, "0001_c1": 1, "0001_c6": 6}
    assert market.left_out == [
        f"{below}query/Thumbs.jpg: its name does not begin with identity and camera; left out",
        "1 junk images (identity -1) are left out, as in the protocol",
    ]
    assert "gallery has 2 images; published are 15,913" in market.notes


# --- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "looked_for"),
    [
        ("cub", "image_class_labels.txt"),
        ("cars196", "cars_annos.mat"),
        ("sop", "Ebay_train.txt"),
        ("inshop", "list_eval_partition.txt"),
        ("market1501", "bounding_box_train/"),
    ],
)
def test_a_layout_nobody_knows_is_refused_with_what_was_looked_for(name, looked_for, tmp_path):
    write(tmp_path, {"README.md": "", "loose.jpg": ""})
    with pytest.raises(FileNotFoundError) as caught:
        data.open(name, tmp_path)
    for words in (f"{name} was not recognized in {tmp_path}", looked_for, "found README.md, loose.jpg"):
        assert words in str(caught.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="found nothing"):
        data.open(name, tmp_path / "empty")
