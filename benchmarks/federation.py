"""What a federation costs: seconds per round beyond the sites' own work, and memory that a long run takes.

``python -m benchmarks.federation [ROUNDS]`` runs plain FA-LD on the bundled trial with NVIDIA FLARE, a server
and four sites on this machine over mutual TLS, and once more with the sites in this process.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import xarray as xr

from benchmarks.loopback import Loopback, split_trial
from fald.federation.coordinator.run import run_federated
from fald.federation.link import LocalLink
from fald.federation.site.worker import SiteSettings, SiteWorker
from fald.study.datasets import study_path
from fald.study.schema import load_study

ALONE = 100  # rounds in one process, enough for their median
TARGET = 0.5  # seconds per round that a federation of four sites may add
SAMPLER = """
[sampler]
num-rounds = {rounds}
local-steps = 5
step-size = 6e-4
num-chains = 4
num-warmup = {warmup}
seed = 1
"""


def write_study(folder: Path, rounds: int) -> Path:
    trial = study_path("indo").read_text().replace('file = "indo.csv"\nsite = "site"\n', "")
    path = folder / "study.toml"
    path.write_text(trial + SAMPLER.format(rounds=rounds, warmup=rounds // 10))
    return path


def journal(out: Path) -> list[dict]:
    path = out / "rounds.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [entry for entry in map(json.loads, lines) if entry.get("round") and "event" not in entry]


def seconds_per_round(lines: list[dict]) -> float:
    """Median over the journal's stretches after the first tenth, in which programs are compiled."""
    later = [line for line in lines if line["round"] > lines[-1]["round"] / 10]
    return statistics.median(
        (b["time"] - a["time"]) / (b["round"] - a["round"]) for a, b in itertools.pairwise(later)
    )


def run_alone(folder: Path, tables: dict[str, Path], study: Path) -> xr.DataTree:
    """The same study with the sites in this process, one after the other."""
    workers = {
        name: SiteWorker(SiteSettings(name, folder / "alone" / name, path, sites=tuple(tables)))
        for name, path in tables.items()
    }
    link = LocalLink({name: worker.handle for name, worker in workers.items()})
    return run_federated(load_study(study), link, folder / "in-process")


def measure(folder: Path, rounds: int) -> None:
    tables = split_trial(folder)
    study, out = write_study(folder, rounds), folder / "out"
    with Loopback(folder, tables) as federation:
        began = time.monotonic()
        run = federation.begin(study, out)
        memory: list[tuple[int, list[float]]] = []
        while run.poll() is None:
            time.sleep(1.0)
            lines = journal(out)
            workers = [federation.worker(site) for site in tables]
            if lines and all(workers):
                used = [worker.memory_info().rss / 2**20 for worker in workers if worker]
                memory.append((lines[-1]["round"], used))
        if run.returncode != 0:
            raise SystemExit(federation.said("run"))
        total = time.monotonic() - began
    lines = journal(out)
    run_alone(folder, tables, write_study(folder, min(rounds, ALONE)))
    alone, together = seconds_per_round(journal(folder / "in-process")), seconds_per_round(lines)
    print(f"{rounds} rounds, {len(tables)} sites: {total:.0f} s from submitting to the result")
    print(
        f"seconds per round: {together:.3f} on the federation, {alone:.3f} with the sites one after the other"
    )
    verdict = "within" if together <= TARGET else "beyond"
    print(f"what the federation adds is less than a whole round, {verdict} the target of {TARGET} s")
    early = next(used for number, used in memory if number >= rounds / 10)
    last = memory[-1][1]
    print(f"largest worker: {max(early):.0f} MB after a tenth of the rounds, {max(last):.0f} MB at the end")


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), rounds)


if __name__ == "__main__":
    main()
