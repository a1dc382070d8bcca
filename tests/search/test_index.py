"""An index of pictures: building, opening, searching, and what is refused."""

import io
import sqlite3

import numpy as np
import pytest
import torch
from PIL import Image
from search_cases import digit, model, model_folder, photos, vectors

from nearfar import networks
from nearfar.data import from_arrays
from nearfar.data.store.decode import BadImage
from nearfar.networks.weights import save
from nearfar.search import Index, Item, encoder
from nearfar.search.items import MissingItem
from nearfar.search.storage import BadIndex
from nearfar.search.storage.storage import ItemTable
from nearfar.utils.preprocessing import GREY, Preprocessing


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """An index of twenty digits; tests only read it."""
    folder = tmp_path_factory.mktemp("built")
    Index.build(model_folder(folder / "model"), photos(folder / "photos"), out=folder / "i", device="cpu").close()
    return folder


def test_items_know_their_name_class_and_hash(built):
    import hashlib

    with Index.open(built / "i", read_only=True) as index:
        item = index.items[0]
        content = (built / "photos" / item.name).read_bytes()
        assert item == Item(0, "digit 0/000.png", "digit 0", hashlib.sha256(content).hexdigest(), {})
        assert [each.id for each in index.items] == list(range(20))
        assert index.items.labels()["digit 0"] == 2


def test_vectors_are_what_the_model_gives(built):
    network = save.load(built / "model")
    with Index.open(built / "i", read_only=True) as index:
        pixels = torch.from_numpy(np.stack([np.array(Image.open(built / "photos" / i.name)) for i in index.items]))
        with torch.no_grad():
            expected = network(GREY(pixels.unsqueeze(1)))
        np.testing.assert_allclose(index.vectors(), expected.numpy(), atol=1e-6)
        np.testing.assert_array_equal(index.vector(7), index.vectors()[7])


def test_a_picture_finds_itself_however_it_is_given(built):
    with Index.open(built / "i", read_only=True, device="cpu") as index:
        file = built / "photos" / index.items[5].name
        asked = [file, str(file), file.read_bytes(), Image.open(file), np.array(Image.open(file)), index.vector(5)]
        for query in [*asked, torch.from_numpy(index.vector(5)).double()]:
            results = index.search(query, 3)
            assert results.ids[0] == 5
            assert results.scores[0] == pytest.approx(1.0, abs=1e-6)
            assert results.scores == sorted(results.scores, reverse=True)


def test_an_item_does_not_find_itself(built):
    with Index.open(built / "i", read_only=True) as index:
        results = index.search(5, 19)
        assert sorted(results.ids) == [id for id in range(20) if id != 5]
        assert results.right == [label == index.item(5).label for label in results.labels]


def test_pictures_are_seen_as_the_card_says(tmp_path):
    """A loaded model knows its preprocessing, and so does the index that is made with it."""
    squash = Preprocessing(size=8, resize=8, aspect="squash", crop="none", normalization=GREY)
    network = save.load(save.save(model(), tmp_path / "model", preprocessing=squash).parent)
    assert save.preprocessing_of(network) == squash
    assert save.preprocessing_of(save.load(save.save(network, tmp_path / "again"))) == squash
    wide = np.zeros((8, 32), dtype=np.uint8)
    wide[:, :8] = 255  # the centre is black; squashed, a quarter is white
    data = from_arrays(np.stack([wide, np.zeros_like(wide)]), np.array([0, 1]))
    with Index.build(network, data, out=tmp_path / "i", device="cpu") as index:
        assert not np.allclose(index.vector(0), index.vector(1))
        np.testing.assert_allclose(index.embed([wide])[0], index.vector(0), atol=1e-6)


