"""Options of commands: declared once for several, or made of the function that a command calls."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, get_origin

from typer import Argument, Option

import nearfar
from nearfar.cli.output import SHOWN
from nearfar.utils import plugins, shipped

MOST = 1000  # runs and indexes to look at


def starting(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Complete a word to names; without any, the shell offers files."""

    def complete(incomplete: str) -> list[str]:
        return sorted(name for name in names() if name.startswith(incomplete))

    return complete


def folders(file: str) -> Iterator[str]:
    """The folders that have a file, up to two folders below this one, or in runs and bench."""
    for pattern in (f"*/{file}", f"*/*/{file}", f"bench/*/cells/*/{file}"):
        yield from (found.parent.as_posix() for found in islice(Path().glob(pattern), MOST))


def _losses() -> list[str]:
    """The keys of losses, read without importing them."""
    files = (Path(nearfar.__file__).parent / "losses").rglob("*.py")
    return [key for file in files for key in re.findall(r'^@register\("(\w+)"', file.read_text("utf-8"), re.MULTILINE)]


complete_recipes = starting(lambda: [*shipped.names("recipe"), *folders("recipe.toml")])
complete_grids = starting(lambda: [*shipped.names("grid"), *folders("grid.toml")])
complete_spaces = starting(lambda: shipped.names("space"))
complete_losses = starting(_losses)
complete_runs = starting(lambda: folders("recipe.toml"))
complete_results = starting(lambda: [*folders("recipe.toml"), *folders("grid.toml")])
complete_indexes = starting(lambda: folders("index.sqlite"))


ROOT = Path(nearfar.__file__).parents[1]
LINES = re.DOTALL | re.MULTILINE
KINDS = {"str": str, "int": int, "float": float, "bool": bool, "Path": Path}
SHORT = {"out": "-o", "k": "-k", "quiet": "-q"}
COMPLETED = {"GRID": complete_grids, "MODEL": complete_runs, "RECIPE": complete_recipes, "space": complete_spaces}
TEXTS = {  # of arguments that many functions have
    "device": "Device: auto, cpu, cuda, cuda:1, …",
    "force": "Replace an existing file that this command did not write.",
    "metric": "The metric: recall@1, map@r, nmi, …",
    "seed": "Random seed.",
}
METAVARS = {
    **{"cache": "FOLDER", "data": "NAME:ROOT", "only": "LABEL", "other_code": "REASON", "out": "FILE"},
    **{"ray_address": "ADDRESS", "space": "SPACE", "storage": "URL", "study": "NAME"},
    **dict.fromkeys(("expand", "jobs", "per_gpu", "queries", "trials", "worst"), "N"),
}

Command = Callable[..., None]


def derived(
    target: str,
    *,
    positional: Mapping[str, str] | None = None,
    leave_out: Sequence[str] = (),
    texts: Mapping[str, str] | None = None,
) -> Callable[[Command], Command]:
    """Add options for the arguments of a function to a command, which gets those that are given as ``**given``.

    An argument that the command declares with an option of its own is not derived, nor are those to leave out.

    Args:
        target: The function, as "package.module:Class.function".
        positional: Arguments without an option, and their names in the help.
        leave_out: Arguments that only Python has.
        texts: Descriptions of arguments, where the function has none or one for Python.
    """
    places, own_texts = positional or {}, texts or {}

    def decorate(command: Command) -> Command:
        hints = inspect.signature(command, eval_str=True).parameters.values()
        mine = {hint.name: hint for hint in hints if get_origin(hint.annotation) is Annotated}
        parameters = {
            name: mine.pop(name)
            if name in mine
            else _parameter(name, annotation, default, own_texts.get(name) or text or TEXTS[name], places.get(name))
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
        switch = default is True or (default is None and "bool" in words)
        names = [f"{option}/--no-{option[2:]}"] if switch else [option] if len(name) > 1 else []
        names += [SHORT[name]] if name in SHORT else []
        declared = Option(*names, metavar=METAVARS.get(name), help=text, autocompletion=COMPLETED.get(name))
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declared]
    )


