"""How loose the published bounds are: the exact W2 on random Gaussian federations as a share of the bound.

``python -m benchmarks.bounds > benchmarks/bounds.md`` takes half a minute; the page on theory bounds quotes
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from fald import gaussian, theory
from fald.settings.participation import Participation, full, with_replacement, without_replacement
from fald.settings.schedules import paper_decay

NUM_FEDERATIONS = 200
NUM_ROUNDS = 40
_MOST = 10**15  # rounds, for the bound of the limit


class Federation(NamedTuple):
    """Gaussian clients, a start, the constants of the bounds, and settings of a run."""

    energies: tuple[np.ndarray, np.ndarray, np.ndarray]
    start: np.ndarray
    constants: theory.Constants
    goal: gaussian.Law
    local_steps: int
    correlation: float
    draws: int


def federation(
    seed: int, *, equal: bool = False, isotropic: bool = False, at_mode: bool = False
) -> Federation:
    """1 to 10 dimensions, 2 to 20 clients, κ up to 100, centres and start within 100 posterior sds."""
    rng = np.random.default_rng(seed)
    d, n = int(rng.integers(1, 11)), int(rng.integers(2, 21))
    m = 10.0 ** rng.uniform(-2, 2)
    L = m if isotropic else m * 10.0 ** rng.uniform(0, 2)
    basis = np.linalg.qr(rng.standard_normal((n, d, d)))[0]
    curvature = rng.uniform(m, L, (n, d))
    hessians = np.tile(m * np.eye(d), (n, 1, 1)) if isotropic else (basis * curvature[:, None]) @ basis.mT
    temperature = 10.0 ** rng.uniform(-1, 1)
    unit = math.sqrt(temperature / m)
    centers = 10.0 ** rng.uniform(-2, 2) * unit * rng.standard_normal((n, d))
    weights = np.full(n, 1 / n) if equal else 0.1 / n + 0.9 * rng.dirichlet(np.ones(n))
    goal = gaussian.target(hessians, centers, weights, temperature)
    away = 10.0 ** rng.uniform(-2, 2) * unit * rng.standard_normal(d)
    start = goal.mean if at_mode else goal.mean + away
    slopes = np.einsum("cpq,cq->cp", hessians, goal.mean - centers)
    known = theory.Constants(
        smoothness=float(curvature.max()),
        strong_convexity=float(curvature.min()),
        dim=d,
        num_clients=n,
        min_weight=float(weights.min()),
        temperature=temperature,
        heterogeneity=float(np.linalg.norm(slopes, axis=1).max()),
        initial_distance=float(np.linalg.norm(start - goal.mean) / math.sqrt(d)),
    )
    correlation = float(rng.choice([0, 1, rng.random()]))
    K, draws = int(rng.integers(1, 30)), int(rng.integers(1, n + 1))
    return Federation((hessians, centers, weights), start, known, goal, K, correlation, draws)


def shares(found: Federation, share: float, participation: Participation, rounds: np.ndarray) -> np.ndarray:
    """Exact W2 over the bound at some rounds, with η = share/(2L)."""
    step = share / (2 * found.constants.smoothness)
    run: dict[str, Any] = {
        "step_size": step,
        "local_steps": found.local_steps,
        "correlation": found.correlation,
        "participation": participation,
    }
    law: dict[str, Any] = {**run, "temperature": found.constants.temperature, "noise": "paper"}
    if rounds[0] == _MOST:
        limit = gaussian.stationary(*found.energies, **law)
        exact = gaussian.wasserstein2(*limit, *found.goal)
    else:
        path = gaussian.law(
            *found.energies, num_rounds=int(rounds.max()), initial_position=found.start, **law
        )
        exact = gaussian.wasserstein2(path.mean[rounds], path.covariance[rounds], *found.goal)
    return exact / theory.fixed_step_bound(found.constants, num_rounds=rounds, **run).total


def decaying(found: Federation, rounds: np.ndarray) -> np.ndarray:
    """Exact W2 over the bound for the decaying step size, all devices."""
    c, run = found.constants, {"local_steps": found.local_steps, "correlation": found.correlation}
    path = gaussian.law(
        *found.energies, step_size=paper_decay(c.smoothness, c.strong_convexity),
        num_rounds=int(rounds.max()), initial_position=found.start, temperature=c.temperature, **run,
    )  # fmt: skip
    exact = gaussian.wasserstein2(path.mean[rounds], path.covariance[rounds], *found.goal)
    return exact / theory.decaying_step_bound(c, num_rounds=rounds, **run).total


def measured(count: int = NUM_FEDERATIONS) -> Iterator[tuple[str, str, np.ndarray]]:
    """Where one looks, who takes part, and the largest share in each of ``count`` federations."""
    schemes: dict[str, Callable[[Federation], Participation]] = {
        "all": lambda _: full(),
        "Scheme I": lambda found: with_replacement(found.draws),
        "Scheme II": lambda found: without_replacement(found.draws),
    }
    start, few = np.array([0]), np.arange(1, 11)
    many, limit = np.arange(11, NUM_ROUNDS + 1), np.array([_MOST])

    def each(share_of: Callable[[int], float], rounds: np.ndarray, scheme: str, **kind: bool) -> np.ndarray:
        values = []
        for seed in range(count):
            found = federation(seed, equal=scheme == "Scheme II", **kind)
            values.append(shares(found, share_of(seed), schemes[scheme](found), rounds).max())
        return np.array(values)

    def usual(seed: int) -> float:
        return float(10.0 ** np.random.default_rng([seed, 1]).uniform(-3, 0))

    def tiny(seed: int) -> float:
        return 1e-12

    yield (
        "start, isotropic, at the mode, η → 0",
        "all",
        each(tiny, start, "all", isotropic=True, at_mode=True),
    )
    yield "start, η → 0", "all", each(tiny, start, "all")
    yield "rounds 1 to 10, η → 0", "all", each(tiny, few, "all")
    yield "rounds 1 to 10, η from 0.001/(2L) to 1/(2L)", "all", each(usual, few, "all")
    for scheme in schemes:
        yield "rounds 11 to 40, η from 0.001/(2L) to 1/(2L)", scheme, each(usual, many, scheme)
    for scheme in schemes:
        yield "limit of many rounds, η from 0.001/(2L) to 1/(2L)", scheme, each(usual, limit, scheme)
    late = np.array([decaying(federation(seed), many).max() for seed in range(count)])
    yield "rounds 11 to 40, decaying η", "all", late


def table(count: int = NUM_FEDERATIONS) -> str:
    """The measurements as Markdown."""
    lines = ["| where | devices | median | largest |", "|---|---|---|---|"]
    for where, who, values in measured(count):
        lines.append(f"| {where} | {who} | {_percent(np.median(values))} | {_percent(values.max())} |")
    return "\n".join(lines)


def _percent(value: float) -> str:
    return f"{100 * value:.2g}%"


if __name__ == "__main__":
    print(table())
