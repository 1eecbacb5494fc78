"""``python -m benchmarks.secure_sum``: what masks cost a site and the coordinator, per round."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import numpy as np

from benchmarks.timing import interleave
from fald.federation.secure.session import Identity, Session, fixed_point_sum, unmask_sum


def introduced(num_sites: int) -> list[Session]:
    """Sites that have accepted each other."""
    identities = {f"site-{i:03d}": Identity.generate() for i in range(num_sites)}
    sessions = [Session(identity, name, "benchmark") for name, identity in identities.items()]
    hellos = {session.name: session.hello() for session in sessions}
    pins = {name: identity.public for name, identity in identities.items()}
    for session in sessions:
        session.accept(hellos, pins)
    return sessions


def contenders(num_sites: int, count: int) -> tuple[dict[str, Callable[[], object]], float]:
    """What to time, and the largest difference to the sum in float64."""
    sessions = introduced(num_sites)
    values = np.random.default_rng(0).normal(size=(num_sites, count)) * 100
    uploads = [s.mask(v, round=0, attempt=1, digest=b"task") for s, v in zip(sessions, values)]
    difference = float(np.abs(unmask_sum(uploads) - values.sum(axis=0)).max())
    rounds = itertools.count(1)
    runs = {
        "mask, one site": lambda: sessions[0].mask(values[0], round=next(rounds), attempt=1, digest=b"task"),
        "unmask, coordinator": lambda: unmask_sum(uploads),
        "fixed point, no masks": lambda: fixed_point_sum(list(values)),
    }
    return runs, difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=18_192, help="numbers in an upload")
    parser.add_argument("--sites", type=int, nargs="+", default=[4, 20, 60])
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    print(f"{args.count:,} numbers, median of {args.repeats}, CPU milliseconds\n")
    print("| sites | mask, one site | unmask, coordinator | fixed point, no masks | kB up | difference |")
    print("|---|---|---|---|---|---|")
    for num_sites in args.sites:
        runs, difference = contenders(num_sites, args.count)
        timed = interleave(runs, repeats=args.repeats, units=1)
        times = " | ".join(f"{1e3 * timed[name]['cpu']:.1f}" for name in runs)
        print(f"| {num_sites} | {times} | {16 * (args.count + 1) / 1000:.0f} | {difference:.1e} |")


if __name__ == "__main__":
    main()
