"""The program: its options, and how errors are told."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer import Option

import nearfar
from nearfar.cli.output import visible
from nearfar.utils import plugins

HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(name="nearfar", rich_markup_mode=None, context_settings=HELP)


def group(name: str, summary: str, *, example: str) -> typer.Typer:
    """Add a group of commands, which prints its help if no command is given."""
    commands = typer.Typer(rich_markup_mode=None, context_settings=HELP)
    app.add_typer(commands, name=name, short_help=summary)

    @commands.callback(invoke_without_command=True, help=f"{summary}\n\nExample: nearfar {name} {example}")
    def show_help(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            print(context.get_help())

    return commands


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its status.

    Args:
        arguments: Words of the command line; those of the process by default.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words  # wherever it stands
    words = [word for word in words if word != "--debug"]
    try:
        words = _using(words)
        code = app(words, prog_name="nearfar", standalone_mode=False)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if debug:
            raise
        # Errors of the parser bring their own exit code and wording.
        words_of = getattr(error, "format_message", None)
        message = words_of() if words_of else _message(error)
        lines = message.splitlines() if hasattr(error, "problems") else [message]  # a line for each problem of a recipe
        lines = [visible(" ".join(line.split())) for line in lines]
        print("nearfar:", "\n  ".join(lines), file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 1))
    sys.exit(code if isinstance(code, int) else 0)


def _message(error: Exception) -> str:
    """What an error says; one of the operating system without its number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _using(words: list[str]) -> list[str]:
    """Run the files of --use, wherever it stands, and leave it out."""
    rest: list[str] = []
    given = iter(words)
    for word in given:
        if word == "--":
            return [*rest, word, *given]
        option, equals, file = word.partition("=")
        if option != "--use":
            rest.append(word)
            continue
        if not equals and (file := next(given, "")) == "":
            raise ValueError("--use needs a Python file, such as --use mine.py")
        plugins.use(file)
    return rest


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, Option("--debug", help="Show the traceback of an error.")] = False,
    use: Annotated[
        list[str] | None,
        Option("--use", metavar="FILE", help="Run a Python file that registers losses, networks or datasets."),
    ] = None,
) -> None:
    """Train, compare and serve embedding models: near what is alike, far what is not.

    Example: nearfar demo

    Example: nearfar index build efficientnet_lite0 photos/ -o my.index && nearfar serve my.index --open

    Example: nearfar init photos/ && nearfar train photos.toml && nearfar report runs/photos
    """
    if version:
        print(f"nearfar {nearfar.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
    elif context.invoked_subcommand != "serve":  # a server returns the memory of a burst of requests
        from nearfar.utils.system import reuse_memory

        reuse_memory()
