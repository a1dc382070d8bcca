"""Responses of the API."""

import json
import re
import shutil

import numpy as np
import pytest
from fake_index import DIM, FakeIndex, encoded, picture, threshold
from PIL import Image

from nearfar import networks
from nearfar.data import from_arrays
from nearfar.search import Index
from nearfar.search.storage import BadIndex
from nearfar.serve import Limits

API = "/api/v1"


def upload(number=3, **settings):
    return {"image": ("picture.png", encoded(picture(number, **settings)), "image/png")}


def test_a_picture_finds_itself_first_and_its_class_next(client):
    answer = client().post(f"{API}/search", files=upload(3), params={"k": 5}).json()
    assert [hit["label"] for hit in answer["hits"]] == ["class 3"] * 5
    assert answer["hits"][0]["id"] == 3
    assert answer["hits"][0]["score"] == pytest.approx(1, abs=1e-4)
    scores = [hit["score"] for hit in answer["hits"]]
    assert scores == sorted(scores, reverse=True)


def test_a_model_that_reads_vectors_embeds_them(client, tmp_path):
    vectors = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    model = networks.create("linear", in_dim=5, dim=3)
    dataset = from_arrays(vectors, list("aabbcc"))
    index = client(Index.build(model, dataset, out=tmp_path / "my.index", device="cpu"))
    answer = index.post(f"{API}/search/vector", json={"vector": vectors[4].tolist()}, params={"k": 1})
    assert [hit["id"] for hit in answer.json()["hits"]] == [4]
    assert index.get(f"{API}/info").json()["pictures"] is False
    answer = index.post(f"{API}/search/vector", json={"vector": [1.0] * 3})
    assert (answer.status_code, answer.json()["error"]["message"]) == (422, "vector has 3 numbers; the model reads 5")
    answer = index.post(f"{API}/search", files=upload(3))
    assert answer.json()["error"]["message"].endswith("its model reads vectors; search by item or vector")


@pytest.mark.parametrize("way", ["", "/id/3", "/vector"])
def test_a_class_can_be_searched_alone(client, way):
    body = {"": {"files": upload(3)}, "/vector": {"json": {"vector": [0.5] * DIM}}}.get(way, {})
    answer = client().post(f"{API}/search{way}", params={"k": 6, "label": "class 1"}, **body).json()
    assert [hit["label"] for hit in answer["hits"]] == ["class 1"] * 6


def test_an_empty_index_answers(client):
    served = client(FakeIndex())
    assert served.post(f"{API}/search", files=upload()).json()["hits"] == []
    assert served.get(f"{API}/items").json() == {"total": 0, "items": []}
    assert served.get(f"{API}/map").status_code == 200


