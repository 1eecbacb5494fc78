"""``python -m benchmarks.verdict``: how often *reached* is wrong, over random posteriors with known answers.

Every problem is one line of ``runs.jsonl`` in the output folder, written when it is done: a run that was
stopped goes on where it ended. The table is made from these lines.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import beta

import fald
from benchmarks.rounds.measure import flat_draws
from benchmarks.verdict import densities, hierarchies, regressions, shapes  # noqa: F401, which register themselves
from benchmarks.verdict.problem import GENERATORS, RESULTS, Problem, make
from fald.core.errors import FaldError

TOLERANCE = 0.05
_KNOWN = 0.01  # what references and 16,000 kept draws may be off by, in sds


def judged(problem: Problem, seed: int) -> dict[str, Any]:
    """The verdict on a problem, and the worst errors of a mean in sds and of an sd relative to it."""
    row: dict[str, Any] = {"dim": problem.model.dim, "what": problem.what}
    began = time.process_time()
    try:
        tree = fald.fit(seed, problem.model, problem.data, progress=False)
    except FaldError as error:
        return {**row, "verdict": f"error: {error.message}", "seconds": time.process_time() - began}
    draws = flat_draws(problem.model, tree)
    return {
        **row,
        "verdict": tree.attrs["verdict"],
        "reason": tree.attrs["reason"],
        "made_by": tree.attrs["method"],
        "rounds": int(tree.attrs["rounds_done"]),
        "seconds": time.process_time() - began,
        "mean_error": float(np.max(np.abs(draws.mean(0) - problem.mean) / problem.sd)),
        "sd_error": float(np.max(np.abs(draws.std(0) / problem.sd - 1))),
    }


def wrong(row: dict[str, Any], limit: float = TOLERANCE) -> bool:
    """Whether a run was called *reached* with an error beyond a limit.

    Examples
    --------
    >>> [wrong({"verdict": "reached", "mean_error": 0.0, "sd_error": e}) for e in (0.0599, 0.0601)]
    [False, True]
    >>> wrong({"verdict": "not reached", "mean_error": 9.0, "sd_error": 9.0})
    False
    """
    return row["verdict"] == "reached" and max(row["mean_error"], row["sd_error"]) > limit + _KNOWN


def interval(wrong: int, count: int) -> tuple[float, float]:
    """Clopper and Pearson's 95% interval of a fraction.

    Examples
    --------
    >>> low, high = interval(0, 300)
    >>> low, round(high, 4)
    (0.0, 0.0122)
    """
    low = float(beta.ppf(0.025, wrong, count - wrong + 1)) if wrong else 0.0
    return low, float(beta.ppf(0.975, wrong + 1, count - wrong)) if wrong < count else 1.0


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: problems, *reached*, and how many of these were wrong, by generator and together."""
    known = [r for r in rows if np.isfinite(r.get("mean_error", 0.0))]
    lines = [
        "| posteriors | problems | reached | beyond 0.05 | beyond 0.1 | worst error | median rounds |",
        "|---|---|---|---|---|---|---|",
    ]
    names = [name for name in GENERATORS if any(r["generator"] == name for r in known)]
    for name in [*names, "all"]:
        own = [r for r in known if name in (r["generator"], "all")]
        reached = [r for r in own if r["verdict"] == "reached"]
        worst = [max(r["mean_error"], r["sd_error"]) for r in reached]
        beyond = [sum(wrong(r, limit) for r in own) for limit in (TOLERANCE, 2 * TOLERANCE)]
        rounds = f"{np.median([r['rounds'] for r in reached]):g}" if reached else "–"
        lines.append(
            f"| {name} | {len(own)} | {len(reached)} | {beyond[0]} | {beyond[1]} | "
            f"{max(worst, default=np.nan):.3f} | {rounds} |"
        )
    low, high = interval(beyond[0], len(reached))
    share = beyond[0] / max(len(reached), 1)
    lines += ["", f"Wrong among *reached*: {share:.1%} (95% interval {low:.1%} to {high:.1%})."]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure what is missing, then write ``table.md``."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.verdict", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("generators", nargs="*", help="names; all by default")
    parser.add_argument("--each", type=int, default=32, help="problems of every generator")
    parser.add_argument("--first", type=int, default=0, help="number of the first problem")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--report-only", action="store_true", help="make the table from what is there")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "runs.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(r["generator"], r["number"]) for r in rows}
    names = given.generators or list(GENERATORS)
    wanted = [(name, number) for number in range(given.first, given.first + given.each) for name in names]
    for name, number in [] if given.report_only else wanted:
        if (name, number) in done:
            continue
        row = {"generator": name, "number": number, **judged(make(name, number), number)}
        rows.append(row)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        error = max(row.get("mean_error", np.nan), row.get("sd_error", np.nan))
        print(f"{name} {number} ({row['what']}): {row['verdict']}, {error:.3f}", file=sys.stderr, flush=True)
    text = table(rows)
    (given.out / "table.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
