"""Provenance: what a run was made from, how often it saw the test classes, and whether its files are unchanged.

- The manifest of a run holds everything that can change its results, the code included.
- The ledger has a line for each evaluation on test classes.
- The seal holds hashes of the files that a finished run consists of. ``check`` compares these files with it.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nearfar
from nearfar import losses
from nearfar.data.store import duplicates
from nearfar.data.store.store import Store
from nearfar.networks.weights import save
from nearfar.training.recipe.files import to_dict
from nearfar.training.recipe.schema import Recipe
from nearfar.training.run.folder import Metrics, RunError, RunFolder, RunTable, finite, parse
from nearfar.training.setup import Setup
from nearfar.utils import plugins
from nearfar.utils.atomic import no_link, tensors_digest, write_json, write_text
from nearfar.utils.folders import read_table
from nearfar.utils.progress import Watch
from nearfar.utils.system import expanded

FORMAT = 2  # of manifests
DIGITS = 16  # of a hash of code
SEAL = 32  # bytes of a digest in a seal
# Parts of the package that no result of a run depends on.
NOT_COMPUTING = ("__main__.py", "bench", "cli", "demo.py", "plots", "reports", "search", "serve")
GRID, CELLS = "grid.toml", "cells"  # file of a grid, and the folder of its runs beside it
LABELS = "cell.json"  # in a run folder: name, key and labels of its cell
PACKAGES = ("torch", "numpy", "scikit-learn", "pillow", "safetensors", "timm", "torchvision", "transformers")


def of(setup: Setup) -> dict[str, Any]:
    """The manifest of a run; call this before the first step, while the network has its first weights."""
    recipe, store = setup.recipe, setup.store
    validates = bool(len(setup.rows["validation"]))
    return {
        "format": FORMAT,
        "began": now(),
        "recipe": to_dict(recipe),
        "data": {
            "name": setup.dataset.name,
            "fingerprint": setup.fingerprint,
            "source": setup.dataset.source.fingerprint(),
            "rows": {part: len(rows) for part, rows in setup.rows.items()},
            "classes": {part: len(np.unique(setup.labels[rows])) for part, rows in setup.rows.items()},
            "skipped": len(store.bad) if isinstance(store, Store) else 0,
            "left_out": [f"{bad.name}: {bad.reason}" for bad in store.bad] if isinstance(store, Store) else [],
            "notes": list(setup.dataset.notes),
        },
        "network": {
            **save.card(setup.model, setup.preprocessing),
            "parameters": sum(each.numel() for each in setup.model.parameters()),
            "first_weights": tensors_digest(setup.model.state_dict()),
        },
        "weights": _weights(recipe.network.pretrained, recipe.network.name),
        "batch": {
            "pictures": setup.sampler.batch_size,
            "ranks": setup.world.ranks,
            "sampler": setup.sampler.fingerprint(),
        },
        "length": {"epochs": setup.epochs, "steps": setup.steps, "steps_per_epoch": setup.steps_per_epoch},
        "selection": f"best validation {recipe.selection.metric}" if validates else "last epoch",
        "seed": recipe.training.seed,
        "versions": versions(),
        "hardware": hardware(setup.device),
        "commit": COMMIT[0],
        "code": code(recipe),
    }


def duplicates_of(setup: Setup, watch: Watch) -> list[str]:
    """Name the test items that are in a training or validation class as well, a line for each."""
    every = duplicates.signatures(setup.store, progress=watch("comparing"))
    seen = np.sort(np.concatenate([setup.rows["train"], setup.rows["validation"]]))
    unseen = [rows for part, rows in setup.rows.items() if part not in ("train", "validation")]
    pairs = duplicates.between(every, seen, np.sort(np.concatenate(unseen))) if unseen else []
    rows = np.array([row for pair in pairs for row in (pair.first, pair.second)], dtype=np.int64)
    places = setup.dataset_rows(rows).tolist()
    names = {row: setup.dataset.source.name(place) for row, place in zip(rows.tolist(), places, strict=True)}
    return duplicates.told(pairs, names)


def versions() -> dict[str, str]:
    """Versions of Python, nearfar and the libraries it computes with."""
    found = {"python": platform.python_version(), "nearfar": nearfar.__version__}
    if torch.version.cuda is not None:
        found |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}  # type: ignore[no-untyped-call]
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware(device: torch.device) -> dict[str, Any]:
    """The device and the machine."""
    found: dict[str, Any] = {
        "device": str(device),
        "machine": platform.machine(),
        "system": sys.platform,
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        found |= {
            "gpu": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        }
    return found


def now() -> str:
    """The date and time, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


