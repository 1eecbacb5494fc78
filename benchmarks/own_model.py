"""What a round costs beyond the computation of a model of one's own: a Flax network at four sites.

``python -m benchmarks.own_model [ROUNDS]`` installs ``examples/own-models`` and runs its network of 79,510
parameters by FA-LD with minibatches: the coordinator here, each site's model in its own process, without an
engine between them, whose cost ``python -m benchmarks.federation`` measures. It compares CPU-seconds per
round of all processes with those of the local steps alone. Other programs change both, so that runs with and
without take turns, and the median of their ratios counts. Rounds in which programs are compiled do not.

What a round costs beyond its steps depends on the parameters and the sites, not on the steps: every upload
travels under masks, and every site that audits sees all of them. So there are three rows: a few steps, one
pass over a site's rows, and five, which is what averaging of networks usually takes between two rounds.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.installed import copy_source
from fald.federation.coordinator.run import run_federated
from fald.federation.link import LocalLink
from fald.federation.site.langevin import LangevinSite
from fald.federation.site.worker import SiteSettings, SiteWorker
from fald.study.schema import make_study

SITES = ("east", "north", "south", "west")
TARGET, FIRST = 0.15, 4  # rounds in which programs are compiled
TURNS = 5
ROWS, BATCH = 15_000, 256  # Fashion-MNIST at four sites
STEPS = {"a few steps": 20, "one pass": -(-ROWS // BATCH), "five passes": -(-5 * ROWS // BATCH)}
POLICY = 'allowed-models = ["own-models:images"]\nmax-seconds = 3600\n'


def study(rounds: int, steps: int) -> dict[str, Any]:
    sampler = {"num-rounds": rounds, "num-warmup": rounds // 2, "local-steps": steps, "step-size": 1e-5}
    return {
        "data": {"target": "label", "features": ["image"]},
        "model": {"family": "own-models:images", "options": {"pixels": 784, "hidden": 100}},
        "sampler": {**sampler, "batch-size": BATCH, "num-chains": 1},
    }


def write_rows(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for site in SITES:
        label = rng.integers(0, 10, ROWS).astype(np.uint8)
        np.savez(folder / f"{site}.npz", image=rng.integers(0, 256, (ROWS, 28, 28), np.uint8), label=label)


def cpu() -> float:
    """CPU-seconds of this process and of what it has started."""
    here = psutil.Process()
    return sum(sum(p.cpu_times()[:2]) for p in (here, *here.children(recursive=True)))


class Looks(LocalLink):
    """Notes the CPU-seconds before some of its messages."""

    def __init__(self, handlers, where):
        super().__init__(handlers)
        self.where, self.count = where, 0
        self.seen: list[float] = []

    def send(self, messages, *, timeout, enough=None):
        """Hand each message to its site."""
        if self.count in self.where:
            self.seen.append(cpu())
        self.count += 1
        return super().send(messages, timeout=timeout, enough=enough)


def run(folder: Path, rounds: int, steps: int, *, confined: bool) -> float:
    """CPU-seconds per round of a run; ``confined``: the models are in this process already."""
    place = Path(tempfile.mkdtemp(dir=folder))
    policy, handlers = folder / "policy.toml", {}
    for site in SITES:
        settings = SiteSettings(site, place / site, folder / f"{site}.npz", policy)
        handlers[site] = SiteWorker(settings, confined=confined).handle
    # greeting, opening and beginning come first, and the end last
    link = Looks(handlers, (3 + FIRST, 2 + rounds))
    run_federated(make_study(study(rounds, steps), "a benchmark"), link, place / "out")
    began, ended = link.seen
    return (ended - began) / (rounds - 1 - FIRST)


def compute(folder: Path, rounds: int, steps: int) -> float:
    """CPU-seconds per round of the local steps of all sites."""
    answer, spent = LangevinSite.answer, []

    def timed(self, task):
        began = time.process_time()
        found = answer(self, task)
        spent.append(time.process_time() - began)
        return found

    LangevinSite.answer = timed
    run(folder, rounds, steps, confined=True)
    LangevinSite.answer = answer
    return sum(spent[FIRST * len(SITES) :]) / (rounds - FIRST)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 24
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run(
            [*pip, "--no-index", "--target", folder / "installed", copy_source(folder / "source")], check=True
        )
        sys.path.insert(0, str(folder / "installed"))
        write_rows(folder)
        (folder / "policy.toml").write_text(POLICY)
        print("CPU-seconds per round of four sites | the steps alone | in all | more, of all turns")
        for what, steps in STEPS.items():
            alone, together = np.empty(TURNS), np.empty(TURNS)
            for turn in range(TURNS):
                alone[turn] = compute(folder, rounds, steps)
                together[turn] = run(folder, rounds, steps, confined=False)
            more = together / alone - 1
            verdict = "within" if np.median(more) <= TARGET else "beyond"
            turns = ", ".join(f"{100 * each:+.0f}" for each in sorted(more))
            means = f"{np.median(alone):.3f} | {np.median(together):.3f}"
            print(
                f"{what} ({steps}) | {means} | {100 * np.median(more):+.0f}%, {verdict} ({turns})", flush=True
            )
    print(f"the target is {100 * TARGET:g}%")


if __name__ == "__main__":
    main()
