"""FA-LD on the convolutional network beside a loop by hand: CPU, what is hidden, memory, and kill -9.

    python -m benchmarks.networks            # 200 rounds each; about eight CPU-minutes
    python -m benchmarks.networks 6          # to see that it works

10 clients, batches of 64, K = 10, as in ``fald bench networks``. What it finds is stored in
``benchmarks/speed/networks.json``.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

STORED = Path(__file__).parent / "speed" / "networks.json"
KILLED_AT, ENDS_AT = 7, 12  # rounds


def problem() -> tuple[Any, Any, Any]:
    """The network, made-up images, and these at clients."""
    import fald
    from fald.lab import networks
    from fald.lab.bench.many import images

    rows = images(np.random.default_rng(0), 6000, 784)
    data = fald.FederatedData(rows, np.arange(11) * 600, tuple("0123456789"))
    return networks.cnn(), rows, data


def in_use() -> int:
    """Bytes of memory that the process has."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def sampled(rounds: int, name: str = "cnn", folder: str = "") -> dict[str, Any]:
    """Rounds of ``fald.sample`` with a sink: seconds of each, what is left over, memory in MB after each."""
    import jax

    import fald
    from fald.lab import networks

    model, data = getattr(networks, name)(), problem()[2]
    seen: list[tuple[float, float]] = []
    held, used = [], []

    def look(number: int, positions: Any, stats: Any) -> None:
        seen.append((time.monotonic(), time.process_time()))
        held.append(sum(array.nbytes for array in jax.live_arrays()) / 1e6)
        used.append(in_use() / 1e6)
        if folder:
            print(number, flush=True)

    moments = fald.sinks.RunningMoments(rank=0)
    began = time.monotonic(), time.process_time()
    fald.sample(
        0, model, data, num_rounds=rounds, local_steps=10, step_size=1e-7, temperature=0.1, batch_size=64,
        num_chains=1, sinks=[moments], callback=look, progress=False,
        checkpoint=fald.Checkpoint(folder, rounds=1) if folder else None,
    )  # fmt: skip
    ended = time.monotonic(), time.process_time()
    mean = np.concatenate([np.ravel(leaf) for leaf in moments.mean().values()])
    found: dict[str, Any] = {"draws": hashlib.sha256(mean.tobytes()).hexdigest()[:16]}
    if len(seen) > 1:
        wall, cpu = ((seen[-1][i] - seen[0][i]) / (len(seen) - 1) for i in (0, 1))
        first = min(20, len(seen) - 1)
        late = used[first:]
        found |= {
            "cpu_seconds_a_round": cpu,
            "cpu_seconds": ended[1] - began[1],
            "wall_seconds_beside_rounds": ended[0] - began[0] - rounds * wall,
            "cpu_seconds_beside_rounds": ended[1] - began[1] - rounds * cpu,
            "arrays_held_after_round_20": [min(held[first:]), max(held[first:])],
            "in_use_after_round_20": [min(late), max(late)],
            "in_use_on_average_in_the_first_and_last_third_after_round_20": [
                float(np.mean(part[: max(1, len(late) // 3)])) for part in (late, late[::-1])
            ],
        }
    return found


def by_hand(rounds: int) -> dict[str, Any]:
    """As many rounds of the loop by hand."""
    from fald.lab.bench.networks import _by_hand

    model, rows, _ = problem()
    run, began = _by_hand(model, rows, rounds), time.process_time()
    run()
    return {"cpu_seconds": time.process_time() - began}


def apart(what: str, *arguments: Any) -> dict[str, Any]:
    """The same in a process of its own, which compiles for itself."""
    command = [sys.executable, "-m", "benchmarks.networks", what, *map(str, arguments)]
    alone = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env={**alone, "FALD_CACHE": "off"}
    )
    return json.loads(done.stdout.splitlines()[-1])


def killed() -> bool:
    """Whether a run that is killed in its middle goes on to the draws of one that is not."""
    with tempfile.TemporaryDirectory() as folder:
        asked = ["sampled", str(ENDS_AT), "cnn", f"{folder}/run"]
        command = [sys.executable, "-m", "benchmarks.networks", *asked]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.strip() == str(KILLED_AT):
                    os.kill(process.pid, signal.SIGKILL)
                    break
        resumed = apart("sampled", ENDS_AT, "cnn", f"{folder}/run")
        whole = apart("sampled", ENDS_AT, "cnn", f"{folder}/other")
    return process.returncode == -signal.SIGKILL and resumed["draws"] == whole["draws"]


def main(rounds: int) -> None:
    """All of it, stored; the loop by hand before and after, as what else the machine does changes."""
    parts = [rounds - rounds // 2, rounds // 2]
    before, ours, after = (
        apart("by_hand", parts[0]),
        apart("sampled", rounds),
        apart("by_hand", parts[1]),
    )
    hand = before["cpu_seconds"] + after["cpu_seconds"]
    found = {
        "rounds": rounds,
        "load": os.getloadavg()[0],
        "fald": ours,
        "by hand": {"cpu_seconds": hand},
        "cpu, times the loop by hand": ours["cpu_seconds"] / hand,
        "a perceptron": apart("sampled", rounds, "perceptron"),
        "killed and resumed to the same draws": killed(),
    }
    STORED.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["sampled"]:
        print(json.dumps(sampled(int(sys.argv[2]), *sys.argv[3:])))
    elif sys.argv[1:2] == ["by_hand"]:
        print(json.dumps(by_hand(int(sys.argv[2]))))
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 200)
