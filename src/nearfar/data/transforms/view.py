"""How a picture is looked at: which part of it, how large, and from which side.

Every view is four steps with whole numbers: cut a piece out of the picture, resize the piece, cut a window out of that,
and perhaps mirror it. Plans are made for a whole batch at once; ``nearfar.data.transforms.cpu`` carries
them out. What else happens to the window, to its colours for instance, is told by
``nearfar.data.transforms.effects``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearfar.data.transforms.effects import Draw, Effects, draw_effects
from nearfar.data.transforms.pieces import Whole, random_pieces
from nearfar.utils.validation import number, one_of, positive, whole

CROPS = ("random", "center", "random_resized", "none")
ASPECTS = ("keep", "squash", "shrink")
LIMITS = {"color": 1.0, "grey": 1.0, "erase": 1.0, "rotate": 180.0}  # of what there is of each effect


@dataclass(frozen=True)
class Plan:
    """What to do with each of b pictures.

    Args:
        pieces: [b, 4], top, left, height and width of the piece that is cut out of the picture.
        resized: [b, 2], height and width it is resized to.
        corners: [b, 2], top and left of the window in the resized piece.
        flips: [b], whether the window is mirrored.
        size: Height and width of the window, the same for all.
    """

    pieces: Whole
    resized: Whole
    corners: Whole
    flips: NDArray[np.bool_]
    size: tuple[int, int]

    def __len__(self) -> int:
        return len(self.flips)

    @property
    def boxes(self) -> NDArray[np.float64]:
        """[b, 4], top, left, height and width of what the windows show, in pixels of the pictures."""
        scale = self.pieces[:, 2:] / self.resized
        return np.concatenate([self.pieces[:, :2] + self.corners * scale, self.size * scale], axis=1)

    def touched(self) -> Whole:
        """[b, 4], top, left, height and width of the pixels that have any part in the windows."""
        scale = self.pieces[:, 2:] / self.resized
        reach = np.maximum(scale, 1.0)  # of the triangle filter, see render
        first = np.floor((self.corners + 0.5) * scale - reach - 0.5).astype(np.int64) + 1
        last = np.ceil((self.corners + np.array(self.size) - 0.5) * scale + reach - 0.5).astype(np.int64) - 1
        first, last = np.maximum(first, 0), np.minimum(last, self.pieces[:, 2:] - 1)
        return np.concatenate([self.pieces[:, :2] + first, last - first + 1], axis=1)


@dataclass(frozen=True, kw_only=True)
class View:
    """What becomes of a picture before a network sees it.

    Args:
        size: Of what the network sees, one number or (height, width).
        crop: "random": anywhere in the resized picture; "center": its middle; "random_resized": a piece of random
            area and shape, resized to ``size``; "none": the whole picture, squashed to ``size``.
        resize: Before "random" and "center": the shorter side (aspect "keep") or both ("squash"). None leaves pictures
            as they are; only those too small for the window grow to fit it.
        aspect: "keep" or "squash", where ``resize`` is used; or "shrink": as "keep" for pictures that are larger, as
            without ``resize`` for others.
        scale: Of "random_resized": smallest and largest share of the picture's area.
        ratio: Of "random_resized": smallest and largest width / height.
        flip: Mirror every other picture, at random.
        color: Up to 1: brightness, contrast and saturation are multiplied, in this order, by random factors from
            1 − ``color`` to 1 + ``color``. Pictures of one channel have no saturation.
        grey: The share of pictures that become grey; those of one channel are, and stay as they are.
        erase: The share of pictures in which a random rectangle is wiped out: 2 to 33 % of the window, 0.3 to 3.3
            times as wide as high. It is zero after the normalization, which is the mean; without one, black.
        rotate: Up to so many degrees, either way, each window is turned about its middle. What comes in from outside is
            its mirror image.

    The last four are off where they are None. Each has random numbers of its own: crops, flips and the others stay the
    same draws whether it is on or not.

    Differences:
        Colours change as torchvision's ColorJitter changes them, but always in the same order, and hues stay. Random
        erasing draws shapes on a logarithmic scale, as random crops do; the paper draws them evenly, and fills with
        random values where it does not say otherwise.

    Reference:
        Zhong et al., Random Erasing Data Augmentation, 2017.

    >>> view = View(size=224, crop="center", resize=256, flip=False)
    >>> view.plan(np.array([[512, 1024]])).boxes.tolist()
    [[32.0, 288.0, 448.0, 448.0]]
    """

    size: int | tuple[int, int] = 224
    crop: str = "random"
    resize: int | None = 256
    aspect: str = "keep"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True
    color: float | None = None
    grey: float | None = None
    erase: float | None = None
    rotate: float | None = None

    def __post_init__(self) -> None:
        one_of("crop", self.crop, CROPS)
        one_of("aspect", self.aspect, ASPECTS)
        for side in self.window:
            whole("size", side)
        if self.resize is not None and whole("resize", self.resize) < max(self.window) and self.crop in CROPS[:2]:
            raise ValueError(f"resize is {self.resize}; a window of size {self.size} needs at least {max(self.window)}")
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if positive(name, low) > number(name, high):
                raise ValueError(f"{name} is {(low, high)}; the first must not be larger than the second")
        number("scale", self.scale[1], high=1.0)
        for name, most in LIMITS.items():
            if getattr(self, name) is not None:
                number(name, getattr(self, name), low=0.0, high=most, open_low=True)

    @property
    def window(self) -> tuple[int, int]:
        """Height and width of what the network sees."""
        return self.size if isinstance(self.size, tuple) else (self.size, self.size)

    @property
    def random(self) -> bool:
        """Whether two plans for one picture can differ."""
        return self.flip or self.crop in ("random", "random_resized")

    def plan(self, sizes: NDArray[Any], rng: np.random.Generator | None = None) -> Plan:
        """A plan for pictures of these heights and widths, [b, 2]; a view with nothing random needs no generator."""
        sizes = np.asarray(sizes, dtype=np.int64)
        if sizes.ndim != 2 or sizes.shape[1] != 2 or (sizes < 1).any():
            raise ValueError(f"sizes has shape {sizes.shape}; needed is [b, 2] of numbers ≥ 1")
        if rng is None and self.random:
            raise ValueError("rng is None; a view with a random crop or flip needs a numpy.random.Generator")
        window = np.array(self.window)
        pieces = np.concatenate([np.zeros_like(sizes), sizes], axis=1)
        resized = np.broadcast_to(window, sizes.shape)
        corners = np.zeros_like(sizes)
        if self.crop == "random_resized":
            assert rng is not None
            pieces = random_pieces(sizes, self.scale, self.ratio, rng)
        elif self.crop != "none":
            resized = self._resized(sizes)
            room = resized - window
            if self.crop == "random":
                assert rng is not None
                corners = rng.integers(0, room + 1)
            else:
                corners = np.rint(room / 2).astype(np.int64)
        flips = rng.random(len(sizes)) < 0.5 if self.flip and rng is not None else np.zeros(len(sizes), dtype=bool)
        return Plan(pieces, resized, corners, flips, self.window)

    def effects(self, count: int, draw: Draw, *, rank: int = 0, ranks: int = 1) -> Effects | None:
        """What happens to the windows of ``count`` pictures, None where nothing does.

        Args:
            draw: Gives the generator of an effect by its name: "color", "grey", "erase" or "rotate".
            rank, ranks: Which share of a batch these are, and of how many of one size.

        >>> view = View(grey=0.5)
        >>> view.effects(4, lambda name: np.random.default_rng(0)).greys.tolist()
        [False, True, True, True]
        """
        settings = {name: getattr(self, name) for name in LIMITS}
        return draw_effects(draw, count, self.window, **settings, rank=rank, ranks=ranks)

    def _resized(self, sizes: Whole) -> Whole:
        """[b, 2], how large whole pictures become before the window is cut out of them."""
        if self.resize is not None:
            if self.aspect == "squash":
                return np.full_like(sizes, self.resize)
            shorter = sizes.min(axis=1, keepdims=True)
            kept: Whole = self.resize * sizes // shorter
            if self.aspect == "keep":
                return kept
            sizes = np.where(shorter > self.resize, kept, sizes)
        # Exactly as they are, or as little larger as they have to be.
        growth = np.maximum((np.array(self.window) / sizes).max(axis=1, keepdims=True), 1.0)
        grown: Whole = np.maximum(np.rint(sizes * growth).astype(np.int64), self.window)
        return grown