Settings = Annotated[
    list[str] | None,
    Option("--set", metavar="SECTION.KEY=VALUE", help="Change the recipe, as in loss.alpha=32; repeatable."),
]
Roots = Annotated[
    list[str] | None, Option(metavar="ROOT", help="Location of the data (data.root); repeat for several archives.")
]


def name_file(network: Any) -> Any:
    """Run the file of a network "FILE.py:NAME": naming it on the command line is as --use."""
    if (file := str(network).rpartition(":")[0]).endswith(".py"):
        plugins.use(file)
    return network


Network = Annotated[
    str | None,
    Option(metavar="NAME", callback=name_file, help="The network: a name, or FILE.py:FUNCTION that returns a module."),
]
Columns = Annotated[
    str | None,
    Option(metavar="path=NAME,…", help="Columns of a table: path=NAME,label=NAME,split=NAME; split= is none."),
]
Device = Annotated[str, Option(help="Device: auto, cpu, cuda, cuda:1, …")]
RecipeDevice = Annotated[str | None, Option(help="Device instead of the recipe's: auto, cpu, cuda, cuda:1, …")]
Cache = Annotated[
    Path | None, Option(metavar="FOLDER", help="Folder of decoded images; default: $NEARFAR_CACHE or ~/.cache/nearfar.")
]
OnError = Annotated[
    str | None,
    Option(help="What to do with files of DATA that cannot be decoded: skip or fail; fail or as in the recipe."),
]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print only the results.")]
Seed = Annotated[int, Option(help="Random seed.")]
Everything = Annotated[bool, Option("--all", help=f"List everything, not just the first {SHOWN}.")]
Json = Annotated[Path | None, Option(metavar="FILE", help="Write all results as JSON; - prints them instead of text.")]

Runs = Annotated[
    list[Path],
    Argument(
        metavar="RUNS…", help="Run folders, folders that hold some, or packed grids.", autocompletion=complete_results
    ),
]
Metric = Annotated[str, Option(help="The metric: recall@1, map@r, nmi, …")]
Format = Annotated[str, Option(help="text, csv, latex or html.")]
ChartFormat = Annotated[str, Option(help="text, csv, latex, html, or svg for a chart.")]
Force = Annotated[bool, Option("--force", help="Replace an existing file that this command did not write.")]
Out = Annotated[Path | None, Option("-o", "--out", metavar="FILE", help="Write to a file.")]

IndexFolder = Annotated[
    Path, Argument(metavar="INDEX", help="The folder of an index.", autocompletion=complete_indexes)
]
Model = Annotated[
    Path,
    Argument(
        metavar="MODEL",
        help="A run folder, one with model.safetensors, or a network with published weights, such as "
        "efficientnet_lite0, timm:NAME or FILE.py:FUNCTION.",
        autocompletion=complete_runs,
        callback=name_file,
    ),
]
Download = Annotated[
    bool, Option("--download", help="Download the weights of a network if they are not on this machine.")
]
NoLabels = Annotated[bool, Option("--no-labels", help="Do not use folders as classes.")]
Where = Annotated[
    list[str] | None,
    Option(
        metavar="KEY=VALUE", help="Only items that pass this filter: label=jay, year>=2019, name~garden/*; repeatable."
    ),
]


def table_columns(text: str | None) -> dict[str, str]:
    """Parse --columns: the settings of a table that name its columns."""
    pairs = [part.partition("=") for part in (text or "").split(",") if part]
    columns = {"label" if key.strip() == "class" else key.strip(): column.strip() for key, _, column in pairs}
    if not all(equals for _, equals, _ in pairs) or not columns.keys() <= {"path", "label", "split"}:
        raise ValueError(f"--columns is {text!r}; path=NAME, label=NAME (or class=NAME) and split=NAME are allowed")
    return columns


def recipe_overrides(
    settings: Sequence[str] | None, data: list[str] | None, device: str | None, columns: str | None = None
) -> dict[str, Any]:
    """What --set, --data, --device and --columns change in a recipe."""
    from nearfar.training.recipe.files import parse_override

    found = dict(map(parse_override, settings or ()))
    if data:
        found["data.root"] = data[0] if len(data) == 1 else data
    if device is not None:
        found["training.device"] = device
    if columns:
        found["data.name"] = "table"
        found |= {f"data.settings.{key}": column for key, column in table_columns(columns).items()}
    return found
