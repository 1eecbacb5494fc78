"""Line figures as one self-contained HTML file that opens without a network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from fald.core.errors import ConfigError
from fald.core.files import write_atomically
from fald.report.svg import COLOURS, DASHES, QUIET, Plot

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, Helvetica, Arial, sans-serif; color: #1a1a1a; }}
body {{ max-width: 860px; margin: 24px auto; padding: 0 16px; }}
h1 {{ font-size: 20px; }}
ul {{ display: flex; flex-wrap: wrap; gap: 4px 20px; list-style: none; padding: 0; }}
.stretched * {{ vector-effect: non-scaling-stroke; }}
</style></head><body><h1>{title}</h1>{plot}<ul>{legend}</ul></body></html>
"""


def write_lines(
    path: str | Path,
    series: Mapping[str, tuple[Any, Any]],
    *,
    title: str,
    x: str,
    y: str,
    logarithmic: tuple[bool, bool] = (False, False),
    level: tuple[str, float] | None = None,
) -> Path:
    """Draw named lines and write them to an HTML file.

    Parameters
    ----------
    path
        File to write; its name must end in ``.html``.
    series
        Name -> (x values, y values).
    title, x, y
        Words on the figure.
    logarithmic
        Whether the x and the y axis are logarithmic.
    level
        Name and height of a horizontal line to compare with.
    """
    path = Path(path)
    if path.suffix != ".html":
        raise ConfigError(
            f"a figure is written as .html; got {path}", hint=f"use {path.with_suffix('.html')}"
        )
    values = [[float(v) for pair in series.values() for v in pair[axis]] for axis in (0, 1)]
    if level is not None:
        values[1].append(level[1])
    ends = [_ends(v, flag) for v, flag in zip(values, logarithmic)]
    plot = Plot(420, ends[0], ends[1], logarithmic).x_axis(x).y_axis(y)
    legend = []
    for i, (name, (xs, ys)) in enumerate(series.items()):
        style = COLOURS[i % len(COLOURS)], 2.5, DASHES[(i + i // len(COLOURS)) % len(DASHES)]
        plot.line([float(v) for v in xs], [float(v) for v in ys], *style[:2], dash=style[2])
        legend.append(_entry(name, *style))
    if level is not None:
        plot.line(ends[0], [level[1]] * 2, QUIET, 1.5, dash="2 3")
        legend.append(_entry(level[0], QUIET, 1.5, "2 3"))
    page = _PAGE.format(title=escape(title), plot=plot.svg("figure", title), legend="".join(legend))
    write_atomically(path, page.encode())
    return path


def _ends(values: list[float], log: bool) -> tuple[float, float]:
    finite = [v for v in values if math.isfinite(v) and (v > 0 or not log)] or [1.0]
    low, high = min(finite), max(finite)
    if log:
        return (low / 1.1, high * 1.1)
    pad = 0.04 * (high - low or 1.0)
    return (low - pad, high + pad)


def _entry(name: str, colour: str, width: float, dash: str) -> str:
    style = f'stroke="{colour}" stroke-width="{width}" stroke-dasharray="{dash}"'
    line = f'<svg width="34" height="10"><line x1="0" x2="34" y1="5" y2="5" {style}/></svg>'
    return f"<li>{line} {escape(name)}</li>"
