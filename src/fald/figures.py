"""Line figures as one self-contained HTML file that opens without a network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fald.checkpoint import write_atomically
from fald.errors import ConfigError

# Okabe and Ito's colours, which colour-blind readers can tell apart; dashes tell them apart in print
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid")


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
    import plotly.graph_objects as go

    path = Path(path)
    if path.suffix != ".html":
        raise ConfigError(
            f"a figure is written as .html; got {path}", hint=f"use {path.with_suffix('.html')}"
        )
    figure = go.Figure()
    for i, (name, (xs, ys)) in enumerate(series.items()):
        line = {
            "color": _COLOURS[i % len(_COLOURS)],
            "dash": _DASHES[(i + i // len(_COLOURS)) % len(_DASHES)],
            "width": 2.5,
        }
        figure.add_trace(go.Scatter(x=list(xs), y=list(ys), name=name, mode="lines", line=line))
    if level is not None:
        # a line of its own: plotly misplaces the text of a marked level on a logarithmic axis
        ends = [f(f(xs) for xs, _ in series.values()) for f in (min, max)]
        line = {"color": "#555555", "dash": "dot", "width": 1.5}
        figure.add_trace(go.Scatter(x=ends, y=[level[1]] * 2, name=level[0], mode="lines", line=line))
    kinds = ["log" if flag else "linear" for flag in logarithmic]
    figure.update_layout(
        title=title,
        template="plotly_white",
        font_size=15,
        xaxis={"title": x, "type": kinds[0]},
        yaxis={"title": y, "type": kinds[1]},
    )
    write_atomically(path, figure.to_html(include_plotlyjs=True, full_html=True).encode())
    return path
