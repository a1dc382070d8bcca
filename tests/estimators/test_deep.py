"""A deep metric as a scikit-learn estimator."""

import gc
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import nearfar as nf
from nearfar.bench import Run
from nearfar.estimators import DeepMetric
from nearfar.reports.run_report import report

X, Y = (array[:400] for array in load_digits(return_X_y=True))
X = X / 16
SMALL = {"n_components": 8, "network_settings": {"hidden": [32]}, "device": "cpu", "random_state": 0}


@pytest.fixture(scope="module")
def fitted():
    return DeepMetric(epochs=3, **SMALL).fit(X, Y)


@parametrize_with_checks(
    [DeepMetric(n_components=2, epochs=1, batch_size=16, per_class=2, network_settings={"hidden": [4]}, device="cpu")]
)
def test_scikit_learn(estimator, check):
    check(estimator)


def test_training_improves_retrieval(fitted):
    untrained = DeepMetric(epochs=1, lr=1e-12, metric="map@r", **SMALL).fit(X, Y)
    assert clone(fitted).set_params(metric="map@r", epochs=10).fit(X, Y).score(X, Y) > untrained.score(X, Y) + 0.1


def test_scores_are_those_of_the_metrics(fitted):
    expected = nf.metrics.retrieval(fitted.transform(X), Y)["recall@1"]
    assert fitted.score(X, Y.astype(str)) == expected


def test_distances_are_those_of_embeddings(fitted):
    mapped = fitted.transform(X)
    expected = np.linalg.norm(mapped[0] - mapped[5])
    assert fitted.metric_(X[0], X[5]) == pytest.approx(expected, abs=1e-5)
    np.testing.assert_allclose(np.linalg.norm(mapped, axis=1), 1, atol=1e-5)


def test_one_seed_gives_one_result_and_leaves_the_global_generators(fitted):
    torch.manual_seed(3)
    np.random.seed(3)
    again = clone(fitted).fit(X, Y)
    here = (torch.rand(1).item(), np.random.rand())
    torch.manual_seed(3)
    np.random.seed(3)
    assert here == (torch.rand(1).item(), np.random.rand())
    np.testing.assert_array_equal(again.transform(X), fitted.transform(X))


def test_partial_fit_goes_on_from_the_learned_weights(fitted):
    model = clone(fitted).set_params(lr=1e-12).partial_fit(X, Y)
    other = clone(fitted).set_params(lr=1e-12, random_state=9)
    before = model.transform(X)
    model.set_params(random_state=9).partial_fit(X[:200], Y[:200])  # another seed would give other first weights
    np.testing.assert_allclose(model.transform(X), before, atol=1e-5)
    assert not np.allclose(other.fit(X, Y).transform(X), before, atol=1e-2)


def test_training_stops_when_validation_classes_no_longer_improve(tmp_path):
    model = DeepMetric(epochs=9, validation=0.3, patience=2, lr=1e-12, runs=tmp_path, **SMALL).fit(X, Y)
    log = [json.loads(line) for line in (Path(model.run_) / "log.jsonl").read_text().splitlines()]
    measured = [line["metrics"] for line in log if "metrics" in line]
    assert len(measured) == 3  # the first epoch is the best, and two more do not improve
    assert model.metrics_["selection"] == "best validation recall@1"
    assert model.metrics_["validation"]["queries"] == np.isin(Y, _validation_classes(model)).sum()


def _validation_classes(model):
    with np.load(Path(model.run_) / "data.npz") as data:
        held = {int(label) for label in data["y"][data["split"] == "validation"]}
        assert held.isdisjoint({int(label) for label in data["y"][data["split"] == "train"]})
    assert len(held) == 3
    return sorted(held)


def test_images():
    pictures = (X.reshape(-1, 8, 8) * 255).astype(np.uint8)
    settings = {**SMALL, "network": "small_cnn", "network_settings": None}
    model = DeepMetric(epochs=2, **settings).fit(torch.as_tensor(pictures), Y)
    assert model.transform(pictures).shape == (400, 8)
    assert model.score(pictures, Y) > 0.8
    with pytest.raises(ValueError, match=r"X is float64 of shape \(400, 8, 8\); images must be uint8"):
        model.fit(X.reshape(-1, 8, 8), Y)