def test_items_are_paged_filtered_and_drawn_at_random(client):
    served = client()
    page = served.get(f"{API}/items", params={"offset": 38, "limit": 10}).json()
    assert (page["total"], [item["id"] for item in page["items"]]) == (40, [38, 39])
    only = served.get(f"{API}/items", params={"label": "class 2", "limit": 3}).json()
    assert (only["total"], [item["id"] for item in only["items"]]) == (10, [2, 6, 10])
    drawn = [served.get(f"{API}/items", params={"shuffle": seed, "limit": 5}).json()["items"] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_classes_are_counted_in_the_order_of_people(client):
    index = FakeIndex()
    index.add_images([(f"{n}", picture(n), label, {}) for n, label in enumerate(["b10", "b9", None, "b9"])])
    assert client(index).get(f"{API}/labels").json() == {
        "labels": [{"label": "b9", "count": 2}, {"label": "b10", "count": 1}],
        "unlabelled": 1,
    }


def test_what_is_added_is_found_at_once(client):
    served = client()
    before = served.get(f"{API}/info").json()
    made = served.post(f"{API}/items", files=upload(99, classes=100), data={"label": "new", "name": "mine.png"})
    assert made.status_code == 201
    id = made.json()["id"]
    assert served.get(f"{API}/items/{id}").json() == {"id": id, "name": "mine.png", "label": "new", "metadata": {}}
    answer = served.post(f"{API}/search", files=upload(99, classes=100), params={"k": 1, "label": "new"}).json()
    assert [hit["id"] for hit in answer["hits"]] == [id]
    after = served.get(f"{API}/info").json()
    assert (after["count"], after["labels"]) == (before["count"] + 1, before["labels"] + 1)
    assert after["version"] != before["version"]


def test_what_is_removed_is_gone_and_its_number_stays_unused(client):
    served = client()
    assert served.delete(f"{API}/items/39").json() == {"removed": 39}
    assert served.get(f"{API}/items/39").status_code == 404
    assert served.get(f"{API}/items/39/thumbnail").status_code == 404
    assert served.post(f"{API}/search/id/39").status_code == 404
    assert served.delete(f"{API}/items/39").status_code == 404
    assert served.post(f"{API}/items", files=upload()).json()["id"] == 40


def test_names_of_uploads_are_no_paths_and_hold_only_what_is_seen(client):
    served = client()
    names = {"../../etc/passwd": "passwd", "C:\\me\\cat.png": "cat.png", "\x00\x1b[31m": "[31m"}
    for name, kept in {**names, "cat\u202egpj.exe\u200b": "catgpj.exe"}.items():
        words = {"name": name, "label": "\ufeffj\u2066ay\u2028"}
        id = served.post(f"{API}/items", files=upload(), data=words).json()["id"]
        item = served.get(f"{API}/items/{id}").json()
        assert (item["name"], item["label"]) == (kept, "jay")


def test_thumbnails_are_pictures_and_kept_where_the_page_says_so(client):
    served = client()
    plain, kept = (served.get(f"{API}/items/3/thumbnail", params=params) for params in ({}, {"v": "abc"}))
    assert plain.headers["content-type"] == "image/jpeg"
    assert plain.content[:2] == b"\xff\xd8"
    assert plain.headers["cache-control"] == "no-store"
    assert "immutable" in kept.headers["cache-control"]


def test_the_map_has_every_item_with_its_class(client):
    served = client()
    answer = served.get(f"{API}/map")
    length = int.from_bytes(answer.content[8:12], "little")
    header, rest = json.loads(answer.content[16 : 16 + length]), answer.content[16 + length :]
    assert header["count"] == 40
    assert len(rest) == 40 * 16
    assert np.frombuffer(rest[:160], "<u4").tolist() == list(range(40))
    assert np.frombuffer(rest[160:320], "<i4").tolist() == [n % 4 for n in range(40)]
    assert np.isfinite(np.frombuffer(rest[320:], "<f4")).all()
    again = served.get(f"{API}/map", headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    served.delete(f"{API}/items/0")
    assert served.get(f"{API}/map", headers={"if-none-match": answer.headers["etag"]}).status_code == 200


class Moving(FakeIndex):
    """An item is removed and one is added between listing the items and computing the map."""

    def map_with_ids(self, method="pca"):
        self.remove([3])
        self.add_images([("new", picture(50), None, {})])
        return super().map_with_ids(method)


def test_items_stay_in_their_places_when_one_goes_meanwhile(client):
    index = Moving(40)
    content = client(index).get(f"{API}/map").content
    length = int.from_bytes(content[8:12], "little")
    count, rest = json.loads(content[16 : 16 + length])["count"], content[16 + length :]
    ids = np.frombuffer(rest[: 4 * count], "<u4").tolist()
    assert ids == [id for id in range(40) if id != 3]
    points = np.frombuffer(rest[8 * count :], "<f4").reshape(count, 2)
    np.testing.assert_array_equal(points, [index.vector(id)[:2] for id in ids])


def test_a_read_only_server_changes_nothing(client):
    served = client(read_only=True)
    for answer in (served.post(f"{API}/items", files=upload()), served.delete(f"{API}/items/3")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "read_only")
    assert served.post(f"{API}/search", files=upload()).status_code == 200
    assert served.get(f"{API}/info").json()["read_only"] is True


def test_an_index_of_vectors_reads_no_pictures(client):
    served = client(FakeIndex(8, model=None))
    for way in ("search", "items"):
        answer = served.post(f"{API}/{way}", files=upload())
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "no_model")
    assert served.post(f"{API}/search/id/2").status_code == 200
    assert served.get(f"{API}/info").json()["pictures"] is False


@pytest.mark.parametrize(
    ("method", "path", "settings", "status", "message"),
    [
        ("GET", "/items/999", {}, 404, "id is 999; the index has no such item"),
        ("GET", "/items/-1", {}, 422, "id is '-1'; input should be greater than or equal to 0"),
        ("GET", "/items/../../etc/passwd", {}, 404, "nothing at"),
        ("GET", "/items/%2e%2e%2fetc", {}, 404, "nothing at"),
        ("POST", "/search/id/3?k=0", {}, 422, "k is '0'"),
        ("POST", "/search/id/3?k=1000", {}, 422, "k is '1000'"),
        ("POST", "/search/id/3?label=owl", {}, 404, "label is 'owl'"),
        ("POST", f"/search/id/3?where=name!={',x' * 1000}", {}, 422, "where has more than 1,000 alternatives"),
        ("POST", "/search", {}, 422, "image is missing"),
        ("POST", "/search", {"files": {"image": ("a.png", b"hello")}}, 422, "text, not an image"),
        ("POST", "/search", {"data": {"image": "text"}}, 422, "image is 'text'"),
        ("POST", "/search/vector", {"json": {"vector": [1.0]}}, 422, f"vector has 1 numbers; the index has {DIM}"),
        ("POST", "/search/vector", {"json": {"vector": [0.0] * DIM}}, 422, "only zeros"),
        ("POST", "/search/vector", {"json": {"vector": ["a"] * DIM}}, 422, "vector.0 is 'a'"),
        ("POST", "/search/vector", {"json": {"vektor": []}}, 422, "vector is missing"),
        ("POST", "/search/vector", {"content": b'{"vector": [NaN]}'}, 422, "vector.0 is nan"),
        ("POST", "/search/vector", {"content": b'{"vector": [1e999]}'}, 422, "vector.0 is inf"),
        ("POST", "/search/vector", {"content": b"{"}, 422, ""),
        ("DELETE", "/items", {}, 405, "DELETE is not allowed"),
        ("GET", "/nothing", {}, 404, "there is nothing at '/api/v1/nothing'"),
        ("GET", "/runs", {}, 404, "there is nothing at"),
    ],
)
def test_errors_are_json_with_a_sentence(client, method, path, settings, status, message):
    if "content" in settings:
        settings = {**settings, "headers": {"content-type": "application/json"}}
    answer = client().request(method, API + path, **settings)
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}
    assert message in answer.json()["error"]["message"]


