"""Everything that writes files, tried in folders that hold files of others: ``python creators.py FOLDER``.

Each creator runs in a forked process, in which an audit hook counts the writes below its output and lets one of them
fail, or ends the process there. The result is a table of JSON: for each creator what it used and what went wrong.
"""

import errno
import gc
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from itertools import count
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("data-birds/jay.jpg", "journal-covers/one.png", "cells/mine/notes.txt", "model-old/model.json", "notes.txt")
CHANGES = ("remove", "rmdir", "rename", "mkdir", "link", "symlink", "truncate", "chmod")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


# --- the table: what is run, with {w} for a folder of inputs, {out} for that of the output, {up} for its parent -------


def demo(w, out):
    from nearfar import demo as characters

    characters.CHARACTERS |= {"classes": 32, "per_class": 4, "side": 28}
    characters.STEPS, characters.DIMENSIONS = 1, 4
    characters.show(["contrastive"], out, epochs=1)


def train_arrays(w, out):
    import nearfar as nf

    with np.load(w / "vectors.npz") as arrays:
        nf.train(w / "recipe.toml", data=(arrays["X"], arrays["y"]), out=out)


def from_vectors(w, out):
    from nearfar.search import Index

    if (out / "index.sqlite").is_file():
        with Index.open(out) as index:
            index.remove([item.id for item in index.items[:2]])
            index.compact()
    else:
        Index.from_vectors(np.eye(8, dtype=np.float32), out=out).close()


def save_network(w, out):
    from nearfar import networks
    from nearfar.networks.weights import save

    out.mkdir(exist_ok=True)
    save.save(networks.create("mlp", in_dim=4, dim=2), out)


CREATORS = {
    "train": "train {w}/recipe.toml -o {out} --quiet",
    "train(data=)": train_arrays,
    "bench run": "bench run {w}/grid.toml -o {up} --engine inline --quiet",
    "tune": "tune {w}/tuned.toml --space {w}/space.toml --sampler random --trials 1 -o {out} --quiet",
    "demo": demo,
    "index build": "index build {w}/run {w}/vectors.npz -o {out} --device cpu",
    "Index.from_vectors": from_vectors,
    "networks.save": save_network,
    "data prepare": "data prepare folder {w}/photos --cache {out} --side 16 --workers 1",
    "init": "init {w}/photos -o {out}/photos.toml --device cpu",
    "embed": "embed {w}/run {w}/vectors.npz -o {out}/embedded.npz --device cpu",
    "embed npy": "embed {w}/run {w}/vectors.npz -o {out}/embedded.npy --device cpu",
    "embed safetensors": "embed {w}/run {w}/vectors.npz -o {out}/embedded.safetensors --device cpu",
    "export": "export {w}/run -o {out}/exported.onnx",
    "export safetensors": "export {w}/run --format safetensors -o {out}/exported.safetensors",
    "calibrate": "calibrate {w}/run -o {out}/threshold.json --json {out}/told.json --device cpu",
    "verify": "verify {w}/seen {w}/photos/jay/0.png {w}/photos/owl/0.png --threshold {w}/seen.json "
    "--json {out}/verified.json --device cpu",
    "evaluate": "evaluate {w}/vectors.npz --json {out}/evaluated.json --key X --labels-key y",
    "report": "report {w}/run -o {out}/run.html --queries 0 --worst 0",
    "papers table": "papers table --format csv -o {out}/papers.csv",
    "papers compare": "papers compare {w}/grid/small --format html -o {out}/beside.html",
    "bench pack": "bench pack {w}/grid/small -o {out}/packed.zip",
    "bench report": "bench report {w}/grid/small -o {out}/board.html",
    "bench compare": "bench compare {w}/grid/small --anyway -o {out}/table.txt",
    "bench compare html": "bench compare {w}/grid/small --anyway --format html -o {out}/table.html",
    "tournament": "tournament {w}/grid/small --anyway --format svg -o {out}/ranks.svg",
    "search": "search {w}/index --id 0 --html {out}/found.html --json {out}/found.json --device cpu",
    "index info": "index info {w}/index --json {out}/info.json",
    "index duplicates": "index duplicates {w}/index --json {out}/same.json",
    "index clusters": "index clusters {w}/index -k 2 --html {out}/clusters.html",
    "data show": "data show folder {w}/photos -o {out}/batch.png --classes 2 --per-class 2 --side 16 --size 16",
    "data audit": "data audit {w}/photos --model {w}/seen --html {out}/audit.html --json {out}/audit.json --device cpu",
    "losses": "losses raw --plot {out}/raw.svg",
    "recipe schema": "recipe schema -o {out}/schema.json",
}
AGAIN = {"train": "train --resume {out} --quiet", "index build": "index update {out} {w}/vectors.npz --prune --yes"}
UNMARKED = ("init", "embed npy", "papers table", "bench compare")  # outputs that say nothing of their origin
IMPORTED = (
    "jinja2.ext", "matplotlib.backends.backend_svg", "matplotlib.figure", "nearfar.bench.comparison.loss_ranking",
    "nearfar.bench.grid.runner", "nearfar.bench.tuning.workers", "nearfar.cli", "nearfar.demo",
    "nearfar.networks.weights.published", "nearfar.plots", "nearfar.reports.leaderboard", "nearfar.reports.run_report",
    "nearfar.reports.search_pages", "nearfar.reports.tuning_page", "nearfar.search.audit",
    "nearfar.training.evaluation.evaluate", "nearfar.training.trainer", "onnx", "optuna",
    "sklearn.decomposition", "torch.onnx",
)  # fmt: skip
FEW = 20  # writes, of which only one is chosen to fail
DEAR = ("demo", "tune", "data audit", "verify", "init", "bench run")  # tried at one stage only


