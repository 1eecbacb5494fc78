"""The figures of a report: Plotly's data and layout, readable on a phone and on paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from fald.results import draws_by_row
from fald.tables import number

if TYPE_CHECKING:
    import xarray as xr

# Okabe and Ito's colours; shapes say the same, for print and for colour-blind readers
CLEAR, OTHER, OUTSIDE, EXPECTED, INK, GRID = "#0072B2", "#595959", "#B00020", "#9a9a9a", "#1a1a1a", "#d9d9d9"
CHAINS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
MOST_ROWS, _ROW_HEIGHT = 40, 46
_MOST_POINTS = 400
_FONT = {"family": "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif", "size": 14, "color": INK}

Figure = dict[str, Any]


def figures(document: Mapping[str, Any], tree: xr.DataTree) -> dict[str, Figure]:
    """All figures that the document has something for, by the id of their place on the page."""
    made: dict[str, Figure] = {}
    effects = document["effects"][:MOST_ROWS]
    if effects:
        made["forest"] = forest(effects, document["run"]["level"])
        if any(e["scale"] for e in effects):
            made["forest-log"] = forest(
                [_on_log_scale(e, document) for e in effects], document["run"]["level"]
            )
    checked = document["predictive"]
    if checked is not None:
        made["calibration"] = calibration(checked)
        shown = [s for s in checked["sites"] if s["seen"] is not None]
        if shown:
            made["site-means"] = site_means(shown[:MOST_ROWS], checked["outcome"])
    if not document["run"]["point_estimate"] and "verdict" not in document["run"]:
        made["trace"] = trace(document, tree)
    if any(s["mean_drift"] is not None for s in document["sites"]):
        made["drift"] = drift(document["sites"][:MOST_ROWS])
    return made


def _on_log_scale(effect: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """An effect as its parameter, instead of as a ratio."""
    row = document["run"]["summary"][effect["row"]]
    _, low, high = effect["keys"]
    ends = [key.removeprefix(effect["scale"]).strip() for key in (low, high)]
    name = f"log {effect['scale'].removesuffix(' ratio')}"
    estimate = {"estimate": row["mean"], "low": row[ends[0]], "high": row[ends[1]]}
    return {**effect, **estimate, "neutral": 0.0, "scale": name}


def _plain(text: str) -> str:
    """Text that Plotly shows as it is, whatever tags a name pretends to have."""
    return escape(text, quote=False)


def _layout(height: int, x: Mapping[str, Any], y: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": OTHER, "ticks": "outside", "tickcolor": OTHER}
    return {
        "height": height,
        "font": _FONT,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "showlegend": False,
        "dragmode": False,
        "hoverlabel": {"bgcolor": "#ffffff", "font": _FONT},
        "xaxis": {**axis, "automargin": True, **x},
        "yaxis": {**axis, "automargin": True, **y},
        **more,
    }


def _as_dict(traces: Sequence[Any], layout: Mapping[str, Any]) -> Figure:
    """Plotly's own check of the figure, then plain values."""
    import plotly.graph_objects as go

    made = go.Figure(data=list(traces), layout=dict(layout))
    return {key: value for key, value in made.to_plotly_json().items() if key in ("data", "layout")}


def _line(**values: Any) -> Any:
    import plotly.graph_objects as go

    return go.Scatter(**values)


def _rows(count: int) -> list[int]:
    """Heights of rows, the first on top."""
    return list(range(count, 0, -1))


def _row_axis(count: int) -> dict[str, Any]:
    return {"visible": False, "range": [0.5, count + 0.95], "fixedrange": True}


def _above(place: int, name: str, numbers: str) -> dict[str, Any]:
    """A row's name and numbers, above its mark and not beside it, so that long names fit a phone."""
    return {
        "text": f"<b>{_plain(name)}</b>  {numbers}",
        "x": 0,
        "xref": "paper",
        "xanchor": "left",
        "y": place,
        "yanchor": "bottom",
        "yshift": 7,
        "showarrow": False,
        "align": "left",
        "font": {"size": 13, "color": INK},
        "bgcolor": "rgba(255,255,255,0.8)",
        "borderpad": 0,
    }


