"""J: ``fald.fit`` beside tools that pool the rows, and how its cost grows with rows, parameters and sites."""

from __future__ import annotations

import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import fald
from fald.calculus import predicted, sums
from fald.core.errors import ExitCode
from fald.core.threads import one_thread
from fald.lab.bench.fitters import PATIENCE
from fald.lab.bench.scaling import fitted

TOOLS = {
    "fald": "fald.fit",
    "rstanarm": "rstanarm stan_glm",
    "numpyro": "NumPyro NUTS, float32",
    "blackjax": "BlackJAX NUTS, float32",
}
# rows up to which a tool is waited for, because it takes minutes there
_MOST = {"fald": 10**7, "rstanarm": 10**5, "numpyro": 10**5, "blackjax": 10**5}
_BESIDE = [("logistic", n, 10) for n in (10**3, 10**4, 10**5)]
_BESIDE += [("logistic", 5000, 40), ("poisson", 10**4, 10), ("linear", 10**4, 10)]
_ALONG = {
    "rows": [(n, 10, 5) for n in (10**3, 10**4, 10**5, 10**6, 10**7)],
    "dim": [(5000, d, 5) for d in (5, 10, 20, 40)],
    "sites": [(20_000, 10, s) for s in (1, 5, 20, 100, 1000)],
    "wide": [(100_000, 10, s) for s in (5, 1000)],
    "many": [(1400, d, 5) for d in (50, 100, 200, 301, 500)],
}
_AXES = {"rows": 0, "dim": 1, "sites": 2}
# rows, parameters: which call, and how many times less than the best other tool
_GOALS = {
    (10**3, 10): ("warm", 4.0),
    (10**4, 10): ("cold", 10.0),
    (10**5, 10): ("cold", 10.0),
    (5000, 40): ("cold", 5.0),
}
_SECONDS = {(10**6, 10): 60.0, (10**7, 10): 600.0, (1400, 301): 180.0}  # CPU-seconds of a first call
_CLASSES = 3  # of the softmax regression whose sums are timed
_TIMES_ROWS, _TIMES_SITES = 2.0, 1.5  # memory at 10⁷ rows; CPU-seconds of 1,000 sites over those of 5


def measure(quick: bool, repeats: int) -> dict[str, Any]:
    """What ``bench.json`` holds of it: fits beside other tools, growth, and sums over rows at their limit."""
    beside = [("logistic", 300, 3)] if quick else _BESIDE
    along = {"rows": [(200, 3, 2), (400, 3, 2), (800, 3, 2)]} if quick else _ALONG
    present = [tool for tool in TOOLS if _present(tool)]
    found: dict[str, Any] = {"missing": [TOOLS[tool] for tool in TOOLS if tool not in present]}
    specs = [
        {"tool": tool, "family": family, "rows": count, "dim": dim, "sites": 5}
        for family, count, dim in beside
        for tool in present
        if count <= _MOST[tool]
    ]
    found["beside"] = _in_turns(specs, repeats)
    found["along"] = {
        axis: _in_turns(
            [{"tool": "fald", "family": "logistic", "rows": n, "dim": d, "sites": s} for n, d, s in sizes],
            1,
        )
        for axis, sizes in along.items()
    }
    found["sums"] = row_sums(2 if quick else 7)
    return found


def _present(tool: str) -> bool:
    if tool != "rstanarm":
        return importlib.util.find_spec(tool) is not None
    asked = ["Rscript", "-e", "quit(status = !requireNamespace('rstanarm', quietly = TRUE))"]
    return shutil.which("Rscript") is not None and not subprocess.run(asked, capture_output=True).returncode


def _in_turns(specs: Sequence[dict[str, Any]], repeats: int) -> list[dict[str, Any]]:
    """Every fit in a process of its own, in turns; medians of seconds and memory."""
    runs: list[list[dict[str, Any]]] = [[] for _ in specs]
    for _ in range(repeats):
        for spec, done in zip(specs, runs):
            call = [sys.executable, "-m", "fald.lab.bench.fitters", json.dumps(spec)]
            said = subprocess.run(call, capture_output=True, text=True)
            if said.returncode == int(ExitCode.INTERRUPTED) or said.returncode < 0:
                raise KeyboardInterrupt
            said.check_returncode()
            done.append(json.loads(said.stdout.splitlines()[-1]))
    middle = {key: [statistics.median(run[key] for run in done) for done in runs] for key in _NUMBERS}
    return [
        {**spec, **done[-1], **{key: middle[key][i] for key in _NUMBERS}}
        for i, (spec, done) in enumerate(zip(specs, runs))
    ]


