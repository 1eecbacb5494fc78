"""``make bench``: the sampler against the loops people would write themselves.

Every benchmark interleaves its contenders in one run, so that a busy machine slows all of them; read
the ratios, not the times.
"""

from __future__ import annotations

import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import fald
from benchmarks.timing import interleave, table


def gaussian_simulation() -> str:
    """The paper's simulation, one step = 300 runs × 50 clients × 2 dimensions, against plain NumPy."""
    runs, clients, steps, rounds = 300, 50, 100, 4
    rng = np.random.default_rng(0)
    covariance = np.array([[5.0, -2.0], [-2.0, 1.0]])
    means = rng.normal(size=(clients, 2)) * 0.05
    size = 1000.0
    data = fald.FederatedData.from_arrays(
        {f"client-{c:02d}": (means[c : c + 1], np.array([size])) for c in range(clients)}
    )
    model = fald.models.gaussian_location(covariance)
    precision = np.linalg.inv(covariance) * size * clients
    eta = 1e-7

    def numpy_loop():
        generator = np.random.default_rng(1)
        theta = np.zeros((runs, 2))
        for _ in range(rounds):
            beta = np.broadcast_to(theta[:, None], (runs, clients, 2))
            for _ in range(steps):
                noise = generator.standard_normal((runs, clients, 2)) * np.sqrt(2 * eta * clients)
                beta = beta - eta * (beta - means) @ precision + noise
            theta = beta.mean(axis=1)
        return theta

    def fald_sample():
        return fald.sample(
            1,
            model,
            data,
            num_rounds=rounds,
            local_steps=steps,
            step_size=eta,
            num_chains=runs,
            progress=False,
        )

    contenders = {"plain NumPy": numpy_loop, "fald.sample": fald_sample}
    results = interleave(contenders, repeats=5, units=rounds * steps)
    return table("Gaussian simulation, N=50, d=2, 300 runs, K=100", "step", results, "plain NumPy")


def logistic_chains() -> str:
    """The bundled trial, 48 chains, against a Python loop with one compiled gradient per client and chain."""
    data = fald.datasets.load("indo")
    model = fald.models.logistic_regression(list(data.features))
    chains, steps, rounds, eta = 48, 5, 20, 3e-4
    parts = [jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), data.client(n)) for n in data.names]
    shares = data.weights

    @jax.jit
    def gradient(theta, rows, share):
        def energy(t):
            return (
                -model.flat_logprior(t)
                - jnp.sum(jax.vmap(model.flat_loglikelihood, (None, 0))(t, rows)) / share
            )

        return jax.grad(energy)(theta)

    def python_loop():
        generator = np.random.default_rng(0)
        theta = np.zeros((chains, model.dim))
        for _ in range(rounds):
            new = np.zeros_like(theta)
            for chain in range(chains):
                for rows, share in zip(parts, shares):
                    beta = theta[chain].copy()
                    for _ in range(steps):
                        noise = generator.standard_normal(model.dim) * np.sqrt(2 * eta / share)
                        beta = beta - eta * np.asarray(gradient(beta, rows, share)) + noise
                    new[chain] += share * beta
            theta = new

    def fald_sample():
        fald.sample(
            1,
            model,
            data,
            num_rounds=rounds,
            local_steps=steps,
            step_size=eta,
            num_chains=chains,
            progress=False,
        )

    contenders = {"Python loop, jitted gradient": python_loop, "fald.sample": fald_sample}
    results = interleave(contenders, repeats=3, units=rounds * steps)
    return table("Bundled trial, 4 sites, d=9, 48 chains", "step", results, "Python loop, jitted gradient")


def imports() -> str:
    """Start-up: `import fald` against `import jax`, each in a process of its own."""

    def load(module):
        return lambda: subprocess.run([sys.executable, "-c", f"import {module}"], check=True)

    results = interleave({"import jax": load("jax"), "import fald": load("fald")}, repeats=7, units=1)
    return table("Start-up", "process", results, "import jax")


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
    for benchmark in (imports, gaussian_simulation, logistic_chains, planning, accounting):
        print(benchmark(), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
