"""The figures of a report, readable on a phone and on paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fald.report.svg import COLOURS, QUIET, Plot
from fald.results.kinds import KINDS
from fald.results.text import number
from fald.results.tree import draws_by_row

if TYPE_CHECKING:
    import xarray as xr

CLEAR, OUTSIDE, EXPECTED = COLOURS[0], "#B00020", "#9a9a9a"
MOST_ROWS, _ROW_HEIGHT = 40, 46
_MOST_POINTS = 400


def figures(document: Mapping[str, Any], tree: xr.DataTree) -> dict[str, Plot]:
    """All figures that the document has something for, by the id of their place on the page."""
    made: dict[str, Plot] = {}
    effects = [e for e in document["effects"][:MOST_ROWS] if _can_be_drawn(e)]
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
    if KINDS[document["run"]["kind"]].chains:
        made["trace"] = trace(document, tree)
    if any(s["mean_drift"] is not None for s in document["sites"]):
        made["drift"] = drift(document["sites"][:MOST_ROWS])
    return made


def _can_be_drawn(effect: Mapping[str, Any]) -> bool:
    """Whether the numbers have a place on an axis; the table shows all of them."""
    numbers = [effect[key] for key in ("estimate", "low", "high")]
    ratio = effect["scale"].endswith("ratio")
    return all(v is not None and np.isfinite(v) and (v > 0 or not ratio) for v in numbers)


def _on_log_scale(effect: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """An effect as its parameter, instead of as a ratio."""
    row = document["run"]["summary"][effect["row"]]
    _, low, high = effect["keys"]
    ends = [key.removeprefix(effect["scale"]).strip() for key in (low, high)]
    name = f"log {effect['scale'].removesuffix(' ratio')}"
    estimate = {"estimate": row["mean"], "low": row[ends[0]], "high": row[ends[1]]}
    return {**effect, **estimate, "neutral": 0.0, "scale": name}


def _height(rows: Sequence[Any]) -> int:
    return _ROW_HEIGHT * len(rows)


def _places(rows: Sequence[Any]) -> list[int]:
    """Heights of the rows' marks; a row's words stand above its mark, so that long names fit a phone."""
    return [_ROW_HEIGHT * i + 32 for i in range(len(rows))]


def forest(effects: Sequence[Mapping[str, Any]], level: float) -> Plot:
    """A row per effect: its interval, on a logarithmic axis for ratios."""
    ratio, neutral = effects[0]["scale"].endswith("ratio"), effects[0]["neutral"]
    ends = [v for e in effects for v in (e["low"], e["high"])] + ([] if neutral is None else [neutral])
    plot = Plot(_height(effects), _log_span(ends) if ratio else _span(ends), log=(ratio, False))
    ticks = _ratio_ticks(min(ends), max(ends)) if ratio else None
    plot.x_axis(f"{effects[0]['scale'] or 'mean'}, {100 * level:g}% credible interval", ticks)
    if neutral is not None:
        plot.upright(neutral, (0, plot.height), QUIET, 1.5, dash="6 4")
    for place, e in zip(_places(effects), effects):
        colour = CLEAR if e["excluded"] else QUIET
        numbers = f"{number(e['estimate'])} ({number(e['low'])} to {number(e['high'])})"
        plot.segment((e["low"], e["high"]), place, colour, 2.5, ends=True)
        said = f"{e['label']}: {numbers}"
        plot.mark(e["estimate"], place, "diamond" if e["excluded"] else "circle", colour, said=said)
        plot.words(place - 13, e["label"], numbers)
    return plot


def _ratio_ticks(low: float, high: float) -> list[float] | None:
    """Ticks that are read as factors; the wider the range, the coarser.

    Examples
    --------
    >>> _ratio_ticks(0.6, 1.9)
    [0.6, 0.8, 1, 1.25, 1.5, 2]
    """
    low, high = min(low, 1.0), max(high, 1.0)
    width = high / low
    if width <= 1.5:
        return None
    if width <= 6:
        fine = (0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 4, 5, 6)
        return [t for t in fine if low / 1.1 <= t <= high * 1.1]
    base = 2.0 if width <= 300 else 10.0
    first, last = np.floor(np.log(low) / np.log(base)), np.ceil(np.log(high) / np.log(base))
    return [float(t) for t in base ** np.arange(first, last + 1, max(1, (last - first) // 8))]


def calibration(checked: Mapping[str, Any]) -> Plot:
    """Seen against predicted averages, over rows of similar prediction."""
    bins = checked["bins"]
    span = _span([v for b in bins for v in (b["predicted"], b["seen"], b["low"], b["high"])])
    plot = Plot(310, span, span).x_axis("predicted").y_axis("seen")
    plot.line(span, span, QUIET, 1.5, dash="6 4")
    for b in bins:
        plot.upright(b["predicted"], (plot.down(b["high"]), plot.down(b["low"])), EXPECTED, 8)
    for b in bins:
        said = (
            f"{b['rows']} rows: predicted {number(b['predicted'])}, seen {number(b['seen'])}, "
            f"expected range {number(b['low'])} to {number(b['high'])}"
        )
        plot.mark(b["predicted"], plot.down(b["seen"]), "circle", CLEAR, said=said)
    return plot


def site_means(sites: Sequence[Mapping[str, Any]], outcome: str) -> Plot:
    """The mean outcome of every site, over the range that the model expects."""
    plot = Plot(_height(sites), _span([v for s in sites for v in (s["low"], s["high"], s["seen"])]))
    plot.x_axis(outcome)
    for place, s in zip(_places(sites), sites):
        outside = not s["low"] <= s["seen"] <= s["high"]
        numbers = f"seen {number(s['seen'])}, expected {number(s['low'])} to {number(s['high'])}"
        plot.segment((s["low"], s["high"]), place, EXPECTED, 9)
        shape, colour = ("cross", OUTSIDE) if outside else ("circle", CLEAR)
        plot.mark(s["seen"], place, shape, colour, said=f"{s['client']}: {numbers}")
        plot.words(place - 13, s["client"], numbers)
    return plot


def _span(values: Sequence[float]) -> tuple[float, float]:
    """A range a little wider than the values."""
    low, high = min(values), max(values)
    pad = 0.04 * (high - low or 1.0)
    return low - pad, high + pad


def _log_span(values: Sequence[float]) -> tuple[float, float]:
    low, high = _span(np.log(values).tolist())
    return float(np.exp(low)), float(np.exp(high))


def trace(document: Mapping[str, Any], tree: xr.DataTree) -> Plot:
    """The chains of the parameter that mixes worst, against rounds."""
    rows = document["run"]["summary"]
    worst = max(rows, key=lambda r: np.inf if r["r_hat"] is None else r["r_hat"])["parameter"]
    draws = draws_by_row(tree)[worst][1]
    rounds = tree.children["sample_stats"].to_dataset()["round"].values
    taken = np.unique(np.linspace(0, len(rounds) - 1, _MOST_POINTS).astype(int))
    shown = draws[: len(COLOURS), taken].astype(float)
    finite = shown[np.isfinite(shown)]
    heights = _span(finite.tolist() if finite.size else [0.0])
    plot = Plot(220, _span([float(rounds[0]), float(rounds[-1])]), heights)
    plot.x_axis("round").y_axis(worst)
    for chain, colour in zip(shown, COLOURS):
        plot.line(rounds[taken].tolist(), chain.tolist(), colour, 1)
    return plot


def drift(sites: Sequence[Mapping[str, Any]]) -> Plot:
    """How far each site ends from the average: mean and largest over the kept rounds."""
    known = [s for s in sites if s["mean_drift"] is not None]
    plot = Plot(_height(known), (0.0, 1.04 * max(s["max_drift"] for s in known) or 1.0))
    plot.x_axis("distance from the average at the end of a round")
    for place, s in zip(_places(known), known):
        numbers = f"mean {number(s['mean_drift'])}, largest {number(s['max_drift'])}"
        plot.segment((s["mean_drift"], s["max_drift"]), place, CLEAR, 2.5, ends=True)
        plot.mark(s["mean_drift"], place, "circle", CLEAR, said=f"{s['client']}: {numbers}")
        plot.words(place - 13, s["client"], numbers)
    return plot
