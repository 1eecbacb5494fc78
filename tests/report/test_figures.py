"""Figures of a report: what cannot be placed on an axis is left out, and the rest is drawn."""

import math

import pytest

from fald.report.figures import figures, forest
from fald.report.svg import Plot, ticks


def effect(estimate, low, high, scale="odds ratio"):
    numbers = {"estimate": estimate, "low": low, "high": high}
    return {**numbers, "scale": scale, "neutral": 1.0, "excluded": False, "label": "<b>x</b>", "row": 0,
            "keys": ("odds ratio", "odds ratio 2.5%", "odds ratio 97.5%")}  # fmt: skip


def document(effects):
    summary = [{"parameter": "x", "mean": 0.1, "2.5%": -1.0, "97.5%": 1.2, "r_hat": 1.0}]
    run = {"level": 0.95, "summary": summary, "kind": "few-round"}
    return {"effects": effects, "run": run, "predictive": None, "sites": []}


@pytest.mark.parametrize("wrong", [math.inf, math.nan, 0.0, None])
def test_an_effect_without_a_place_on_the_axis_does_not_end_the_report(wrong):
    good = effect(0.5, 0.2, 0.9)
    drawn = figures(document([good, effect(wrong, 0.1, 2.0)]), None)["forest"]
    text = drawn.svg("forest", "words")
    assert text.count('class="mark"') == 1
    assert "<b>x" not in text  # names are text, not markup
    # the twin: two that have a place are both drawn
    assert forest([good, good], 0.95).svg("forest", "words").count('class="mark"') == 2


@pytest.mark.parametrize(
    ("low", "high"), [(1e-300, 1e300), (0.99999, 1.00001), (-1e12, 1e12), (3.0, 3.0000001)]
)
def test_ticks_are_few_and_between_the_ends(low, high):
    for found in [ticks(low, high)] + ([ticks(low, high, log=True)] if low > 0 else []):
        assert 1 <= len(found) <= 13
        slack = 1e-8 * (high - low)
        assert all(low - slack <= t <= high + slack for t in found)


def test_a_line_breaks_where_values_are_not_finite():
    plot = Plot(100, (0.0, 3.0), (0.0, 1.0))
    plot.line([0, 1, 2, 3], [0.1, math.nan, 0.5, 0.6], "#000", 1)
    assert plot.svg("a", "b").count("<polyline") == 2
