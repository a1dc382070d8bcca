"""A trained network embeds images in search as in its evaluation."""

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file
from training_runs import recipe, train

import nearfar as nf
from nearfar import data
from nearfar.search.encoder import Encoder

SIZES = ((24, 48), (40, 20), (28, 28), (20, 50))  # height and width


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Four classes of four smooth color images of different shapes."""
    folder = tmp_path_factory.mktemp("photographs")
    rng = np.random.default_rng(0)
    for number in range(16):
        height, width = SIZES[number % 4]
        small = Image.fromarray(rng.integers(0, 256, (3, 3, 3), dtype=np.uint8))
        file = folder / f"class {number // 4}" / f"{number}.png"
        file.parent.mkdir(exist_ok=True)
        small.resize((width, height), Image.Resampling.BICUBIC).save(file)
    return folder


SETTINGS = {
    "as usual": {},
    "squashed when decoded": {"data__aspect": "squash", "data__side": 18},
    "squashed, then cut": {"data__aspect": "squash", "data__side": 24, "evaluation__resize": "none"},
    "grey": {"data__channels": 1},
    "as they are": {"evaluation__resize": "none"},
    "as they are, though squashed for training": {"evaluation__resize": "none", "augmentation__aspect": "squash"},
    "as they are where not shrunk": {"evaluation__resize": "none", "data__side": 22},
    "too small": {
        "evaluation__resize": "none",
        "augmentation__size": 26,
        "network__settings": {"channels": 3, "size": 26},
    },
    "whole": {"evaluation__crop": "none"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_loaded_network_embeds_as_its_test_did(settings, photographs, tmp_path):
    chosen = recipe(
        photographs,
        **{
            "data__name": "folder",
            "data__root": str(photographs),
            "sampler__classes": 2,
            "sampler__steps": 1,
            "network__name": "small_cnn",
            "network__settings": {"channels": 3, "size": 16},
            "augmentation__size": 16,
            "training__epochs": 1,
        }
        | settings,
    )
    run = train(chosen, tmp_path / "run", cache=tmp_path / "cache").folder
    tested = load_file(run / "embeddings.safetensors")
    source = data.open("folder", photographs).source
    pictures = [photographs / source.name(row) for row in tested["rows"].tolist()]
    served = Encoder(nf.load(run), device="cpu").encode(pictures)
    # Not to the last bit: on one of the ways pictures may be resized in two steps.
    np.testing.assert_allclose(served, tested["embeddings"].numpy(), atol=0.01)
