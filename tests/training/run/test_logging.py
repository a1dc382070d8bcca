"""Loggers: what is told arrives in TensorBoard, in MLflow and in Weights & Biases."""

import sys

import pytest
from training_runs import recipe, vectors

import nearfar as nf
from nearfar.training.run import loggers
from nearfar.training.run.folder import RunError
from nearfar.training.trainer import train

VALUES = {"loss": 1.5, "test/recall@1": 0.25}


def test_tensorboard_has_every_number_at_its_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for step in (20, 40):  # the second time as a run that was resumed
        logger = loggers.create("tensorboard", tmp_path)
        logger.log(step, VALUES)
        logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("test/recall@1")] == [(20, 0.25), (40, 0.25)]
    assert [event.value for event in events.Scalars("loss")] == [1.5, 1.5]


def test_mlflow_has_numbers_and_settings_in_its_sqlite_store(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    settings = {
        "loss": {"name": "raw", "alpha": 2.0},
        "split": {"name": "standard"},
        "many": {str(i): i for i in range(150)},
    }
    logger = loggers.create("mlflow", tmp_path / "first", settings=settings)
    logger.log(20, VALUES)
    again = loggers.create("mlflow", tmp_path / "first")  # resumed after a kill
    again.log(40, {"loss": 1.0})
    again.close()
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("nearfar").experiment_id])
    assert run.info.run_name == "first"
    assert run.info.status == "FINISHED"
    assert run.data.params["loss.alpha"] == "2.0"
    assert len(run.data.params) == 153
    assert run.data.metrics == {"loss": 1.0, "test/recall_at_1": 0.25}
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(20, 1.5), (40, 1.0)]


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("mlflow", "mlflow"), ("wandb", "wandb")]
)
def test_a_missing_package_is_named(name, module, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"needs {name}; install it with: pip install 'nearfar\[{name}\]'"):
        loggers.create(name, tmp_path)


def test_who_is_refused_tells_nobody(tmp_path):
    chosen = recipe(vectors(tmp_path), training__epochs=1)
    folder = train(chosen, out=tmp_path / "run").folder
    before = sorted(folder.rglob("*"))
    with pytest.raises(RunError, match="holds a run already"):
        train(chosen, out=folder, loggers=["tensorboard"])
    assert sorted(folder.rglob("*")) == before
    with pytest.raises(FileNotFoundError, match="does not exist"):
        train(recipe(tmp_path / "missing.npz"), out=tmp_path / "new", loggers=["tensorboard"])
    assert not (tmp_path / "new").exists()


def test_a_training_opens_the_loggers_that_are_named_and_closes_all(tmp_path, monkeypatch):
    class Hears:
        steps, closed = 0, False

        def log(self, step, values):
            assert not self.closed
            self.steps = step

        def close(self):
            self.closed = True

    named, given = Hears(), Hears()
    monkeypatch.setattr(loggers, "create", lambda name, folder, *, settings: named)
    train(recipe(vectors(tmp_path), training__epochs=1), out=tmp_path / "run", loggers=["tensorboard", given])
    assert [(each.steps, each.closed) for each in (named, given)] == [(6, True), (6, True)]


def test_a_missing_package_is_said_before_anything_is_begun(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ImportError, match="needs mlflow"):
        train(recipe(tmp_path / "missing.npz"), out=tmp_path / "run", loggers=["mlflow"])
    assert not (tmp_path / "run").exists()


def test_an_unknown_logger_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"logger is 'comet'; allowed are"):
        loggers.create("comet", tmp_path)


def test_nested_tables_become_names_of_numbers():
    values = {"step": 3, "loss": 1.0, "note": "x", "ok": True, "metrics": {"test": {"recall@1": 0.5}}}
    assert loggers.numbers(values) == {"step": 3, "loss": 1.0, "metrics/test/recall@1": 0.5}


def test_wandb_has_every_number_and_continues_its_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for step, settings in ((20, {"loss": {"alpha": 2.0}}), (40, None)):
        logger = loggers.create("wandb", tmp_path / "first", settings=settings)
        logger.log(step, VALUES)
        logger.log(10, {"best": 0.5})  # an earlier step is kept, too
        logger.close()
        ids.append((tmp_path / "first" / "wandb.txt").read_text())
    assert ids[0] == ids[1]
    parts = sorted((tmp_path / "first" / "wandb").glob(f"offline-run-*/run-{ids[0].strip()}.wandb"))
    assert parts
    written = b"".join(part.read_bytes() for part in parts)
    for text in (b"test/recall@1", b"0.25", b"alpha", b"best", b"step"):
        assert text in written


def test_a_logger_of_ones_own_receives_what_the_log_does(tmp_path):
    class Notes:
        def __init__(self):
            self.lines = []
            self.closed = 0

        def log(self, step, values):
            self.lines.append((step, dict(values)))

        def close(self):
            self.closed += 1

    notes = Notes()
    result = nf.train(recipe(vectors(tmp_path), training__epochs=2), tmp_path / "run", loggers=[notes, "tensorboard"])
    assert (result.folder / "tensorboard").is_dir()
    assert notes.closed == 1
    found = [values["metrics/test/recall@1"] for _, values in notes.lines if "metrics/test/recall@1" in values]
    assert found[-1] == result.metrics["test"]["recall@1"]
    assert any("loss" in values for _, values in notes.lines)
