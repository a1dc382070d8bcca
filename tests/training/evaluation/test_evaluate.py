"""``nearfar evaluate``: the numbers of ``nearfar.metrics``, from files, on the screen and in JSON."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import nearfar as nf
from nearfar.search.embedding_files import EmbeddedImages
from nearfar.training.evaluation.embeddings import EmbeddingSet
from nearfar.training.evaluation.evaluate import evaluate_embeddings, load_files


def sample(n=60, classes=12, *, seed=0):
    """Embeddings of classes that overlap, some of them with a single member."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.cat([torch.arange(n - 3) % classes, torch.arange(100, 103)])
    centers = torch.randn(103, 8, generator=generator)
    return centers[labels] + torch.randn(n, 8, generator=generator), labels


EMBEDDINGS, LABELS = sample()
GALLERY, GALLERY_LABELS = sample(80, seed=0)
WORDS = np.array([f"bird [{label}]" for label in LABELS.tolist()])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with files, to work in."""
    np.save(tmp_path / "embeddings.npy", EMBEDDINGS.numpy())
    np.save(tmp_path / "labels.npy", LABELS.numpy())
    np.save(tmp_path / "words.npy", WORDS)
    (tmp_path / "embeddings.txt").touch()
    np.save(tmp_path / "one_class.npy", np.zeros(60, dtype=np.int64))
    np.save(tmp_path / "all_alone.npy", np.arange(60))
    np.save(tmp_path / "empty.npy", np.zeros((0, 8), dtype=np.float32))
    np.save(tmp_path / "nan.npy", np.where(np.arange(60)[:, None] == 7, np.nan, EMBEDDINGS.numpy()))
    save_file({"embeddings": EMBEDDINGS, "labels": LABELS}, tmp_path / "both.safetensors")
    save_file({"embeddings": GALLERY, "labels": GALLERY_LABELS}, tmp_path / "gallery.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_numbers_are_those_of_the_metrics(evaluated, folder):
    report = evaluated("embeddings.npy", "labels.npy")
    assert report["files"] == {"embeddings": "embeddings.npy", "labels": "labels.npy"}
    assert report["nearfar"] == nf.__version__
    assert report["settings"] == {"ks": [1, 2, 4, 8], "measure": "cosine", "normalization": "arithmetic", "seed": 0}
    assert report["queries"] == {"vectors": 60, "dimensions": 8, "classes": 15}
    assert report["retrieval"] == nf.metrics.retrieval(EMBEDDINGS, LABELS)
    assert report["clustering"] == nf.metrics.clustering(EMBEDDINGS, LABELS)
    assert not {"intervals", "worst", "gallery"} & set(report)


def test_the_table_has_every_metric(folder, nearfar):
    printed = nearfar("evaluate", "embeddings.npy", "labels.npy", "--ks", "1,5")
    cells = dict(line.split() for line in printed.out.splitlines() if len(line.split()) == 2)
    found = {**nf.metrics.retrieval(EMBEDDINGS, LABELS, ks=(1, 5)), **nf.metrics.clustering(EMBEDDINGS, LABELS)}
    for name in ("recall@1", "recall@5", "precision@1", "r_precision", "map@r", "map", "mrr", "nmi", "ami", "f1"):
        assert cells[name] == f"{100 * found[name]:.2f}"
    assert "60 embeddings of 8 dimensions, 15 classes" in printed.out
    assert "57 queries, nearest by cosine similarity." in printed.out
    assert "3 more had none of their class to find." in printed.out
    assert printed.err == ""
    assert not (folder / "report.json").exists()


def test_settings_reach_the_metrics(evaluated, folder):
    settings = ["--measure", "euclidean", "--seed", "3", "--normalization", "geometric"]
    report = evaluated("embeddings.npy", "labels.npy", *settings)
    assert report["retrieval"] == nf.metrics.retrieval(EMBEDDINGS, LABELS, measure="euclidean")
    expected = nf.metrics.clustering(EMBEDDINGS, LABELS, normalize=False, seed=3, normalization="geometric")
    assert report["clustering"] == expected


def test_without_clustering(evaluated, nearfar, folder):
    assert "clustering" not in evaluated("embeddings.npy", "labels.npy", "--no-clustering")
    assert "nmi" not in nearfar("evaluate", "embeddings.npy", "labels.npy", "--no-clustering").out


@pytest.mark.parametrize("words", [["both.safetensors"], ["both.safetensors", "both.safetensors"]])
def test_one_file_for_both(evaluated, words, folder):
    assert evaluated(*words)["retrieval"] == nf.metrics.retrieval(EMBEDDINGS, LABELS)


def test_keys(evaluated, folder):
    save_file({"a": EMBEDDINGS, "b": LABELS, "c": LABELS + 1}, folder / "keys.safetensors")
    report = evaluated("keys.safetensors", "--key", "a", "--labels-key", "b")
    assert report["retrieval"] == nf.metrics.retrieval(EMBEDDINGS, LABELS)


def test_labels_that_are_words(evaluated, folder):
    report = evaluated("embeddings.npy", "words.npy", "--worst", "1")
    assert report["retrieval"] == nf.metrics.retrieval(EMBEDDINGS, LABELS)
    assert report["worst"][0]["label"] in WORDS


@pytest.mark.parametrize("labels", [[], ["--gallery-labels", "gallery.safetensors"]])
def test_a_gallery(evaluated, nearfar, labels, folder):
    words = ["embeddings.npy", "labels.npy", "--gallery", "gallery.safetensors", *labels]
    report = evaluated(*words)
    assert report["retrieval"] == nf.metrics.retrieval(EMBEDDINGS, LABELS, GALLERY, GALLERY_LABELS)
    assert report["clustering"] == nf.metrics.clustering(EMBEDDINGS, LABELS)
    assert report["gallery"] == {"vectors": 80, "dimensions": 8, "classes": 15}
    assert "a gallery of 80" in nearfar("evaluate", *words).out


def test_intervals(evaluated, nearfar, folder):
    report = evaluated("embeddings.npy", "labels.npy", "--intervals")
    per_query = nf.metrics.retrieval(EMBEDDINGS, LABELS, per_query=True)["per_query"]
    expected = nf.metrics.class_intervals(per_query, torch.as_tensor(LABELS))
    assert report["intervals"] == {
        name: {"low": found.low, "high": found.high, "classes": found.classes} for name, found in expected.items()
    }
    printed = nearfar("evaluate", "embeddings.npy", "labels.npy", "--intervals").out
    assert f"{100 * expected['mrr'].low:.2f} – {100 * expected['mrr'].high:.2f}" in printed
    assert f"95 % intervals over {expected['mrr'].classes} classes" in printed


def test_the_worst_queries(evaluated, nearfar, folder):
    report = evaluated("embeddings.npy", "words.npy", "--worst", "4")
    values = nf.metrics.retrieval(EMBEDDINGS, LABELS, per_query=True)["per_query"]
    precision = values["map"].tolist()
    rows = sorted((row for row in range(60) if not math.isnan(precision[row])), key=lambda row: (precision[row], row))
    assert report["worst"] == [
        {"row": row, "label": WORDS[row], "map": precision[row], "first_match": round(1 / values["mrr"][row].item())}
        for row in rows[:4]
    ]
    printed = nearfar("evaluate", "embeddings.npy", "words.npy", "--worst", "4").out
    for row in rows[:4]:
        assert WORDS[row] in printed


def test_all_queries_are_no_more_than_there_are(evaluated, folder):
    assert len(evaluated("embeddings.npy", "labels.npy", "--worst", "1000")["worst"]) == 57


def test_json_replaces_a_file_and_leaves_nothing_else(nearfar, folder):
    nearfar("evaluate", "embeddings.npy", "labels.npy", "--json", "report.json")
    before = {path.name for path in folder.iterdir()}
    nearfar("evaluate", "embeddings.npy", "labels.npy", "--json", "report.json")
    assert {path.name for path in folder.iterdir()} == before


def test_json_is_printed_alone(folder, nearfar):
    out = nearfar("evaluate", "embeddings.npy", "labels.npy", "--no-clustering", "--json", "-").out
    assert "recall@1" in json.loads(out)["retrieval"]


@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
def test_what_has_no_class_is_left_out(tmp_path, ending, nearfar):
    vectors = np.random.default_rng(0).standard_normal((7, 4)).astype(np.float32)
    labels = ("auk", "auk", None, "bee", "bee", None, "bee")
    file = tmp_path / f"embedded{ending}"
    EmbeddedImages(vectors, tuple("abcdefg"), labels, (), "model").write(file)
    found = load_files("embeddings", file)
    assert found.labels.tolist() == [0, 0, 1, 1, 1]
    assert found.embeddings.tolist() == vectors[[0, 1, 3, 4, 6]].tolist()
    printed = nearfar("evaluate", str(file), "--no-clustering").out
    assert "5 embeddings of 4 dimensions, 2 classes\n2 more have no class and are left out.\n" in printed
    EmbeddedImages(vectors, tuple("abcdefg"), (None,) * 7, (), "model").write(file)
    assert "has no class for any of its 7 embeddings" in nearfar("evaluate", str(file), code=1).err


def test_progress_is_told_what_work_it_is():
    calls = []

    def watch(work):
        return lambda done, total: calls.append((work, done, total))

    evaluate_embeddings(EmbeddingSet(EMBEDDINGS, LABELS), watch=watch)
    assert list(dict.fromkeys(work for work, _, _ in calls)) == ["ranking", "clustering"]
    assert calls[-1][1] == calls[-1][2]


def test_embeddings_are_mapped_not_read(folder):
    found = load_files("embeddings", folder / "embeddings.npy", folder / "labels.npy")
    file = (folder / "embeddings.npy").open("r+b")
    file.seek(-EMBEDDINGS.numel() * 4, 2)
    file.write(np.float32(42).tobytes())
    file.close()
    assert found.embeddings[0, 0] == 42


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["embeddings.npy"], "embeddings.npy holds a single array; embeddings and labels need a file each"),
        (
            ["nowhere.npy", "labels.npy"],
            "nowhere.npy is not there; needed is a run folder, a network, or a file of embeddings",
        ),
        (["embeddings.txt", "labels.npy"], "its name must end in .npy, .npz, .safetensors, .parquet"),
        (["empty.npy", "labels.npy"], "embeddings has shape (0, 8)"),
        (["embeddings.npy", "embeddings.npy"], "embeddings and labels need a file each"),
        (["nan.npy", "labels.npy"], "embeddings contains NaN or infinity in 1 of 60 rows; the first is row 7"),
        (["embeddings.npy", "labels.npy", "--gallery-labels", "labels.npy"], "--gallery-labels goes with --gallery"),
        (["gallery.safetensors", "labels.npy"], "labels has shape (60,); needed is [80]"),
        (["embeddings.npy", "one_class.npy"], "labels have one class, so there is nothing to cluster"),
        (["embeddings.npy", "all_alone.npy"], "no class has two members"),
        (["embeddings.npy", "labels.npy", "--ks", "1,x"], "--ks is '1,x'; whole numbers"),
        (["embeddings.npy", "labels.npy", "--ks", "0"], "ks contains 0"),
        (["embeddings.npy", "labels.npy", "--measure", "dot"], "measure is 'dot'; allowed are cosine, euclidean"),
        (["embeddings.npy", "labels.npy", "--normalization", "max"], "normalization is 'max'"),
        (["embeddings.npy", "labels.npy", "--worst", "-1"], "worst is -1; it must be ≥ 0"),
        (["embeddings.npy", "labels.npy", "--seed", "-1"], "seed is -1"),
        (["embeddings.npy", "labels.npy", "--device", "tpu"], "device is 'tpu'; allowed are auto, cpu, cuda"),
        (["embeddings.npy", "labels.npy", "--device", "mps"], "device is 'mps'; allowed are auto, cpu, cuda"),
        (
            ["embeddings.npy", "labels.npy", "--device", "cuda:99"],
            "device is 'cuda:99'; the number of GPUs that PyTorch finds is ",
        ),
        (["embeddings.npy", "labels.npy", "--json", "nowhere/a.json"], "nowhere/a.json cannot be written"),
        (["embeddings.npy", "labels.npy", "--json", "."], ". cannot be written; needed is a file"),
        (["embeddings.npy", "labels.npy", "--key", "a"], "holds a single array without a name; 'a' was asked for"),
        ([], "Missing argument"),
    ],
)
def test_bad_input_ends_in_one_line(words, message, folder, nearfar):
    before = list(folder.iterdir())
    printed = nearfar("evaluate", *words, code=None)
    assert printed.out == ""
    assert printed.err.startswith("nearfar: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err
    assert list(folder.iterdir()) == before


def test_one_class_can_be_ranked(evaluated, folder):
    report = evaluated("embeddings.npy", "one_class.npy", "--no-clustering")
    assert report["retrieval"]["recall@1"] == 1.0


def test_parquet(evaluated, folder):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pa.table({"embedding": list(EMBEDDINGS.numpy()), "label": WORDS.tolist()})
    parquet.write_table(table, folder / "both.parquet")
    assert evaluated("both.parquet")["retrieval"] == nf.metrics.retrieval(EMBEDDINGS, LABELS)
