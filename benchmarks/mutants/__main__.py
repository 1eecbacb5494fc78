"""Change the promising modules in one place at a time, run their tests, and store what was noticed.

python -m benchmarks.mutants                    every module, a sample of 40 mutants of each
python -m benchmarks.mutants wire.py --all      every mutant of the modules whose path contains "wire.py"
python -m benchmarks.mutants --known            the known slips of ``known.toml`` alone, as CI does
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import sys
import tomllib
from pathlib import Path

from benchmarks.mutants.modules import TESTS
from benchmarks.mutants.runner import ROOT, Verdict, Warm
from benchmarks.mutants.slips import Mutant, mutants

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"


def _paths(module: str) -> list[str]:
    return [f"tests/{test}" for test in TESTS[module]]


def _equivalent() -> dict[str, str]:
    """Mutants that change nothing anybody could see, by name without the line, with the reason."""
    stored = json.loads((FOLDER / "equivalent.json").read_text(encoding="utf-8"))
    return {name: reason for table in stored.values() for name, reason in table.items()}


def _name(mutant: Mutant) -> str:
    """A name that outlives other changes of the file: without the line."""
    where, what = mutant.name.split(" ", 1)
    return f"{where.rsplit(':', 1)[0]} {what}"


def measure(warm: Warm, module: str, sample: int | None, seed: int) -> dict:
    """Score of one module."""
    before = warm.run(_paths(module), 600.0)
    if before.state != "passed":
        raise SystemExit(f"{module}: the tests fail without any change: {before.test}")
    limit = 3 * before.seconds + 10
    every = mutants(module, (ROOT / "src" / module).read_text(encoding="utf-8"))
    chosen = every if sample is None or sample >= len(every) else _sampled(every, sample, seed)
    argued, alive, noticed, same = _equivalent(), [], 0, 0
    for mutant in chosen:
        if _name(mutant) in argued:
            same += 1
            continue
        verdict: Verdict = warm.run(_paths(module), limit, module, mutant.text)
        if verdict.state == "broken":
            raise SystemExit(f"{module}: {verdict.test}")
        killed = verdict.state != "passed"
        noticed += killed
        if not killed:
            alive.append(mutant.name)
        mark = {"passed": "LIVES", "slow": "slow"}.get(verdict.state, "ok")
        print(f"{mark:5} {verdict.seconds:5.1f}s {mutant.name}  [{verdict.test[-70:]}]", flush=True)
    tried = noticed + len(alive)
    return {
        "date": datetime.date.today().isoformat(),
        "mutants": len(every),
        "tried": tried,
        "noticed": noticed,
        "change nothing": same,
        "score": round(100 * noticed / max(1, tried), 1),
        "seconds of the tests": round(before.seconds, 1),
        "seed": seed if len(chosen) < len(every) else None,
        "alive": alive,
    }


def known() -> int:
    """Make the known slips; the number of those that nobody noticed."""
    slips = tomllib.loads((FOLDER / "known.toml").read_text(encoding="utf-8"))["slip"]
    warm = Warm(sorted({f"tests/{test}" for slip in slips for test in slip["tests"]}))
    missed = 0
    for slip in slips:
        text = (ROOT / "src" / slip["module"]).read_text(encoding="utf-8")
        if text.count(slip["old"]) != 1:
            raise SystemExit(f"{slip['module']}: {slip['old']!r} does not stand there exactly once")
        found = warm.run(
            [f"tests/{test}" for test in slip["tests"]],
            120.0,
            slip["module"],
            text.replace(slip["old"], slip["new"]),
        )
        missed += found.state in ("passed", "broken")
        print(f"{found.state:7} {found.seconds:5.1f}s {slip['promise']}  [{found.test[-60:]}]", flush=True)
    print(f"{len(slips) - missed} of {len(slips)} known slips were noticed")
    return missed


def _sampled(every: list[Mutant], sample: int, seed: int) -> list[Mutant]:
    order = list(range(len(every)))
    random.Random(seed).shuffle(order)
    return [every[i] for i in sorted(order[:sample])]


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("modules", nargs="*", help="parts of paths; all modules where none is given")
    parser.add_argument("--sample", type=int, default=40, help="mutants of each module (40)")
    parser.add_argument("--all", action="store_true", help="every mutant")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--known", action="store_true", help="the known slips alone")
    args = parser.parse_args()
    if args.known:
        return int(known() > 0)
    modules = [m for m in TESTS if not args.modules or any(part in m for part in args.modules)]
    if not modules:
        parser.error(f"no module matches; there are: {', '.join(TESTS)}")
    warm = Warm(sorted({path for module in modules for path in _paths(module)}))
    RESULTS.mkdir(exist_ok=True)
    low = False
    for module in modules:
        found = measure(warm, module, None if args.all else args.sample, args.seed)
        print(f"== {module}: {found['noticed']} of {found['tried']} noticed, {found['score']}%", flush=True)
        _stored(module).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        low |= found["score"] < 90
        (FOLDER / "scores.md").write_text(_table(), encoding="utf-8")
    return int(low)


def _table() -> str:
    """All stored scores, as Markdown."""
    lines = [
        "# Slips that the tests notice",
        "",
        "Made by `make mutants`. Of all slips that can be made in a module a sample is tried; those argued",
        "in `equivalent.json` to change nothing are left out, and the tests that `modules.py` names must",
        "notice the others. `results/` lists every slip that lives.",
        "",
        "| module | noticed | of tried | score | change nothing | of all | date |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for module in TESTS:
        path = _stored(module)
        if path.exists():
            r = json.loads(path.read_text(encoding="utf-8"))
            row = (r["noticed"], r["tried"], f"{r['score']}%", r["change nothing"], r["mutants"], r["date"])
            lines.append(f"| `{module.removeprefix('fald/')}` | " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines) + "\n"


def _stored(module: str) -> Path:
    return RESULTS / (module.removeprefix("fald/").removesuffix(".py").replace("/", ".") + ".json")


if __name__ == "__main__":
    sys.exit(main())