def forest(effects: Sequence[Mapping[str, Any]], level: float) -> Figure:
    """A row per effect: its interval, on a logarithmic axis for ratios."""
    ratio, neutral = effects[0]["scale"].endswith("ratio"), effects[0]["neutral"]
    traces, notes, shapes = [], [], []
    for place, e in zip(_rows(len(effects)), effects):
        colour = CLEAR if e["excluded"] else OTHER
        numbers = f"{number(e['estimate'])} ({number(e['low'])} to {number(e['high'])})"
        whiskers = {
            "type": "data",
            "symmetric": False,
            "array": [e["high"] - e["estimate"]],
            "arrayminus": [e["estimate"] - e["low"]],
            "color": colour,
            "thickness": 2.5,
            "width": 5,
        }
        marker = {"color": colour, "size": 11, "symbol": "diamond" if e["excluded"] else "circle"}
        said = f"{_plain(e['label'])}: {numbers}<extra></extra>"
        traces.append(_line(
            x=[e["estimate"]], y=[place], error_x=whiskers, mode="markers", marker=marker, hovertemplate=said
        ))  # fmt: skip
        notes.append(_above(place, e["label"], numbers))
    if neutral is not None:
        line = {"color": OTHER, "width": 1.5, "dash": "dash"}
        shapes.append(
            {"type": "line", "x0": neutral, "x1": neutral, "y0": 0, "y1": 1, "yref": "paper", "line": line}
        )
    scale = effects[0]["scale"] or "mean"
    x = {
        "title": {"text": f"{scale}, {100 * level:g}% credible interval"},
        "type": "log" if ratio else "linear",
    }
    if ratio:
        x |= _ratio_ticks(min(e["low"] for e in effects), max(e["high"] for e in effects))
    y = _row_axis(len(effects))
    return _as_dict(traces, _layout(_height(effects), x, y, annotations=notes, shapes=shapes))


def _height(rows: Sequence[Any]) -> int:
    return _ROW_HEIGHT * len(rows) + 84


