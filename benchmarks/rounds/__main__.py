"""``python -m benchmarks.rounds``: rounds to accuracy on real studies, against NUTS on the pooled rows.

Every (study, method, seed) is one line of ``runs.jsonl`` in the output folder, written when it is done: a run
that was stopped goes on where it ended. The table and the picture are made from these lines.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.rounds import studies
from benchmarks.rounds.measure import measure
from benchmarks.rounds.report import picture, table
from fald.core.errors import ExitCode, Interrupted

RESULTS = Path(__file__).parent / "results"
METHODS = ("auto", "corrected")


def main() -> int:
    """Measure what is missing, then write ``table.md`` and ``rounds.svg``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rounds", description=__doc__.splitlines()[0])
    parser.add_argument("studies", nargs="*", help="names; all that have a mean and an sd by default")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--report-only", action="store_true", help="make table and picture from what is there"
    )
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "runs.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(r["study"], r["method"], r["seed"]) for r in rows}
    wanted = [] if given.report_only else given.studies or [*studies.names()]
    for name in wanted:
        for method in given.methods:
            for seed in range(given.seeds):
                if (name, method, seed) in done:
                    continue
                try:
                    row = measure(name, method, seed)
                except (Interrupted, KeyboardInterrupt):
                    print("stopped; runs that were finished are kept", file=sys.stderr)
                    return int(ExitCode.INTERRUPTED)
                rows.append(row)
                with path.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{name}, {method}, seed {seed}: {row['verdict']}", file=sys.stderr, flush=True)
    (given.out / "table.md").write_text(table(rows), encoding="utf-8")
    picture(rows, given.out / "rounds.svg")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
