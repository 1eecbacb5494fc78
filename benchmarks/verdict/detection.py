"""``python -m benchmarks.verdict.detection``: how often a second mode is found, by width, mass, dimension.

Two normals: N(0, I), which the proposal knows exactly, and another of some share of the mass, width and
distance. Climbers and lookouts look for three rounds, with the exact log density and gradient instead of
sites, and have found the second mode when one of the places to which they send explorers lies on its hill,
from where Newton's method leads to its top. Whole fits look in further ways (sites' own optima, the prior,
rays), so that they find no less.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fald.core.threads import one_thread
from fald.fewround import proposal
from fald.fewround.climbers import Climbers

RESULTS = Path(__file__).parent / "results"
DIMENSIONS = (2, 5, 10, 20, 40)
WIDTHS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2)
# sds of the known mode between the two, mass, and the share of directions that are narrow; others are as wide
PANELS = ((6.0, 0.02, 1.0), (6.0, 0.1, 1.0), (6.0, 0.5, 1.0), (30.0, 0.1, 1.0), (6.0, 0.1, 0.5))
_ROUNDS = 3
_REACH = 1000.0  # of the prior, in sds


def found(dim: int, width: float, seed: int, *, mass: float, apart: float, narrow: float = 1.0) -> bool:
    """Whether climbers find the second mode with this seed.

    Examples
    --------
    >>> found(2, 1.0, 0, mass=0.5, apart=6.0), found(20, 0.1, 0, mass=0.5, apart=6.0)
    (True, False)
    """
    rng = np.random.default_rng([seed, 41])
    centre = rng.standard_normal(dim)
    centre *= apart / np.linalg.norm(centre)
    widths = np.where(np.arange(dim) < narrow * dim, width, 1.0)

    def levels(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        near = np.log1p(-mass) - np.sum(x**2, axis=1) / 2
        square = np.sum(((x - centre) / widths) ** 2, axis=1)
        return near, np.log(mass) - square / 2 - np.sum(np.log(widths))

    def derivatives(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        near, far = levels(x)
        value = np.logaddexp(near, far)
        slope = np.exp(near - value)[:, None] * x
        return value, -slope - np.exp(far - value)[:, None] * (x - centre) / widths**2

    climbers = Climbers(proposal.gaussian(np.zeros(dim), np.eye(dim)), rng, _REACH)
    for _ in range(_ROUNDS):
        along, seen = derivatives(climbers.paths(np.zeros(dim)))[0], climbers.lookouts
        lines = climbers.far_lookouts
        sent = climbers.climb(*derivatives(climbers.positions), along)
        climbers.watch(seen, derivatives(seen)[0] + np.sum(seen**2, axis=1) / 2)
        if len(lines):
            climbers.watch_far(derivatives(lines)[0])
        near, far = levels(sent)
        if np.any(far > near):
            return True
    return False


@one_thread
def measure(seeds: int) -> list[dict[str, Any]]:
    """Share of seeds with which the second mode is found, for every point of the grid."""
    rows = []
    for apart, mass, narrow in PANELS:
        kind = {"mass": mass, "apart": apart, "narrow": narrow}
        for dim in DIMENSIONS:
            for width in WIDTHS:
                share = float(np.mean([found(dim, width, seed, **kind) for seed in range(seeds)]))
                rows.append({"dim": dim, "width": width, **kind, "seeds": seeds, "found": share})
        print(f"{kind}: done", file=sys.stderr, flush=True)
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The curves as a figure: a panel for every mass and distance, a line for every dimension."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "fald"
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(PANELS), figsize=(12, 3), sharey=True, layout="constrained")
    for panel, kind in zip(panels, PANELS):
        apart, mass, narrow = kind
        for dim in DIMENSIONS:
            own = [r for r in rows if (r["dim"], r["apart"], r["mass"], r["narrow"]) == (dim, *kind)]
            panel.plot([r["width"] for r in own], [r["found"] for r in own], ".-", label=f"{dim} parameters")
        half = ",\nnarrow in half of the directions" if narrow < 1 else ""
        panel.set_title(f"{mass:.0%} of the mass, {apart:g} sds away{half}", fontsize=8)
        panel.set_xlabel("width relative to the known mode", fontsize=8)
    panels[0].set_ylabel("found, share of seeds")
    panels[-1].legend(fontsize=7, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> int:
    """Measure, store ``detection.json``, and draw ``detection.svg``."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.verdict.detection", description="how often a second mode is found"
    )
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--report-only", action="store_true", help="draw what is stored")
    given = parser.parse_args()
    stored = given.out / "detection.json"
    rows = json.loads(stored.read_text()) if given.report_only else measure(given.seeds)
    stored.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")
    draw(rows, given.out / "detection.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
