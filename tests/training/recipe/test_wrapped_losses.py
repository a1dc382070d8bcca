"""Losses of recipes with prefixes, further losses and regularizers."""

import json
import tomllib
from typing import get_args

import jsonschema
import pytest

from nearfar.bench.grid import _key
from nearfar.losses import Matryoshka, MultipleLosses, Regularized
from nearfar.losses.regularized import REGULARIZERS
from nearfar.training.recipe import files
from nearfar.training.recipe.schema import LossSection, json_schema

RECIPE = """
[data]
name = "digits"
[network]
name = "small_cnn"
dim = 16
[loss]
name = "softmax"
matryoshka = [4, 8]
regularizer = "orthogonal"
regularizer_weight = 0.01
[[loss.plus]]
name = "center"
weight = 0.003
[[loss.plus]]
name = "multi_similarity"
alpha = 3.0
[sampler]
classes = 4
per_class = 4
[optimizer]
lr = 1e-3
[training]
epochs = 1
"""


def recipe(**loss):
    tables = tomllib.loads(RECIPE)
    return {**tables, "loss": {**tables["loss"], **loss}}


def test_a_recipe_creates_what_it_says():
    section = files.load(recipe()).loss
    loss = section.create(num_classes=5, dim=16)
    assert isinstance(loss, Regularized)
    assert (loss.regularizer, loss.weight) == ("orthogonal", 0.01)
    (inner,) = loss.parts
    assert isinstance(inner, MultipleLosses)
    assert inner.weights == [1.0, 0.003, 1.0]
    prefixes, center, pairs = inner.parts
    assert isinstance(prefixes, Matryoshka)
    assert prefixes.dims == [4, 8, 16]
    assert [tuple(proxies.shape) for proxies in prefixes.parameters()] == [(5, 4), (5, 8), (5, 16)]
    assert center.settings()["dim"] == 16
    assert pairs.settings()["alpha"] == 3.0
    assert section.names == ["softmax", "center", "multi_similarity"]


def test_a_recipe_is_written_and_read_again():
    found = files.load(recipe())
    assert files.load(tomllib.loads(files.to_toml(found))) == found
    assert "plus" not in files.to_dict(files.load({**recipe(), "loss": {"name": "raw"}}))["loss"]


def test_overrides_reach_every_key():
    found = files.load(recipe(), overrides=["loss.plus.0.weight=0.5", "loss.regularizer=l2", "loss.name=raw"]).loss
    assert (found.plus[0].weight, found.regularizer, found.name) == (0.5, "l2", "raw")
    assert found.matryoshka == (4, 8)  # belongs to no loss


def test_the_key_of_a_cell_depends_on_what_is_added():
    keys = [
        _key(files.load(tables), {}, is_baseline=False)
        for tables in (recipe(), recipe(plus=[]), recipe(matryoshka=[4]))
    ]
    assert len(set(keys)) == 3


def test_the_schema_knows_the_keys():
    schema = json.loads(json.dumps(json_schema()))
    jsonschema.validate(tomllib.loads(RECIPE), schema)
    for wrong in ({"regularizer": "l3"}, {"matryoshka": [0]}, {"plus": [{"name": "centre"}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(recipe(**wrong), schema)


def test_the_schema_has_every_regularizer():
    allowed = get_args(LossSection.model_fields["regularizer"].annotation)[0]
    assert get_args(allowed) == REGULARIZERS


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"matryoshka": [8, 4]}, r"loss\.matryoshka is \[8, 4\]; allowed: increasing"),
        ({"matryoshka": [8, 16]}, r"loss\.matryoshka is \[8, 16\]; it must be below the 16 of the embedding"),
        ({"weight": 2.0}, r"loss\.weight is 2\.0; it is for losses in loss\.plus"),
        ({"regularizer": "l3"}, r"loss\.regularizer is 'l3'"),
        ({"regularizer": "sparse_centers", "name": "raw", "plus": []}, r"'sparse_centers' is for losses with proxies"),
        ({"plus": [{"name": "centre"}]}, r"loss\.plus\.0\.name is 'centre' \(did you mean 'center'"),
        ({"plus": [{"name": "raw", "alpah": 1.0}]}, r"loss\.plus\.0\.alpah"),
        ({"plus": [{"weight": 1.0}]}, r"loss\.plus\.0\.name is missing"),
        ({"plus": "center"}, r"loss\.plus is 'center'"),
    ],
)
def test_what_is_wrong_is_said(wrong, message):
    with pytest.raises(files.RecipeError, match=message):
        files.load(recipe(**wrong))
