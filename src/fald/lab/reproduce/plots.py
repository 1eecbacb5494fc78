"""Figures for print: colours that colour-blind readers can tell apart, and a dash and a marker for each."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Stroke(NamedTuple):
    """How one series looks."""

    color: str
    dash: Any
    marker: str


# Okabe and Ito's colours without their yellow, which is too pale on paper
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
_DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)), "-")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LAW = "#555555"

_RC: dict[Any, Any] = {
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "legend.handlelength": 3.2,
    "svg.hashsalt": "fald",
    "savefig.dpi": 200,
}


def look(i: int) -> Stroke:
    """The look of the i-th series.

    Examples
    --------
    >>> len({look(i) for i in range(7)})
    7
    """
    return Stroke(_COLOURS[i % 7], _DASHES[i % 7], _MARKERS[i % 7])


@contextmanager
def style() -> Iterator[None]:
    """Sizes and lines for a page, for figures made and written inside."""
    import matplotlib as mpl

    with mpl.rc_context(_RC):
        yield


def grid(rows: int, columns: int, width: float = 7.0, height: float = 2.7) -> tuple[Figure, np.ndarray]:
    """A figure with (rows, columns) axes; ``height`` is that of one row, in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def line(axes: Axes, i: int, x: Any, y: Any, *, label: str, marks: int = 8) -> None:
    """One series with its colour, dash and marker; about ``marks`` markers along it."""
    color, dash, marker = look(i)
    every = max(1, len(np.asarray(x)) // marks)
    axes.plot(x, y, color=color, linestyle=dash, marker=marker, markevery=every, label=label)


def band(axes: Axes, i: int, x: Any, ends: tuple[Any, Any]) -> None:
    """A pale band in the colour of a series."""
    axes.fill_between(x, *ends, color=look(i).color, alpha=0.18, linewidth=0)


def level(axes: Axes, value: float) -> None:
    """A thin dashed line across, to compare with."""
    axes.axhline(value, color=LAW, linewidth=0.8, linestyle=(0, (2, 2)))


def logarithmic(axes: Axes, which: str) -> None:
    """Logarithmic axes; ticks of a short range are plain numbers."""
    from matplotlib.ticker import LogFormatterSciNotation, LogLocator, NullFormatter

    for name in which:
        axis = getattr(axes, f"{name}axis")
        axes.set(**{f"{name}scale": "log"})
        low, high = axis.get_view_interval()
        if high / low < 30:
            axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
            axis.set_major_formatter("{x:g}")
        else:
            axis.set_major_formatter(LogFormatterSciNotation())
        axis.set_minor_formatter(NullFormatter())


def legend_below(figure: Figure, axes: Axes) -> None:
    """The legend of one axis below all of them, where it hides nothing."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5)


def rendered(figure: Figure, kind: str) -> bytes:
    """The figure as a file of one kind; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    with style():
        figure.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else {"Software": ""})
    return buffer.getvalue()
