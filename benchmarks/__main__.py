"""The slow parts that are not sampling: planning a study, exact laws, accounting for privacy."""

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


def exact_laws() -> str:
    """Time for the exact law of fifty Gaussian clients: many rounds, and many local steps in each."""
    rng = np.random.default_rng(0)
    root = rng.standard_normal((50, 2, 4))
    problem = root @ root.transpose(0, 2, 1), rng.standard_normal((50, 2)), np.full(50, 0.02)
    lines = ["### Exact laws, 50 clients", "", "| case | s of CPU time |", "|---|---|"]
    for name, run in {
        "10,000 rounds of 10 steps, 10 clients drawn": {
            "step_size": 1e-4, "local_steps": 10, "num_rounds": 10_000,
            "participation": fald.with_replacement(10),
        },
        "10 rounds of 10,000 steps": {"step_size": 1e-5, "local_steps": 10_000, "num_rounds": 10},
    }.items():  # fmt: skip
        used = time.process_time()
        fald.gaussian.law(*problem, correlation=0.5, **run)
        lines.append(f"| {name} | {time.process_time() - used:.2f} |")
    return "\n".join(lines)


def accounting() -> str:
    """Time to account for 10,000 local steps of ten clients, by both accountants."""
    lines = [
        "### Privacy accounting, 10,000 steps, 10 clients",
        "",
        "| case | PLD, s | RDP, s |",
        "|---|---|---|",
    ]
    distinct = 1e-6 / (1 + np.arange(10_000) / 5000)
    for name, step, local_steps, drawn in (
        ("constant step", 1e-6, 1, None),
        ("10,000 distinct steps", distinct, 1, None),
        ("10,000 distinct steps, 5 clients drawn for 10 of them", distinct, 10, fald.without_replacement(5)),
    ):
        run = fald.privacy.RunSettings(
            sizes=[6000] * 10,
            local_steps=local_steps,
            num_rounds=10_000 // local_steps,
            step_size=step,
            batch_size=200,
            sensitivity=2.0,
            participation=drawn,
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
    for benchmark in (planning, exact_laws, accounting):
        print(benchmark(), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