def test_a_failure_inside_is_told_without_its_insides(client):
    index = FakeIndex(4)
    index.search_batch = lambda *_, **__: 1 / 0
    answer = client(index).post(f"{API}/search/id/1")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "failed")
    assert "division" not in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize(("limit", "asked", "count"), [(500, {"k": 250}, 250), (10, {}, 10), (200, {}, 24)])
def test_as_many_neighbors_are_found_as_the_server_allows(client, limit, asked, count):
    served = client(FakeIndex(300), limits=Limits(neighbors=limit))
    assert len(served.post(f"{API}/search/id/3", params=asked).json()["hits"]) == count
    answer = served.post(f"{API}/search/id/3", params={"k": limit + 1})
    message = f"k is '{limit + 1}'; input should be less than or equal to {limit}"
    assert (answer.status_code, answer.json()["error"]["message"]) == (422, message)
    schema = served.get(f"{API}/openapi.json").json()["paths"][f"{API}/search/id/{{id}}"]["post"]["parameters"]
    assert next(parameter["schema"]["maximum"] for parameter in schema if parameter["name"] == "k") == limit


def test_the_index_is_closed_at_the_end(client):
    index = FakeIndex(4)
    served = client(index)
    assert index.add_vectors(index.vectors()) == [4, 5, 6, 7]
    served.__exit__()
    with pytest.raises(BadIndex, match="is closed"):
        index.remove([0])


