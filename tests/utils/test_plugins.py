"""Files of a user's own: run when asked for, in every process that needs them, and told apart by what they hold."""

import json
import os
import subprocess
import sys

import pytest
from training_runs import vectors

import nearfar as nf
from nearfar.cli.app import _using
from nearfar.utils import plugins

LOSS = '''
from beside import LOWER
import nearfar as nf
from nearfar.engine.rows import masked_sum
from nearfar.losses.base import PairLoss


@nf.losses.register("two_hinges")
class TwoHinges(PairLoss):
    """Pulls positives above one similarity, pushes negatives below another."""

    def __init__(self, *, upper: float = 0.8) -> None:
        super().__init__()
        self.upper = upper

    def rows(self, sim, pos, neg):
        return masked_sum((self.upper - sim).relu(), pos) + masked_sum((sim - LOWER).relu(), neg)
'''

GRID = """
name = "own"
baseline = false
losses = {{two_hinges = {{}}, contrastive = {{}}}}

[recipe]
data = {{name = "arrays", root = "{root}"}}
sampler = {{classes = 4, per_class = 3, steps = 2}}
network = {{name = "linear", dim = 4}}
optimizer = {{lr = 1e-2}}
training = {{epochs = 1, device = "cpu"}}
evaluation = {{every = 0}}
"""


@pytest.fixture(autouse=True)
def nothing_used():
    """As if no test had used a file."""
    path = list(sys.path)
    yield
    plugins.forget()
    sys.path[:] = path


def nearfar(folder, *words):
    """A command in a process of its own: what it registers is gone with it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "nearfar", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_file_is_run_once_and_remembered(tmp_path):
    file = tmp_path / "counts.py"
    file.write_text("import os\nos.environ['COUNTED'] = os.environ.get('COUNTED', '') + 'x'\nclass Thing: pass\n")
    os.environ.pop("COUNTED", None)
    nf.use(file)
    nf.use(str(file), file)
    assert os.environ.pop("COUNTED") == "x"
    assert list(plugins.used()) == [file]
    module = next(each for name, each in sys.modules.items() if name.startswith("counts_"))
    assert plugins.digest(module.Thing) == plugins.used()[file]
    assert plugins.digest(nf.losses.Raw) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file or directory"), ("1 / 0", "ZeroDivisionError: division by zero"), ("def", "SyntaxError")],
)
def test_what_cannot_be_used_is_said_in_words(tmp_path, content, words):
    file = tmp_path / "wrong.py"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=f"cannot be used: {words}"):
        nf.use(file)
    assert not plugins.used()


def test_the_option_may_stand_anywhere(tmp_path):
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    for file in (first, second):
        file.write_text("")
    assert _using(["train", "--use", str(first), "a.toml", f"--use={second}", "--", "--use"]) == [
        "train",
        "a.toml",
        "--",
        "--use",
    ]
    assert list(plugins.used()) == [first, second]
    with pytest.raises(ValueError, match="--use needs a Python file"):
        _using(["train", "--use"])


def test_cells_of_a_grid_train_a_loss_of_ones_own(tmp_path):
    (tmp_path / "beside.py").write_text("LOWER = 0.4\n")
    mine = tmp_path / "mine.py"
    mine.write_text(LOSS)
    (tmp_path / "own.toml").write_text(GRID.format(root=vectors(tmp_path)))
    run = ("bench", "run", "own.toml", "--out", "out", "--jobs", "2")
    refused = nearfar(tmp_path, *run)
    assert refused.returncode == 1
    assert "'two_hinges'" in refused.stderr
    done = nearfar(tmp_path, *run, "--use", "mine.py")
    assert done.returncode == 0, done.stdout + done.stderr
    manifests = [json.loads(file.read_text()) for file in tmp_path.glob("out/own/cells/*/manifest.json")]
    assert sorted(each["recipe"]["loss"]["name"] for each in manifests) == ["contrastive", "two_hinges"]
    assert [list(each["code"]["used"]) for each in manifests] == [["mine.py", "beside.py"]] * 2
    compared = nearfar(tmp_path, "bench", "compare", "out/own")
    assert compared.returncode == 0, compared.stderr

    mine.write_text(LOSS.replace("0.8", "0.7"))  # another loss by the same name
    states = nearfar(tmp_path, *run, "--use", "mine.py", "--dry-run").stdout.split("cell", 1)[1]
    told = {line.split()[0]: line.split()[1] for line in states.splitlines() if "-seed0" in line}
    assert told == {"two_hinges-seed0": "new", "contrastive-seed0": "finished"}
