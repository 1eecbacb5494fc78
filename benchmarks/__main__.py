"""The slow parts that are not sampling: planning a study, accounting for privacy."""

from __future__ import annotations

import time

import numpy as np

import fald


def planning() -> str:
    """Time to plan a study with 50 parameters and 100 sites; the first call, compilation included."""
    rng = np.random.default_rng(0)
    clients = {}
    for c in range(100):
        x = rng.standard_normal((200, 49))
        chance = 1 / (1 + np.exp(-x @ (0.3 * rng.standard_normal(49))))
        clients[f"{c:03d}"] = (x, (rng.random(200) < chance).astype(float))
    data = fald.FederatedData.from_arrays(clients)
    began, used = time.perf_counter(), time.process_time()
    fald.planner.plan(fald.models.logistic_regression(49), data)
    seconds, cpu = time.perf_counter() - began, time.process_time() - used
    return f"### Planning, d=50, N=100\n\n{seconds:.1f} s, {cpu:.1f} s of CPU time"


def accounting() -> str:
    """Time to account for 10,000 local steps of ten clients, by both accountants."""
    lines = [
        "### Privacy accounting, 10,000 steps, 10 clients",
        "",
        "| case | PLD, s | RDP, s |",
        "|---|---|---|",
    ]
    for name, step in (
        ("constant step", 1e-6),
        ("10,000 distinct steps", 1e-6 / (1 + np.arange(10_000) / 5000)),
    ):
        run = fald.privacy.RunSettings(
            sizes=[6000] * 10,
            local_steps=1,
            num_rounds=10_000,
            step_size=step,
            batch_size=200,
            sensitivity=2.0,
        )
        seconds = []
        for method in ("pld", "rdp"):
            began = time.perf_counter()
            fald.privacy.account(run, delta=1e-5, method=method)
            seconds.append(f"{time.perf_counter() - began:.2f}")
        lines.append(f"| {name} | {' | '.join(seconds)} |")
    return "\n".join(lines)


def main() -> None:
    """Run all and print Markdown."""
    for benchmark in (planning, accounting):
        print(benchmark(), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