def prepare(w):
    """Write the inputs: images, vectors, recipes, and what is made of them."""
    from grids_for_tests import small
    from training_runs import recipe, vectors

    from nearfar.bench import grid
    from nearfar.training.recipe.files import to_toml

    rng = np.random.default_rng(0)
    for number, name in enumerate(("jay", "owl", "wren", "kite")):
        (w / "photos" / name).mkdir(parents=True)
        for image in range(4):
            pixels = rng.normal(60 * number + 30, 20, (16, 16, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(w / "photos" / name / f"{image}.png")
    file = vectors(w)
    held = {"split__name": "fixed_validation", "split__share": 0.34, "training__epochs": 1}
    (w / "recipe.toml").write_text(to_toml(recipe(file, sampler__steps=1, **held)))
    (w / "tuned.toml").write_text(to_toml(recipe(file, **held)))
    (w / "space.toml").write_text('"loss.margin" = {low = 0.0, high = 0.5}\n')
    seen = recipe(
        file, training__epochs=1, sampler__steps=1, sampler__classes=2, sampler__per_class=2,
        data={"name": "folder", "root": str(w / "photos")}, network={"name": "small_cnn", "dim": 4},
        augmentation={"size": 16, "resize": 16, "crop": "none", "flip": False},
    )  # fmt: skip
    (w / "seen.toml").write_text(to_toml(seen))
    quick = {"sampler": {"steps": 1}, "training": {"epochs": 1}}
    (w / "grid.toml").write_text(grid.to_toml(grid.load(small(w, changes=quick, baseline=True))))
    np.savez(w / "other.npz", X=rng.integers(0, 255, (12, 16, 16, 3), dtype=np.uint8), y=np.repeat([7, 8, 9], 4))
    for words in (
        "train {w}/recipe.toml -o {w}/run --quiet",
        "train {w}/seen.toml -o {w}/seen --quiet",
        "calibrate {w}/seen --data arrays:{w}/other.npz -o {w}/seen.json --device cpu",
        "index build {w}/run {w}/vectors.npz -o {w}/index --device cpu",
        "bench run {w}/grid.toml -o {w}/grid --engine inline --quiet",
    ):
        ended = attempt(words, w, w)
        if ended["code"]:
            raise RuntimeError(f"{words}: {ended['said']}")


# --- runs of a creator ------------------------------------------------------------------------------------------------


def attempt(creator, w, out, *, fail=0, kill=0):
    """Run a creator in a forked process; the write of number ``fail`` fails, the process ends at that of ``kill``."""
    told = out.parent / f"{out.name}.told"
    child = os.fork()
    if child == 0:
        code = 1
        with open(told, "w", encoding="utf-8") as said, redirect_stdout(said), redirect_stderr(said):
            os.dup2(said.fileno(), 1), os.dup2(said.fileno(), 2)
            names = []
            try:
                watch(out, names, fail, kill)
                code = run(creator, w, out)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}")
            finally:
                watched.clear()
                said.flush()
                (out.parent / f"{out.name}.names").write_text(json.dumps(names))
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    names = out.parent / f"{out.name}.names"
    used = json.loads(names.read_text()) if names.is_file() else []
    names.unlink(missing_ok=True)
    return {"code": code, "said": told.read_text(encoding="utf-8"), "names": used}


def run(creator, w, out):
    from nearfar.cli import main

    if not isinstance(creator, str):
        creator(w, out)
        return 0
    if "{out}/" in creator:
        out.mkdir(exist_ok=True)
    try:
        main([word.format(w=w, out=out, up=out.parent) for word in creator.split()])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


watched = []


def hook(event, arguments):
    if not watched:
        return
    kind, _, call = event.partition(".")
    if event == "open":
        if isinstance(arguments[2], int) and arguments[2] & WRITES and not isinstance(arguments[0], int):
            watched[0](arguments[0])
    elif (kind == "os" and call in CHANGES) or kind == "shutil" or event == "sqlite3.connect":
        for path in arguments[: 2 if call in ("rename", "link", "move") else 1]:
            if isinstance(path, (str, bytes, os.PathLike)):
                watched[0](os.fspath(path))


def watch(out, names, fail, kill):
    """Note the names of what is written below a folder."""
    number = count(1)

    def note(path):
        with suppress(ValueError):
            names.append(Path(os.path.abspath(os.fsdecode(path))).relative_to(out).as_posix())
            at = next(number)
            if at == kill:
                os._exit(9)
            if at == fail:
                raise OSError(errno.ENOSPC, "No space left on device", os.fsdecode(path))

    watched.append(note)


# --- files of others --------------------------------------------------------------------------------------------------


def fill(out, names, outside):
    """Write foreign files; each third is a link to one outside. Returns the bytes by path."""
    out.mkdir(exist_ok=True)
    outside.mkdir(exist_ok=True)
    (outside / "folder").mkdir(exist_ok=True)
    placed = {}
    for number, name in enumerate(names):
        file, content = out / name, f"mine: {name}".encode()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(file):
                continue
            if number % 3 == 2:
                target = outside / f"{number}.txt"
                target.write_bytes(content)
                file.symlink_to(target)
            else:
                file.write_bytes(content)
        except (FileExistsError, NotADirectoryError):
            continue  # a foreign file is in the place of its folder
        placed[str(file)] = content
    (outside / "folder" / "kept.txt").write_bytes(b"kept")
    with suppress(FileExistsError):
        (out / "linked").symlink_to(outside / "folder")
        placed[str(out / "linked" / "kept.txt")] = b"kept"
    return placed


def lost(placed):
    """The foreign files that are no longer what they were."""
    gone = []
    for name, content in placed.items():
        try:
            same = Path(name).read_bytes() == content
        except OSError:
            same = False
        if not same:
            gone.append(name)
    return gone


def trials(name, w, place, used):
    """Try a creator among foreign files and yield what went wrong."""
    creator = CREATORS[name]
    own = {file for other, files in used.items() if other[:5].lower() == name[:5].lower() for file in files}  # its kind
    again = AGAIN.get(name, creator)
    pool = sorted({*CLASSES, *(each for names in used.values() for each in names if each != ".")})
    numbers = count(1)

    def new():
        folder = place / f"{next(numbers)}" / "small"
        folder.parent.mkdir()
        return folder

    out = new()
    placed = fill(out, [*own, *pool], out.parent / "outside")
    ended = attempt(creator, w, out)
    if gone := lost(placed):
        yield f"in a folder of others: {gone} changed; {ended['said']}"
    said = ended["said"].strip()
    if ended["code"] and (len(said.splitlines()) != 1 or not any(Path(each).name in said for each in placed)):
        yield f"in a folder of others: the refusal is not one line that names a file: {said}"

    out = new()
    others = [each for each in pool if each not in own and not any(mine.startswith(f"{each}/") for mine in own)]
    placed = fill(out, others, out.parent / "outside") if isinstance(creator, str) and "{out}/" in creator else {}
    ended = attempt(creator, w, out)
    if ended["code"]:
        yield f"among files of other names: {ended['said']}"
    placed |= fill(out, others, out.parent / "outside")
    ended = attempt(again, w, out)
    if isinstance(creator, str) and "{out}/" in creator:
        if bool(ended["code"]) != (name in UNMARKED):
            yield f"over its own output: {ended['said']}"
        if name in UNMARKED and (ended := attempt(f"{creator} --force", w, out))["code"]:
            yield f"with --force: {ended['said']}"
    if gone := lost(placed):
        yield f"a second time: {gone} changed"

    writes = len(used[name])
    stages = {1, writes // 2, writes - 1} if writes > FEW and name not in DEAR else {max(1, writes // 2)}
    for at in sorted(stages):
        out = new()
        attempt(creator, w, out, kill=at)
        placed = fill(out, others, out.parent / "outside")
        attempt(again, w, out, fail=at)
        attempt(again, w, out)
        if gone := lost(placed):
            yield f"after it was killed and failed at write {at} of {writes}: {gone} changed"


def main(folder, chosen):
    for module in IMPORTED:  # once, for all processes
        with suppress(ImportError):
            import_module(module)
    from nearfar.training.recipe import starter

    starter.measure_seconds = lambda network: (0.0, 0.0)  # creates a large network
    w = folder / "inputs"
    w.mkdir()
    os.environ |= {"NEARFAR_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    os.chdir(folder)
    sys.addaudithook(hook)
    gc.disable()  # forked processes would copy all objects
    prepare(w)
    used = {}
    report = {}
    for number, (name, creator) in enumerate(CREATORS.items()):
        out = folder / f"fresh{number}" / "small"
        out.parent.mkdir()
        ended = attempt(creator, w, out)
        below = [file.relative_to(out).as_posix() for file in out.rglob("*") if not file.is_dir()]
        used[name] = [*ended["names"], *below]
        report[name] = {"writes": len(ended["names"]), "wrong": [ended["said"]] if ended["code"] else []}
    for number, name in enumerate(chosen or CREATORS):
        place = folder / f"trials{number}"
        place.mkdir()
        report[name]["wrong"] += trials(name, w, place, used)
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