def test_a_run_and_back(fitted, tmp_path):
    run = fitted.to_run(tmp_path / "run")
    again = DeepMetric.from_run(run)
    np.testing.assert_array_equal(again.transform(X), fitted.transform(X))
    assert again.get_params()["loss"] == "multi_similarity"
    network = nf.load(run)
    with torch.no_grad():
        direct = network(torch.as_tensor(X, dtype=torch.float32)).numpy()
    np.testing.assert_allclose(direct, fitted.transform(X), atol=1e-6)
    assert len(nf.data.open("arrays", run / "data.npz")) == 400
    assert Run(run).metrics == fitted.metrics_
    with pytest.raises(FileExistsError, match="exists already"):
        fitted.to_run(run)


def test_the_run_of_an_ensemble_and_back(tmp_path):
    fitted = DeepMetric(epochs=1, recipe={"network": {"members": 2}}, **SMALL).fit(X, Y)
    assert fitted.transform(X).shape == (400, 16)
    assert len(fitted.get_feature_names_out()) == 16
    again = DeepMetric.from_run(fitted.to_run(tmp_path / "run"))
    np.testing.assert_array_equal(again.transform(X), fitted.transform(X))
    assert again.recipe == {"network": {"members": 2}}
    assert again.partial_fit(X, Y).transform(X).shape == (400, 16)


def test_a_run_keeps_the_share_of_validation_classes(tmp_path):
    fitted = DeepMetric(epochs=2, validation=0.3, patience=1, **SMALL).fit(X, Y)
    again = DeepMetric.from_run(fitted.to_run(tmp_path / "run"))
    assert again.validation == pytest.approx(0.3)
    assert again.patience == 1


def test_the_run_of_a_recipe_keeps_the_share_of_validation_classes(tmp_path):
    parts = np.where(Y < 5, "train", "test")
    recipe = {
        "split": {"name": "fixed_validation", "share": 0.4},
        "sampler": {"batch_size": 32, "per_class": 4},
        "network": {"name": "mlp", "dim": 8},
        "loss": {"name": "triplet"},
        "optimizer": {"lr": 0.001},
        "selection": {"patience": 3},
        "training": {"epochs": 1, "device": "cpu"},
    }
    nf.train(recipe, out=tmp_path / "run", data=(X, Y, parts))
    model = DeepMetric.from_run(tmp_path / "run")
    assert (model.validation, model.patience) == (0.4, 3)


def test_a_run_without_test_classes_is_evaluated_on_named_data(fitted, tmp_path):
    run = fitted.to_run(tmp_path / "run")
    for data in (None, str(run / "data.npz")):  # the run's own data, here or where it was
        with pytest.raises(ValueError, match="has no test classes: its split is 'train_only'"):
            nf.evaluate(run, data=data, device="cpu")
    found = nf.evaluate(run, device="cpu", data=f"arrays:{run / 'data.npz'}")
    assert found["retrieval"]["recall@1"] == pytest.approx(fitted.score(X, Y))


def test_a_report_of_a_run(fitted, tmp_path):
    page = report(fitted.to_run(tmp_path / "run"), out=tmp_path / "page.html").read_text()
    assert "multi_similarity" in page


def test_a_temporary_run_is_removed_with_its_estimator():
    model = DeepMetric(epochs=1, **SMALL).fit(X, Y)
    first = Path(model.run_)
    model.partial_fit(X, Y)
    second = Path(model.run_)
    assert not first.exists()
    assert second.is_dir()
    del model
    gc.collect()
    assert not second.exists()


def test_further_sections_of_a_recipe():
    model = DeepMetric(epochs=1, recipe={"optimizer": {"name": "sgd"}, "schedule": {"name": "cosine"}}, **SMALL)
    recipe = nf.training.load_recipe(Path(model.fit(X, Y).run_))
    assert recipe.optimizer.name == "sgd"
    assert recipe.schedule.name == "cosine"


def test_in_a_pipeline():
    pipeline = make_pipeline(StandardScaler(), DeepMetric(epochs=20, **SMALL), KNeighborsClassifier(3))
    assert pipeline.fit(X[:300], Y[:300]).score(X[300:], Y[300:]) > 0.8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"validation": 1.0}, "validation is 1.0; it must be from 0"),
        ({"validation": 0.9}, "at least two must remain for training"),
        ({"loss": "tripelt"}, "triplet"),
        ({"network": "resnet50", "network_settings": None}, "reads images"),
        ({"metric": "recall"}, "selection.metric is 'recall'"),
        ({"patience": 2}, "patience is 2 and validation 0"),
    ],
)
def test_errors(settings, message):
    with pytest.raises(ValueError, match=message):
        DeepMetric(**{**SMALL, **settings}).fit(X, Y)
