"""The Gaussian simulation: 300 runs, 50 clients, two dimensions; step by step, and composed."""

from __future__ import annotations

import numpy as np

import fald
from fald.lab import methods as samplers
from fald.lab.bench.limits import normals_alone
from fald.lab.bench.timing import Case, Contender, Mark, times_faster

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

    def run(method: samplers.FALD, count: int) -> None:
        fald.sample(1, model, data, method=method, num_rounds=count, num_chains=_RUNS, progress=False)

    stepwise = samplers.fald(local_steps=steps, step_size=_STEP)
    composed = samplers.composed(local_steps=long, step_size=_STEP)
    plain, ours, alone = "plain NumPy", "fald.sample", "its normals alone"
    contenders = {
        plain: Contender(lambda: _numpy_rounds(means, steps, rounds // 4), steps * rounds // 4),
        ours: Contender(lambda: run(stepwise, rounds), steps * rounds),
        alone: Contender(normals_alone(_RUNS * _CLIENTS, 2, steps * rounds), steps * rounds),
    }
    marks = [
        Mark(f"times {plain}", times_faster(ours, plain), 4.5),
        Mark("share of its own rate of normals", times_faster(ours, alone), 0.75),
    ]
    whole = "fald.samplers.composed"
    of_composed = {
        plain: Contender(lambda: _numpy_rounds(means, numpy_steps, 1), numpy_steps / long),
        whole: Contender(lambda: run(composed, many), many),
    }
    mark = Mark(f"times {plain}", times_faster(whole, plain), 2000)
    title = "Gaussian simulation, 300 runs × 50 clients × 2 dimensions, K = 100"
    again = "the same, K = 3000, one draw per client and round"
    return [
        Case("A", title, "step", plain, contenders, marks),
        Case("A, composed", again, "round", plain, of_composed, [mark]),
    ]
