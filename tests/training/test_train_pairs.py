"""Training and evaluation with given pairs and triplets."""

import json

import numpy as np
import pandas
import pytest
import torch

import nearfar as nf
from nearfar.cli import main
from nearfar.training.recipe.files import load
from nearfar.training.setup import build

RNG = np.random.default_rng(0)
CLASSES = np.arange(120) % 12
# Classes differ in four dimensions; the others are large and say nothing.
VECTORS = np.hstack([3 * RNG.normal(size=(12, 4))[CLASSES] + RNG.normal(size=(120, 4)), 8 * RNG.normal(size=(120, 12))])
PARTS = {"train": range(72), "validation": range(72, 96), "test": range(96, 120)}


def draw(rows, same, anchor):
    return int(RNG.choice([row for row in rows if row != anchor and (CLASSES[row] == CLASSES[anchor]) == same]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("pairs")
    np.save(place / "vectors.npy", VECTORS.astype(np.float32))
    pairs, triplets = [], []
    for part, rows in PARTS.items():
        for number in range(240):
            anchor = int(RNG.choice(rows))
            positive, negative = draw(rows, True, anchor), draw(rows, False, anchor)
            pairs.append((anchor, positive if number % 2 else negative, number % 2, part))
            triplets.append((anchor, positive, negative, part))
    pandas.DataFrame(pairs, columns=["left", "right", "same", "split"]).to_csv(place / "pairs.csv", index=False)
    columns = ["anchor", "positive", "negative", "split"]
    pandas.DataFrame(triplets, columns=columns).to_csv(place / "triplets.csv", index=False)
    return place


def recipe(folder, kind, **more):
    loss = {"name": "contrastive"} if kind == "pairs" else {"name": "triplet"}
    return {
        "data": {"name": kind, "root": str(folder / f"{kind}.csv"), "settings": {"items": str(folder / "vectors.npy")}},
        "sampler": {"name": "given", "batch_size": 48},
        "network": {"name": "linear", "dim": 8},
        "loss": loss,
        "optimizer": {"lr": 0.03},
        "training": {"epochs": 12, "device": "cpu"},
        "selection": {"metric": "auc"},
        **more,
    }


@pytest.mark.parametrize("kind", ["pairs", "triplets"])
def test_training_tells_unseen_pairs_apart(kind, folder, tmp_path, capsys):
    table = pandas.read_csv(folder / f"{kind}.csv")
    test = table[table.split == "test"]
    if kind == "pairs":
        left, right, same = test.left, test.right, test.same
    else:
        left, right = pandas.concat([test.anchor] * 2), pandas.concat([test.positive, test.negative])
        same = pandas.Series([1] * 240 + [0] * 240)
    pairs = nf.supervision.Pairs(left, right, same)
    before = nf.metrics.verification(VECTORS, pairs)
    run = nf.train(recipe(folder, kind), tmp_path / "run")
    after = nf.metrics.verification(nf.load(run.folder).embed(VECTORS), pairs)
    found = run.metrics["test"]
    assert found["auc"] == pytest.approx(after["auc"])
    assert found["auc"] > before["auc"] + 0.1
    assert run.metrics["selection"] == "best validation auc"
    if kind == "triplets":
        embeddings = torch.from_numpy(nf.load(run.folder).embed(VECTORS)).double()
        anchor, positive, negative = (embeddings[test[name].to_numpy()] for name in ("anchor", "positive", "negative"))
        near, far = (anchor * positive).sum(dim=1), (anchor * negative).sum(dim=1)
        assert found["triplet_accuracy"] == pytest.approx(float((near > far).double().mean()), abs=0.005)
    assert nf.evaluate(run.folder, device="cpu")["verification"] == pytest.approx(found)
    with pytest.raises(SystemExit):
        main(["evaluate", str(run.folder), "--json", str(tmp_path / "found.json")])
    assert json.loads((tmp_path / "found.json").read_text())["verification"]["auc"] == pytest.approx(found["auc"])
    assert "accuracy" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["report", str(run.folder)])
    assert stop.value.code == 0


def test_a_step_is_the_loss_of_the_drawn_pairs(folder):
    parts = build(load(recipe(folder, "pairs")))
    batch = next(iter(parts.loader.epoch(parts.sampler, 0, rows=parts.rows["train"])))
    found = parts.given(0, 0)
    assert found is not None
    (loss,) = parts.stages[0].losses.values()
    embeddings = parts.model(batch.images).detach()
    table = pandas.read_csv(folder / "pairs.csv")
    drawn = table[table.split == "train"].iloc[parts.sampler.drawn(0, 0)]
    assert batch.indices.tolist() == [*drawn.left, *drawn.right]
    unit = {row: embeddings[batch.indices.tolist().index(row)] for row in {*drawn.left, *drawn.right}}
    given = {tuple(sorted(pair)): kind for *pair, kind in zip(drawn.left, drawn.right, drawn.same, strict=True)}
    rows = list(unit)
    again = nf.supervision.Pairs(
        torch.tensor([rows.index(one) for one, _ in given]),
        torch.tensor([rows.index(other) for _, other in given]),
        torch.tensor(list(given.values())),
    )
    expected = loss(torch.stack([unit[row] for row in rows]), again)
    assert float(loss(embeddings[found.rows], found.supervision)) == pytest.approx(float(expected))


def test_a_run_is_resumed(folder, tmp_path):
    whole = nf.train(recipe(folder, "pairs"), tmp_path / "whole")
    run = nf.train(recipe(folder, "pairs"), tmp_path / "run")
    (run.folder / "metrics.json").unlink()
    assert nf.train(resume=run.folder).metrics["test"] == whole.metrics["test"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"sampler": {"classes": 2, "per_class": 2}}, "sampler.name is 'groups'; pairs gives pairs or triplets"),
        ({"loss": {"name": "proxy_anchor"}}, "loss.name is 'proxy_anchor', which .*; pairs gives pairs or triplets"),
        ({"training": {"epochs": 1, "memory": 100}}, "training.memory is 100; it is for classes"),
        ({"selection": {"metric": "recall@1"}}, "selection.metric is 'recall@1'; .* metrics are accuracy and auc"),
        ({"data": {"name": "digits"}}, "sampler.name is 'given'; digits has classes"),
    ],
)
def test_recipes_that_do_not_fit(more, message, folder, tmp_path):
    with pytest.raises(ValueError, match=message):
        nf.train(recipe(folder, "pairs", **more), tmp_path / "run")


def test_graded_pairs_have_a_rank_correlation(folder, tmp_path):
    table = pandas.read_csv(folder / "pairs.csv")
    table["same"] = np.where(table.same == 1, 0.9, RNG.choice([0.1, 0.3], len(table)))
    table.to_csv(folder / "graded.csv", index=False)
    data = {"name": "pairs", "root": str(folder / "graded.csv"), "settings": {"items": str(folder / "vectors.npy")}}
    found = nf.train(recipe(folder, "pairs", data=data), tmp_path / "run").metrics["test"]
    assert 0 < found["spearman"] < 1
    losses = [{"name": "cosent", "graded": graded} for graded in (False, True)]
    runs = [nf.train(recipe(folder, "pairs", data=data, loss=loss), tmp_path / f"{n}") for n, loss in enumerate(losses)]
    plain, graded = (run.metrics["test"]["spearman"] for run in runs)
    assert plain != graded, "the grades of the table are used"
