"""The Gaussian simulation: 300 runs, 50 clients, two dimensions; step by step, and composed."""

from __future__ import annotations

import numpy as np

import fald
from fald.lab import methods as samplers
from fald.lab.bench.limits import normals_alone
from fald.lab.bench.timing import Case, Contender, Goal, times_faster

_RUNS, _CLIENTS, _ROWS = 300, 50, 1000.0
_STEP = 1e-7
_COVARIANCE = np.array([[5.0, -2.0], [-2.0, 1.0]])


def _federation():
    means = np.random.default_rng(0).normal(size=(_CLIENTS, 2)) * 0.05
    rows = {f"{c:02d}": (means[c : c + 1], np.array([_ROWS])) for c in range(_CLIENTS)}
    return means, fald.FederatedData.from_arrays(rows), fald.models.gaussian_location(_COVARIANCE)


def _numpy_rounds(means: np.ndarray, steps: int, rounds: int) -> np.ndarray:
    """What one writes first: arrays (runs, clients, 2), one pass over them per step."""
    generator = np.random.default_rng(1)
    precision = np.linalg.inv(_COVARIANCE) * _ROWS * _CLIENTS
    scale = np.sqrt(2 * _STEP * _CLIENTS)
    theta = np.zeros((_RUNS, 2))
    for _ in range(rounds):
        beta = np.repeat(theta[:, None], _CLIENTS, axis=1)
        for _ in range(steps):
            noise = scale * generator.standard_normal((_RUNS, _CLIENTS, 2))
            beta = beta - _STEP * (beta - means) @ precision + noise
        theta = beta.mean(axis=1)
    return theta


def cases(quick: bool) -> list[Case]:
    """Steps against NumPy's, and composed rounds of K = 3000 against 3,000 of NumPy's steps."""
    means, data, model = _federation()
    steps, rounds = 100, 4 if quick else 500
    long, numpy_steps, many = 3000, 300 if quick else 3000, 50 if quick else 1000
    settings = {"num_chains": _RUNS, "progress": False}

    def stepwise():
        method = samplers.fald(local_steps=steps, step_size=_STEP)
        fald.sample(1, model, data, method=method, num_rounds=rounds, **settings)

    def composed():
        method = samplers.composed(local_steps=long, step_size=_STEP)
        fald.sample(1, model, data, method=method, num_rounds=many, **settings)

    alone = "its normals alone"
    return [
        Case(
            "A",
            "Gaussian simulation, 300 runs × 50 clients × 2 dimensions, K = 100",
            "step",
            "plain NumPy",
            {
                "plain NumPy": Contender(
                    lambda: _numpy_rounds(means, steps, rounds // 4), steps * rounds // 4
                ),
                "fald.sample": Contender(stepwise, steps * rounds),
                alone: Contender(normals_alone(_RUNS * _CLIENTS, 2, steps * rounds), steps * rounds),
            },
            [
                Goal("times plain NumPy", times_faster("fald.sample", "plain NumPy"), 4.5),
                Goal("share of its own rate of normals", times_faster("fald.sample", alone), 0.75),
            ],
        ),
        Case(
            "A, composed",
            "the same, K = 3000, one draw per client and round",
            "round",
            "plain NumPy",
            {
                "plain NumPy": Contender(lambda: _numpy_rounds(means, numpy_steps, 1), numpy_steps / long),
                "fald.samplers.composed": Contender(composed, many),
            },
            [Goal("times plain NumPy", times_faster("fald.samplers.composed", "plain NumPy"), 2000)],
        ),
    ]