# --- code ----------------------------------------------------------------------------------------------------------


def code(recipe: Recipe) -> dict[str, Any]:
    """Hashes of the code that a recipe is trained with."""
    sections = [recipe.loss, *(stage.loss for stage in recipe.stages if stage.loss is not None)]
    names = [name for section in sections for name in section.names]
    files = dict.fromkeys(file for name in names for file in _loss_files(losses.get(name)))
    own = {file.name: LOSSES.get(file) or plugins.SOURCES.get(file) or _hash(file.read_bytes()) for file in files}
    return {
        "package": dict(PACKAGE),
        "loss": {"files": list(own), "digest": _hash(json.dumps(own).encode())},
        "diff": COMMIT[1],
        "used": {file.name: found for file, found in plugins.SOURCES.items()},
    }


def relevant_code(about: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The hashes that a result depends on, apart from those of the loss; None if they were not recorded."""
    if not about or "package" not in about:
        return None
    parts = {f"package.{part}": found for part, found in about["package"].items() if part not in NOT_COMPUTING}
    own = about.get("loss", {}).get("files") or ()
    used = {f"used.{name}": found for name, found in about.get("used", {}).items() if name not in own}
    later = [relevant_code(each.get("code")) for each in about.get("resumed", ())]
    return {**parts, **used, **({"resumed": later} if later else {})}


def record_resume(about: dict[str, Any], recipe: Recipe, step: int) -> dict[str, Any]:
    """Add the present code to the manifest of a run that is resumed, if it is not the code of before."""
    resumed = about["code"].get("resumed", [])
    before, present = (resumed[-1]["code"] if resumed else about["code"]), code(recipe)
    if relevant_code(present) != relevant_code({**before, "resumed": []}) or present["loss"] != before["loss"]:
        about["code"]["resumed"] = [*resumed, {"began": now(), "step": step, "commit": COMMIT[0], "code": present}]
    return about


def _package() -> tuple[dict[str, str], dict[Path, str]]:
    """Hashes of the parts of the package (folders and files at its top), and of the files that define losses."""
    root = Path(nearfar.__file__).parent
    defining = {file for name in losses.names() for file in _defining(losses.get(name))}
    parts: dict[str, Any] = {}
    own = {}
    for file in sorted(root.rglob("*.py")):
        content, path = file.read_bytes(), file.relative_to(root)
        if file in defining:
            own[file] = _hash(content)
            continue
        part = parts.setdefault(path.parts[0], hashlib.blake2b(digest_size=DIGITS // 2))
        part.update(f"{path.as_posix()}\0".encode() + hashlib.blake2b(content).digest())
    return {part: digest.hexdigest() for part, digest in parts.items()}, own


def _defining(thing: type) -> list[Path]:
    """The file that defines a class; none for a class of an interactive session."""
    try:
        return [Path(inspect.getfile(thing))]
    except (OSError, TypeError):
        return []


def _loss_files(thing: type) -> Iterator[Path]:
    """The file that defines a loss, and those of other losses that it imports."""
    for file in _defining(thing):
        yield file
        text = file.read_text(encoding="utf-8")
        for name in re.findall(r"^from nearfar\.losses\.(\w+) import", text, re.MULTILINE):
            other = Path(losses.__file__).with_name(f"{name}.py")
            if other in LOSSES:
                yield other


def _commit() -> tuple[str | None, str | None]:
    """The git commit of this code and a hash of the changes since; None outside a repository, and without changes."""
    where = Path(nearfar.__file__).parent

    def git(*words: str) -> str:
        environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        command = ["git", "-C", str(where), *words]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=10, check=True
        ).stdout

    try:
        # nearfar may be installed inside a repository of something else.
        git("ls-files", "--error-unmatch", "__init__.py")
        head, diff = git("rev-parse", "HEAD").strip(), git("diff", "HEAD", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return None, None
    return head, _hash(diff.encode()) if diff else None


def _hash(content: bytes, size: int = DIGITS // 2) -> str:
    return hashlib.blake2b(content, digest_size=size).hexdigest()


# Of the code that this process has imported: files that change later do not matter to it.
(PACKAGE, LOSSES), COMMIT = _package(), _commit()


# --- the ledger of test looks --------------------------------------------------------------------------------------


def grid_file(run: Path) -> Path | None:
    """Where the grid of a run would be described; None if the run is not in the folder of a grid's cells."""
    above = run.absolute().parent
    return above.with_name(GRID) if above.name == CELLS else None


def record_look(run: RunFolder, by: str, **about: Any) -> None:
    """Append a line to the ledger of a run, and to that of its grid."""
    line = {"date": now(), "run": run.folder.absolute().name, "by": by, **about}
    file = grid_file(run.folder)
    grids = [] if file is None or not file.is_file() else [file.with_name(run.looks.name)]
    for ledger in (run.looks, *grids):
        with suppress(PermissionError), open(ledger, "a", encoding="utf-8", opener=no_link) as opened:
            opened.write(json.dumps(line) + "\n")


def count_looks(ledger: bytes | None) -> int:
    """The number of evaluations on test classes in a ledger; 0 without one."""
    return 0 if ledger is None else ledger.count(b"\n")


# --- the seal ------------------------------------------------------------------------------------------------------


def finish(run: RunFolder, metrics: Mapping[str, Any]) -> None:
    """Write the metrics of a finished run, with hashes of all its files; the run counts as finished after that."""
    about = json.loads(run.manifest.read_bytes())
    ledger = run.looks.read_bytes() if run.looks.is_file() else None
    write_json(run.manifest, {**about, "test_looks": count_looks(ledger)})
    text = json.dumps(finite(metrics), indent=2, ensure_ascii=False) + "\n"
    files = [file for file in (run.recipe, run.manifest, run.log, run.queries) if file.is_file()]
    digests = {file.name: _hash(file.read_bytes(), SEAL) for file in files}
    write_json(run.seal, {**digests, run.metrics.name: _hash(text.encode(), SEAL)})
    write_text(run.metrics, text)


def is_finished(run: RunFolder) -> bool:
    """Whether a run has metrics, and none of its files is damaged or changed."""
    try:
        check(run, lambda file: file.read_bytes() if file.is_file() else None)
    except RunError:
        return False
    return True


def can_measure_again(run: RunFolder) -> bool:
    """Whether a run that was finished has its last checkpoint, and its recipe, manifest and log are as they were."""
    digests = read_table(run.seal)
    files = (run.recipe, run.manifest, run.log)
    intact = all(file.is_file() and digests.get(file.name) == _hash(file.read_bytes(), SEAL) for file in files)
    return intact and run.checkpoint.is_file()


def check(run: RunFolder, read: Callable[[Path], bytes | None]) -> dict[str, Any]:
    """Check that the files of a finished run fit each other and their seal."""
    content = read(run.metrics)
    if content is None:
        raise RunError(f"the run in {run.folder} is not finished: {run.metrics.name} is missing")
    metrics, about = parse(run.metrics, content, Metrics), parse(run.manifest, read(run.manifest) or b"{}", RunTable)
    seal = read(run.seal)
    if seal is not None:
        digests = parse(run.seal, seal)
        files = {file.name: read(file) for file in (run.recipe, run.manifest, run.log, run.queries, run.metrics)}
        changed = [name for name, found in digests.items() if _hash(files.get(name) or b"", SEAL) != found]
        changed += [name for name, found in files.items() if found is not None and name not in digests]
        if changed:
            raise RunError(f"{run.folder}: {', '.join(changed)} changed after the run had finished")
    elif "format" in about:
        raise RunError(f"{run.folder}: {run.seal.name} is missing")
    return metrics


# --- parts of the manifest -----------------------------------------------------------------------------------------


def _weights(pretrained: bool | str, name: str) -> dict[str, Any] | None:
    """The pretrained weights; None for random ones."""
    if pretrained is False:
        return None
    if pretrained is True:
        return {"name": name}
    file = expanded(pretrained)
    with open(file, "rb") as content:
        return {"file": file.name, "sha256": hashlib.file_digest(content, "sha256").hexdigest()}
