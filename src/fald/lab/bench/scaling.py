"""Whether the cost of a round is linear in K, participants, batch and parameters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import fald
from fald.lab import methods as samplers
from fald.lab.bench.many import images, rounds_of

# so much work that clients are visited on threads everywhere; smaller rounds cost less than these lines say
_USUAL = {"local_steps": 20, "participants": 20, "batch": 100, "features": 200}
_FACTORS = (0.5, 1, 2, 4)
_CLIENTS, _ROWS = 100, 500


def _round(settings: dict[str, int]):
    rows = images(np.random.default_rng(0), _CLIENTS * _ROWS, settings["features"])
    names = tuple(f"{c:03d}" for c in range(_CLIENTS))
    data = fald.FederatedData(rows, np.arange(_CLIENTS + 1) * _ROWS, names)
    model = fald.models.softmax_regression(settings["features"], 10)
    method = samplers.fald(local_steps=settings["local_steps"], step_size=1e-9, batch_size=settings["batch"])
    run = rounds_of(model, data, method, fald.without_replacement(settings["participants"]), count=1)
    run()
    return run


def measure(repeats: int) -> list[dict[str, Any]]:
    """CPU-seconds of a round (best of several) along each axis, with a line fitted to each."""
    found = []
    for axis, usual in _USUAL.items():
        values = [int(factor * usual) for factor in _FACTORS]
        rounds = [_round({**_USUAL, axis: value}) for value in values]
        seconds: list[list[float]] = [[] for _ in values]
        for _ in range(repeats):
            for i, run in enumerate(rounds):
                began = time.process_time()
                run()
                seconds[i].append(time.process_time() - began)
        found.append({"axis": axis, "values": values, **fitted(values, [min(s) for s in seconds])})
    return found


def fitted(values: Sequence[float], seconds: Sequence[float]) -> dict[str, Any]:
    """A line fitted to relative errors, its R², and log-log slope; linear cost has a slope of at most one.

    Examples
    --------
    >>> found = fitted([1, 2, 4], [0.3, 0.5, 0.9])
    >>> round(found["intercept"], 6), round(found["slope"], 6), round(found["r2"], 6)
    (0.1, 0.2, 1.0)
    """
    x, y = np.asarray(values, float), np.asarray(seconds, float)
    slope, intercept = np.polyfit(x, y, 1, w=1 / y)
    line = intercept + slope * x
    r2 = 1 - np.sum((y - line) ** 2) / np.sum((y - y.mean()) ** 2)
    power = np.polyfit(np.log(x), np.log(y), 1)[0]
    numbers = {"slope": slope, "intercept": intercept, "r2": r2, "power": power}
    return {"seconds": y.tolist(), **{name: float(value) for name, value in numbers.items()}}


def plot(found: Sequence[dict[str, Any]], path: Any) -> None:
    """Four panels: measured rounds and the fitted lines."""
    from matplotlib.figure import Figure

    names = {"local_steps": "local steps K", "participants": "participants S"}
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    for axes, one in zip(figure.subplots(1, len(found), sharey=False), found):
        x = np.array([0, *one["values"]])
        axes.plot(one["values"], 1e3 * np.array(one["seconds"]), "o", color="#1f77b4")
        axes.plot(x, 1e3 * (one["intercept"] + one["slope"] * x), "-", color="#888888", lw=1)
        axes.set(xlabel=names.get(one["axis"], one["axis"]), ylim=(0, None), xlim=(0, None))
        axes.set_title(f"R² = {one['r2']:.3f}", fontsize=9)
    figure.axes[0].set_ylabel("CPU time of a round, ms")
    figure.savefig(path)