def test_transparent_and_deep_pictures_are_read_as_from_files(built):
    with Index.open(built / "i", read_only=True, device="cpu") as index:
        for image in (
            Image.new("RGBA", (9, 9), (10, 20, 30, 40)),
            Image.new("P", (9, 9), 3),
            Image.new("I;16", (9, 9), 30_000),
            Image.new("CMYK", (9, 9), (10, 20, 30, 40)),
            Image.new("1", (9, 9), 1),
        ):
            file = io.BytesIO()
            image.save(file, "TIFF")
            np.testing.assert_allclose(index.embed([image]), index.embed([file.getvalue()]), atol=1e-6)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_open_pictures_are_upright_as_from_files(orientation):
    pixels = np.random.default_rng(0).integers(0, 256, (60, 40, 4), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    for mode, kind in (("RGB", "PNG"), ("L", "PNG"), ("RGBA", "PNG"), ("RGB", "TIFF"), ("CMYK", "TIFF")):
        file = io.BytesIO()
        Image.fromarray(pixels).convert("RGB").convert(mode).save(file, kind, exif=exif)
        asked = encoder.decoded(file.getvalue(), 3, 1000)
        assert asked.shape == ((60, 40, 3) if orientation < 5 else (40, 60, 3))
        with Image.open(file) as opened:
            np.testing.assert_array_equal(encoder.decoded(opened, 3, 1000), asked)


@pytest.mark.parametrize(("mode", "colour"), [("RGB", (10, 20, 30)), ("L", 10)])
def test_a_colour_that_is_transparent_is_white_as_from_files(mode, colour):
    file = io.BytesIO()
    Image.new(mode, (9, 9), colour).save(file, "PNG", transparency=colour)
    with Image.open(file) as opened:
        assert encoder.decoded(opened, 3, 1000).min() == encoder.decoded(file.getvalue(), 3, 1000).min() == 255


def test_broken_exif_is_no_reason_to_lose_a_picture():
    image = Image.new("RGB", (9, 6), "teal")
    image.info["exif"] = b"Exif\0\0nothing"
    assert encoder.decoded(image, 3, 1000).shape == (6, 9, 3)


def test_a_picture_is_decoded_once_for_the_model_and_for_people():
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((900, 600)).save(file, "JPEG")
    torch.manual_seed(0)
    reads = encoder.Encoder(networks.create("efficientnet_lite0", dim=4, pretrained=False), device="cpu")
    expected, alone, decoded = reads.preprocess(file.getvalue()), encoder.thumbnail(file.getvalue()), []

    def counted(*given, **more):
        decoded.append(given)
        return encoder.decode(*given, **more)

    seen, small = reads.preprocess_with_thumbnail(file.getvalue(), counted)
    assert len(decoded) == 1
    np.testing.assert_array_equal(seen, expected)
    shown, before = (np.asarray(Image.open(io.BytesIO(each)), dtype=np.float64) for each in (small, alone))
    assert shown.shape == before.shape == (107, 160, 3)
    assert np.abs(shown - before).mean() < 3


def test_thumbnails_are_small_jpegs(built, tmp_path):
    with Index.open(built / "i", read_only=True) as index:
        picture = Image.open(io.BytesIO(index.thumbnail(3)))
        assert (picture.format, picture.size) == ("JPEG", (160, 160))
    with Index.build(built / "model", [_photo(tmp_path)], out=tmp_path / "i", device="cpu") as index:
        assert Image.open(io.BytesIO(index.thumbnail(0))).size == (160, 80)


def _photo(folder):
    file = folder / "large.jpg"
    Image.new("RGB", (800, 400), "teal").save(file)
    return file


def test_a_failed_build_of_nothing_leaves_nothing(tmp_path):
    photos(tmp_path / "photos", 3)
    broken = model()
    with torch.no_grad():
        next(broken.parameters()).fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN"):
        Index.build(broken, tmp_path / "photos", out=tmp_path / "i", device="cpu")
    assert not (tmp_path / "i").exists()
    Index.build(model(), tmp_path / "photos", out=tmp_path / "i", device="cpu").close()


def test_files_that_are_no_pictures_are_named(tmp_path):
    photos(tmp_path / "photos", 3)
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"\xff\xd8\xff nothing")
    (tmp_path / "photos" / "notes.txt").write_text("no picture")
    with Index.build(model(), tmp_path / "photos", out=tmp_path / "i", device="cpu") as index:
        assert len(index) == 3
        assert [name for name, _ in index.skipped] == ["broken.jpg"]
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.png").write_bytes(b"text")
    with pytest.raises(ValueError, match=r"none of the images can be read; the first reason: a\.png: text"):
        Index.build(model(), tmp_path / "bad", out=tmp_path / "j", device="cpu")
    assert not (tmp_path / "j").exists()


