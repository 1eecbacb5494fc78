"""``python -m benchmarks.verdict.hunt``: posteriors that once were called *reached* wrongly, with many seeds.

Named cases of few parameters with 20 seeds each, with ``--others`` posteriors of other kinds, and with
``--large`` one seed of posteriors with 60 to 150 parameters. Every run is a line of ``hunt.jsonl``; what is
there is not run again. It ends at the first *reached* that is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.verdict import densities, hierarchies, shapes
from benchmarks.verdict.__main__ import interval, judged, wrong
from benchmarks.verdict.others import OTHERS
from benchmarks.verdict.problem import RESULTS, Problem, rotation
from benchmarks.verdict.sampled import sampled

# yields of dyestuff from six batches (Davies and Goldsmith 1972), and the eight schools (Rubin 1981)
_DYESTUFF = [
    [1545, 1440, 1440, 1520, 1580], [1540, 1555, 1490, 1560, 1495], [1595, 1550, 1605, 1510, 1560],
    [1445, 1440, 1595, 1465, 1545], [1595, 1630, 1515, 1635, 1625], [1520, 1455, 1450, 1480, 1445],
]  # fmt: skip
_SCHOOLS = [28, 8, -3, 7, -1, 1, 18, 12], [15, 10, 16, 11, 9, 11, 10, 18]
_DIMENSIONS = (60, 90, 120, 150)
_LARGE = (
    densities.mixtures, densities.scale_mixtures, densities.spikes_and_slabs, densities.funnels,
    densities.bananas, densities.ridges, densities.heavy_tails, densities.tops,
)  # fmt: skip


def _wide(dim: int, weight: float, width: float) -> Problem:
    return densities.two_normals(
        [1 - weight, weight], np.zeros((2, dim)), [np.eye(dim), width**2 * np.eye(dim)], f"d={dim}"
    )


def _cigar(dim: int, weight: float, length: float) -> Problem:
    way = rotation(dim, np.random.default_rng(dim))[0]
    spread = np.eye(dim) + (length**2 - 1) * np.outer(way, way)
    return densities.two_normals([1 - weight, weight], np.zeros((2, dim)), [np.eye(dim), spread], f"d={dim}")


def _far_modes(apart: float) -> Problem:
    means = np.array([[0.0, 0.0], [apart, 0.0]])
    return densities.two_normals([0.5, 0.5], means, [np.eye(2)] * 2, f"{apart:g} sds apart")


def _schools(centred: bool) -> Problem:
    measured, errors = (np.array(part, np.float32) for part in _SCHOOLS)
    return hierarchies.schools(measured, errors, centred, "8 groups")


def _many_groups() -> Problem:
    """Thirty counties with a few houses each, little variance between them."""
    rng = np.random.default_rng(5)
    table = 1.3 + 0.3 * rng.normal(size=(30, 1)) + 0.8 * rng.normal(size=(30, 4))
    return hierarchies.batches(table.astype(np.float32), "30 groups of 4")


CASES: dict[str, Callable[[], Problem]] = {
    "1% ten times as wide, d = 2": lambda: _wide(2, 0.01, 10),
    "1% ten times as wide, d = 5": lambda: _wide(5, 0.01, 10),
    "1% ten times as wide, d = 10": lambda: _wide(10, 0.01, 10),
    "5% five times as wide, d = 10": lambda: _wide(10, 0.05, 5),
    "2% eight times as wide, d = 2": lambda: _wide(2, 0.02, 8),
    "cigar of 3%, 15 times as long, d = 2": lambda: _cigar(2, 0.03, 15),
    "cigar of 3%, 15 times as long, d = 10": lambda: _cigar(10, 0.03, 15),
    "two equal modes 40 sds apart": lambda: _far_modes(40),
    "two equal modes 80 sds apart": lambda: _far_modes(80),
    "2% in a wide shell off centre": lambda: shapes.shell(
        np.array([3, 0], np.float32), np.float32(0.02), np.float32(15), np.float32(2)
    ),
    "Student t, 2.5 degrees, d = 2": lambda: densities.student(2, 2.5),
    "Dyestuff, explicit effects": lambda: hierarchies.batches(
        ((np.array(_DYESTUFF) - 1527.5) / 50).astype(np.float32), "6 batches of 5"
    ),
    "eight schools, centred": lambda: _schools(True),
    "eight schools, not centred": lambda: _schools(False),
    "thirty groups, explicit effects": _many_groups,
    "spike and slab, d = 10": lambda: densities.slabs(10, 0.01, 100),
    "orob, explicit effects": lambda: sampled("orob"),
    "horseshoe regression": lambda: sampled("horseshoe"),
}


def _varied(function: Any, number: int) -> Callable[[], Problem]:
    return lambda: function(np.random.default_rng([number, 11]))


# weights .002 to .3, widths 3 to 300, in some random directions or all, up to ten parameters
VARIATIONS: dict[str, Callable[[], Problem]] = {
    f"{function.__name__.replace('_', ' ')}, variation {number}": _varied(function, number)
    for number in range(8)
    for function in (densities.scale_mixtures, densities.spikes_and_slabs)
}


def _large() -> dict[str, Callable[[], Problem]]:
    """Posteriors of many parameters, by name."""

    def maker(function: Any, dim: int) -> Callable[[], Problem]:
        return lambda: function(np.random.default_rng([dim, 7]), dim)

    return {
        f"{function.__name__.replace('_', ' ')}, d = {dim}": maker(function, dim)
        for dim in _DIMENSIONS
        for function in _LARGE
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: runs, how many were *reached*, how many of these were wrong, and the worst error of them."""
    large = _large()
    lines = ["| posterior | runs | reached | wrong | worst error |", "|---|---|---|---|---|"]
    groups = {name: [name] for name in CASES}
    groups |= {"16 variations of these": list(VARIATIONS), f"{len(OTHERS)} of other kinds": list(OTHERS)}
    groups |= {"60 to 150 parameters": list(large)}
    for name, members in groups.items():
        own = [r for r in rows if r["case"] in members]
        reached = [r for r in own if r["verdict"] == "reached"]
        worst = max((max(r["mean_error"], r["sd_error"]) for r in reached), default=np.nan)
        shown = f"{worst:.3f}" if reached else "–"
        if own:
            lines.append(f"| {name} | {len(own)} | {len(reached)} | {sum(map(wrong, own))} | {shown} |")
    count = sum(r["verdict"] == "reached" for r in rows)
    low, high = interval(sum(map(wrong, rows)), count)
    lines += [
        "",
        f"Runs: {len(rows)}, reached {count}; wrong among these: 95% interval {low:.1%} to {high:.1%}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure what is missing, then write ``hunt.md``."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.verdict.hunt", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--others", action="store_true", help="posteriors of other kinds")
    parser.add_argument("--large", action="store_true", help="60 to 150 parameters, one seed each")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "hunt.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(r["case"], r["seed"]) for r in rows}
    cases, seeds = (OTHERS if given.others else CASES | VARIATIONS), given.seeds
    if given.large:
        cases, seeds = _large(), 1
    for seed, name in [(seed, name) for seed in range(seeds) for name in cases]:
        if (name, seed) in done:
            continue
        row = {"case": name, "seed": seed, **judged(cases[name](), seed)}
        rows.append(row)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        (given.out / "hunt.md").write_text(table(rows), encoding="utf-8")
        error = max(row.get("mean_error", np.nan), row.get("sd_error", np.nan))
        print(f"{name}, seed {seed}: {row['verdict']}, {error:.3f}", file=sys.stderr, flush=True)
        if wrong(row):
            print(f"wrong: {row}", file=sys.stderr)
            return 1
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
