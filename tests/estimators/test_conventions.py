"""scikit-learn's conventions: its own checks, pipelines, searches, supervision by pairs and triplets, errors."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from estimator_cases import blobs
from sklearn.base import clone
from sklearn.datasets import load_iris, load_wine
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from nearfar import estimators as E
from nearfar.estimators.pair_methods import pola_update
from nearfar.estimators.pairs import draw_pairs, draw_triplets

CHEAP = [
    E.Mahalanobis(),
    E.RCA(),
    E.LFDA(),
    E.NCA(max_iter=2),
    E.MCML(max_iter=2),
    E.MLKR(max_iter=2),
    E.LMNN(rounds=1, max_iter=2),
    E.MMC(n_constraints=20, max_iter=2),
    E.ITML(n_constraints=20, max_iter=2),
    E.LSML(n_constraints=20, max_iter=2),
    E.POLA(n_constraints=10),
    E.LinearMetric(n_constraints=20, max_iter=2),
    E.KernelMetric(),
    E.KernelMetric(E.RCA(n_components=1), n_components=2),
]
ITERATIVE = [
    E.NCA(max_iter=20),
    E.MCML(max_iter=20),
    E.MLKR(max_iter=20),
    E.LMNN(rounds=5),
    E.MMC(random_state=0, n_constraints=60),
    E.MMC(random_state=0, n_constraints=60, diagonal=True),
    E.ITML(random_state=0, n_constraints=60),
    E.LSML(random_state=0, n_constraints=60),
    *(
        E.LinearMetric(regularizer=regularizer, loss=loss, random_state=0, n_constraints=60)
        for regularizer in ("frobenius", "trace", "logdet")
        for loss in ("hinge", "relative", "squared")
    ),
    E.LinearMetric(n_components=2, random_state=0, n_constraints=60),
]
X, Y = blobs(60, 4)
PAIRS = np.array([[0, 3, 1], [1, 4, 1], [2, 8, 1], [0, 1, -1], [2, 4, -1], [5, 7, -1]])
TRIPLETS = np.array([[0, 3, 1], [12, 9, 4], [15, 9, 4]])


def test_all_estimators_are_checked():
    deep = {"DeepMetric"}  # has tests of its own
    assert {type(each).__name__ for each in CHEAP} == {*E.__all__} - {"LinearTransformer"} - deep


@parametrize_with_checks(CHEAP)
def test_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.parametrize("estimator", ITERATIVE, ids=lambda each: repr(each)[:70])
def test_the_objective_never_increases_and_the_metric_is_positive_semidefinite(estimator):
    model = clone(estimator).fit(X, Y)
    assert len(model.objective_) > 1
    assert (np.diff(model.objective_) <= 1e-12 * np.abs(model.objective_[:-1])).all()
    assert model.objective_[-1] < model.objective_[0]
    assert model.n_iter_ == len(model.objective_) - 1
    values = np.linalg.eigvalsh(model.get_mahalanobis_matrix())
    assert values.min() >= -1e-10 * values.max()


def test_mmc_stops_where_neighbors_are_better_than_at_the_optimum():
    models = [E.MMC(random_state=0, **more) for more in ({}, {"tol": 1e-6})]
    data = load_wine(return_X_y=True)
    scores = [
        cross_val_score(make_pipeline(StandardScaler(), model, KNeighborsClassifier(3)), *data).mean()
        for model in models
    ]
    assert scores[0] > scores[1]
    early, late = (model.fit(*data).objective_ for model in models)
    assert early[-1] > late[-1]


def test_a_diagonal_metric_weighs_features():
    matrix = E.MMC(diagonal=True, random_state=0).fit(X, Y).get_mahalanobis_matrix()
    np.testing.assert_allclose(matrix, np.diag(matrix.diagonal()), atol=1e-12)


@pytest.mark.parametrize("estimator", [each for each in CHEAP if not isinstance(each, E.KernelMetric)], ids=str)
def test_distances_agree(estimator):
    model = clone(estimator).fit(X, Y)
    mapped = model.transform(X)
    difference = X[0] - X[7]
    expected = float(np.linalg.norm(mapped[0] - mapped[7]))
    assert model.metric_(X[0], X[7]) == pytest.approx(expected)
    assert model.pair_distance(X[:1], X[7:8])[0] == pytest.approx(expected)
    assert difference @ model.get_mahalanobis_matrix() @ difference == pytest.approx(expected**2)


def test_the_learned_metric_fits_a_neighbor_classifier():
    model = E.RCA().fit(X, Y)
    by_metric = KNeighborsClassifier(3, metric=model.metric_, algorithm="brute").fit(X, Y).predict(X)
    by_transform = KNeighborsClassifier(3).fit(model.transform(X), Y).predict(model.transform(X))
    assert (by_metric == by_transform).all()


# --- supervision ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", [E.MMC(), E.ITML(), E.POLA(random_state=0), E.LinearMetric(), E.RCA()], ids=str)
def test_pairs_instead_of_labels_by_rows_or_columns_also_in_a_pipeline(estimator):
    expected = clone(estimator).fit(StandardScaler().fit_transform(X), pairs=PAIRS)
    columns = SimpleNamespace(left=PAIRS[:, 0], right=PAIRS[:, 1], same=PAIRS[:, 2] == 1)
    pipeline = make_pipeline(StandardScaler(), clone(estimator), KNeighborsClassifier(3))
    # The classifier gets labels of one class, which no metric could learn from.
    pipeline.fit(X, np.zeros(60), **{f"{type(estimator).__name__.lower()}__pairs": columns})
    np.testing.assert_array_equal(pipeline[1].components_, expected.components_)


def test_equal_samples_of_different_classes_do_not_spoil_itml():
    equal = np.array([[0, 0, 1], [1, 1, 0], [2, 2, 0]])
    np.testing.assert_allclose(E.ITML().fit(X, pairs=equal).get_mahalanobis_matrix(), np.eye(4), atol=1e-9)
    assert np.isfinite(E.ITML(random_state=0).fit(np.ones((20, 3)), np.arange(20) % 2).components_).all()


@pytest.mark.parametrize("estimator", [E.ITML(), E.LinearMetric(regularizer="logdet", upper=0.5, lower=9.0)], ids=str)
def test_pairs_move_as_they_say(estimator):
    model = clone(estimator).fit(X, pairs=PAIRS)
    before = np.linalg.norm(X[PAIRS[:, 0]] - X[PAIRS[:, 1]], axis=1)
    ratio = model.pair_distance(X[PAIRS[:, 0]], X[PAIRS[:, 1]]) / before
    assert ratio[:3].mean() < ratio[3:].mean()


@pytest.mark.parametrize("estimator", [E.LSML(), E.LinearMetric(loss="relative")], ids=str)
def test_triplets_instead_of_labels(estimator):
    model = clone(estimator).fit(X, triplets=TRIPLETS)
    a, near, far = X[TRIPLETS.T]
    before = np.linalg.norm(a - near, axis=1) - np.linalg.norm(a - far, axis=1)
    after = model.pair_distance(a, near) - model.pair_distance(a, far)
    assert before.max() > 0
    assert after.max() < before.max()


def test_triplets_are_quadruplets_of_one_anchor():
    by_triplets = E.LSML().fit(X, triplets=TRIPLETS)
    by_quadruplets = E.LSML().fit(X, quadruplets=TRIPLETS[:, [0, 1, 0, 2]])
    np.testing.assert_array_equal(by_triplets.components_, by_quadruplets.components_)


def test_pairs_drawn_from_labels_are_distinct_and_of_their_kind():
    similar, dissimilar = draw_pairs(Y, 40, np.random.RandomState(0))
    assert len(similar) == len(dissimilar) == 40
    for pairs, same in ((similar, True), (dissimilar, False)):
        assert ((Y[pairs[:, 0]] == Y[pairs[:, 1]]) == same).all()
        assert (pairs[:, 0] < pairs[:, 1]).all()
        assert len(np.unique(pairs, axis=0)) == 40
    anchor, near, far = Y[draw_triplets(Y, 40, np.random.RandomState(0)).T]
    assert len(anchor) == 40
    assert (anchor == near).all()
    assert (anchor != far).all()


def test_many_classes_do_not_ask_for_more_pairs_than_memory_has():
    labels = np.repeat(np.arange(2_000), 8)  # 20 times the square would be 80,000,000
    similar, dissimilar = draw_pairs(labels, None, np.random.RandomState(0))
    assert len(similar) <= 100_000
    assert len(dissimilar) == 100_000


def test_pola_learns_on_from_where_it_was():
    first = E.POLA(random_state=0).fit(X, pairs=PAIRS)
    matrix, threshold = first.matrix_.copy(), first.threshold_
    first.partial_fit(X, pairs=PAIRS[:2])
    expected = torch.as_tensor(matrix)
    centered = torch.as_tensor(X - X.mean(axis=0))
    for i in np.random.RandomState(0).permutation(2):
        left, right, _ = PAIRS[i]
        expected, threshold = pola_update(expected, threshold, centered[left] - centered[right], 1.0)
    np.testing.assert_allclose(first.matrix_, expected.numpy())
    assert first.threshold_ == threshold
    again = clone(first).fit(X, pairs=PAIRS)  # fit forgets
    np.testing.assert_array_equal(again.matrix_, matrix)


# --- errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "given", "message"),
    [
        (E.ITML(), {"pairs": PAIRS[:, :2]}, r"pairs has shape \(6, 2\); it must be \(count, 3\)"),
        (E.ITML(), {"pairs": PAIRS + np.array([0, 60, 0])}, "pairs names row 68; rows are 0 to 59"),
        (E.ITML(), {"pairs": PAIRS + np.array([0, 0, 5])}, "third column of pairs holds"),
        (E.ITML(), {}, "ITML requires y"),
        (E.ITML(gamma=0), {"y": Y}, "gamma is 0"),
        (E.ITML(prior="x"), {"y": Y}, "prior is 'x'"),
        (E.ITML(bounds=(0, 2)), {"y": Y}, r"bounds is \(0, 2\); it must be two positive numbers"),
        (E.ITML(bounds=(1, 2, 3)), {"y": Y}, "it must be two positive numbers"),
        (E.ITML(n_constraints=0), {"y": Y}, "n_constraints is 0; it must be ≥ 1"),
        (E.ITML(device="gpu"), {"y": Y}, "device is 'gpu'; allowed are auto, cpu, cuda"),
        (E.NCA(max_iter=0), {"y": Y}, "max_iter is 0; it must be ≥ 1"),
        (E.NCA(tol=-1.0), {"y": Y}, "tol is -1.0; it must be ≥ 0"),
        (E.LMNN(rounds=0), {"y": Y}, "rounds is 0; it must be ≥ 1"),
        (E.LFDA(neighbors=0), {"y": Y}, "neighbors is 0; it must be ≥ 1"),
        (E.POLA(epochs=0), {"y": Y}, "epochs is 0; it must be ≥ 1"),
        (E.LinearMetric(trade_off=-1.0), {"y": Y}, "trade_off is -1.0; it must be > 0"),
        (E.MMC(), {"pairs": PAIRS[:3]}, "3 similar and 0 dissimilar pairs; MMC needs both"),
        (E.RCA(), {"pairs": PAIRS[3:]}, "no similar pair"),
        (E.RCA(), {}, "RCA requires y"),
        (E.LSML(), {"triplets": TRIPLETS, "weights": [1.0]}, "weights has 1 values; there are 3 comparisons"),
        (E.LSML(), {"triplets": TRIPLETS, "weights": [1.0, -1.0, 1.0]}, "weights holds a negative number"),
        (E.LSML(), {"triplets": TRIPLETS, "quadruplets": [[0, 1, 2, 3]]}, "both quadruplets and triplets are given"),
        (E.LSML(), {"y": np.arange(60)}, "no class has two samples"),
        (E.LinearMetric(loss="x"), {"y": Y}, "loss is 'x'; it must be one of hinge, relative, squared"),
        (E.LinearMetric(regularizer="logdet", n_components=2), {"y": Y}, "infinite for A of low rank"),
        (E.LinearMetric(), {"triplets": TRIPLETS}, "labels or pairs, not from triplets"),
        (E.LinearMetric(loss="relative"), {"pairs": PAIRS}, "labels or triplets, not from pairs"),
        (E.LinearMetric(loss="squared"), {"y": Y, "targets": [1.0]}, "targets are given without pairs"),
        (E.LinearMetric(loss="squared"), {"pairs": PAIRS, "targets": [1.0]}, "targets has 1 values; pairs has 6"),
        (E.NCA(n_components=5), {"y": Y}, "n_components is 5; it must be from 1 to the number of features, 4"),
        (E.NCA(precision="x"), {"y": Y}, "precision is 'x'"),
        (E.LMNN(neighbors=0), {"y": Y}, "neighbors is 0"),
        (E.LMNN(push=1.0), {"y": Y}, "push is 1.0"),
        (E.LMNN(), {"y": np.zeros(60, dtype=int)}, "y has one class, 0; LMNN needs at least two"),
        (E.LMNN(), {"y": X[:, 0]}, "Unknown label type: continuous"),
        *(
            (each, {"y": np.arange(60)}, "y has 60 classes of one sample; .* needs two of a class")
            for each in (E.RCA(), E.LFDA(), E.NCA(), E.MCML(), E.LMNN())
        ),
        (E.LFDA(embedding="x"), {"y": Y}, "embedding is 'x'"),
        (E.Mahalanobis(shrinkage=2.0), {}, "shrinkage is 2.0"),
        (E.MLKR(), {"y": np.where(Y == 0, "jay", "wren")}, "y holds text; MLKR needs numbers"),
    ],
)
def test_errors_name_argument_value_and_what_is_allowed(estimator, given, message):
    with pytest.raises(ValueError, match=message):
        estimator.fit(X, **given)


def test_dimensions_and_row_numbers_are_whole_numbers():
    with pytest.raises(TypeError, match=r"n_components is 1.5; a whole number is needed"):
        E.NCA(n_components=1.5).fit(X, Y)
    with pytest.raises(TypeError, match="triplets has dtype float64; row numbers must be integers"):
        E.LSML().fit(X, triplets=TRIPLETS.astype(float))


def test_pairs_need_two_sides():
    with pytest.raises(ValueError, match="left has 4 samples and right 1; both need one for each pair"):
        E.RCA().fit(X, Y).pair_distance(X[:4], X[:1])


# --- pipelines ------------------------------------------------------------------------------------------


def test_a_search_over_a_pipeline():
    samples, labels = load_iris(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), E.LMNN(rounds=2), KNeighborsClassifier(3))
    search = GridSearchCV(pipeline, {"lmnn__neighbors": [1, 3], "lmnn__n_components": [2]}, cv=3)
    search.fit(samples, labels)
    assert search.best_score_ > 0.93
    assert search.best_estimator_["lmnn"].components_.shape == (2, 4)


def test_pandas_output_has_named_columns():
    pandas = pytest.importorskip("pandas")
    frame = E.RCA(n_components=2).set_output(transform="pandas").fit(X, Y).transform(X)
    assert isinstance(frame, pandas.DataFrame)
    assert frame.columns.tolist() == ["rca0", "rca1"]