@pytest.mark.parametrize("size", [(50_000, 4), (4, 50_000), (51, 1)])
def test_a_picture_that_is_far_too_thin_is_refused(client, size):
    image = {"image": ("thin.png", encoded(Image.new("RGB", size)), "image/png")}
    answer = client().post(f"{API}/search", files=image)
    assert answer.status_code == 422
    assert answer.json()["error"]["code"] == "bad_image"
    assert "one side is more than 50 times as long as the other" in answer.json()["error"]["message"]


def test_both_sides_of_an_upload_are_bounded(client):
    kept = []

    class Watching(FakeIndex):
        def embed(self, images):
            kept.extend(np.asarray(image).shape for image in images)
            return super().embed(images)

    served = client(Watching(8))
    kept.clear()
    for size in ((20_000, 800), (640, 480)):
        image = {"image": ("long.png", encoded(Image.new("RGB", size)), "image/png")}
        assert served.post(f"{API}/search", files=image).status_code == 200
    assert kept == [(246, 6144, 3), (480, 640, 3)]


# --- filters and re-ranking: the same query code as in Python and on the command line ---------------------------


def garden(folder):
    """Vectors on a circle with labels, names and metadata."""
    angles = np.linspace(0, np.pi, 30, dtype=np.float32)
    return Index.from_vectors(
        np.stack([np.cos(angles), np.sin(angles)], axis=1),
        out=folder / "garden.index",
        names=[f"garden/{n}.jpg" if n % 2 else f"field/{n}.jpg" for n in range(30)],
        labels=["jay", "wren", "owl"] * 10,
        metadata=[{"year": 2010 + n} for n in range(30)],
    )


@pytest.mark.parametrize(
    ("params", "settings"),
    [
        ({"k": 50}, {"k": 50}),
        ({"where": ["year>=2019"]}, {"where": {"year": {">=": 2019}}}),
        ({"where": ["year>=2019", "year<2025"]}, {"where": {"year": {">=": 2019, "<": 2025}}}),
        ({"where": ["name~garden/*", "label!=jay,owl"]}, {"where": {"name": {"~": "garden/*"}, "label": "wren"}}),
        ({"where": ["year>=2019"], "label": "owl"}, {"where": {"year": {">=": 2019}, "label": "owl"}}),
        ({"rerank": "k_reciprocal"}, {"rerank": "k_reciprocal"}),
        ({"expand": 3}, {"expand": 3}),
        ({"expand": 2, "rerank": "k_reciprocal", "where": ["label=jay,wren"]}, {"where": {"label": ["jay", "wren"]}}),
    ],
)
@pytest.mark.parametrize("by_vector", [False, True])
def test_http_searches_like_python(client, tmp_path, params, settings, by_vector):
    index = garden(tmp_path)
    settings = {"k": 6, "expand": params.get("expand", 0), "rerank": params.get("rerank"), **settings}
    query = index.vector(4) if by_vector else 4
    expected = index.search(query, **settings)
    body = {"json": {"vector": index.vector(4).tolist()}} if by_vector else {}
    path = f"{API}/search/vector" if by_vector else f"{API}/search/id/4"
    answer = client(index).post(path, params={"k": 6, **params}, **body).json()
    hits = answer["hits"]
    assert (answer["query"] or {}).get("name") == (None if by_vector else index.item(4).name)
    assert [hit["id"] for hit in hits] == expected.ids
    assert [hit["score"] for hit in hits] == pytest.approx(expected.scores, abs=1e-6)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"where": "year"}, "where is 'year'; it must be KEY=VALUE"),
        ({"where": "yaer>2019"}, "where has 'yaer' (did you mean 'year'?); items have"),
        ({"where": ["label=jay", "label=wren"]}, "where has 'label' twice"),
        ({"where": "label=jay", "label": "wren"}, "where has 'label' twice"),
        ({"where": ["year>1"] * 21}, "where is ["),
        ({"rerank": "magic"}, "rerank is 'magic'; allowed are k_reciprocal"),
        ({"expand": -1}, "expand is '-1'; input should be greater than or equal to 0"),
    ],
)
def test_bad_filters_and_rerankings_are_refused(client, tmp_path, params, message):
    answer = client(garden(tmp_path)).post(f"{API}/search/id/4", params=params)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "bad_value")
    assert message in answer.json()["error"]["message"]


