"""Gaussian mixtures fitted to weighted draws."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from fald.fewround.proposal import Proposal, cholesky
from fald.fewround.weights import moments

Array = NDArray[Any]

_MOST_CORES = 4
_MOST_DRAWS = 16384


def log_parts(mixture: Proposal, positions: Array) -> Array:
    """(C, k) log weight times density of each core."""
    columns = []
    for weight, mean, factor in zip(*mixture):
        # one product with the small inverse: solving for thousands of draws takes ten times as long
        z = (positions - mean) @ solve_triangular(factor, np.eye(len(mean)), lower=True).T
        normal = -np.einsum("ci,ci->c", z, z) / 2 - np.sum(np.log(np.diag(factor)))
        columns.append(np.log(weight) + normal)
    return np.stack(columns, axis=1)


def _shares(logs: Array) -> tuple[Array, Array]:
    """(C, k) share of each core in each draw, and log density (C,)."""
    top = logs.max(axis=1)
    parts = np.exp(logs - top[:, None])
    total = parts.sum(axis=1)
    return parts / total[:, None], top + np.log(total)


def _spread(positions: Array, weights: Array, cores: int, rng: np.random.Generator) -> Array:
    """(C, k) shares of cores spread along a direction in which the draws are least normal."""
    whole, (n, d) = moments(positions, weights), positions.shape
    # draws in units in which all directions are equal, cut at quantiles of a random direction
    factor = cholesky(whole.covariance)
    z = solve_triangular(factor, (positions - whole.mean).T, lower=True).T
    fourth = weights @ z**4 - 3 * (weights @ z**2) ** 2
    direction = np.abs(weights @ z**3) + np.abs(fourth) + 0.1 * rng.random(d)
    along = z @ (direction / np.linalg.norm(direction))
    order = np.argsort(along, kind="stable")
    group = np.empty(n, int)
    group[order] = np.minimum(cores * np.cumsum(weights[order]), cores - 1e-9).astype(int)
    return np.eye(cores)[group]


def _fit(
    positions: Array, weights: Array, cores: int, rng: np.random.Generator, *, start: Proposal | None = None
) -> Proposal | None:
    """Weighted expectation-maximisation from ``start``, or from cores spread along the widest direction."""
    whole = moments(positions, weights)
    if cores == 1:
        return Proposal(np.ones(1), whole.mean[None], cholesky(whole.covariance)[None])
    parts = (
        _spread(positions, weights, cores, rng) if start is None else _shares(log_parts(start, positions))[0]
    )
    d = positions.shape[1]
    last = -np.inf
    mixture = None
    for _ in range(60):
        share = weights @ parts
        # each core needs draws enough for its covariance
        if np.min(share**2 / np.maximum((weights**2) @ parts**2, 1e-300)) < 2 * d:
            return None
        means, factors = [], []
        for k in range(cores):
            own = moments(positions, weights * parts[:, k] / share[k])
            means.append(own.mean)
            factors.append(cholesky(own.covariance + 1e-3 * whole.covariance))
        mixture = Proposal(share / share.sum(), np.array(means), np.array(factors))
        parts, density = _shares(log_parts(mixture, positions))
        value = float(weights @ density)
        if value - last < 1e-4:
            break
        last = value
    return mixture


def fit_mixture(positions: Array, weights: Array, seed: int, *, most: int = _MOST_CORES) -> Proposal:
    """A mixture for weighted draws, with as many cores as held-out draws ask for, and ``most``.

    A further core is taken when the mean log density of draws that were not used for the fit rises by more
    than two standard errors.
    """
    rng = np.random.Generator(np.random.Philox([seed & (2**64 - 1), 77]))
    # one number for each draw, so that the last digit of one weight does not change the use of all others
    half, waits = rng.random(len(weights)) < 0.5, rng.exponential(size=len(weights))
    kept = np.flatnonzero(weights > 1e-7 * weights.max())
    weights = weights / weights[kept].sum()
    if len(kept) > _MOST_DRAWS:
        # drawn in proportion to the weights, so that what is left of them is nearly equal
        kept = np.sort(kept[np.argsort(waits[kept] / weights[kept], kind="stable")[:_MOST_DRAWS]])
        weights = np.maximum(weights, 1 / _MOST_DRAWS)
    positions, weights, half = positions[kept], weights[kept] / weights[kept].sum(), half[kept]
    best = _fit(positions, weights, 1, rng)
    assert best is not None
    train, test = weights * half, weights * ~half
    if min(train.sum(), test.sum()) < 0.1:
        return best
    train, test = train[half] / train.sum(), test / test.sum()
    reference = _fit(positions[half], train, 1, rng)
    assert reference is not None
    density = _shares(log_parts(reference, positions))[1]
    for cores in range(2, most + 1):
        fitted = _fit(positions[half], train, cores, rng)
        if fitted is None:
            break
        new = _shares(log_parts(fitted, positions))[1]
        gains = new - density
        gain = float(test @ gains)
        error = float(np.sqrt(np.sum((test * (gains - gain)) ** 2)))
        if gain < max(2 * error, 0.01):
            break
        whole = _fit(positions, weights, cores, rng, start=fitted)
        if whole is None:
            break
        best, density = whole, new
    return best