def _ratio_ticks(low: float, high: float) -> dict[str, Any]:
    """Ticks that are read as factors; the wider the range, the coarser.

    Examples
    --------
    >>> _ratio_ticks(0.6, 1.9)["ticktext"]
    ['0.6', '0.8', '1', '1.25', '1.5', '2']
    """
    low, high = min(low, 1.0), max(high, 1.0)
    width = high / low
    if width <= 1.5:
        return {}
    if width <= 6:
        fine = (0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 4, 5, 6)
        ticks = [t for t in fine if low / 1.1 <= t <= high * 1.1]
    else:
        base = 2.0 if width <= 300 else 10.0
        first, last = np.floor(np.log(low) / np.log(base)), np.ceil(np.log(high) / np.log(base))
        ticks = base ** np.arange(first, last + 1, max(1, (last - first) // 8))
    return {"tickvals": [float(t) for t in ticks], "ticktext": [f"{t:g}" for t in ticks]}


def calibration(checked: Mapping[str, Any]) -> Figure:
    """Seen against predicted averages, over rows of similar prediction."""
    bins = checked["bins"]
    x = [b["predicted"] for b in bins]
    values = [v for b in bins for v in (b["predicted"], b["seen"], b["low"], b["high"])]
    span = _span(values)
    said = [
        f"{b['rows']} rows: predicted {number(b['predicted'])}, seen {number(b['seen'])}, "
        f"expected range {number(b['low'])} to {number(b['high'])}<extra></extra>"
        for b in bins
    ]
    middle = [(b["low"] + b["high"]) / 2 for b in bins]
    whiskers = {
        "type": "data",
        "array": [(b["high"] - b["low"]) / 2 for b in bins],
        "color": EXPECTED,
        "thickness": 8,
        "width": 0,
    }
    hidden = {"color": "rgba(0,0,0,0)", "size": 1}
    traces = [
        _line(
            x=span,
            y=span,
            mode="lines",
            line={"color": OTHER, "dash": "dash", "width": 1.5},
            hoverinfo="skip",
        ),
        _line(x=x, y=middle, mode="markers", marker=hidden, error_y=whiskers, hoverinfo="skip"),
        _line(
            x=x,
            y=[b["seen"] for b in bins],
            mode="markers",
            marker={"color": CLEAR, "size": 10, "line": {"color": "#ffffff", "width": 1}},
            hovertemplate=said,
        ),
    ]
    x_axis = {"title": {"text": "predicted"}, "range": span}
    y_axis = {"title": {"text": "seen"}, "range": span}
    return _as_dict(traces, _layout(380, x_axis, y_axis))


def site_means(sites: Sequence[Mapping[str, Any]], outcome: str) -> Figure:
    """The mean outcome of every site, over the range that the model expects."""
    traces, notes = [], []
    for place, s in zip(_rows(len(sites)), sites):
        outside = not s["low"] <= s["seen"] <= s["high"]
        numbers = f"seen {number(s['seen'])}, expected {number(s['low'])} to {number(s['high'])}"
        marker = {"color": OUTSIDE if outside else CLEAR, "size": 11, "symbol": "x" if outside else "circle"}
        ends = [s["low"], s["high"]]
        bar = {"color": EXPECTED, "width": 9}
        said = f"{_plain(s['client'])}: {numbers}<extra></extra>"
        traces += [
            _line(x=ends, y=[place, place], mode="lines", line=bar, hoverinfo="skip"),
            _line(x=[s["seen"]], y=[place], mode="markers", marker=marker, hovertemplate=said),
        ]
        notes.append(_above(place, s["client"], numbers))
    x = {
        "title": {"text": outcome},
        "range": _span([v for s in sites for v in (s["low"], s["high"], s["seen"])]),
    }
    return _as_dict(traces, _layout(_height(sites), x, _row_axis(len(sites)), annotations=notes))


def _span(values: Sequence[float]) -> list[float]:
    """A range a little wider than the values."""
    low, high = min(values), max(values)
    pad = 0.04 * (high - low or 1.0)
    return [low - pad, high + pad]


def trace(document: Mapping[str, Any], tree: xr.DataTree) -> Figure:
    """The chains of the parameter that mixes worst, against rounds."""
    rows = document["run"]["summary"]
    worst = max(rows, key=lambda r: np.inf if r["r_hat"] is None else r["r_hat"])["parameter"]
    draws = draws_by_row(tree)[worst][1]
    rounds = tree.children["sample_stats"].to_dataset()["round"].values
    taken = np.unique(np.linspace(0, len(rounds) - 1, _MOST_POINTS).astype(int))
    traces = [
        _line(
            x=rounds[taken].tolist(), y=np.round(draws[chain, taken].astype(float), 6).tolist(), mode="lines",
            line={"color": CHAINS[chain % len(CHAINS)], "width": 1}, name=f"chain {chain}",
        )
        for chain in range(min(len(draws), len(CHAINS)))
    ]  # fmt: skip
    title = {"text": _plain(worst)}
    return _as_dict(traces, _layout(300, {"title": {"text": "round"}}, {"title": title}))


def drift(sites: Sequence[Mapping[str, Any]]) -> Figure:
    """How far each site ends from the average: mean and largest over the kept rounds."""
    known = [s for s in sites if s["mean_drift"] is not None]
    traces, notes = [], []
    for place, s in zip(_rows(len(known)), known):
        numbers = f"mean {number(s['mean_drift'])}, largest {number(s['max_drift'])}"
        marker = {"size": [11, 11], "symbol": ["circle", "line-ns"], "color": CLEAR}
        marker["line"] = {"color": CLEAR, "width": 2.5}
        said = f"{_plain(s['client'])}: {numbers}<extra></extra>"
        traces.append(_line(
            x=[s["mean_drift"], s["max_drift"]], y=[place, place], mode="lines+markers",
            line={"color": CLEAR, "width": 2.5}, marker=marker, hovertemplate=said,
        ))  # fmt: skip
        notes.append(_above(place, s["client"], numbers))
    x = {"title": {"text": "distance from the average at the end of a round"}, "rangemode": "tozero"}
    return _as_dict(traces, _layout(_height(known), x, _row_axis(len(known)), annotations=notes))
