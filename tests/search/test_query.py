"""Queries of every kind go through the same code."""

import numpy as np
import pytest
from PIL import Image
from search_cases import digit, model, photos, vectors

from nearfar.data.store import decode
from nearfar.search import Index, VectorQuery, encoder

SETTINGS = [
    {},
    {"k": 3},
    {"where": {"label": "1"}},
    {"where": {"label": ["0", "2"]}, "k": 4},
    {"expand": 3},
    {"rerank": "k_reciprocal"},
    {"where": {"label": "1"}, "rerank": "k_reciprocal", "expand": 2, "k": 6},
]


def test_a_batch_finds_what_single_queries_find(tmp_path):
    points = vectors(90)
    with Index.from_vectors(points, out=tmp_path / "i", labels=[str(row % 3) for row in range(90)]) as index:
        batch = [VectorQuery(vector=index.vector(row), exclude=row, **each) for row, each in enumerate(SETTINGS)]
        for row, (each, found) in enumerate(zip(SETTINGS, index.search_batch(batch), strict=True)):
            expected = index.search(row, **each)
            assert [neighbor.item.id for neighbor in found] == expected.ids
            np.testing.assert_allclose([neighbor.score for neighbor in found], expected.scores, atol=1e-6)
        assert index.search_batch([]) == []


def test_queries_with_equal_filters_share_a_search(tmp_path, monkeypatch):
    with Index.from_vectors(vectors(30), out=tmp_path / "i", labels=["a", "b"] * 15) as index:
        nearest, shapes = index.nearest, []

        def counted(points, k, **more):
            shapes.append((len(points), k))
            return nearest(points, k, **more)

        monkeypatch.setattr(index, "nearest", counted)
        wheres = [None, {"label": "a"}, None, {"label": "a"}, None]
        found = index.search_batch(
            [VectorQuery(vector=index.vector(row), k=row + 1, where=where) for row, where in enumerate(wheres)]
        )
        assert shapes == [(3, 5), (2, 4)]
        assert [len(each) for each in found] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"k": 0}, "k is 0"), ({"expand": -1}, "expand is -1"), ({"rerank": "magic"}, "rerank is 'magic'; allowed are")],
)
def test_wrong_settings_of_a_query_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        VectorQuery(vector=np.zeros(3), **settings)


def test_a_decoded_image_is_not_decoded_again(tmp_path, monkeypatch):
    """Pixels and Pillow images are used as they are; a file is decoded once, for the vector and the thumbnail."""
    photos(tmp_path / "photos", 6)
    with Index.build(model(), tmp_path / "photos", out=tmp_path / "i", device="cpu") as index:
        real, decoded = decode._open, []

        def counted(*given, **more):
            decoded.append(given)
            return real(*given, **more)

        monkeypatch.setattr(decode, "_open", counted)
        color = np.repeat(digit(3)[:, :, None], 3, axis=2)
        for query in (digit(3), digit(3)[:, :, None], color, Image.fromarray(digit(3)), Image.fromarray(color)):
            assert index.search(query, 1).ids == [3]
            assert index.embed([query]).shape == (1, 8)
        assert decoded == []
        assert index.search(tmp_path / "photos" / index.item(3).name, 1).pictures[0]
        assert len(decoded) <= 2  # the model takes gray images, and thumbnails are in color


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 1), (4, 5, 3)])
@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_are_read_as_from_a_pillow_image(shape, channels):
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    image = Image.fromarray(pixels.reshape(4, 5) if pixels.size == 20 else pixels)
    expected = np.asarray(image.convert("L" if channels == 1 else "RGB")).reshape(4, 5, channels)
    np.testing.assert_array_equal(encoder.decoded(pixels, channels, 100), expected)
    np.testing.assert_array_equal(encoder.decoded(image, channels, 100), expected)


def test_pixels_of_another_kind_are_refused():
    with pytest.raises(ValueError, match=r"the image is of float64 and has shape \(4, 5\); it must be uint8"):
        encoder.decoded(np.zeros((4, 5)), 3, 100)
    with pytest.raises(TypeError, match="the image is a list; it must be a path"):
        encoder.decoded([1], 3, 100)
