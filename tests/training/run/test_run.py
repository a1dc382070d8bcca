"""The run folder: who may write to it, and what its files hold."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_runs import Interrupts, assert_same, recipe, train, vectors, weights

from nearfar.networks.weights import save
from nearfar.training.recipe.files import load, to_toml
from nearfar.training.run import provenance
from nearfar.training.run.folder import Log, RunError, RunFolder, contradictions, finite, read_log
from nearfar.training.trainer import Stopped, free_folder, open_model
from nearfar.training.trainer import train as train_recipe


def test_a_folder_that_somebody_writes_to_is_refused(tmp_path):
    with (
        RunFolder(tmp_path).owned(),
        pytest.raises(RunError, match=r"is in use by another process \(PID \d+\)"),
        RunFolder(tmp_path).owned(),
    ):
        pass
    with RunFolder(tmp_path).owned():
        pass


def test_two_trainings_are_not_given_the_same_folder(tmp_path):
    chosen = recipe(vectors(tmp_path))
    found = [free_folder("recipes/one.toml", chosen, tmp_path / "runs") for _ in range(3)]
    assert [folder.name for folder in found] == ["one", "one-2", "one-3"]
    assert all(folder.is_dir() for folder in found)
    with pytest.raises(RunError, match="cannot hold run folders: a file is in its place"):
        free_folder("one.toml", chosen, tmp_path / "vectors.npz")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("photos.toml", "photos"),
        ("./photos.toml", "photos"),
        ("../photos.toml", "photos"),
        ("recipes/cub/fast.toml", "cub-fast"),
        ("/data/mine/photos.toml", "mine-photos"),
        ("cub/fast", "cub-fast"),
    ],
)
def test_a_run_is_named_after_the_path_of_its_recipe(tmp_path, given, name):
    assert free_folder(given, recipe(vectors(tmp_path)), tmp_path / "runs").name == name


def test_a_free_folder_goes_again_where_nothing_came_of_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        train_recipe(recipe(tmp_path / "missing.npz"))
    assert list((tmp_path / "runs").iterdir()) == []
    assert train_recipe(recipe(vectors(tmp_path), training__epochs=1)).folder == Path("runs/arrays-contrastive")
    assert RunFolder("runs/arrays-contrastive").metrics.is_file()


def test_a_folder_with_a_run_is_not_begun_anew(tmp_path):
    chosen = recipe(vectors(tmp_path))
    RunFolder(tmp_path).begin(chosen, resume=False)
    (tmp_path / "recipe.toml").write_text(to_toml(chosen))
    with pytest.raises(RunError, match="holds a run already; resume it, or name another folder"):
        RunFolder(tmp_path).begin(chosen, resume=False)


def test_a_run_that_could_not_begin_leaves_the_folder_free(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        train(recipe(tmp_path / "missing.npz"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    train(recipe(vectors(tmp_path), training__epochs=1), tmp_path / "run")


def test_a_file_is_no_run_folder(tmp_path):
    (tmp_path / "taken").touch()
    for place in (tmp_path / "taken", tmp_path / "taken" / "below"):
        with pytest.raises(RunError, match="cannot be a run folder: a file is in its place"):
            train(recipe(vectors(tmp_path)), place)


def test_damaged_files_are_named(tmp_path):
    chosen = recipe(vectors(tmp_path), training__epochs=1)
    folder = train(chosen, tmp_path / "run").folder
    with open(folder / "log.jsonl", "a", encoding="utf-8") as log:
        log.write("no json\n")
    with pytest.raises(RunError, match=r"log\.jsonl, line \d+, is not valid JSON"):
        read_log(folder / "log.jsonl")
    checkpoint = folder / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:50])
    with pytest.raises(ValueError, match=r"checkpoint\.safetensors cannot be read"):
        train(chosen, folder, resume=True)


def test_everybody_who_may_read_the_metrics_may_read_the_embeddings(tmp_path):
    folder = train(recipe(vectors(tmp_path), training__epochs=1), tmp_path / "run").folder
    modes = {(folder / name).stat().st_mode for name in ("metrics.json", "embeddings.safetensors")}
    assert len(modes) == 1


def test_there_must_be_a_run_to_resume(tmp_path):
    with pytest.raises(RunError, match=r"holds no run to resume: recipe.toml is missing"):
        RunFolder(tmp_path).begin(recipe(vectors(tmp_path)), resume=True)


def test_what_changes_no_result_contradicts_nothing(tmp_path):
    file = vectors(tmp_path)
    moved = file.rename(tmp_path / "moved.npz")
    one = recipe(file)
    two = recipe(
        moved, training__device="auto", training__checkpoint_steps=5, data__mode="resident", evaluation__before=True
    )
    assert contradictions(one, two) == []
    assert contradictions(one, recipe(file, training__seed=1)) == ["training.seed: 0 → 1"]


def test_numbers_that_json_does_not_have_are_null(tmp_path):
    with Log(tmp_path / "log.jsonl") as log:
        log.write({"loss": float("nan"), "lr": {"head": float("inf")}})
    assert read_log(tmp_path / "log.jsonl") == [{"loss": None, "lr": {"head": None}}]
    assert finite([1.5, "two", True]) == [1.5, "two", True]


def test_a_log_goes_on_after_it_was_cut(tmp_path):
    with Log(tmp_path / "log.jsonl") as log:
        log.write({"step": 1})
        size = log.size()
        log.write({"step": 2})
    with Log(tmp_path / "log.jsonl") as log:
        log.cut(size)
        log.write({"step": 3})
    assert [line["step"] for line in read_log(tmp_path / "log.jsonl")] == [1, 3]


def test_a_line_that_was_cut_short_is_left_out_and_removed(tmp_path):
    file = tmp_path / "log.jsonl"
    file.write_text('{"step": 1}\n{"st')
    assert read_log(file) == [{"step": 1}]
    with Log(file) as log:
        log.cut(100)
        log.write({"step": 2})
    assert [line["step"] for line in read_log(file)] == [1, 2]


def test_a_network_that_is_gone_is_not_replaced_by_another(tmp_path):
    chosen = recipe(vectors(tmp_path), split__name="fixed_validation", sampler__classes=3, training__epochs=2)
    run = RunFolder(train(chosen, tmp_path / "run").folder)
    run.model.unlink()
    with pytest.raises(FileNotFoundError, match=r"run has no network: model\.safetensors was deleted"):
        open_model(run.folder)


def test_a_training_that_goes_on_has_the_network_of_its_checkpoint(tmp_path):
    with pytest.raises(Stopped):
        train(recipe(vectors(tmp_path)), tmp_path / "run", display=Interrupts(4))
    last = {key: value for key, value in weights(tmp_path / "run").items() if key.startswith("model:")}
    assert_same({f"model:{key}": value for key, value in open_model(tmp_path / "run").state_dict().items()}, last)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return train(recipe(vectors(folder), training__epochs=2, evaluation__test_every=1), folder / "run").folder


def test_a_run_folder_holds_what_the_design_says(run):
    found = {str(entry.relative_to(run)) for entry in run.rglob("*") if entry.is_file()} - {".lock", ".nearfar"}
    files = {
        "recipe.toml",
        "manifest.json",
        "log.jsonl",
        "metrics.json",
        "embeddings.safetensors",
        "queries.safetensors",
        "test_looks.jsonl",
        "digests.json",
        "checkpoint.safetensors",
        "model.safetensors",
        "model.json",
    }
    assert found == files


def test_its_recipe_is_the_one_it_was_made_with(run):
    assert load(run) == recipe(run.parent / "vectors.npz", training__epochs=2)


def test_its_embeddings_are_those_of_the_last_network(run):
    found = load_file(run / "embeddings.safetensors")
    content = np.load(run.parent / "vectors.npz")
    rows = found["rows"].numpy()
    assert sorted(set(content["y"][rows].tolist())) == [6, 7, 8, 9, 10, 11]
    assert found["labels"].tolist() == content["y"][rows].tolist()
    with torch.no_grad():
        expected = save.load(run)(torch.from_numpy(content["X"][rows]))
    assert torch.allclose(found["embeddings"], expected, atol=1e-6)


def test_what_each_query_found_makes_up_the_metrics(run):
    found, measured = load_file(run / "queries.safetensors"), json.loads((run / "metrics.json").read_text())
    tested = load_file(run / "embeddings.safetensors")
    assert all(found[name].tolist() == tested[name].tolist() for name in ("rows", "labels"))
    for name in ("recall@1", "map@r"):
        assert found[name].double().mean().item() == pytest.approx(measured["test"][name], abs=1e-6)


def test_it_says_what_it_took(run):
    measured = json.loads((run / "metrics.json").read_text())
    assert measured["seconds"] > 0
    assert measured["memory"] > 1  # MiB


def test_its_manifest_names_what_can_change_the_number(run):
    found = json.loads((run / "manifest.json").read_text())
    assert found["data"]["rows"] == {"train": 72, "validation": 0, "test": 72}
    assert found["data"]["classes"]["test"] == 6
    assert found["selection"] == "last epoch"
    assert found["seed"] == 0
    assert found["length"] == {"epochs": 2, "steps": 12, "steps_per_epoch": 6}
    assert {"torch", "numpy", "python", "nearfar"} <= found["versions"].keys()
    assert found["hardware"]["device"] == "cpu"
    assert len(found["network"]["first_weights"]) == 64
    assert found["recipe"]["loss"]["name"] == "contrastive"


def test_weights_from_a_file_are_named_by_what_is_in_it(tmp_path):
    import hashlib

    (tmp_path / "weights.bin").write_bytes(b"numbers")
    found = provenance._weights(str(tmp_path / "weights.bin"), "mlp")
    assert found == {"file": "weights.bin", "sha256": hashlib.sha256(b"numbers").hexdigest()}


def test_its_log_has_losses_rates_speed_and_metrics(run):
    lines = read_log(run / "log.jsonl")
    steps = [line for line in lines if "loss" in line]
    assert steps[-1]["step"] == 12
    assert steps[-1]["epoch"] == 1
    assert set(steps[-1]["lr"]) == {"backbone", "head"}
    assert steps[-1]["images_s"] > 0
    measured = [line for line in lines if "metrics" in line]
    assert [line["epoch"] for line in measured] == [0, 1]
    assert measured[-1]["metrics"]["test"] == json.loads((run / "metrics.json").read_text())["test"]
