"""An index follows a folder: only what is new is embedded, and what was moved keeps its id."""

import os
from dataclasses import replace

import pytest
from PIL import Image
from search_cases import digit, model, photos
from trees_on_disk import lock

from nearfar.search import Index
from nearfar.search import index as index_module
from nearfar.search.encoder import Encoder
from nearfar.search.images import list_images
from nearfar.search.storage import BadIndex


@pytest.fixture
def index(tmp_path):
    photos(tmp_path / "photos", 6)
    with Index.build(model(), tmp_path / "photos", out=tmp_path / "i", device="cpu") as made:
        yield made


@pytest.fixture
def embedded(monkeypatch):
    """How many pictures the model was shown, a number for each batch."""
    seen = []
    original = Encoder.vectors

    def count(self, pictures):
        seen.append(len(pictures))
        return original(self, pictures)

    monkeypatch.setattr(Encoder, "vectors", count)
    return seen


def test_what_is_unchanged_is_not_embedded_again(index, tmp_path, embedded):
    found = index.update(tmp_path / "photos")
    assert found.unchanged == 6
    assert [found.added, found.moved, found.replaced, found.missing] == [[], [], [], []]
    assert embedded == []


def test_only_what_is_new_is_embedded(index, tmp_path, embedded):
    Image.fromarray(digit(40)).save(tmp_path / "photos" / "new.png")
    found = index.update(tmp_path / "photos")
    assert (found.added, found.unchanged, embedded) == ([6], 6, [1])
    assert index.item(6).label is None  # it lies in no class folder


def test_moved_files_keep_their_id(index, tmp_path, embedded):
    (tmp_path / "photos" / "moved").mkdir()
    (tmp_path / "photos" / "digit 2" / "002.png").rename(tmp_path / "photos" / "moved" / "x.png")
    found = index.update(tmp_path / "photos", prune=True)
    assert (found.moved, found.missing, embedded) == ([2], [], [])
    assert (index.item(2).name, index.item(2).label) == ("moved/x.png", "moved")


def test_files_that_change_places_keep_their_ids(index, tmp_path, embedded):
    one, other = (tmp_path / "photos" / f"digit {n}" / f"00{n}.png" for n in (1, 2))
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    found = index.update(tmp_path / "photos")
    assert sorted(found.moved) == [1, 2]
    assert (index.item(1).name, index.item(2).name, embedded) == ("digit 2/002.png", "digit 1/001.png", [])


def test_a_copy_is_an_item_of_its_own_but_not_embedded(index, tmp_path, embedded):
    original = tmp_path / "photos" / "digit 2" / "002.png"
    (tmp_path / "photos" / "copy.png").write_bytes(original.read_bytes())
    found = index.update(tmp_path / "photos")
    assert (found.added, found.moved, embedded) == ([6], [], [])
    assert index.search(6, 1).ids == [2]
    assert index.thumbnail(6) == index.thumbnail(2)


def test_changed_files_get_a_new_id(index, tmp_path):
    Image.fromarray(digit(40)).save(tmp_path / "photos" / "digit 2" / "002.png")
    found = index.update(tmp_path / "photos")
    assert (found.added, found.replaced) == ([6], [2])
    assert 2 not in index
    assert index.item(6).name == "digit 2/002.png"


def test_deleted_files_are_pruned_when_asked(index, tmp_path):
    (tmp_path / "photos" / "digit 2" / "002.png").unlink()
    assert index.update(tmp_path / "photos").missing == [2]
    assert 2 in index
    assert not index.update(tmp_path / "photos", prune=True, most=0.1).pruned
    assert index.update(tmp_path / "photos", prune=True).missing == [2]
    assert 2 not in index


def test_adding_moves_and_removes_nothing(index, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "copy.png").write_bytes((tmp_path / "photos" / "digit 2" / "002.png").read_bytes())
    found = index.add(other)
    assert (found.added, found.moved, found.missing) == ([6], [], [])
    assert index.add(other).unchanged == 1
    assert len(index) == 7


def test_an_interrupted_build_is_gone_on_with(tmp_path, embedded):
    photos(tmp_path / "photos", 12)

    class Interrupt(Exception):
        pass

    def watch(work):
        def progress(done, total):
            if work == "embedding" and done == 8:
                raise Interrupt

        return progress

    with pytest.raises(Interrupt):
        Index.build(model(), tmp_path / "photos", out=tmp_path / "j", device="cpu", batch_size=4, watch=watch)
    with Index.open(tmp_path / "j", device="cpu") as index:
        assert len(index) == 8
        index.update(tmp_path / "photos")
        assert len(index) == 12
    assert sum(embedded) == 12


def test_metadata_and_labels_can_change(index, tmp_path):
    index.update(tmp_path / "photos", metadata={"digit 2/002.png": {"year": 2020}}, labels={"digit 2/002.png": "two"})
    assert index.item(2).metadata == {"year": 2020}
    assert index.item(2).label == "two"
    assert index.search(0, where={"year": 2020}).ids == [2]


def test_pruning_keeps_what_is_in_folders_that_cannot_be_looked_at(index, tmp_path, monkeypatch):
    whole = tmp_path / "photos"
    lock(monkeypatch, whole / "digit 3")
    (whole / "digit 4").rename(tmp_path / "elsewhere")
    (whole / "digit 4").symlink_to("digit 4")  # a loop
    (whole / "digit 5" / "005.png").unlink()
    found = index.update(whole, prune=True)
    assert (found.kept, found.missing, len(index)) == ([3, 4], [5], 5)
    assert found.skipped == [("digit 3", "Permission denied"), ("digit 4", "Too many levels of symbolic links")]


