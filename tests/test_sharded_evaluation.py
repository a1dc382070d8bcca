"""Evaluation that several processes share: the embeddings and metrics of a single process, bit for bit."""

import json

import evaluation_worker as worker
import pytest
import torch
from ranks import made_once, run_ranks

import nearfar as nf
from nearfar.distributed import World
from nearfar.training import checkpoint
from nearfar.training.evaluation.embeddings import EmbeddingSet, embed_parts, measure_parts
from nearfar.training.recipe.files import load, to_toml
from nearfar.training.run.folder import RunFolder
from nearfar.training.run.reader import read_json
from nearfar.training.setup import build

RECIPE = {
    "data": {"name": "digits", "settings": {"vectors": True}},
    "split": {"name": "fixed_validation", "share": 0.4},
    "sampler": {"classes": 2, "per_class": 6, "steps": 4},
    "network": {"name": "mlp", "dim": 4},
    "loss": {"name": "contrastive"},
    "optimizer": {"lr": 0.3},  # so large that an early epoch is the best
    "training": {"epochs": 4, "device": "cpu"},
    "evaluation": {"batch_size": 100, "ks": [1, 2]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two processes wrote."""

    def make(folder):
        (folder / "recipe.toml").write_text(to_toml(load(RECIPE)))
        run_ranks(2, worker.__file__, str(folder), str(folder / "recipe.toml"))

    return made_once(tmp_path_factory, "sharded-evaluation", make)


@pytest.fixture(scope="module")
def found(folder):
    return [torch.load(folder / str(rank)) for rank in range(2)]


def test_embeddings_are_those_of_a_single_process(found):
    alone = worker.embedded(World())
    for here in found:
        for name, value in alone.items():
            assert name.endswith("seen") or torch.equal(here["embedded"][name], value), name


def test_processes_share_the_batches(found):
    seen = {size: [here["embedded"][f"{size}.seen"].item() // 2 for here in found] for size in worker.BATCHES}
    assert seen == {7: [35, 26], 30: [60, 1], 100: [61, 0]}


def test_all_processes_leave_if_one_fails(found):
    assert [here["failure"] for here in found] == ["computing embeddings failed in another process", "no memory left"]


def test_a_training_measures_what_a_single_process_does(folder, found):
    run = RunFolder(folder / "run")
    parts = build(load(RECIPE))
    parts.model.load_state_dict(nf.load(run.folder).state_dict())
    best = checkpoint.values_of(run.checkpoint)["state"]["best"]
    assert best["epoch"] < 3  # so the weights of the end are not those that are measured
    alone = embed_parts(parts)
    assert torch.equal(EmbeddingSet.load(run.embeddings).embeddings, alone["test"].embeddings)
    metrics = measure_parts(parts, alone)[0]
    for here in found:
        assert {part: here["metrics"][part] for part in ("validation", "test")} == metrics


def test_the_command_evaluates_once_what_a_single_process_does(folder):
    run = folder / "run"
    looks = [json.loads(line) for line in RunFolder(run).looks.read_text().splitlines()]
    assert [look["by"] for look in looks] == ["train", "evaluate"]
    report = read_json(folder / "evaluated.json")
    alone = nf.evaluate(run, "digits", clustering=True, device="cpu")
    assert {name: report[name] for name in alone} == json.loads(json.dumps(alone))
