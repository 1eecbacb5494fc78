"""What several test files share: Gaussian federations whose exact law is known, and a comparison."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fald
from fald import gaussian, theory

SLOW = pytest.mark.slow
SIZES = (2, 3, 5, 10)
START = np.array([1.5, -1.0])


def linear_model(prior_scale: float | None = None) -> fald.Model:
    """Rows (a, y) with y ~ N(aᵀθ, 1): every client energy is quadratic, with the curvature of its rows."""

    def logprior_fn(theta):
        return jnp.zeros(()) if prior_scale is None else -0.5 * jnp.sum(theta**2) / prior_scale**2

    def loglikelihood_fn(theta, example):
        a, y = example
        return -0.5 * (y - a @ theta) ** 2

    return fald.Model(logprior_fn, loglikelihood_fn, jnp.asarray(START, jnp.float32), name="linear-known")


class Federation(NamedTuple):
    """Clients' rows, and the quadratic energies f^c = ℓ^c/p_c − log π0 that they make."""

    data: fald.FederatedData
    hessians: np.ndarray
    centers: np.ndarray
    weights: np.ndarray

    @property
    def energies(self):
        return self.hessians, self.centers, self.weights


def federation(sizes=SIZES, *, spread=3.0, prior_scale=None, seed=346) -> Federation:
    """Clients that differ in curvature, in centre and, where sizes do, in weight."""
    rng = np.random.default_rng(seed)
    total, d = sum(sizes), len(START)
    clients = {}
    # scaled by 1/√n, so that curvatures are near one however many rows there are
    scales = rng.permutation(np.geomspace(0.5, 2.0, len(sizes))) / np.sqrt(total)
    for c, (size, scale) in enumerate(zip(sizes, scales)):
        a = rng.normal(0, 1, (size, d)) * [scale, 0.5 * scale]
        own = rng.normal(0, spread, d)
        y = a @ own + rng.normal(0, 0.3 * spread / np.sqrt(total), size)
        clients[f"site-{c:03d}"] = (a.astype(np.float32), y.astype(np.float32))
    data = fald.FederatedData.from_arrays(clients)
    return Federation(data, *quadratics(data, prior_scale))


def quadratics(data: fald.FederatedData, prior_scale=None):
    """H_c, x_c and p_c of data for ``linear_model``."""
    weights = data.weights
    hessians, centers = [], []
    for name, p in zip(data.names, weights):
        a, y = (np.asarray(part, float) for part in data.client(name))
        precision = 0.0 if prior_scale is None else prior_scale**-2
        H = a.T @ a / p + precision * np.eye(a.shape[1])
        hessians.append(H)
        centers.append(np.linalg.solve(H, a.T @ y / p))
    return np.array(hessians), np.array(centers), weights


def mostly_slow(cases, quick):
    """Cases of a parametrised test, of which all but some are marked slow."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[] if case in quick else SLOW)
        for case in cases
    ]


def draws(tree) -> np.ndarray:
    """(chains, draws, dim) of a result with one variable."""
    (name,) = tree["posterior"].data_vars
    return tree["posterior"][name].values


def deviations(sample: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    """Sample mean and covariance against exact ones, in standard errors of independent chains.

    Standard errors of covariances come from fourth moments: with random participation the law is not
    Gaussian.
    """
    sample = sample.astype(float)
    count, d = sample.shape
    gap = sample - sample.mean(0)
    i, j = np.triu_indices(d)
    products = gap[:, i] * gap[:, j]
    of_means = (sample.mean(0) - mean) / np.sqrt(gap.var(0) / count)
    of_covariances = (products.sum(0) / (count - 1) - covariance[i, j]) / np.sqrt(products.var(0) / count)
    return np.concatenate([of_means, of_covariances])


def run_python(code: str, *args: str, env: dict[str, str] | None = None, timeout: float = 600) -> str:
    """Run a script in a fresh interpreter and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **(env or {})},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def gaussian_federation(num_clients=4, d=2, seed=1):
    """Clients that differ in curvature, in centre and in weight."""
    rng = np.random.default_rng(seed)
    A = rng.standard_normal((num_clients, d, d + 2))
    hessians = A @ A.transpose(0, 2, 1) / d + 0.3 * np.eye(d)
    centers = rng.normal(0, 1.5, (num_clients, d))
    weights = np.arange(1.0, num_clients + 1)
    return hessians, centers, weights / weights.sum()


def pooled_nuts(model, data, draws_per_chain, seed=20):
    """Flat draws (4 chains together) by NUTS on the pooled rows: the reference of a federated run."""
    import blackjax

    rows = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), data.rows)

    def logdensity(theta):
        terms = jax.vmap(model.flat_loglikelihood, (None, 0))(theta, rows)
        return model.flat_logprior(theta) + jnp.sum(terms)

    warmup = blackjax.window_adaptation(blackjax.nuts, logdensity)
    key = jax.random.key(seed)
    (state, parameters), _ = warmup.run(key, model.flat_initial_position, num_steps=800)
    kernel = blackjax.nuts(logdensity, **parameters).step

    def chain(key):
        def one(state, key):
            state, _ = kernel(key, state)
            return state, state.position

        return jax.lax.scan(one, state, jax.random.split(key, draws_per_chain + 100))[1][100:]

    draws = np.asarray(jax.jit(jax.vmap(chain))(jax.random.split(key, 4)), np.float64)
    return draws.reshape(-1, draws.shape[-1])


def in_parameters(chain, law):
    """Mean and covariance of a planner's law in the parameters of the model."""
    return chain.basis @ law.mean, chain.basis @ law.covariance @ chain.basis.T


def random_federation(rng, equal_weights):
    """Gaussian clients with the constants of their bound, and settings inside its range."""
    d, n = int(rng.integers(1, 11)), int(rng.integers(2, 21))
    m = 10.0 ** rng.uniform(-2, 2)
    L = m * 10.0 ** rng.uniform(0, 2)
    basis = np.linalg.qr(rng.standard_normal((n, d, d)))[0]
    curvature = rng.uniform(m, L, (n, d))
    hessians = (basis * curvature[:, None]) @ basis.transpose(0, 2, 1)
    temperature = 10.0 ** rng.uniform(-1, 1)
    unit = math.sqrt(temperature / m)
    centers = 10.0 ** rng.uniform(-2, 2) * unit * rng.standard_normal((n, d))
    weights = np.full(n, 1 / n) if equal_weights else 0.1 / n + 0.9 * rng.dirichlet(np.ones(n))
    goal = gaussian.target(hessians, centers, weights, temperature)
    start = goal.mean + 10.0 ** rng.uniform(-2, 2) * unit * rng.standard_normal(d)
    constants = theory.Constants(
        smoothness=curvature.max(),
        strong_convexity=curvature.min(),
        dim=d,
        num_clients=n,
        min_weight=weights.min(),
        temperature=temperature,
        heterogeneity=np.linalg.norm(np.einsum("cpq,cq->cp", hessians, goal.mean - centers), axis=1).max(),
        initial_distance=np.linalg.norm(start - goal.mean) / math.sqrt(d),
    )
    draws = int(rng.integers(1, n + 1))
    run = {"local_steps": int(rng.integers(1, 30)), "correlation": float(rng.choice([0, 1, rng.random()]))}
    step = 10.0 ** rng.uniform(-3, 0) / (2 * constants.smoothness)
    return (hessians, centers, weights), goal, start, constants, run, step, draws