_NUMBERS = ("cold", "warm", "memory", "error")


@one_thread  # as in a fit: threads that wait for each other would count as work
def row_sums(repeats: int) -> dict[str, float]:
    """Nanoseconds of one core per row and position, at best: functions alone, and log likelihoods."""
    rng = np.random.default_rng(0)
    tile = {kind: np.abs(rng.standard_normal((128, 512))).astype(kind) for kind in ("float32", "float64")}
    works: dict[str, tuple[Callable[[], Any], int]] = {}
    for kind, array in tile.items():
        out = np.empty_like(array)
        for name, function in {"exp": np.exp, "log1p": np.log1p}.items():
            works[f"{name}, {kind}"] = (lambda f=function, a=array, o=out: f(a, out=o)), array.size
    x = rng.standard_normal((4096, 9))
    for family in ("logistic", "poisson", "linear", "softmax"):
        make = getattr(fald.models, f"{family}_regression")
        model = make(9, _CLASSES) if family == "softmax" else make(9)
        y, positions = rng.integers(0, 2, len(x)).astype(float), 0.1 * rng.standard_normal((512, model.dim))
        work = lambda m=model, t=(x, y), p=positions: predicted.values(m, [t], p)  # noqa: E731
        works[f"log likelihood, {family}"] = work, len(x) * 512
    model = fald.models.logistic_regression(9)
    own = fald.Model(model.logprior_fn, lambda p, row: model.loglikelihood_fn(p, row), model.initial_position)
    site, positions = sums.make_site(own, (x, rng.integers(0, 2, len(x)).astype(float))), np.zeros((1024, 10))
    works["log likelihood, a user's in JAX"] = (lambda: sums.log_likelihoods(site, positions)), len(x) * 1024
    best = dict.fromkeys(works, np.inf)
    for _ in range(repeats + 1):  # the first compiles
        for name, (work, units) in works.items():
            began = time.process_time()
            work()
            best[name] = min(best[name], 1e9 * (time.process_time() - began) / units)
    return best


def shares(found: Mapping[str, float]) -> dict[str, float]:
    """Parts of the elementwise limit that log likelihoods reach: exp of every predictor and a log1p."""
    out = {}
    for name, seconds in found.items():
        what, _, family = name.partition(", ")
        if what == "log likelihood":
            kind = "float32" if family in {"logistic", "softmax"} else "float64"
            predictors = _CLASSES if family == "softmax" else 1
            out[family] = (predictors * found[f"exp, {kind}"] + found[f"log1p, {kind}"]) / seconds
    return out


