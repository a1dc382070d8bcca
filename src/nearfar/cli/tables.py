"""Tables and lists on the terminal, plain where there is none."""

from __future__ import annotations

from collections.abc import Sequence

SHOWN = 20  # lines of a list that may be long


def say(text: str) -> None:
    """A line as it is: no markup, and not broken."""
    from rich.console import Console

    Console(highlight=False, soft_wrap=True).print(text, markup=False)


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
        table.add_row(*(Text(cell) for cell in row))
    Console(highlight=False).print(table)


def print_list(title: str, lines: Sequence[str], everything: bool) -> None:
    """Lines below a title that counts them; the first ones unless everything is wanted."""
    if not lines:
        return
    shown = lines if everything else lines[:SHOWN]
    say(f"{len(lines):,} {title}:")
    for line in shown:
        say(f"  {line}")
    say_more(len(lines), len(shown))


def say_more(count: int, shown: int) -> None:
    """That a list went on."""
    if count > shown:
        say(f"  … and {count - shown:,} more; --all lists them")
