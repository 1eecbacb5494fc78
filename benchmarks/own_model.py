"""What a round costs beyond the computation of a model of one's own: a Flax network at four sites.

``python -m benchmarks.own_model [ROUNDS]`` installs ``examples/own-models`` into an environment of its own,
and runs its network of 79,510 parameters by FA-LD with minibatches, in one process and with NVIDIA FLARE over
mutual TLS. It compares CPU-seconds per round of all processes together, which other programs change little.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from benchmarks.installed import environment
from benchmarks.loopback import Loopback

SITES = ("east", "north", "south", "west")
TARGET = 0.15
STUDY = """
[data]
{files}
target = "label"
features = ["image"]

[model]
family = "own-models:images"

[model.options]
pixels = 784
hidden = 100

[sampler]
num-rounds = {rounds}
num-warmup = 1
local-steps = 20
step-size = 1e-5
batch-size = 256
num-chains = 1

[federation]
timeout = 600
"""
POLICY = 'allowed-models = ["own-models:images"]\nmax-seconds = 600\nunsummed = true\n'


def write_rows(folder: Path) -> dict[str, Path]:
    rng, paths = np.random.default_rng(0), {}
    for site in SITES:
        paths[site] = folder / f"{site}.npz"
        label = rng.integers(0, 10, 2000).astype(np.uint8)
        np.savez(paths[site], image=rng.integers(0, 256, (2000, 28, 28), np.uint8), label=label)
    return paths


def cpu(processes: list[psutil.Process]) -> float:
    """CPU-seconds of processes and of what they have started."""
    family = {p for process in processes for p in (process, *process.children(recursive=True))}
    return sum(sum(p.cpu_times()[:2]) for p in family)


def last_round(out: Path) -> int:
    path = out / "rounds.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line).get("round", 0) for line in lines if line.endswith("}")), default=0)


def per_round(processes: list[psutil.Process], out: Path, rounds: int, run: subprocess.Popen) -> float:
    """CPU-seconds per round between two looks, after what is compiled once."""
    looks: list[tuple[int, float]] = []
    while run.poll() is None and (not looks or looks[-1][0] < rounds - 16):
        number = last_round(out)
        if number and (not looks or number > looks[-1][0]):
            looks.append((number, cpu(processes)))
        time.sleep(0.05)
    (first, before), (last, after) = looks[0], looks[-1]
    return (after - before) / (last - first)


def measure(folder: Path, rounds: int) -> None:
    python, paths = environment(folder / "venv"), write_rows(folder)
    (folder / "policy.toml").write_text(POLICY)
    named = ", ".join(f'{site} = "{path}"' for site, path in paths.items())
    (folder / "here.toml").write_text(STUDY.format(files=f"files = {{ {named} }}", rounds=rounds))
    (folder / "study.toml").write_text(STUDY.format(files="", rounds=rounds))
    federation = Loopback(folder, paths, policy=folder / "policy.toml")
    federation.program = [str(python), "-m", "fald.cli"]
    command = [*federation.program, "run", "here.toml", "--out", "here", "--quiet"]
    run = subprocess.Popen(command, cwd=folder, env=federation.environment, stdout=subprocess.DEVNULL)
    alone = per_round([psutil.Process(run.pid)], folder / "here", rounds, run)
    if run.wait():
        raise SystemExit("the run in one process failed")
    with federation:
        run = federation.begin(folder / "study.toml", folder / "out")
        parties = [psutil.Process(federation.commands[name].pid) for name in ("server", *SITES)]
        together = per_round(parties, folder / "out", rounds, run)
        if run.wait():
            raise SystemExit(federation.said("run"))
    more = together / alone - 1
    print(f"CPU-seconds per round: {alone:.2f} in one process, {together:.2f} on a federation of four sites")
    print(f"{100 * more:+.0f}%, {'within' if more <= TARGET else 'beyond'} the target of {100 * TARGET:g}%")


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), rounds)


if __name__ == "__main__":
    main()