@pytest.mark.parametrize("prune", [False, True])
def test_what_cannot_be_read_now_is_kept(index, tmp_path, prune):
    def broken():
        raise OSError("Input/output error")

    listed = [
        replace(each, read=broken) if each.name == "digit 2/002.png" else each
        for each in list_images(tmp_path / "photos")
    ]
    (tmp_path / "photos" / "digit 3" / "003.png").write_bytes(b"\x89PNG, and no more")
    found = index.update(listed, prune=prune)
    assert (found.kept, found.replaced, found.missing) == ([2, 3], [], [])
    assert [name for name, _ in found.skipped] == ["digit 2/002.png", "digit 3/003.png"]
    assert [item.id for item in index.items] == [*range(6)]


def test_an_upload_named_like_a_file_makes_no_copies(index, tmp_path, embedded):
    index.add_images([("digit 2/002.png", digit(40), "mine", {})])
    embedded.clear()
    found = index.update(tmp_path / "photos")
    assert (found.unchanged, found.added, found.replaced, found.missing) == (6, [], [], [6])
    assert index.item(6).label == "mine"
    assert embedded == []


def test_a_file_moved_over_another_replaces_it(index, tmp_path):
    (tmp_path / "photos" / "digit 1" / "001.png").rename(tmp_path / "photos" / "digit 2" / "002.png")
    found = index.update(tmp_path / "photos")
    assert (found.moved, found.replaced, found.missing) == ([1], [2], [])
    assert index.item(1).name == "digit 2/002.png"


def test_an_interrupted_replacement_is_gone_on_with(index, tmp_path, monkeypatch):
    Image.fromarray(digit(40)).save(tmp_path / "photos" / "digit 2" / "002.png")
    with monkeypatch.context() as patch:
        patch.setattr(index.storage, "remove", lambda ids: None)  # as if it was killed before
        index.update(tmp_path / "photos")
    assert len(index) == 7
    assert index.update(tmp_path / "photos").replaced == [2]
    assert [item.id for item in index.items] == [0, 1, 3, 4, 5, 6]


def test_what_was_told_of_a_picture_is_not_forgotten(index, tmp_path):
    """Its class and metadata stay, when it is moved or changed as well; a class that was just its folder does not."""
    told = {f"digit {n}/00{n}.png" for n in (1, 2, 3)}
    listed = [
        replace(each, label="told", explicit=True) if each.name in told else each
        for each in list_images(tmp_path / "photos")
    ]
    index.update(listed, metadata={name: {"year": 2020} for name in told})
    (tmp_path / "photos" / "moved").mkdir()
    for number in (2, 4):
        file = tmp_path / "photos" / f"digit {number}" / f"00{number}.png"
        file.rename(tmp_path / "photos" / "moved" / file.name)
    Image.fromarray(digit(40)).save(tmp_path / "photos" / "digit 3" / "003.png")
    index.update(tmp_path / "photos")
    found = {item.name: (item.label, item.metadata) for item in index.items}
    assert found["digit 1/001.png"] == found["moved/002.png"] == found["digit 3/003.png"] == ("told", {"year": 2020})
    assert found["moved/004.png"] == ("moved", {})
    index.update(tmp_path / "photos", labels={})
    assert {item.label for item in index.items} == {None}


def test_one_file_is_called_as_several_are(tmp_path):
    photos(tmp_path, 3)
    files = sorted(tmp_path.glob("*/*.png"))
    one, (first, *_) = list_images(files[0]), list_images(files)
    assert (one[0].name, one[0].label) == (first.name, first.label) == (files[0].as_posix(), "digit 0")


def test_a_name_that_is_no_text_costs_only_its_file(tmp_path):
    photos(tmp_path / "photos", 3)
    bad = os.fsencode(tmp_path / "photos") + b"/bad\xff.png"
    try:
        os.link(next((tmp_path / "photos").glob("*/*.png")), bad)
    except OSError:
        pytest.skip("names of files are UTF-8 here")
    with Index.build(model(), tmp_path / "photos", out=tmp_path / "i", device="cpu") as index:
        assert len(index) == 3
        assert index.skipped == [("bad\\xff.png", "its name is not UTF-8; rename the file")]


def test_a_build_that_is_refused_leaves_the_model_of_another(tmp_path, monkeypatch):
    photos(tmp_path / "photos", 3)

    def late(*words):
        monkeypatch.setattr(index_module, "list_images", list_images)
        Index.build(model(), tmp_path / "photos", out=tmp_path / "i", device="cpu").close()
        return list_images(*words)

    monkeypatch.setattr(index_module, "list_images", late)
    with pytest.raises(BadIndex, match="already contains an index"):
        Index.build(model(seed=1), tmp_path / "photos", out=tmp_path / "i", device="cpu")
    with Index.open(tmp_path / "i", device="cpu") as index:
        assert index.search(digit(0), 1).ids == [0]


def test_an_interrupted_build_remembers_its_backend(tmp_path):
    pytest.importorskip("faiss")
    photos(tmp_path / "photos", 4)

    def stop(work):
        if work == "embedding":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Index.build(model(), tmp_path / "photos", out=tmp_path / "i", backend="faiss:hnsw", device="cpu", watch=stop)
    with Index.open(tmp_path / "i", device="cpu") as index:
        index.update(tmp_path / "photos")
        index.compact()
        assert index.info()["backend"] == "faiss:hnsw"
