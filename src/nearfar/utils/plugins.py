"""Plugins: Python files that register losses, networks or datasets, for commands and the processes they start."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path

from nearfar.utils.paths import expanded

_FILES: dict[Path, str] = {}  # files in the order of their use, and a digest of each
_MODULES: dict[str, Path] = {}


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
        ...     [found.name for found in used()]
        ['mine.py']
        >>> forget()
    """
    for name in files:
        file = expanded(name).resolve()
        if file in _FILES:
            continue
        try:
            content = file.read_bytes()
        except OSError as error:
            raise ValueError(f"{name} cannot be used: {error.strerror or error}") from None
        digest = hashlib.sha256(content).hexdigest()[:16]
        module = f"{file.stem}_{digest}"
        spec = importlib.util.spec_from_file_location(module, file)
        if spec is None or spec.loader is None:
            raise ValueError(f"{name} cannot be used: a Python file is needed, such as mine.py")
        made = importlib.util.module_from_spec(spec)
        sys.modules[module] = made
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))  # as for a script: modules beside it can be imported
        try:
            spec.loader.exec_module(made)
        except Exception as error:
            del sys.modules[module]
            raise ValueError(f"{name} cannot be used: {type(error).__name__}: {error}") from error
        _FILES[file], _MODULES[module] = digest, file


def used() -> dict[Path, str]:
    """Return the files that were run, and a digest of each."""
    return dict(_FILES)


def digest(thing: object) -> str | None:
    """Return the digest of the plugin file that a class or function was defined in; None for any other file."""
    file = _MODULES.get(str(getattr(thing, "__module__", "")))
    return None if file is None else _FILES[file]


def forget() -> None:
    """Forget which files were run; what they registered stays registered."""
    _FILES.clear()
    _MODULES.clear()
