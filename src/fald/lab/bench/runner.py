"""Run workloads, judge goals, write JSON, Markdown and a history."""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fald.core.checks import check_count
from fald.core.errors import ConfigError
from fald.core.files import write_atomically
from fald.core.version import __version__
from fald.lab.bench.timing import Case, Timing, interleave

WORKLOADS = {
    "simulation": "A: Gaussian simulation, step by step and composed",
    "images": "B, C: image classifiers against PyTorch",
    "chains": "D: many chains of a logistic regression against a Python loop and BlackJAX",
    "many": "E: 1,000 and 100,000 clients",
    "networks": "G, H, I: networks against loops written by hand; J: results of a million parameters",
    "start": "F: import, compilation, demo",
    "scaling": "cost of a round along K, participants, batch and features",
    "fit": "J: fald.fit beside rstanarm, NumPyro and BlackJAX on pooled rows; along rows, parameters, sites",
    "federations": "joining, beginning and rounds of federations of 4 and 20 sites on this machine",
}
_REPEATS = {
    "simulation": 7,
    "images": 5,
    "chains": 5,
    "many": 7,
    "networks": 3,
    "start": 3,
    "scaling": 9,
    "fit": 3,
    "federations": 1,
}


def run(
    names: Sequence[str],
    out: Path,
    *,
    quick: bool = False,
    repeats: int | None = None,
    report: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure workloads and write ``bench.json``, ``bench.md``, ``history.jsonl`` and pictures.

    Parameters
    ----------
    names
        Some of ``WORKLOADS``; all if empty.
    out
        Folder; the history in it is continued.
    quick
        Small sizes and two repeats: to see that it works, not to measure.
    repeats
        Timed calls of each contender; by default five or so, two if ``quick``.
    report
        Gets a line for each workload when it begins.

    Returns
    -------
    dict
        What ``bench.json`` holds.

    Raises
    ------
    ConfigError
        If there is no such workload, or ``repeats`` is not a count.
    """
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        raise ConfigError(f"no workload named {unknown[0]!r}", hint=f"there are: {', '.join(WORKLOADS)}")
    if repeats is not None:
        check_count("repeats", repeats, 1)
    say = report or (lambda line: None)
    say("machine: matrix products, normals, copies")
    document: dict[str, Any] = {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "quick": quick,
        "machine": _machine(),
        "limits": importlib.import_module("fald.lab.bench.limits").limits(),
        "cases": [],
        "scaling": [],
    }
    out.mkdir(parents=True, exist_ok=True)
    last = _last(out / "history.jsonl", document)
    for name in names or WORKLOADS:
        say(f"{name}: {WORKLOADS[name]}")
        module = importlib.import_module(f"fald.lab.bench.{name}")
        count = repeats or (2 if quick else _REPEATS[name])
        if name == "scaling":
            document["scaling"] = module.measure(count)
            module.plot(document["scaling"], out / "scaling.svg")
        elif name == "fit":
            document["fit"] = module.measure(quick, count)
            module.plot(document["fit"], out / "fit.svg")
        elif name == "federations":
            document["federations"] = module.measure(quick)
        else:
            for case in module.cases(quick):
                document["cases"].append(judged(case, interleave(case.contenders, count), document["limits"]))
        # after each workload, so that an interrupted run leaves what it has measured
        write_atomically(out / "bench.json", json.dumps(document, indent=1).encode())
        write_atomically(out / "bench.md", (markdown(document, last) + "\n").encode())
    with (out / "history.jsonl").open("a") as history:
        history.write(json.dumps(document) + "\n")
    return document


def _machine() -> dict[str, Any]:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {"cores": cores, "load": round(load, 2), "processor": _processor()}
    for package in ("jax", "numpy", "torch", "blackjax"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return {**found, "python": platform.python_version()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def judged(case: Case, timings: Mapping[str, Timing], limits: Mapping[str, float]) -> dict[str, Any]:
    """A case with its figures: seconds per unit, ratios to the baseline, and whether marks are reached."""
    base = timings[case.baseline].median
    values = [(mark, float(mark.value(timings, limits))) for mark in case.marks]
    return {
        **{key: getattr(case, key) for key in ("name", "title", "unit", "baseline")},
        "contenders": {
            name: {**timing._asdict(), "ratio": base / timing.median} for name, timing in timings.items()
        },
        "goals": [{**mark._asdict(), "value": value, "holds": mark.holds(value)} for mark, value in values],
        "missing": list(case.missing),
    }


def _last(path: Path, document: Mapping[str, Any]) -> dict[str, Any] | None:
    """The last entry of the history from a machine like this one and of the same kind."""
    entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def kind(entry: Mapping[str, Any]) -> tuple[Any, ...]:
        return entry["machine"]["processor"], entry["machine"]["cores"], entry["quick"]

    return next((entry for entry in reversed(entries) if kind(entry) == kind(document)), None)


def markdown(document: Mapping[str, Any], last: Mapping[str, Any] | None = None) -> str:
    """The document as tables; ``last`` adds how ratios have changed since then."""
    machine, limits = document["machine"], document["limits"]
    before = {
        (case["name"], name): figures["ratio"]
        for case in (last or {"cases": []})["cases"]
        for name, figures in case["contenders"].items()
    }
    lines = [
        f"fald {document['version']}, {machine['processor']}, {machine['cores']} cores, load "
        f"{machine['load']:g} at the start. Limits of the machine: sgemm {limits['sgemm']:,.0f} GFLOP/s, "
        f"normals {limits['normals']:,.0f} million/s, copy {limits['copy']:,.1f} GB/s.",
    ]
    for case in document["cases"]:
        lines += ["", f"**{case['name']}**: {case['title']}", ""]
        changed = any((case["name"], name) in before for name in case["contenders"])
        header = f"| contender | best, µs per {case['unit']} | median | CPU | × {case['baseline']} |"
        lines += [header + " last time |" * changed, "|---|---|---|---|---|" + "---|" * changed]
        for name, figures in case["contenders"].items():
            best, median, cpu = (_microseconds(figures[key]) for key in ("best", "median", "cpu"))
            row = f"| {name} | {best} | {median} | {cpu} | {_ratio(figures['ratio'])} |"
            old = before.get((case["name"], name))
            lines.append(row + (f" {_ratio(old) if old else '–'} |" if changed else ""))
        lines += [f"\nNot installed here: {', '.join(case['missing'])}."] if case["missing"] else []
        for goal in case["goals"]:
            rule = "at most" if goal["at_most"] else "at least"
            verdict = "reached" if goal["holds"] else "**not reached**"
            wanted = f"wanted {rule} {goal['limit']:,g}"
            lines.append(f"\n{goal['text']}: {_ratio(goal['value'])}, {wanted}: {verdict}.")
    if document["scaling"]:
        lines += ["", "| axis | values | ms per round (CPU) | fit, ms | R² |", "|---|---|---|---|---|"]
    for one in document["scaling"]:
        values = ", ".join(str(v) for v in one["values"])
        seconds = ", ".join(f"{1e3 * s:.1f}" for s in one["seconds"])
        fit = f"{1e3 * one['intercept']:.1f} + {1e3 * one['slope']:.3g} × value"
        lines.append(f"| {one['axis'].replace('_', '-')} | {values} | {seconds} | {fit} | {one['r2']:.4f} |")
    for name in ("fit", "federations"):
        if document.get(name):
            lines += importlib.import_module(f"fald.lab.bench.{name}").table(document[name])
    return "\n".join(lines)


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:.4g}" if seconds < 1e-3 else f"{1e6 * seconds:,.0f}"


def _ratio(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
