"""What commands print and write, plain where there is no terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nearfar.utils.folders import claim_file
from nearfar.utils.shipped import parse_value

SHOWN = 20  # lines of a list that may be long
STDOUT = Path("-")  # a file that is none: what would be written there is printed, and nothing else
COMMANDS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")  # to a terminal, or no text at all


def visible(text: str) -> str:
    r"""Text that moves nothing on a terminal, whatever a file is called: control characters are spelled out.

    >>> visible("\x1b[31mred.jpg")
    '\\x1b[31mred.jpg'
    """
    return COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(text: str) -> None:
    """A line, or several, as they are: no markup, and not broken."""
    from rich.console import Console

    lines = "\n".join(visible(line) for line in text.split("\n"))
    Console(highlight=False, soft_wrap=True).print(lines, markup=False)


@contextmanager
def bad_files(option: str) -> Iterator[None]:
    """Name the option that continues without the files that could not be decoded."""
    try:
        yield
    except ValueError as error:
        from nearfar.data.store.prepare import BadFilesError

        if isinstance(error, BadFilesError):
            raise ValueError(error.message(option)) from error
        raise


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Rows of text; the columns numbered in ``right`` are of numbers."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    Console(highlight=False).print(table)


def output_file(file: Path | None, kind: str | None, *inputs: Any, force: bool | None) -> Path | None:
    """The path of a file to write, which may replace an earlier one of this kind only; or none, or STDOUT."""
    return file if file in (None, STDOUT) else claim_file(file, kind, inputs, force=force)


def print_json(file: Path | None, value: Any) -> None:
    """Write a value to a file and say so, or print it; without a file nothing."""
    from nearfar.utils.atomic import write_json

    if file is None:
        return
    if file == STDOUT:
        print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))
        return
    write_json(file, value)
    say(f"wrote {file}")


def print_text(file: Path | None, text: str) -> None:
    """Write text to a file and say so, or print it."""
    from nearfar.utils.atomic import write_text

    if file is None:
        print(text)
        return
    write_text(file, text + "\n")
    say(f"wrote {file}")


def print_list(one: str, many: str, lines: Sequence[str], everything: bool | None = None) -> None:
    """Lines below a title that counts them; the first ones unless everything is wanted."""
    if not lines:
        return
    shown = lines if everything else lines[:SHOWN]
    say(f"{len(lines):,} {one if len(lines) == 1 else many}:")
    for line in shown:
        say(f"  {visible(line)}")
    say_more(len(lines), len(shown), "" if everything is None else "; --all lists them")


def say_more(count: int, shown: int, how: str = "; --all lists them") -> None:
    """That a list went on, and how to see the rest."""
    if count > shown:
        say(f"  … and {count - shown:,} more{how}")


def whole_numbers(option: str, text: str) -> list[int]:
    """Parse whole numbers separated by commas."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} is {text!r}; whole numbers separated by commas are needed") from None


def setting(text: str) -> tuple[str, Any]:
    """Parse ``NAME=VALUE`` with a TOML value; "none" is None."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"--set is {text!r}; NAME=VALUE is needed")
    found = parse_value(value)
    return name.strip(), None if found == "none" else found