def test_add_images_adds_all_or_none(built, tmp_path):
    with Index.build(built / "model", built / "photos", out=tmp_path / "i", device="cpu") as index:
        with pytest.raises(BadImage):
            index.add_images([("good", digit(30), "x", {}), ("bad", b"text", "x", {})])
        assert len(index) == 20
        ids = index.add_images([("a", digit(30), "x", {"year": 2020}), ("b", digit(31), None, {})])
        assert ids == [20, 21]
        assert index.item(20).metadata == {"year": 2020}
        assert index.search(digit(30), 1).ids == [20]
        assert index.search(digit(30), 2, where={"year": {">": 2019}}).ids == [20]


def test_ids_are_never_used_again(built, tmp_path):
    with Index.build(built / "model", built / "photos", out=tmp_path / "i", device="cpu") as index:
        index.remove(index.add_images([("a", digit(30), None, {})]))
        index.compact()
    with Index.open(tmp_path / "i") as index:
        assert index.add_images([("b", digit(30), None, {})]) == [21]
        with pytest.raises(MissingItem, match="id is 20; the index has no such item among its 21"):
            index.remove([3, 20])
        assert 3 in index  # all or none


def test_another_model_is_refused(built, tmp_path):
    with pytest.raises(BadIndex, match=r"is not the model of .*cannot be compared"):
        Index.open(built / "i", read_only=True, model=model_folder(tmp_path / "other", seed=1))
    Index.open(built / "i", read_only=True, model=built / "model").close()


def test_a_model_that_was_exchanged_is_refused(built, tmp_path):
    Index.build(built / "model", built / "photos", out=tmp_path / "i", device="cpu").close()
    save.save(model(seed=1), tmp_path / "i" / "model")
    with Index.open(tmp_path / "i") as index:
        assert index.search(3, 2).ids  # by id needs no model
        with pytest.raises(BadIndex, match="is not the model of"):
            index.search(digit(0))
        with pytest.raises(BadIndex, match="is not the model of"):
            index.add_images([("a", digit(30), None, {})])


