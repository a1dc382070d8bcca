"""The common style of all plots, and the files they are written to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from nearfar.utils.atomic import whole_file
from nearfar.utils.folders import claim_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")


class Style(NamedTuple):
    """How positives or negatives are drawn, and on which side their caption is."""

    name: str
    color: str
    line: str
    mark: str
    side: Literal["left", "right"]


PULL = Style("positive", "tab:green", "-", "—", "left")
PUSH = Style("negative", "tab:blue", ":", "···", "right")


def check_file(path: Path, *, force: bool = False) -> Path:
    """Return the path, or raise if no plot can be written to it.

    Args:
        path: A file name that ends in .png, .svg or .pdf, in a folder that exists.
        force: Replace a file that is no plot of ours.
    """
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"the plot file is {str(path)!r}; its name must end in {', '.join(FORMATS)}")
    return claim_file(path, "plot", force=force)


@contextmanager
def open_figure(path: str | Path, size: tuple[float, float], *, force: bool = False) -> Iterator[Figure]:
    """Open an empty figure of a size in inches; on exit it is written to the path."""
    path = check_file(Path(path), force=force)
    try:
        import matplotlib
        from matplotlib import figure
    except ImportError as error:
        raise ImportError("plots need matplotlib; install it with: pip install 'nearfar[plot]'") from error
    # Text stays text in an SVG, and the same plot gives the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "nearfar", "font.size": 9}):
        drawn = figure.Figure(figsize=size, layout="constrained")
        yield drawn
        ending = path.suffix.lower().removeprefix(".")
        dated: dict[str, str | None] = {} if ending == "png" else {"Date" if ending == "svg" else "CreationDate": None}
        about = {**dated, "Software" if ending == "png" else "Creator": "nearfar plot"}
        with whole_file(path) as draft:
            drawn.savefig(draft, dpi=150, metadata=about, format=ending)


def simplify_axes(panel: Axes) -> None:
    """Draw a faint grid and remove the frame at the top and on the right."""
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def add_caption(panel: Axes, style: Style, text: str) -> None:
    """Write a text above a panel, in the color and on the side of a style."""
    x = 0.0 if style.side == "left" else 1.0
    caption = f"{style.mark} {text}"
    panel.text(x, 1.02, caption, color=style.color, ha=style.side, va="bottom", fontsize=8, transform=panel.transAxes)
