"""Figures as SVG that stands in a page: no script, no library, text that keeps its size on a phone.

Places along x are percentages of the width that the page gives; heights are pixels. So a figure is as wide as
its column, and its words do not shrink with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

# Okabe and Ito's colours, which colour-blind readers can tell apart; shapes and dashes say the same in print
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
DASHES = ("", "8 4", "2 3", "8 3 2 3", "14 4", "14 4 2 4", "")
INK, QUIET, GRID = "#1a1a1a", "#595959", "#d9d9d9"
_BELOW = 46  # pixels for ticks and the title of the x axis


def ticks(low: float, high: float, most: int = 6, *, log: bool = False) -> list[float]:
    """Round numbers between two ends.

    Examples
    --------
    >>> ticks(0.03, 0.94)
    [0.2, 0.4, 0.6, 0.8]
    >>> ticks(0.5, 2000, log=True)
    [1.0, 10.0, 100.0, 1000.0]
    """
    if log:
        first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
        powers = range(first, last + 1, max(1, math.ceil((last - first + 1) / most)))
        return [10.0**p for p in powers] if len(powers) > 1 else ticks(low, high, most)
    raw = (high - low) / most
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(base * f for f in (1, 2, 5, 10) if base * f >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    found = [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]
    return [t + 0.0 for t in found]


class Plot:
    """One pair of axes, and the marks on them.

    Parameters
    ----------
    height
        Pixels between the top and the x axis.
    x, y
        (low, high) of the axes; y None: rows that the caller places by pixels.
    log
        Whether the x and the y axis are logarithmic.

    Examples
    --------
    >>> plot = Plot(100, (0.0, 10.0), (0.0, 1.0))
    >>> plot.across(5.0), plot.down(0.25)
    ('50%', 75.0)
    """

    def __init__(
        self,
        height: float,
        x: tuple[float, float],
        y: tuple[float, float] | None = None,
        log: tuple[bool, bool] = (False, False),
    ):
        self.height, self.x, self.y, self.log = height, x, y, log
        self._marks: list[str] = []
        self._left = 0

    def across(self, value: float) -> str:
        """Where a value lies along x."""
        return f"{round(100 * _share(value, self.x, self.log[0]), 3):g}%"

    def down(self, value: float) -> float:
        """How many pixels below the top a value lies."""
        assert self.y is not None
        return round(self.height * (1 - _share(value, self.y, self.log[1])), 2)

    def x_axis(self, title: str, at: Sequence[float] | None = None) -> Plot:
        """Ticks, grid and the title below."""
        at = ticks(*self.x, log=self.log[0]) if at is None else at
        for value in at:
            place = self.across(value)
            self._marks.append(
                f'<line x1="{place}" x2="{place}" y1="0" y2="{self.height + 5}" stroke="{GRID}"/>'
                f'<text x="{place}" y="{self.height + 20}" text-anchor="middle">{value:g}</text>'
            )
        self._marks.append(
            f'<line x1="0" x2="100%" y1="{self.height}" y2="{self.height}" stroke="{QUIET}"/>'
            f'<text x="50%" y="{self.height + 40}" text-anchor="middle">{escape(title)}</text>'
        )
        return self

    def y_axis(self, title: str) -> Plot:
        """Ticks and grid, the title on top."""
        assert self.y is not None
        at = ticks(*self.y, log=self.log[1])
        self._left = 14 + 8 * max([len(f"{t:g}") for t in at], default=0)
        for value in at:
            place = self.down(value)
            self._marks.append(
                f'<line x1="0" x2="100%" y1="{place}" y2="{place}" stroke="{GRID}"/>'
                f'<text x="-8" y="{place + 4}" text-anchor="end">{value:g}</text>'
            )
        self._marks.append(f'<text x="{-self._left}" y="-8">{escape(title)}</text>')
        return self

    def segment(
        self, x: tuple[float, float], y: float, colour: str, width: float, *, ends: bool = False
    ) -> None:
        """A horizontal bar at a height in pixels, with ends like whiskers if wanted."""
        a, b = map(self.across, x)
        line = f'stroke="{colour}" stroke-width="{width}"'
        self._marks.append(f'<line x1="{a}" x2="{b}" y1="{y}" y2="{y}" {line}/>')
        for place in (a, b) if ends else ():
            self._marks.append(f'<line x1="{place}" x2="{place}" y1="{y - 5}" y2="{y + 5}" {line}/>')

    def upright(self, x: float, y: tuple[float, float], colour: str, width: float, *, dash: str = "") -> None:
        """A vertical line between two heights in pixels."""
        place = self.across(x)
        self._marks.append(
            f'<line x1="{place}" x2="{place}" y1="{y[0]}" y2="{y[1]}" stroke="{colour}" '
            f'stroke-width="{width}"{_dashed(dash)}/>'
        )

    def mark(self, x: float, y: float, shape: str, colour: str, *, said: str = "") -> None:
        """A dot, diamond or cross at a height in pixels; ``said`` shows when pointed at."""
        x = float(x)
        drawn = {
            "circle": '<circle r="5.5"/>',
            "diamond": '<path d="M0-7.5 6 0 0 7.5-6 0Z"/>',
            "cross": '<path d="M-5-5 5 5M5-5-5 5" stroke-width="3.5"/>',
        }[shape]
        self._marks.append(
            f'<svg class="mark" data-x="{x!r}" x="{self.across(x)}" y="{y}" overflow="visible" '
            f'fill="{colour}" stroke="{colour}">'
            f"<title>{escape(said)}</title>{drawn}</svg>"
        )

    def words(self, y: float, bold: str, plain: str = "") -> None:
        """A line of text from the left edge, its baseline at a height in pixels."""
        self._marks.append(
            f'<text x="0" y="{y}" font-size="13" paint-order="stroke" stroke="#fff" stroke-width="3">'
            f'<tspan font-weight="600">{escape(bold)}</tspan> {escape(plain)}</text>'
        )

    def line(
        self, xs: Sequence[float], ys: Sequence[float], colour: str, width: float, *, dash: str = ""
    ) -> None:
        """A polyline through values; those that are not finite break it."""
        assert self.y is not None
        parts: list[list[str]] = [[]]
        for x, y in zip(xs, ys):
            if math.isfinite(x) and math.isfinite(y) and (y > 0 or not self.log[1]):
                parts[-1].append(f"{1000 * _share(x, self.x, self.log[0]):.5g},{self.down(y):.5g}")
            else:
                parts.append([])
        lines = "".join(f'<polyline points="{" ".join(part)}"/>' for part in parts if part)
        # stretched to the width of the figure, with lines that keep their own
        self._marks.append(
            f'<svg width="100%" height="{self.height}" viewBox="0 0 1000 {self.height}" '
            f'preserveAspectRatio="none" fill="none" stroke="{colour}" stroke-width="{width}"'
            f'{_dashed(dash)} style="overflow:hidden" class="stretched">{lines}</svg>'
        )

    def svg(self, name: str, words: str, *, hidden: bool = False) -> str:
        """The figure, with the words that stand for it where it cannot be seen."""
        top = 24 if self._left else 6
        height = self.height + _BELOW + top
        return (
            f'<div class="plot" id="{escape(name)}" style="padding:0 14px 0 {max(self._left, 14)}px"'
            f"{' hidden' if hidden else ''}>"
            f'<svg role="img" aria-label="{escape(words)}" width="100%" height="{height}" overflow="visible" '
            f'font-family="system-ui, Helvetica, Arial, sans-serif" font-size="14" fill="{INK}">'
            f'<svg y="{top}" overflow="visible">{"".join(self._marks)}</svg></svg></div>'
        )


def _share(value: float, ends: tuple[float, float], log: bool) -> float:
    low, high = ends
    if log:
        value, low, high = math.log(value), math.log(low), math.log(high)
    return (value - low) / (high - low)


def _dashed(dash: str) -> str:
    return f' stroke-dasharray="{dash}"' if dash else ""