def test_a_newer_format_is_refused(built, tmp_path):
    Index.from_vectors(vectors(20), out=tmp_path / "i").close()
    connection = sqlite3.connect(tmp_path / "i" / "index.sqlite")
    for version, advice in ((2, "a newer version of nearfar wrote it"), (0, "build it again")):
        connection.execute(f"PRAGMA user_version = {version}")
        with pytest.raises(BadIndex, match=f"of version {version}; this version of nearfar reads version 1: {advice}"):
            Index.open(tmp_path / "i")
    connection.execute("PRAGMA application_id = 7")
    with pytest.raises(BadIndex, match="not the database of an index"):
        Index.open(tmp_path / "i")
    connection.close()
    with pytest.raises(FileNotFoundError, match=r"contains no index: it has no index\.sqlite"):
        Index.open(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist; an index is needed"):
        Index.open(tmp_path / "nowhere")


def test_damaged_files_are_named(tmp_path):
    Index.from_vectors(vectors(20), out=tmp_path / "i").close()
    (ids,), (points,) = ((tmp_path / "i").glob(f"data-*/{name}.npy") for name in ("ids", "vectors"))
    np.save(ids, np.arange(7))
    with pytest.raises(BadIndex, match="is damaged: its files do not match each other"):
        Index.open(tmp_path / "i")
    for file in (points, ids):
        file.write_bytes(b"")
        with pytest.raises(BadIndex, match=rf"{file.name} is damaged"):
            Index.open(tmp_path / "i")


@pytest.mark.parametrize("words", [{"expand": 3}, {"rerank": "k_reciprocal"}])
def test_what_is_removed_during_a_search_is_left_out(tmp_path, monkeypatch, words):
    with Index.from_vectors(vectors(20), out=tmp_path / "i") as index:
        first = index.search(0, 1).ids[0]
        nearest = index.nearest

        def late(*given, **more):
            found = nearest(*given, **more)
            if first in index:
                index.remove([first])
            return found

        monkeypatch.setattr(index, "nearest", late)
        found = index.search(0, 19, **words)
        assert sorted(found.ids) == [id for id in range(1, 20) if id != first]
        assert len(found.pictures) == 19


def test_what_is_removed_before_its_picture_was_taken_is_left_out(tmp_path, monkeypatch):
    with Index.from_vectors(vectors(20), out=tmp_path / "i") as index:
        first, thumbnails = index.search(0, 1).ids[0], index.thumbnails

        def late(ids):
            if first in ids:
                index.remove([first])
            return thumbnails(ids)

        monkeypatch.setattr(index, "thumbnails", late)
        found = index.search(0, 5)
        assert first not in found.ids
        assert len(found.pictures) == len(found) + 1 == 5


@pytest.mark.parametrize("backend", ["exact", "faiss:flat"])
def test_nobody_looks_for_more_than_there_is(tmp_path, backend):
    if backend != "exact":
        pytest.importorskip("faiss")
    with Index.from_vectors(vectors(20), out=tmp_path / "i", backend=backend) as index:
        scores, ids = index.nearest(vectors(20)[:2], 10**18)
        assert scores.shape == ids.shape == (2, 20)
        index.remove(range(20))
        assert index.search_vectors(vectors(20)[:2], 10**18) == [[], []]
        for rerank in (None, "k_reciprocal"):
            assert len(index.search(vectors(20)[0], 3, rerank=rerank, expand=2)) == 0


def test_only_one_process_writes(tmp_path):
    with Index.from_vectors(vectors(20), out=tmp_path / "i"):
        with pytest.raises(BadIndex, match="is open for writing in another process"):
            Index.open(tmp_path / "i")
        with Index.open(tmp_path / "i", read_only=True) as reader, pytest.raises(BadIndex, match="opened read-only"):
            reader.remove([0])


def test_a_folder_with_an_index_is_left_alone(built):
    with pytest.raises(BadIndex, match="already contains an index; update it"):
        Index.build(built / "model", built / "photos", out=built / "i")
    with pytest.raises(BadIndex, match="already contains an index"):
        Index.from_vectors(vectors(20), out=built / "i")


def test_an_index_of_vectors_has_no_model(tmp_path):
    with Index.from_vectors(vectors(20, dim=4), out=tmp_path / "i", names=[f"n{i}" for i in range(20)]) as index:
        assert index.items[3].name == "n3"
        assert index.thumbnail(3) == b""
        with pytest.raises(ValueError, match="was built from vectors and has no model"):
            index.search(digit(0))
        with pytest.raises(ValueError, match="vectors has 3 dimensions; those of this index have 4"):
            index.search_vectors(np.zeros((1, 3), dtype=np.float32))
        with pytest.raises(ValueError, match="contains NaN"):
            index.search_vectors(np.full((1, 4), np.nan, dtype=np.float32))
        with pytest.raises(TypeError, match="query is a list"):
            index.search([1.0, 2.0])


def test_wrong_arguments_are_named(built, tmp_path):
    with pytest.raises(ValueError, match="backend is 'fast'"):
        Index.build(built / "model", built / "photos", out=tmp_path / "i", backend="fast")
    with pytest.raises(ValueError, match="measure is 'dot'; allowed are cosine, euclidean"):
        Index.build(built / "model", built / "photos", out=tmp_path / "i", measure="dot")
    with pytest.raises(ValueError, match="labels is 'dir'; allowed are 'folder'"):
        Index.build(built / "model", built / "photos", out=tmp_path / "i", labels="dir")
    with pytest.raises(ValueError, match="contains no files with the extension of an image"):
        Index.build(built / "model", built / "model", out=tmp_path / "i")
    with Index.open(built / "i", read_only=True) as index:
        with pytest.raises(ValueError, match="k is 0"):
            index.search(0, 0)
        with pytest.raises(FileNotFoundError, match=r"query is 'no\.jpg'"):
            index.search("no.jpg")
    assert not (tmp_path / "i").exists()


def test_the_map_follows_the_items(tmp_path):
    points = vectors(100)
    with Index.from_vectors(points, out=tmp_path / "i") as index:
        places = index.map()
        assert places.shape == (100, 2)
        assert np.abs(places).max() == pytest.approx(1.0, abs=1e-6)
        # The directions with the most spread, by another way: singular values.
        units = points / np.linalg.norm(points, axis=1, keepdims=True)
        spread = np.linalg.svd(units - units.mean(0), compute_uv=False)
        assert places.std(0)[0] / places.std(0)[1] == pytest.approx(spread[0] / spread[1], rel=1e-4)
        # A few more are put among the others, which stay where they are; many more make a new map.
        index.add_vectors(points[:3] + 0.001)
        index.remove([50])
        again = index.map()
        assert again.shape == (102, 2)
        np.testing.assert_array_equal(again[:50], places[:50])
        np.testing.assert_allclose(again[-3:], places[:3], atol=0.01)
        index.add_vectors(vectors(60, seed=5))
        assert not np.array_equal(index.map()[:50], places[:50])
        assert index.map("tsne").shape == (162, 2)
    with Index.open(tmp_path / "i", read_only=True) as index:
        assert index.map().shape == (162, 2)


def test_a_map_has_ids_and_places_of_one_moment(tmp_path, monkeypatch):
    with Index.from_vectors(vectors(20), out=tmp_path / "i") as index:
        ids = ItemTable.ids

        def late(table):
            found = ids(table)
            if 3 in index and not table._lock._is_owned():
                index.remove([3])
            return found

        monkeypatch.setattr(ItemTable, "ids", late)
        found, places = index.map_with_ids()
        assert len(found) == len(places)
        np.testing.assert_array_equal(places, index.map())


def test_an_index_of_vectors_works_whatever_device_is_usual(tmp_path):
    """As after torch.set_default_device("cuda"): arrays of the processor stay there."""
    before = torch.get_default_device()
    torch.set_default_device("meta")
    try:
        for name in ("exact", "faiss:flat"):
            for measure in ("cosine", "euclidean"):
                place = tmp_path / name / measure
                with Index.from_vectors(vectors(30), out=place, backend=name, measure=measure) as index:
                    index.add_vectors(vectors(3, seed=1))
                    index.remove([5])
                    assert index.search(vectors(30)[4], 3, expand=2, rerank="k_reciprocal").ids
                    assert index.search(vectors(30)[4], 1, where={"id": [4, 6]}).ids == [4]
                    assert index.map().shape == (32, 2)
                    assert index.near_duplicates(0.99) is not None
                    index.compact()
                    assert index.search(vectors(30)[4], 1).ids == [4]
    finally:
        torch.set_default_device(before)


def test_a_damaged_map_is_made_again(tmp_path):
    with Index.from_vectors(vectors(20), out=tmp_path / "i") as index:
        places, file = index.map(), tmp_path / "i" / "map-pca.npz"
        unknown = bytearray(file.read_bytes())
        unknown[unknown.find(b"PK\x01\x02") + 10] = 64  # a compression method that does not exist
        for damaged in (file.read_bytes()[:200], b"", b"PK", unknown):
            file.write_bytes(damaged)
            np.testing.assert_array_equal(index.map(), places)
        np.savez(file, ids=np.arange(20))
        np.testing.assert_array_equal(index.map(), places)


def test_a_data_set_can_be_indexed(built, tmp_path):
    pictures = from_arrays(np.stack([digit(n) for n in range(6)]), np.array([0, 0, 1, 1, 2, 2]))
    with Index.build(built / "model", pictures, out=tmp_path / "i", device="cpu") as index:
        assert [item.label for item in index.items] == ["0", "0", "1", "1", "2", "2"]
        assert index.search(digit(4), 1).ids == [4]