def test_the_schema_describes_filters_and_rerankings(client):
    paths = client().get(f"{API}/openapi.json").json()["paths"]
    for path in ("", "/id/{id}", "/vector"):
        known = {parameter["name"]: parameter for parameter in paths[f"{API}/search{path}"]["post"]["parameters"]}
        assert "year>=2019" in known["where"]["description"]
        assert known["rerank"]["schema"]["enum"] == ["k_reciprocal"]
        assert {"k", "label", "expand"} <= set(known)


def test_an_upload_is_decoded_once(client, small_index, tmp_path, monkeypatch):
    from nearfar.data.store import decode
    from nearfar.data.store.decode import Decoder

    calls = []
    original = Decoder.decode
    monkeypatch.setattr(
        Decoder, "decode", lambda *data, **settings: (calls.append("upload"), original(*data, **settings))[1]
    )
    monkeypatch.setattr(decode, "_open", lambda *_, **__: calls.append("in the process of the server"))
    served = client(Index.open(shutil.copytree(small_index, tmp_path / "my.index"), device="cpu"))
    assert served.post(f"{API}/search", files=upload(3)).status_code == 200
    assert served.post(f"{API}/items", files=upload(50)).status_code == 201
    assert calls == ["upload", "upload"]


def test_hits_match_from_the_threshold_on_and_a_query_without_a_match_is_unknown(client):
    index = FakeIndex(40)
    plain = client(index).post(f"{API}/search/id/3", params={"k": 40}).json()
    assert (plain["unknown"], {hit["match"] for hit in plain["hits"]}) == (None, {None})
    scores = [hit["score"] for hit in plain["hits"]]
    index.set_threshold(threshold(similarity=scores[5]))
    answer = client(index).post(f"{API}/search/id/3", params={"k": 40}).json()
    assert [hit["match"] for hit in answer["hits"]] == [True] * 6 + [False] * (len(scores) - 6)
    assert answer["unknown"] is False
    index.set_threshold(threshold(similarity=1.1))
    answer = client(index).post(f"{API}/search/id/3").json()
    assert (answer["unknown"], {hit["match"] for hit in answer["hits"]}) == (True, {False})
    other = client(index).post(f"{API}/search/id/3", params={"expand": 2}).json()
    assert (other["unknown"], {hit["match"] for hit in other["hits"]}) == (None, {None})
    assert client(index).get(f"{API}/info").json()["index"]["threshold"]["similarity"] == 1.1


# --- metrics of Prometheus ----------------------------------------------------------------------------------------

LINE = re.compile(r'^[a-z_]+(\{([a-z]+="(\\.|[^"\\])*",?)+\})? [0-9.e+-]+$')


def test_requests_are_counted_by_route_and_not_by_address(client):
    served = client(FakeIndex(9))
    for id in (1, 2, 99):
        served.get(f"/api/v1/items/{id}")
    served.get("/made/up")
    served.post(f"{API}/search", files={"image": encoded(picture(1))})
    served.post(f"{API}/search", files={"image": b"no"})
    text = served.get("/metrics").text
    assert 'nearfar_requests_total{method="GET",route="/api/v1/items/{id}",status="200"} 2' in text
    assert 'nearfar_requests_total{method="GET",route="/api/v1/items/{id}",status="404"} 1' in text
    assert 'route="other",status="404"} 1' in text
    assert "made/up" not in text
    assert "nearfar_index_items 9" in text
    assert "nearfar_uploads_refused_total 1" in text
    assert 'nearfar_batch_size_count{work="embed"} 1' in text
    assert re.search(r"^process_resident_memory_bytes [1-9.]+\d*e\+0[789]$", text, re.M)
    for line in text.splitlines():
        assert line.startswith(("# HELP ", "# TYPE ")) or LINE.match(line), line
