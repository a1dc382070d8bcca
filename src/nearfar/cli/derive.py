"""Options of commands from the signature and the docstring of the function they call, read without importing it."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_origin

from typer import Argument, Option

import nearfar
from nearfar.cli import complete

ROOT = Path(nearfar.__file__).parents[1]
LINES = re.DOTALL | re.MULTILINE
KINDS = {"str": str, "int": int, "float": float, "bool": bool, "Path": Path}
SHORT = {"out": "-o", "k": "-k", "quiet": "-q"}
COMPLETED = {"GRID": complete.grids, "MODEL": complete.runs}
METAVARS = {"cache": "FOLDER", "data": "NAME:ROOT", "expand": "N", "jobs": "N", "only": "LABEL", "other_code": "REASON"}
METAVARS |= {"out": "FILE", "per_gpu": "N", "ray_address": "ADDRESS"}

Command = Callable[..., None]


def derived(
    target: str, *, positional: Mapping[str, str] | None = None, leave_out: Sequence[str] = ()
) -> Callable[[Command], Command]:
    """Add options for the arguments of a function to a command, which gets those that are given as ``**given``.

    An argument that the command declares with an option of its own is not derived, nor are those to leave out.

    Args:
        target: The function, as "package.module:Class.function".
        positional: Arguments without an option, and their names in the help.
        leave_out: Arguments that only Python has.
    """
    places = positional or {}

    def decorate(command: Command) -> Command:
        hints = inspect.signature(command, eval_str=True).parameters.values()
        mine = {hint.name: hint for hint in hints if get_origin(hint.annotation) is Annotated}
        parameters = {
            name: mine.pop(name) if name in mine else _parameter(name, annotation, default, text, places.get(name))
            for name, annotation, default, text in _arguments(target)
            if name in mine or name not in leave_out
        }

        @functools.wraps(command)
        def call(**given: Any) -> None:  # without what is not given, so that the defaults of the function hold
            command(**{name: value for name, value in given.items() if value is not None})

        keywords = [each.replace(kind=each.KEYWORD_ONLY) for each in (parameters | mine).values()]
        call.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
        call.__annotations__ = {each.name: each.annotation for each in keywords}
        return call

    return decorate


@functools.cache
def _module(name: str) -> ast.Module:
    return ast.parse(ROOT.joinpath(*name.split(".")).with_suffix(".py").read_text(encoding="utf-8"))


def _arguments(target: str) -> list[tuple[str, str, Any, str]]:
    """Name, annotation, default and description of each argument of "package.module:Class.function"."""
    module, _, path = target.partition(":")
    node: Any = _module(module)
    constants = {
        each.targets[0].id: each.value
        for each in node.body
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name)
    }
    for name in path.split("."):
        node = next(each for each in node.body if getattr(each, "name", None) == name)
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", ast.get_docstring(node) or "", LINES)
    texts = dict(re.findall(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", section[1] if section else "", LINES))
    required = len(node.args.args) - len(node.args.defaults)
    defaults = [*[None] * required, *node.args.defaults, *node.args.kw_defaults]
    return [
        (
            each.arg,
            ast.unparse(each.annotation),
            constants.get(default.id, default) if isinstance(default, ast.Name) else default,
            " ".join(texts.get(each.arg, "").split()),
        )
        for each, default in zip([*node.args.args, *node.args.kwonlyargs], defaults, strict=True)
        if each.arg not in ("self", "cls")
    ]


def _value(default: Any) -> Any:
    """The value of a default, which may also be ``Path("…")``; none at all for an argument that is required."""
    if default is None:
        return inspect.Parameter.empty
    if isinstance(default, ast.Call):
        return Path(ast.literal_eval(default.args[0]))
    value = ast.literal_eval(default)
    return None if value == () else value


def _parameter(name: str, annotation: str, given: Any, text: str, place: str | None) -> inspect.Parameter:
    default = _value(given)
    words = [word.strip() for word in annotation.split("|")]
    kind: Any = Path if "Path" in words else next((KINDS[word] for word in words if word in KINDS), str)
    if any(word.startswith(("Sequence[", "list[")) for word in words):
        kind = list[kind]
    if default is None:
        kind = kind | None
    option = f"--{name.replace('_', '-')}"
    text = re.sub(r'``|"(?=\S+")|(?<=\S)"', "", text)  # values are typed without quotes
    if place is not None:
        declared: Any = Argument(metavar=place, help=text, autocompletion=COMPLETED.get(place))
    else:
        names = [f"{option}/--no-{option[2:]}"] if default is True else [option] if len(name) > 1 else []
        names += [SHORT[name]] if name in SHORT else []
        declared = Option(*names, metavar=METAVARS.get(name), help=text)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declared]
    )
