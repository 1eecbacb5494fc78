"""Change the promising modules in one place at a time, run their tests, and store what was noticed.

python -m benchmarks.mutants                    every module, a sample of 40 mutants of each
python -m benchmarks.mutants wire.py --all      every mutant of the modules whose path contains "wire.py"
python -m benchmarks.mutants wire.py --alive    only those that lived when the module was measured last
python -m benchmarks.mutants --known            the known slips of ``known.toml`` alone
python -m benchmarks.mutants --attacks          a site without one of its guards at a time, ``attacks.toml``
python -m benchmarks.mutants --known --worst    of those the ones marked as the worst, as CI does
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


def _equivalent(module: str) -> dict[str, str]:
    """Mutants that change nothing anybody could see, with the reason."""
    stored = json.loads((FOLDER / "equivalent.json").read_text(encoding="utf-8"))
    return stored.get(module.removeprefix("fald/"), {})


def measure(warm: Warm, module: str, sample: int | None, seed: int) -> dict:
    """Score of one module."""
    every = mutants(module, (ROOT / "src" / module).read_text(encoding="utf-8"))
    chosen = every if sample is None or sample >= len(every) else _sampled(every, sample, seed)
    argued = _equivalent(module)
    tried = [mutant for mutant in chosen if mutant.place not in argued]
    alive, seconds = _living(warm, module, tried)
    return {
        "date": datetime.date.today().isoformat(),
        "mutants": len(every),
        "tried": len(tried),
        "noticed": len(tried) - len(alive),
        "change nothing": len(chosen) - len(tried),
        "score": _score(len(tried), alive),
        "seconds of the tests": seconds,
        "seed": seed if len(chosen) < len(every) else None,
        "alive": alive,
    }


def again(warm: Warm, module: str) -> dict:
    """Score of a module where only those mutants are tried that lived when it was measured last."""
    if not _stored(module).exists():
        raise SystemExit(f"{module}: was never measured")
    found = json.loads(_stored(module).read_text(encoding="utf-8"))
    every = mutants(module, (ROOT / "src" / module).read_text(encoding="utf-8"))
    lived = [mutant for mutant in every if mutant.name in found["alive"]]
    if len(every) != found["mutants"] or {m.name for m in lived} != set(found["alive"]):
        raise SystemExit(f"{module}: has changed since it was measured; measure it without --alive")
    argued = _equivalent(module)
    waiting = [mutant for mutant in lived if mutant.place not in argued]
    same = len(lived) - len(waiting)
    found["change nothing"] += same
    found["tried"] -= same
    found["alive"], found["seconds of the tests"] = _living(warm, module, waiting)
    found["noticed"] = found["tried"] - len(found["alive"])
    return found | {
        "date": datetime.date.today().isoformat(),
        "score": _score(found["tried"], found["alive"]),
    }


def _living(warm: Warm, module: str, tried: list[Mutant]) -> tuple[list[str], float]:
    """Names of the mutants that the tests do not notice, and how many CPU seconds the tests take."""
    before = warm.run(_paths(module), 600.0)
    if before.state != "passed":
        raise SystemExit(f"{module}: the tests fail without any change: {before.test}")
    alive = []
    for mutant in tried:
        verdict: Verdict = warm.run(_paths(module), 3 * before.seconds + 10, module, mutant.text)
        if verdict.state == "passed":
            alive.append(mutant.name)
        mark = {"passed": "LIVES", "slow": "slow"}.get(verdict.state, "ok")
        print(f"{mark:5} {verdict.seconds:5.1f}s {mutant.name}  [{verdict.test[-70:]}]", flush=True)
    return alive, round(before.seconds, 1)


def _score(tried: int, alive: list[str]) -> float:
    return round(100 * (tried - len(alive)) / max(1, tried), 1)


def known(name: str, worst: bool) -> int:
    """Make the slips of a list, or those marked as the worst; the number of those that nobody noticed."""
    slips = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))["slip"]
    if worst:
        slips = [slip for slip in slips if slip.get("worst")]
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
        missed += found.state == "passed"
        print(f"{found.state:7} {found.seconds:5.1f}s {slip['promise']}  [{found.test[-60:]}]", flush=True)
    print(f"{len(slips) - missed} of {len(slips)} slips of {name}.toml were noticed")
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
    parser.add_argument("--alive", action="store_true", help="only those that lived the last time")
    parser.add_argument("--known", action="store_true", help="the known slips alone")
    parser.add_argument("--attacks", action="store_true", help="the guards of a site alone")
    parser.add_argument("--worst", action="store_true", help="with these two: those marked as the worst")
    args = parser.parse_args()
    if args.known or args.attacks:
        return int(known("attacks" if args.attacks else "known", args.worst) > 0)
    modules = [m for m in TESTS if not args.modules or any(part in m for part in args.modules)]
    if not modules:
        parser.error(f"no module matches; there are: {', '.join(TESTS)}")
    warm = Warm(sorted({path for module in modules for path in _paths(module)}))
    RESULTS.mkdir(exist_ok=True)
    low = False
    for module in modules:
        if args.alive:
            found = again(warm, module)
        else:
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
