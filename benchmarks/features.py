"""``python -m benchmarks.features``: 50 to 500 features and 1,400 rows, beside NUTS on the pooled rows.

Every cell of the table is one first fit in a process of its own, ended after ``--limit`` CPU-seconds, and one
line of ``cells.jsonl`` in the output folder, written when it is done: a run that was stopped goes on where it
ended, and ``table.md`` says of a cell that was never run that it was not. Shorter fits come first.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from fald.lab.bench.fitters import DRAWS

RESULTS = Path(__file__).parent / "speed" / "features"
SITES, ROWS = 5, 1400
SIZES = (50, 100, 200, 300, 500)
FAMILIES = ("logistic", "poisson", "horseshoe")
TOOLS = {"fald": "fald.fit", "numpyro": "NumPyro NUTS, float32"}
_GOOD = 0.05  # error of a mean, in sds, of draws that are of use


def cell(tool: str, family: str, features: int, limit: int) -> dict[str, Any]:
    """One fit, or why there is none."""
    spec = {"tool": tool, "family": family, "rows": ROWS, "dim": features + 1, "sites": SITES, "once": True}
    said = subprocess.run(
        [sys.executable, "-m", "fald.lab.bench.fitters", json.dumps(spec)],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (limit, limit)),
    )
    row: dict[str, Any] = {"tool": tool, "family": family, "features": features, "limit": limit}
    if said.returncode < 0:
        return {**row, "verdict": "not finished", "cold": float(limit)}
    if said.returncode:
        return {**row, "verdict": "refused", "reason": said.stderr.splitlines()[-1], "cold": 0.0}
    found = json.loads(said.stdout.splitlines()[-1])
    keys = ("cold", "memory", "error", "verdict")
    return {**row, **{key: found[key] for key in keys}}


def _told(row: dict[str, Any] | None) -> str:
    """A cell of the table."""
    if row is None:
        return "not run"
    if row["verdict"] == "not finished":
        return f"not finished after {row['limit']} CPU-s"
    if row["verdict"] == "refused":
        return f"refused: {row['reason'].partition(': ')[2] or row['reason']}"
    seconds = f"{row['cold']:.1f} CPU-s, {row['memory']:,.0f} MB"
    if row["tool"] == "fald":
        verdict, comma, _ = row["verdict"].partition(";")  # the first of its reasons
        return f"{verdict}{' …' * bool(comma)} in {seconds}, error of a mean {row['error']:.4f}"
    return f"{seconds}, error of a mean {row['error']:.3f}" + ("" if row["error"] <= _GOOD else ", of no use")


def table(rows: list[dict[str, Any]]) -> str:
    """What was measured, as Markdown."""
    known = {(row["family"], row["features"], row["tool"]): row for row in rows}
    lines = [
        f"{ROWS:,} rows, {SITES} sites, first fits, each in a process of its own. NUTS: four chains of "
        f"{DRAWS:,} draws after as many of warm-up, on the pooled rows. The error is the largest Monte-Carlo "
        "standard error of a mean of coefficients and intercept, in posterior sds.",
        "",
        f"| family | features | {' | '.join(TOOLS.values())} |",
        "|---|---|---|---|",
    ]
    for family in FAMILIES:
        for features in SIZES:
            told = [_told(known.get((family, features, tool))) for tool in TOOLS]
            name = "linear, horseshoe" if family == "horseshoe" else family
            lines.append(f"| {name} | {features} | {' | '.join(told)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run what is missing, and write the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.features", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--tools", nargs="*", default=list(TOOLS), choices=list(TOOLS))
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--features", nargs="*", type=int, default=list(SIZES), choices=SIZES)
    parser.add_argument("--limit", type=int, default=180, help="CPU-seconds of a process")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "cells.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(row["tool"], row["family"], row["features"]) for row in rows}
    for features in given.features:
        for family in given.families:
            for tool in given.tools:
                if (tool, family, features) not in done:
                    rows.append(cell(tool, family, features, given.limit))
                    with path.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
                    print(family, features, TOOLS[tool], _told(rows[-1]), file=sys.stderr, flush=True)
    (given.out / "table.md").write_text(table(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