def table(found: Mapping[str, Any]) -> list[str]:
    """The document as Markdown."""
    lines = [
        "",
        "**J**: `fald.fit`, 5 sites, beside tools that pool the rows: CPU-seconds of the fit. The error is "
        "the largest Monte-Carlo standard error of a mean, in posterior sds. Where a first call takes more "
        f"than {PATIENCE:g} s there is no second, and its figure is repeated",
        "",
    ]
    lines += [
        "| family | rows | d | tool | first call | second | memory, MB | error of a mean, sds | × fald |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    ours = {_case(row): row for row in found["beside"] if row["tool"] == "fald"}
    for row in found["beside"]:
        own = ours[_case(row)]
        times = "" if row is own else f"{row['cold'] / own['cold']:.3g}, {row['warm'] / own['warm']:.3g}"
        lines.append(
            f"| {row['family']} | {row['rows']:,} | {row['dim']} | {TOOLS[row['tool']]} | "
            f"{row['cold']:.2f} | {row['warm']:.2f} | {row['memory']:,.0f} | {row['error']:.4f} | {times} |"
        )
    lines += [f"\nNot installed here: {', '.join(found['missing'])}."] if found["missing"] else []
    lines += [f"\n{sentence}" for sentence in _judged(found)]
    lines += [
        "",
        "| along | rows | d | sites | verdict | first call | second | memory, MB | bytes of rows, MB |",
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for axis, rows in found["along"].items():
        for row in rows:
            lines.append(
                f"| {axis} | {row['rows']:,} | {row['dim']} | {row['sites']:,} | {row['verdict']} | "
                f"{row['cold']:.2f} | {row['warm']:.2f} | {row['memory']:,.0f} | {_megabytes(row):,.0f} |"
            )
    for axis in [axis for axis in _AXES if len(found["along"].get(axis, ())) > 2]:
        line = growth(found["along"][axis], axis)
        lines.append(
            f"\nSecond calls grow with the power {line['power']:.2f} of {axis} (R² {line['r2']:.3f})."
        )
    limit, parts = found["sums"], shares(found["sums"])
    lines += ["", "| one core, per row and position | ns | share of exp and log1p |", "|---|---|---|"]
    for name, seconds in limit.items():
        part = parts.get(name.partition(", ")[2]) if name.startswith("log ") else None
        lines.append(f"| {name} | {seconds:.2f} | {'' if part is None else f'{part:.0%}'} |")
    return lines


def _case(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["family"], row["rows"], row["dim"]


def _judged(found: Mapping[str, Any]) -> list[str]:
    """A sentence for every goal whose fits were measured."""
    said = []

    def say(what: str, value: float, limit: float, at_most: bool = True) -> None:
        holds = value <= limit if at_most else value >= limit
        rule = f"wanted at {'most' if at_most else 'least'} {limit:g}"
        said.append(f"{what}: {value:.3g}, {rule}: {'reached' if holds else '**not reached**'}.")

    for (count, dim), (call, limit) in _GOALS.items():
        here = [row for row in found["beside"] if _case(row) == ("logistic", count, dim)]
        others = {row["tool"]: row[call] for row in here}
        own = others.pop("fald", None)
        if own and others:
            best = min(others, key=lambda tool: others[tool])
            which = "first" if call == "cold" else "second"
            what = f"{count:,} rows, d = {dim}, {which} call, times less than the best other ({TOOLS[best]})"
            say(what, others[best] / own, limit, at_most=False)
    rows = [row for part in found["along"].values() for row in part]
    for row in rows:
        size = row["rows"], row["dim"]
        if size in _SECONDS:
            say(f"{size[0]:,} rows, d = {size[1]}, CPU-seconds", row["cold"], _SECONDS[size])
        if size == (10**7, 10):
            say("memory there, times the rows", row["memory"] / _megabytes(row), _TIMES_ROWS)
        few = [r for r in rows if (r["rows"], r["dim"], r["sites"]) == (*size, 5)]
        if row["sites"] == 1000 and few:
            what = f"{size[0]:,} rows, times the CPU-seconds of 5 sites that 1,000 take, first call"
            say(what, row["cold"] / few[0]["cold"], _TIMES_SITES)
    return said


def _megabytes(row: Mapping[str, Any]) -> float:
    """Of the rows, outcome included."""
    return 8e-6 * row["rows"] * row["dim"]


def growth(rows: Sequence[Mapping[str, Any]], axis: str) -> dict[str, Any]:
    """A line through the seconds of second calls along an axis, and its power."""
    return fitted([row[axis] for row in rows], [row["warm"] for row in rows])


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Second calls along rows, parameters and sites, with the other tools where there are some."""
    from matplotlib.figure import Figure

    axes = [axis for axis in _AXES if found["along"].get(axis)]
    figure = Figure(figsize=(3.2 * len(axes), 2.8), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(axes), sharey=True))
    for panel, axis in zip(panels, axes):
        own = found["along"][axis]
        panel.loglog([row[axis] for row in own], [row["warm"] for row in own], "o-", label="fald.fit", ms=4)
        for tool in list(TOOLS)[1:] if axis == "rows" else ():
            rows = [
                r for r in found["beside"] if (r["tool"], r["family"], r["dim"]) == (tool, "logistic", 10)
            ]
            panel.loglog([r["rows"] for r in rows], [r["warm"] for r in rows], "s--", label=TOOLS[tool], ms=4)
        panel.set(xlabel={"rows": "rows", "dim": "parameters", "sites": "sites"}[axis])
    panels[0].set_ylabel("CPU-seconds of the second call")
    panels[0].legend(fontsize=7)
    figure.savefig(path)
