"""index, search and embed on the command line."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from search_cases import model_folder, photos

import nearfar as nf
from nearfar.networks.weights import save


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    model_folder(folder / "model")
    photos(folder / "photos", 12)
    return folder


def test_from_photos_to_neighbors(place, nearfar):
    index, photo = place / "my.index", place / "photos" / "digit 3" / "003.png"
    said = nearfar("index", "build", place / "model", place / "photos", "-o", index, "--device", "cpu").out
    assert "12 images of 10 classes, 8 dimensions, exact" in said
    files = ["--html", place / "a.html", "--json", place / "a.json"]
    assert "digit 3/003.png" in nearfar("search", index, photo, "-k", 3, "--label", "digit 3", *files).out
    found = json.loads((place / "a.json").read_text())[0]["neighbors"]
    assert (found[0]["name"], found[0]["right"], len(found)) == ("digit 3/003.png", True, 3)
    assert (place / "a.html").stat().st_size > 1000
    assert "digit 1" in nearfar("search", index, "--id", 0, "--where", "label~digit [12]", "-k", 2).out
    facts = nearfar("index", "info", index, "--json", place / "info.json").out
    assert "small_cnn" in facts
    assert json.loads((place / "info.json").read_text())["count"] == 12
    (place / "photos" / "copy.png").write_bytes(photo.read_bytes())
    table = place / "more.csv"
    table.write_text("name,label,year\ncopy.png,digit 3,2020\n")
    said = nearfar("index", "update", index, place / "photos", "--metadata", table).out
    assert "1 added, 12 unchanged; 13 in all" in said
    assert "copy.png" in nearfar("search", index, photo, "--where", "year>2019").out
    said = nearfar("index", "duplicates", index, "--threshold", 1, "--json", place / "d.json").out
    assert "identical files: " in said
    assert json.loads((place / "d.json").read_text())["groups"][0]["identical"]
    assert "4 clusters" in nearfar("index", "clusters", index, "-k", 4, "--html", place / "c.html").out
    assert "1 removed, 12 left" in nearfar("index", "remove", index, 12).out
    assert "1 added" in nearfar("index", "add", index, place / "photos", "--no-labels").out
    assert "13 removed, 0 left" in nearfar("index", "remove", index, "--where", "name~*").out


def test_embeddings_can_be_evaluated(place, nearfar):
    for ending in ("npz", "npy", "safetensors"):
        file = place / f"vectors.{ending}"
        said = nearfar("embed", place / "model", place / "photos", "-o", file, "--device", "cpu").out
        assert "embeddings of 8 dimensions" in said
    with np.load(place / "vectors.npz") as found:
        assert found["names"][0] in ("copy.png", "digit 0/000.png")
        np.testing.assert_array_equal(found["embeddings"], np.load(place / "vectors.npy"))
        assert found["classes"][found["labels"][-1]] == "digit 9"
    nearfar("evaluate", place / "vectors.safetensors", "--no-clustering", "--ks", "1")


def test_a_data_set_is_indexed_by_name(place, nearfar, tmp_path):
    words = ("--data", "folder", "--part", "test", "--device", "cpu")
    said = nearfar("index", "build", place / "model", photos(tmp_path / "p", 12), "-o", tmp_path / "i", *words).out
    assert "5 images of 5 classes" in said


@pytest.fixture
def small(place, tmp_path, nearfar):
    """A folder with "photos" and an index "i" of them."""
    photos(tmp_path / "photos", 4)
    nearfar("index", "build", place / "model", tmp_path / "photos", "-o", tmp_path / "i", "--device", "cpu")
    return tmp_path


def test_an_item_that_is_named_twice_is_removed_once(small, nearfar):
    assert "1 removed, 3 left" in nearfar("index", "remove", small / "i", 3, 3).out


def test_classes_that_are_not_wanted_are_all_left_out(small, nearfar):
    words = ("--where", "label!=digit 1", "--where", "label!=digit 2")
    assert "2 removed, 2 left" in nearfar("index", "remove", small / "i", *words).out


def test_labels_of_a_table_survive_a_plain_update(small, nearfar):
    (small / "m.csv").write_text("name,label\ndigit 1/001.png,eagle\n")
    nearfar("index", "update", small / "i", small / "photos", "--metadata", small / "m.csv")
    nearfar("index", "update", small / "i", small / "photos")
    assert "eagle: 1" in nearfar("index", "info", small / "i").out


def test_names_of_a_table_that_match_nothing_are_told(small, nearfar):
    (small / "m.csv").write_text("name,year\ndigit 1/001.png,1\n" + "".join(f"x{n}.png,2\n" for n in range(5)))
    said = nearfar("index", "update", small / "i", small / "photos", "--metadata", small / "m.csv").out
    assert "5 of 6 names match no image: x0.png, x1.png, x2.png, …" in said


@pytest.mark.parametrize(
    ("name", "text"),
    [("m.csv", "name,score\na.png,1\nb.png,nan\n"), ("m.jsonl", '{"name": "a"}\n{"name": "b", "score": NaN}\n')],
)
def test_a_number_that_is_none_is_named(small, refused, name, text):
    (small / name).write_text(text)
    error = refused("index", "update", small / "i", small / "photos", "--metadata", small / name)
    assert f"{small / name} has nan as 'score' in line {3 if name == 'm.csv' else 2}; allowed are" in error


def test_a_query_that_is_no_picture_is_named(small, refused):
    (small / "notes.txt").write_text("words")
    assert f"{small / 'notes.txt'}: text, not an image" in refused("search", small / "i", small / "notes.txt")
    assert "that is not a file" in refused("search", small / "i", small / "photos")


def test_pruning_most_of_an_index_is_refused(small, nearfar, refused):
    (small / "photos" / "digit 1" / "001.png").unlink()
    said = nearfar("index", "update", small / "i", small / "photos", "--prune").out
    assert "1 removed, 3 unchanged; 3 in all" in said
    assert "1 item was removed:\n  digit 1/001.png" in said
    words = ("index", "update", small / "i", small / "photos" / "digit 2", "--prune")
    assert "would remove 2 of 3 items, so none was removed" in refused(*words)
    assert "3 in all" in nearfar("index", "update", small / "i", small / "photos").out
    assert "1 moved, 2 removed, 0 unchanged; 1 in all" in nearfar(*words, "--yes").out


def test_a_file_that_became_unreadable_is_kept_and_told(small, nearfar):
    (small / "photos" / "digit 1" / "001.png").write_bytes(b"text")
    said = nearfar("index", "update", small / "i", small / "photos").out
    assert "0 added, 1 kept (cannot be read), 3 unchanged; 4 in all" in said


def test_names_command_no_terminal(place, tmp_path, nearfar, refused):
    photos(tmp_path / "photos", 1)
    good = next((tmp_path / "photos").glob("*/*.png"))
    for name in ("\x1b[31mred\x1b]0;title\x07\nline.png", "turned\u202egnp.png"):
        good.with_name(name).write_bytes(good.read_bytes())
    good.with_name("\x1b[2Jbad.png").write_bytes(b"text")
    said = nearfar("index", "build", place / "model", tmp_path / "photos", "-o", tmp_path / "i", "--device", "cpu").out
    assert "  digit 0/\\x1b[2Jbad.png: " in said
    said += nearfar("search", tmp_path / "i", good).out
    said += nearfar("index", "duplicates", tmp_path / "i").out
    assert "\\x1b[31mred\\x1b]0;title\\x07\\nline.png" in said
    assert not set("\x1b\x07\u202e") & set(said)
    assert "\x1b" not in refused("search", tmp_path / "i", "\x1b[2Jno.png")


def test_only_who_can_list_all_says_so(place, tmp_path, nearfar):
    photos(tmp_path / "photos", 1)
    for number in range(25):
        folder = tmp_path / "photos" / f"class {number}"
        folder.mkdir()
        (folder / "bad.png").write_bytes(b"text")
        (folder / "good.png").write_bytes(next((tmp_path / "photos").glob("*/000.png")).read_bytes())
    said = nearfar("index", "build", place / "model", tmp_path / "photos", "-o", tmp_path / "i", "--device", "cpu").out
    said += nearfar("embed", place / "model", tmp_path / "photos", "-o", tmp_path / "e.npz", "--device", "cpu").out
    assert said.count("… and 5 more\n") == 2
    assert "… and 6 more; --all lists them" in nearfar("index", "info", tmp_path / "i").out
    assert "class 9: 1\n" in nearfar("index", "info", tmp_path / "i", "--all").out


def test_a_network_by_name_is_calibrated_into_a_file(tmp_path, nearfar, refused, monkeypatch):
    create = save.registry.create_backbone

    def published(name, pretrained):
        torch.manual_seed(0)
        return create(name)

    monkeypatch.setattr(save.registry, "create_backbone", published)
    monkeypatch.chdir(tmp_path)
    pictures = photos(tmp_path / "photos", 30)
    words = ("calibrate", "small_cnn", "--data", f"folder:{pictures}", "--device", "cpu", "--cache", tmp_path / "cache")
    assert "out is missing; small_cnn is the name of a network" in refused(*words)
    assert "verify small_cnn A.jpg B.jpg --threshold found.json" in nearfar(*words, "--out", "found.json").out
    assert not (tmp_path / "small_cnn").exists()
    same = pictures / "digit 3" / "003.png"
    compared = ("verify", "small_cnn", same, same)
    assert nearfar(*compared, "--threshold", "found.json").out.startswith("match: similarity 1.0000\nthreshold ")
    remedy = "nearfar calibrate small_cnn --data folder:PHOTOS --out threshold.json"
    assert remedy in refused(*compared)
    assert remedy in refused("calibrate", "small_cnn")
    error = refused(*compared, "--threshold", "none.json")
    assert "none.json does not exist; needed is a threshold written by nearfar calibrate --out" in error


def test_calibration_can_skip_files_that_cannot_be_decoded(tmp_path, nearfar, refused):
    model, pictures = model_folder(tmp_path / "model"), photos(tmp_path / "photos", 30)
    (pictures / "digit 3" / "text.png").write_text("no image")
    words = ("calibrate", model, "--data", f"folder:{pictures}", "--device", "cpu", "--cache", tmp_path / "cache")
    assert "--on-error skip continues without them" in refused(*words)
    assert "threshold" in nearfar(*words, "--on-error", "skip").out


def test_suggested_commands_are_quoted_for_a_shell(place, tmp_path, nearfar):
    index = tmp_path / "my index"
    said = nearfar("index", "build", place / "model", place / "photos", "-o", index, "--device", "cpu").out
    assert f"nearfar search '{index}' IMAGE, or in a browser with: nearfar serve '{index}'" in said


def test_one_image_of_one_class_is_counted_as_one(place, tmp_path, nearfar):
    file = place / "photos" / "digit 3" / "003.png"
    copy = tmp_path / "photos" / "three" / "3.png"
    copy.parent.mkdir(parents=True)
    copy.write_bytes(file.read_bytes())
    said = nearfar("index", "build", place / "model", tmp_path / "photos", "-o", tmp_path / "i", "--device", "cpu").out
    assert "1 image of 1 class, 8 dimensions" in said
    assert (
        "1 embedding of 8" in nearfar("embed", place / "model", copy, "-o", tmp_path / "x.npz", "--device", "cpu").out
    )
    assert "folder: 1 image of 1 class\n" in nearfar("data", "info", "folder", tmp_path / "photos").out


def test_a_filter_that_leaves_nothing_is_said(place, tmp_path, nearfar):
    index, photo = tmp_path / "my.index", place / "photos" / "digit 3" / "003.png"
    nearfar("index", "build", place / "model", place / "photos", "-o", index, "--device", "cpu")
    assert nearfar("search", index, photo, "--where", "label=none").out.strip() == "no item meets --where label=none"
    nearfar("index", "remove", index, "--where", "name~*")
    assert nearfar("search", index, photo).out.strip() == "the index has no items"


def test_a_calibrated_model_verifies_and_its_index_tells_matches(place, tmp_path, nearfar, refused):
    model = model_folder(tmp_path / "model")
    others, pictures = photos(tmp_path / "others", 40), photos(tmp_path / "photos", 12)
    same, other = pictures / "digit 3" / "003.png", pictures / "digit 4" / "004.png"
    assert "has no threshold; choose one with: nearfar calibrate" in refused("verify", model, same, other)
    assert "data is missing" in refused("calibrate", model)
    words = ("--data", f"folder:{others}", "--device", "cpu", "--cache", tmp_path / "cache")
    assert "allowed are" in refused("calibrate", model, *words, "--criterion", "best")
    said = nearfar("calibrate", model, *words, "--criterion", "0.2").out
    assert "of the pairs of two classes match, and" in said
    assert " of strangers would match, and " in said
    kept = json.loads((tmp_path / "model" / "threshold.json").read_text())
    assert (kept["criterion"], kept["about"]["data"]) == (0.2, "folder:others")
    assert nearfar("verify", model, same, same).out.startswith("match: similarity 1.0000\nthreshold ")
    found = json.loads(nearfar("verify", model, same, other, "--json", "-").out)
    assert found["match"] == (found["similarity"] >= kept["similarity"] - 1e-6)
    assert "B is missing; the form is: nearfar verify MODEL A B" in refused("verify", same, other)
    (tmp_path / "text.png").write_text("no image")
    assert "text.png: " in refused("verify", model, same, tmp_path / "text.png")

    nearfar("index", "build", model, pictures, "-o", tmp_path / "i", "--device", "cpu")
    said = nearfar("search", tmp_path / "i", same, "-k", 3, "--json", tmp_path / "a.json").out
    results = json.loads((tmp_path / "a.json").read_text())[0]
    assert (results["unknown"], results["neighbors"][0]["match"]) == (False, True)
    assert "match: digit 3" in said
    lowest = nf.metrics.SearchThreshold(**kept["search"]).at(12).similarity
    assert results["threshold"]["similarity"] == lowest
    assert f"threshold {lowest:.4f} for 12 items: on folder:others, " in said
    assert f"threshold {lowest:.4f} for 12 items" in " ".join(nearfar("index", "info", tmp_path / "i").out.split())
    assert "decision" not in nearfar("search", tmp_path / "i", same, "--expand", 2).out
    nearfar("calibrate", model, *words, "--criterion", "accuracy", "--index", tmp_path / "i")
    nearfar("calibrate", model, *words, "--unknown", 0, "--items", 1000, "--index", tmp_path / "i")
    info = json.loads(nearfar("index", "info", tmp_path / "i", "--json", "-").out)
    assert (info["threshold"]["unknown"], info["threshold"]["items"]) == (0, 12)
    with nf.Index.open(tmp_path / "i") as index:
        index.set_threshold(
            replace(
                index.threshold,
                table={**index.threshold.table, "similarity": [2.0] * len(index.threshold.table["items"])},
            )
        )
    said = nearfar("search", tmp_path / "i", same).out
    assert "No match\nthreshold 2.0000 for 12 items" in said


def test_vectors_with_nan_are_not_embedded_and_images_are_no_vectors(place, tmp_path, refused):
    save.save(nf.networks.create("mlp", in_dim=3, dim=2), tmp_path / "model")
    vectors = np.ones((4, 3), dtype=np.float32)
    vectors[2, 1] = np.nan
    np.save(tmp_path / "x.npy", vectors)
    error = refused("embed", tmp_path / "model", tmp_path / "x.npy", "-o", tmp_path / "out.npz")
    assert "1 of 4 embeddings have NaN or infinity; the first is that of '2'" in error
    assert not (tmp_path / "out.npz").exists()
    error = refused("embed", tmp_path / "model", place / "photos", "-o", tmp_path / "out.npz")
    assert error.endswith("the model reads vectors of 3 numbers, not images or files")
