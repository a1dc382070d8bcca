"""Plugins: Python files that register losses, networks or datasets, for commands and the processes they start."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from nearfar.utils.system import expanded

SOURCES: dict[Path, str] = {}  # digests of the files that were used, and of the local modules that they import
_FILES: dict[Path, str] = {}  # files in the order of their use, and a digest of each with its modules


def use(*files: str | Path) -> None:
    """Run Python files, so that recipes can name what they register; each file is run once.

    Code runs only through this function, never by opening a recipe, a checkpoint or an index. Processes that are
    started for the cells of a grid, or for tuning, run the same files.

    Args:
        files: Python files.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "mine.py"
        ...     _ = file.write_text("class Mine: pass")
        ...     use(file)
        ...     [plugin.name for plugin in used()]
        ['mine.py']
        >>> forget()
    """
    for name in files:
        file = expanded(name).resolve()
        if file in _FILES:
            continue
        sources, digest = sources_of(file)
        module = f"{file.stem}_{digest}"
        spec = importlib.util.spec_from_file_location(module, file)
        if spec is None or spec.loader is None:
            raise ValueError(f"{name} cannot be used: a Python file is needed, such as mine.py")
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[module] = loaded
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))  # as for a script: modules beside it can be imported
        try:
            spec.loader.exec_module(loaded)
        except Exception as error:
            del sys.modules[module]
            raise ValueError(f"{name} cannot be used: {type(error).__name__}: {error}") from error
        _FILES[file] = digest
        SOURCES.update(sources)


def sources_of(file: Path) -> tuple[dict[Path, str], str]:
    """Return digests of a file and the local modules that it imports, and one of all."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file} cannot be used: {error.strerror or error}") from None
    sources = {file: _digest(content)}
    try:
        sources |= {local: _digest(local.read_bytes()) for local in _local_modules(file)}
    except (SyntaxError, ValueError, OSError) as error:
        raise ValueError(f"{file} cannot be used: {type(error).__name__}: {error}") from error
    return sources, _digest(content) if len(sources) == 1 else _digest("".join(sources.values()).encode())


def find(name: str) -> tuple[Any, str]:
    """Return what "FILE.py:NAME" names in a file that was used, and the digest of the file."""
    file, _, attribute = name.rpartition(":")
    for used, digest in _FILES.items():
        if used.name == Path(file).name:
            module = sys.modules[f"{used.stem}_{digest}"]
            if not callable(thing := getattr(module, attribute, None)):
                raise ValueError(f"{used} has no function {attribute!r}")
            return thing, digest
    raise ValueError(f"{name} is in a file that was not named; --use {file}, or nearfar.use, runs it")


def used() -> dict[Path, str]:
    """Return the files that were run, and a digest of each."""
    return dict(_FILES)


def digest(thing: object) -> str | None:
    """Return the digest of the plugin file, with its modules, that defines a class or function; None for others."""
    module = sys.modules.get(str(getattr(thing, "__module__", "")))
    return _FILES.get(Path(getattr(module, "__file__", None) or ""))


def forget() -> None:
    """Forget which files were run; what they registered stays registered."""
    SOURCES.clear()
    _FILES.clear()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _local_modules(file: Path) -> Iterator[Path]:
    """Yield the Python files that a file imports, and those that they import, unless they are installed."""
    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    package = str(Path(__file__).parents[1])
    seen, waiting = {file}, [file]
    while waiting:
        importer = waiting.pop()
        for name in _imported(importer):
            spec = PathFinder.find_spec(name, [str(importer.parent), str(file.parent), *sys.path])
            if spec is None or spec.origin is None or spec.origin.startswith((*installed, package)):
                continue
            if "-packages/" in spec.origin:  # of another environment
                continue
            origin = Path(spec.origin).resolve()
            files = sorted(origin.parent.rglob("*.py")) if spec.submodule_search_locations else [origin]
            for module in files:
                if module.suffix == ".py" and module not in seen:
                    seen.add(module)
                    waiting.append(module)
                    yield module


def _imported(file: Path) -> Iterator[str]:
    """Yield the first words of the modules that a file imports."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from (name.partition(".")[0] for name in names)
