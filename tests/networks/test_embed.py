"""``model.embed``: embeddings of arrays, tables, images and files."""

import numpy as np
import pandas
import pytest
import torch
from PIL import Image

from nearfar import networks
from nearfar.networks import Ensemble

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 8, 8), dtype=np.uint8)


def test_vectors_of_every_kind_are_embedded_alike():
    model = networks.create("mlp", in_dim=3, dim=2, hidden=[4])
    vectors = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.eval()(vectors).numpy()
    for kind in (
        vectors,
        vectors.numpy(),
        vectors.double().numpy(),
        pandas.DataFrame(vectors.numpy()),
        vectors.tolist(),
    ):
        np.testing.assert_allclose(model.embed(kind, batch_size=3), expected, rtol=1e-6)


def test_images_of_every_kind_are_embedded_alike(tmp_path):
    model = networks.create("small_cnn", dim=4, size=8)
    images = [Image.fromarray(pixels) for pixels in PIXELS]
    paths = [tmp_path / f"{row}.png" for row in range(len(images))]
    for image, path in zip(images, paths, strict=True):
        image.save(path)
    expected = model.embed(PIXELS)
    assert (expected.shape, expected.dtype) == ((5, 4), np.float32)
    for kind in (images, paths, pandas.Series([str(path) for path in paths]), list(PIXELS), PIXELS[..., None]):
        np.testing.assert_allclose(model.embed(kind, batch_size=2), expected, rtol=1e-6)


def test_an_ensemble_embeds_as_its_forward_pass():
    model = Ensemble([networks.create("linear", in_dim=3, dim=2) for _ in range(2)])
    with torch.no_grad():
        expected = model(torch.eye(3)).numpy()
    np.testing.assert_allclose(model.embed(np.eye(3)), expected, rtol=1e-6)


def test_the_mode_of_the_network_is_kept():
    model = networks.create("linear", in_dim=3, dim=2).train()
    model.embed(np.eye(3), progress=True)
    assert model.training


def test_inputs_that_the_model_does_not_read_are_refused():
    with pytest.raises(TypeError, match=r"the model reads vectors of 3 numbers; the input is float32 \[4\]"):
        networks.create("linear", in_dim=3, dim=2).embed(np.eye(4))
    with pytest.raises(TypeError, match="the model reads vectors of 3 numbers; the input is uint8"):
        networks.create("linear", in_dim=3, dim=2).embed(PIXELS)
    with pytest.raises(ValueError, match="must be uint8"):
        networks.create("small_cnn", dim=4, size=8).embed(np.eye(4))
