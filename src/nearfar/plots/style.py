"""The house style, and the files pictures go to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")


class Style(NamedTuple):
    """How positives or negatives are drawn, and on which side they are told of."""

    name: str
    color: str
    line: str
    mark: str
    side: Literal["left", "right"]


PULL = Style("positive", "tab:green", "-", "—", "left")
PUSH = Style("negative", "tab:blue", ":", "···", "right")


def check_file(path: Path) -> Path:
    """The path, if a picture can be written to it."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"the picture is to go to {str(path)!r}; its name must end in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise ValueError(f"the picture is to go to {str(path)!r}, but there is no folder {str(path.parent)!r}")
    return path


@contextmanager
def picture(path: str | Path, size: tuple[float, float]) -> Iterator[Figure]:
    """An empty figure, so many inches wide and high, that is written to the path once it is drawn."""
    path = check_file(Path(path))
    try:
        import matplotlib
        from matplotlib import figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib; install it with: pip install 'nearfar[plot]'") from error
    # Text stays text in an SVG, and the same picture gives the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "nearfar", "font.size": 9}):
        drawn = figure.Figure(figsize=size, layout="constrained")
        yield drawn
        dated = {} if path.suffix.lower() == ".png" else {"Date" if path.suffix == ".svg" else "CreationDate": None}
        drawn.savefig(path, dpi=150, metadata=dated)


def plain(panel: Axes) -> None:
    """A faint grid, and no frame above and to the right."""
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def tell(panel: Axes, style: Style, text: str) -> None:
    """A few words above a panel, in the colour and on the side of a style."""
    x = 0.0 if style.side == "left" else 1.0
    words = f"{style.mark} {text}"
    panel.text(x, 1.02, words, color=style.color, ha=style.side, va="bottom", fontsize=8, transform=panel.transAxes)
