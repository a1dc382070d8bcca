"""First recipes: what init says about images, and that what it writes can be trained."""

import json
import shutil
import tomllib

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

from nearfar.cli import main
from nearfar.networks import registry as networks
from nearfar.networks.weights import published
from nearfar.training.recipe import starter
from nearfar.training.recipe.files import load
from nearfar.training.trainer import train


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Five classes; one image is there twice, one is broken, and a class has a single image."""
    folder, rng = tmp_path_factory.mktemp("init") / "photos", np.random.default_rng(0)
    for number in range(13):
        file = folder / f"class {min(number // 3, 4)}" / f"{number:02d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(file)
    (folder / "class 1" / "again.png").write_bytes((folder / "class 0" / "00.png").read_bytes())
    (folder / "class 2" / "broken.png").write_bytes(b"no image")
    return folder


@pytest.fixture(scope="module")
def found(photos, tmp_path_factory):
    return starter.examine(photos, cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """As many classes as the training of a whole network needs."""
    folder, rng = tmp_path_factory.mktemp("many") / "photos", np.random.default_rng(0)
    for number in range(4 * starter.WHOLE_CLASSES):
        file = folder / f"class {number // 2:02d}" / f"{number:02d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(file)
    return starter.examine(folder, cache=tmp_path_factory.mktemp("cache"))


def test_what_is_found(photos, found):
    assert found.lines() == [
        f"{photos}: 14 images of 5 classes, 1 to 4 of each",
        "14 images with a shorter side below 224 pixels, down to 40",
        "1 class with one image, which has no match: class 4",
        "1 duplicate: 1 exact, 0 near; 1 in two classes",
        "3 classes for training, 2 other classes for the test",
    ]
    assert [bad.name for bad in found.store.bad] == ["class 2/broken.png"]


def test_recipes_fit_data_and_machine(photos, found, many, tmp_path):
    for gpu, findings, whole in ((False, found, False), (True, found, False), (False, many, False), (True, many, True)):
        file = tmp_path / "recipe.toml"
        file.write_text(starter.starter(findings, gpu=gpu, seconds=(0.1, 1.0)))
        recipe = load(file)  # complete and consistent
        assert recipe.network.freeze != whole
        assert (recipe.split.name == "fixed_validation") == whole
        assert recipe.selection.blend
        assert recipe.evaluation.before
        settings = recipe.data.name, recipe.data.root, recipe.sampler.per_class
        assert settings == ("folder", str(findings.root), 3 if findings is found else 2)
    assert "1.4 s here" in starter.starter(found, gpu=False, seconds=(0.1, 1.0))


@pytest.mark.parametrize(
    ("gpu", "device"), [(False, "cpu"), (True, "cpu"), pytest.param(True, "cuda", marks=pytest.mark.gpu)]
)
def test_what_init_writes_is_trained_to_its_metrics(gpu, device, found, many, tmp_path, monkeypatch):
    """The text as it is, but for the number of epochs, and with random weights in place of the published ones."""
    monkeypatch.setenv("NEARFAR_CACHE", str(tmp_path))
    findings = many if gpu else found
    network = findings.network
    weights = {key: value.contiguous() for key, value in networks.create_backbone(network).state_dict().items()}
    save_file(weights, tmp_path / "random.safetensors")
    monkeypatch.setattr(published, "fetch", lambda weights: tmp_path / "random.safetensors")
    (tmp_path / "photos.toml").write_text(starter.starter(findings, gpu=gpu, seconds=(0.1, 1.0)))
    length = {"epochs": 2, "device": device}
    metrics = train(tmp_path / "photos.toml", out=tmp_path / "run", training=length).metrics
    assert metrics["test"].keys() == metrics["before"].keys()
    assert metrics["steps"] == 2
    assert json.loads((tmp_path / "run" / "metrics.json").read_text()) == metrics


def test_a_table_is_another_dataset(photos, tmp_path):
    table = photos.parent / "photos.csv"
    files = sorted(photos.glob("*/[0-9]*.png"))
    table.write_text("path,label\n" + "".join(f"{file},{file.parent.name}\n" for file in files))
    found = starter.examine(table, cache=tmp_path)
    assert tomllib.loads(starter.starter(found, gpu=True))["data"]["name"] == "table"


def test_columns_of_a_table_are_written_to_the_recipe(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(starter, "measure_seconds", lambda name: (0.1, 1.0))
    files = sorted(photos.glob("*/[0-9]*.png"))
    rows = "".join(f"{file},{file.parent.name},{number % 4}\n" for number, file in enumerate(files))
    (tmp_path / "photos.csv").write_text("file,class,season\n" + rows)
    with pytest.raises(SystemExit) as end:
        main(
            ["init", "photos.csv", "--columns", "class=season", "--images", "/", "--device", "cpu", "--cache", "cache"]
        )
    assert end.value.code == 0
    assert "table: guessed that path is 'file'\n" in capsys.readouterr().out
    section = load(tmp_path / "photos.toml").data
    assert (section.name, section.root) == ("table", "photos.csv")
    assert section.settings == {"path": "file", "label": "season", "images": "/"}


def test_groups_above_the_classes_are_said(photos, tmp_path):
    for number, folder in enumerate(sorted(photos.iterdir())[:4]):
        shutil.copytree(folder, tmp_path / f"photos/kind {number // 2}" / folder.name)
    found = starter.examine(tmp_path / "photos", cache=tmp_path)
    assert "folder: guessed that classes is 'leaves'" in found.lines()
    assert "group_1, a column of the folders above the classes: kind 0, kind 1" in found.lines()
    section = tomllib.loads(starter.starter(found, gpu=False))["data"]
    assert section["settings"] == {"classes": "leaves"}
    found = starter.examine(photos, settings={"pattern": "{class}/{number}.png"}, cache=tmp_path)
    assert tomllib.loads(starter.starter(found, gpu=False))["data"]["settings"] == {"pattern": "{class}/{number}.png"}


@pytest.mark.parametrize("columns", ["kind=season", "class", "path:file"])
def test_columns_that_no_table_has_are_refused(columns, capsys):
    with pytest.raises(SystemExit):
        main(["train", "folder", "--data", "photos.csv", "--columns", columns])
    assert "path=NAME, label=NAME (or class=NAME) and split=NAME are allowed" in capsys.readouterr().err


def test_few_classes_are_refused(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / name / "1.png")
    with pytest.raises(ValueError, match="has 3 classes; at least 4 are needed"):
        starter.examine(tmp_path)


def test_the_command_writes_a_recipe_once(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(starter, "measure_seconds", lambda name: (0.1, 1.0))
    for code in (0, 1):
        with pytest.raises(SystemExit) as end:
            main(["init", str(photos), "--device", "cpu", "--cache", str(tmp_path / "cache")])
        assert end.value.code == code
    printed = capsys.readouterr()
    for words in ("14 images of 5 classes", "class 2/broken.png", "again.png has the pixels of", "computed once"):
        assert words in printed.out
    assert "photos.toml exists" in printed.err
    assert load(tmp_path / "photos.toml").network.name == "efficientnet_lite0"


def test_seconds_of_an_image_are_measured(monkeypatch):
    monkeypatch.setattr(starter, "TIMED", 1)
    once, step = starter.measure_seconds("efficientnet_lite0")
    assert once > 0
    assert step > 0
