"""Interleaved timing: contenders take turns in one run, and ratios are to a named baseline."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def interleave(
    contenders: Mapping[str, Callable[[], object]], *, repeats: int, units: int
) -> dict[str, dict[str, float]]:
    """Time each contender ``repeats`` times, in turns, after one untimed call of each.

    Returns per contender: best and median seconds per unit, and CPU-seconds per unit of the median.
    """
    for run in contenders.values():
        run()
    wall: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            began, used = time.perf_counter(), time.process_time()
            run()
            wall[name].append((time.perf_counter() - began) / units)
            cpu[name].append((time.process_time() - used) / units)
    return {
        name: {
            "best": min(wall[name]),
            "median": statistics.median(wall[name]),
            "cpu": statistics.median(cpu[name]),
        }
        for name in contenders
    }


def table(title: str, unit: str, results: Mapping[str, Mapping[str, float]], baseline: str) -> str:
    """A Markdown table with speed-ups over the baseline."""
    lines = [
        f"### {title}",
        "",
        f"| contender | best, µs per {unit} | median | CPU, µs | × {baseline} (median) |",
        "|---|---|---|---|---|",
    ]
    base = results[baseline]["median"]
    for name, r in results.items():
        best, median, cpu = (f"{1e6 * r[k]:,.1f}" for k in ("best", "median", "cpu"))
        lines.append(f"| {name} | {best} | {median} | {cpu} | {base / r['median']:.2f} |")
    return "\n".join(lines)
